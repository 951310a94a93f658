"""The exceptions of shardmesh: one for each status code of the service, by what the caller does next.

Each is an Error, and also the builtin kind that fits best, so that code which knows nothing of shardmesh catches it.
str() of any is the plain message: what was wrong, with the value, and what would be right.
"""


class Error(Exception):
    """Whatever shardmesh raises."""

    def __str__(self) -> str:  # KeyError's own would quote the message
        return str(self.args[0]) if self.args else ""


class InvalidArgument(Error, ValueError):
    """A bug or a typo of the caller: fix the value that the message names."""


class NotFound(Error, KeyError):
    """Something was named that does not exist."""


class AlreadyExists(Error, ValueError):
    """A second one of something unique."""


class FailedPrecondition(Error, RuntimeError):
    """The wrong step, epoch or state; the message has the current one."""


class OutOfRange(Error, IndexError):
    """Past the end."""


class Aborted(Error, RuntimeError):
    """Stale, or lost a race: start again."""


class Unavailable(Error, ConnectionError):
    """A peer is gone or not ready: the same call may be repeated, after a pause."""


class DeadlineExceeded(Error, TimeoutError):
    """Waited as long as it was told to."""


class ResourceExhausted(Error, RuntimeError):
    """Over a limit, which the message names: ask for less, or later."""


class PermissionDenied(Error, PermissionError):
    """Not allowed: other credentials, or another user."""


class DataLoss(Error, RuntimeError):
    """Bytes are wrong: stop, and restore."""


class Unimplemented(Error, NotImplementedError):
    """Built without this."""


class Internal(Error, RuntimeError):
    """A bug in shardmesh: please report it."""


class WentBack(Error, RuntimeError):
    """The job lost weights of which no copy was left, and went back to a checkpoint by itself (on_loss="checkpoint"):
    steps after `step` are lost. Take the data from there on; what raised this has the checkpoint's weights already."""

    def __init__(self, message: str, step: int, lost_step: int, checkpoint: str) -> None:
        """step: that the job is at. lost_step: the newest one that it is known to have had. checkpoint: its folder."""
        super().__init__(message)
        self.step, self.lost_step, self.checkpoint = step, lost_step, checkpoint


BY_CODE: dict[str, type[Error]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "NOT_FOUND": NotFound,
    "ALREADY_EXISTS": AlreadyExists,
    "FAILED_PRECONDITION": FailedPrecondition,
    "OUT_OF_RANGE": OutOfRange,
    "ABORTED": Aborted,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "RESOURCE_EXHAUSTED": ResourceExhausted,
    "PERMISSION_DENIED": PermissionDenied,
    "DATA_LOSS": DataLoss,
    "UNIMPLEMENTED": Unimplemented,
    "INTERNAL": Internal,
}
