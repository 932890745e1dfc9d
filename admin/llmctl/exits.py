"""Exit statuses of llmctl, and the errors that carry them."""

from __future__ import annotations

from typing import Final

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NOT_RUNNING: Final = 3
NOT_ANSWERING: Final = 4
BAD_INPUT: Final = 65
LOST: Final = 69
BUSY: Final = 75
PERMISSION: Final = 77
TIMED_OUT: Final = 124
INTERRUPTED: Final = 130

#: For --help and the documentation.
MEANINGS: Final = {
    OK: "done",
    FAILED: "it ran and failed, or is refused; `status` and `health`: up but not ready",
    USAGE: "usage",
    NOT_RUNNING: "llmd isn't running",
    NOT_ANSWERING: "llmd doesn't answer, cannot tell",
    BAD_INPUT: "bad input",
    LOST: "the connection was lost mid-way",
    BUSY: "busy, or in conflict with something that runs",
    PERMISSION: "permission",
    TIMED_OUT: "timed out",
    INTERRUPTED: "interrupted",
}


class CtlError(Exception):
    """Ends llmctl with `status`; `hint` is what to type next, `data` what the daemon said."""

    def __init__(self, status: int, message: str, hint: str = "", data: object = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.hint = hint
        self.data = data
