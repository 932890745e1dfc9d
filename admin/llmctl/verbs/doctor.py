"""Look for what is wrong, or will be: on this machine, in llmd's directories, and in llmd itself if it runs. Exit 1 if something is wrong.

Looks at: operating system and Python, the run directory and who may use its socket, disk space, memory and the cgroup's limit, file descriptors,
GPU driver, the configuration and the model's files (as `llmd check` does), the port, versions, states, restarts, crashes of the last hour,
and changes that wait for a reload.
"""

from __future__ import annotations

from typing import Final

from llmctl import exits
from llmctl.context import Context
from llmctl.verbs import _checks
from llmctl.verbs._checks import Finding

_MARKS: Final = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "wrong": ("WRONG", "red")}


def run(context: Context) -> int:
    findings = _checks.all_of(context)
    if not context.out.is_table:
        context.out.data([finding.__dict__ for finding in findings])
    else:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            _show(context, finding, width)
    return exits.FAILED if any(finding.state == "wrong" for finding in findings) else exits.OK


def _show(context: Context, finding: Finding, width: int) -> None:
    word, colour = _MARKS[finding.state]
    out = context.out
    first, *more = finding.text.splitlines() or [""]
    out.line(f"{out.paint(f'{word:<7}', colour)}  {finding.what:<{width}}  {first}".rstrip())
    for line in more:
        out.line(f"{'':<9}{'':<{width}}  {line}")
    if finding.hint:
        out.line(f"{'':<9}{'':<{width}}  {out.paint(finding.hint, 'dim')}")
