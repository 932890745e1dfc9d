"""The one error tree, and the one table from code to HTTP status and exit status.

    LlmdError
    ├── UsageError        exit 2   bad command line
    ├── ConfigError       exit 78  this config or these model files can never work; carries every fault found
    ├── ResourceError     exit 71  an OS resource: port, socket path, run directory, lock, file descriptors
    ├── GaveUp            exit 70  crash budget spent, engine lost
    ├── StartupError               an Engine could not be started: at which stage, and with which exit status llmd ended
    └── RequestError      HTTP     one request cannot be answered; never costs another one
        └── EngineDead             the llmd that an Engine has started is no more; no later request can be answered either

A message says what is wrong and what to do next; it never holds a prompt or a secret.
"""

from __future__ import annotations

import errno
from typing import Final

EXIT_OK: Final = 0
EXIT_USAGE: Final = 2
EXIT_GAVE_UP: Final = 70
EXIT_RESOURCE: Final = 71
EXIT_CONFIG: Final = 78
EXIT_INTERRUPTED: Final = 130

#: code -> (HTTP status, seconds for Retry-After or None). The catalogue of docs and tests is this table.
CODES: Final[dict[str, tuple[int, int | None]]] = {
    "context_length_exceeded": (400, None),
    "exceeds_kv_capacity": (400, None),
    "invalid_json": (400, None),
    "no_chat_template": (400, None),
    "grammar_too_complex": (400, None),
    "invalid_api_key": (401, None),
    "forbidden": (403, None),
    "not_found": (404, None),
    "model_not_found": (404, None),
    "method_not_allowed": (405, None),
    "busy": (409, None),
    "flush_in_progress": (409, None),
    "reload_in_progress": (409, None),
    "incompatible_weights": (409, None),
    "too_many_adapters": (409, None),
    "duplicate_request_id": (409, None),
    "timeout": (409, None),
    "aborted": (409, None),
    "reloaded": (409, None),
    "request_too_large": (413, None),
    "queue_full": (429, 1),
    "rate_limit_exceeded": (429, 1),
    "internal_error": (500, None),
    "engine_crash": (500, None),
    "non_finite_logits": (500, None),
    "loading": (503, 5),
    "draining": (503, 5),
    "queue_timeout": (503, 5),
    "engine_unavailable": (503, 5),
    "shutting_down": (503, 5),
    "request_timeout": (504, None),
}


class LlmdError(Exception):
    """Base of every error llmd raises on purpose. `exit_status` is what `llmd` ends with when it reaches the top."""

    exit_status: int = EXIT_GAVE_UP
    shown: bool = False
    """It is in the log already."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(LlmdError):
    """Bad command line."""

    exit_status = EXIT_USAGE


class ConfigError(LlmdError):
    """A configuration or model files that can never work. `faults` holds one line for each fault, all of them."""

    exit_status = EXIT_CONFIG

    def __init__(self, faults: str | list[str], *, hint: str = "") -> None:
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        self.readable: object = None
        """Of a configuration: an `llmd.config.load.Loaded` of the values that are right."""
        super().__init__("\n".join(self.faults), hint=hint)


class ResourceError(LlmdError):
    """The operating system refuses something llmd needs: a port, a path, a lock, descriptors."""

    exit_status = EXIT_RESOURCE


#: What is used up, and what sets its limit.
_EXHAUSTED: Final = {
    errno.EAGAIN: "no more processes or threads may be started; the limit is `ulimit -u`, TasksMax= in the unit, or pids.max of the cgroup",
    errno.EMFILE: "no more files may be opened; the limit is `ulimit -n`, or LimitNOFILE= in the unit",
    errno.ENFILE: "the machine has no more open files; the limit is the sysctl fs.file-max",
    errno.ENOMEM: "no memory is left",
    errno.ENOSPC: "no space or no inodes are left on the disk: see `df` and `df -i`",
    errno.EDQUOT: "the disk quota is used up",
}


def exhausted(error: BaseException, doing: str = "") -> ResourceError | None:
    """The error in our words if it says that something of the system is used up; else None. `doing`: at what, like `cannot start scheduler-0`."""
    number = error.errno if isinstance(error, OSError) else errno.EAGAIN if "can't start new thread" in str(error) else None
    if number not in _EXHAUSTED:
        return None
    file = getattr(error, "filename", None)
    return ResourceError(": ".join(filter(None, (doing, str(file) if file is not None else "", _EXHAUSTED[number]))))


class GaveUp(LlmdError):
    """The restart budget is spent, or the engine cannot be brought up."""

    exit_status = EXIT_GAVE_UP


class StartupError(LlmdError):
    """`Engine` could not be started. Everything it had begun has been undone.

    `stage`: what was being done, such as `config`, `model files` or `loading weights`; `exit_code`: llmd's exit status (negative: a signal).
    """

    def __init__(self, stage: str, exit_code: int, message: str = "") -> None:
        super().__init__(f"llmd did not start (stage {stage!r}, exit status {exit_code})" + (f": {message}" if message else ""))
        self.stage = stage
        self.exit_code = exit_code


class RequestError(LlmdError):
    """One request cannot be answered. `code` (or None) picks the HTTP status; `param` is a path like `messages[0].content[1]`."""

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.status = status if status is not None else (CODES[code][0] if code else 400)

    @property
    def retry_after(self) -> int | None:
        """Seconds for the Retry-After header, or None."""
        return CODES[self.code][1] if self.code in CODES else None

    def copy(self) -> RequestError:
        """Another one like it: one cause may end many requests, each raising in a thread of its own."""
        return RequestError(self.message, code=self.code, param=self.param, status=self.status)


class EngineDead(RequestError):
    """The llmd that an `Engine` had started has ended. The message names its pid and how it ended."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="engine_unavailable")

    def copy(self) -> EngineDead:
        """See RequestError."""
        return EngineDead(self.message)


def error_type(status: int) -> str:
    """The envelope's `type` for an HTTP status."""
    if status in (401, 403):
        return "authentication_error"
    if status == 429:
        return "overloaded_error"
    return "invalid_request_error" if status < 500 else "server_error"


def envelope(message: str, status: int, *, code: str | None = None, param: str | None = None) -> dict[str, object]:
    """The error body of both planes: `{"error": {message, type, param, code}}`."""
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}
