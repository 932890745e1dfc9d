"""The live dashboard, `llmctl top`. It asks the admin plane once a second, keeps what it has seen, and draws it; it changes nothing without showing the plan.

Only llmctl.verbs.top imports it, for textual takes longer to import than all the rest of llmctl. What draws is app, panes, widgets, dialogs and palette;
what knows is feed, history, metrics, words and actions, which have no textual and are used by `--once` too.
"""
