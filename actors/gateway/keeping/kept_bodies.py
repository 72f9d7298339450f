"""The memory of large requests that stay in the records of their connections until they are answered. Runs in the gateway's loop."""

LARGE_BYTES = 1 << 20
_BODIES = 4  # of the largest size: as many may be received at a time (``reading/bodies``)


class KeptBodies:
    """All of a gateway. ``max_body_bytes``: of one request; None: there is no limit to all together."""

    def __init__(self, max_body_bytes: int | None = None) -> None:
        self._max_bytes = None if max_body_bytes is None else _BODIES * max_body_bytes
        self._num_bytes = 0

    def add(self, num_bytes: int) -> bool:
        """Count so many more bytes (of less than 0: no more), if there is room for them. Returns whether there is."""
        if num_bytes > 0 and self._max_bytes is not None and self._num_bytes + num_bytes > self._max_bytes:
            return False
        self._num_bytes += num_bytes
        return True


class HeldBody:
    """The request of one connection, as far as ``bodies`` count it. Without them nobody does."""

    def __init__(self, bodies: KeptBodies | None) -> None:
        self._bodies = KeptBodies() if bodies is None else bodies
        self._num_bytes = 0

    def hold(self, num_bytes: int) -> bool:
        """Count the request. Returns whether there is room for it, or one is counted already."""
        if not self._num_bytes and self._bodies.add(num_bytes):
            self._num_bytes = num_bytes
        return self._num_bytes > 0

    def release(self) -> None:
        """Count it no more."""
        self._bodies.add(-self._num_bytes)
        self._num_bytes = 0
