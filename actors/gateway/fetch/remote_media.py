"""Have the media of a request fetched that came as URLs. Runs in the gateway's event loop; digests are made in a thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ....runtime.config.sections import MediaSection
from ....runtime.errors import RequestError
from ....shm.spool import AnyBytes, Spool
from ..at_work import in_thread
from ..reading.bodies import OVERLOAD_RETRY_S, too_many_large
from ..reading.fields import refuse
from ..reading.media import Medium, fill
from ..reading.url_rules import FetchError
from .client import FetchClient


class RemoteMedia:
    """Fills in media. ``hold`` counts bytes that the gateway holds, and returns whether it has room for more; they lie in ``spool``."""

    def __init__(self, client: FetchClient, limits: MediaSection, hold: Callable[[int], bool], spool: Spool) -> None:
        self._client = client
        self._limits = limits
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="fetched")
        self._hold = hold
        self._spool = spool

    async def fill(self, media: tuple[Medium, ...]) -> tuple[Medium, ...]:
        """Return the media of a request with all their bytes.

        Raises:
            RequestError: names the part's path: 4xx for a URL's fault, 503 or 500 for the server's.
        """
        remote = [(medium, url) for medium in media for url in medium.urls]
        if not remote:
            return media
        sizes: list[int] = []
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._fetch(medium, url, sizes)) for medium, url in remote]
        try:
            fetched = await asyncio.gather(*tasks)
            return await loop.run_in_executor(self._threads, in_thread(fill), media, fetched, self._limits)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._hold(-sum(sizes))

    async def _fetch(self, medium: Medium, url: str, sizes: list[int]) -> AnyBytes:
        """``sizes``: of what has been fetched for the request."""
        try:
            data = await self._client.fetch(url, self._limits.max_item_mib << 20)
        except FetchError as error:
            raise as_request_error(error, medium) from None
        sizes.append(len(data))
        has_room = self._hold(len(data))
        limit = self._limits.fetch.max_request_mib << 20
        if (total := sum(sizes)) > limit:
            message = f"makes {total} bytes in all media that are fetched, the limit is {limit} (media.fetch.max_request_mib)"
            raise refuse(medium.path, message, 413)
        if not has_room:
            raise too_many_large()
        spooled = self._spool.new()
        spooled.append(data)
        return spooled


def as_request_error(error: FetchError, medium: Medium) -> RequestError:
    """Return the error of the request that has this medium."""
    found = refuse(medium.path, error.message, error.status)
    found.medium = medium.kind
    if error.status >= 500:
        found.type = "overloaded_error" if error.status == 503 else "internal_error"
        found.retry_after_s = OVERLOAD_RETRY_S if error.status == 503 else None
    return found
