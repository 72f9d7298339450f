"""The news of an answer that several clients may follow at once."""

import asyncio


class News:
    """Wakes all who wait for more. Belongs to the running event loop."""

    def __init__(self) -> None:
        self._more = asyncio.Event()

    def tell(self) -> None:
        """Wake all who wait now."""
        more, self._more = self._more, asyncio.Event()
        more.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait until there is more. Returns whether that was in this time."""
        try:
            await asyncio.wait_for(self._more.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
