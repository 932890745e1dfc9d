"""llmd as a library: `llmd.Engine`, its child process, and the frontend that lives in the caller's process.

Import nothing here: the child (llmd.engine.child) must stay as light as the supervisor that it becomes.
"""
