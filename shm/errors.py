"""Errors of a run directory or of a segment in it. Messages name the thing, the value and the limit.

All of these are ``ValueError``s: they reach the user, who can mend the cause. Broken invariants are assertions instead.
"""


class ShmError(ValueError):
    """Base of everything that this package raises on purpose."""


class BusyError(ShmError):
    """The run directory belongs to a run that is alive. ``pids`` are its processes, as far as they are known."""

    def __init__(self, message: str, pids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.pids = pids


class MissingError(ShmError):
    """There is no such run, or no such segment in it (yet)."""


class SpaceError(ShmError):
    """The file system cannot hold the segment. Nothing was left behind."""

    def __init__(self, message: str, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class SegmentError(ShmError):
    """A file that is not what it should be: of another kind or version, truncated, or corrupt."""


class DeviceError(ShmError):
    """The CUDA driver refused. The message says what was asked for, and the driver's word for why not."""


class StalePage(ShmError):
    """A page run that names a page outside the pool, or one that has been granted to another owner since."""


class StaleRow(ShmError):
    """A row of the sequence table that belongs to another request by now."""
