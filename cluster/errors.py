"""The errors of this room, drawn as one tree.

ChunkserveError
+-- ConfigError        a setting is unknown, out of range, or contradicts another
+-- ModelError         a model cannot be found, fetched or read
+-- RequestError       the client's fault: becomes a 4xx that names the field
+-- EngineError        the engine cannot serve: becomes a 503
    +-- EngineLost     the engine that held a request cannot go on with it; another may
    +-- RequestFailed  the engine serves, but not this request: becomes a 500 that says why
    +-- ExecutorError  a rank died, hung or answered nonsense
"""

from typing import Literal


class ChunkserveError(Exception):
    """Base of every error that chunkserve raises on purpose."""


class ConfigError(ChunkserveError):
    """A setting is unknown, out of range, or contradicts another; the message names it."""


class ModelError(ChunkserveError):
    """A model cannot be found, fetched or read; the message says where was looked."""


class RequestError(ChunkserveError):
    """A client's request is wrong, or cannot be met now. `param` names the field, never its content.

    `retry_after`: seconds after which it may be sent again.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code
        self.retry_after = retry_after


class EngineError(ChunkserveError):
    """The engine cannot serve now; the message says why."""


class EngineLost(EngineError):
    """The engine that held a request cannot go on with it, whatever became of it; another may."""


class RequestFailed(EngineError):
    """The engine gave up this request alone, and would again; the message says why, to the client too."""


LossKind = Literal["worker_died", "worker_hung", "step_failed", "link", "startup"]
"""What recoveries are counted by."""


class ExecutorError(EngineError):
    """A rank died, hung or answered nonsense; the message names the rank."""

    def __init__(self, message: str, kind: LossKind = "step_failed") -> None:
        super().__init__(message)
        self.kind: LossKind = kind


def root_cause(error: BaseException) -> str:
    """One line on a failed remote call: what the callee itself raised, else what Ray or Serve say."""
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {lines[0]}"
