"""Errors of media."""


class MediaError(ValueError):
    """A medium that cannot be used. ``status``: 400 for a limit, 422 for broken data. The message holds no path or address."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class OutOfTime(MediaError):
    """Decoding took longer than its time budget."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"decoding took longer than the limit of {limit_s:g} s", 400)


class MediaMemoryError(MediaError, MemoryError):
    """A decoder got no memory: the medium asks for too much, or this process has too little left; the caller can tell which."""

    def __init__(self) -> None:
        super().__init__("decoding takes more memory than there is", 400)
