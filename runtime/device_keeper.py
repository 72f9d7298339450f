"""What ``memory`` has on a CUDA device, kept for its next generation by the supervisor, which knows nothing of CUDA.

An allocation lives as long as somebody has it mapped or holds its descriptor (``shm.device_memory``). The supervisor holds the
descriptors too, and hands them to a ``memory`` that finds its predecessor dead.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from ..shm.descriptors import Descriptor, DescriptorServer, fetch_descriptors
from ..shm.errors import ShmError
from .layout import DEVICE_SOCKET, SPARE_SOCKET

_FETCH_S = 10.0
_AGAIN_S = 0.5


class DeviceKeeper:
    """Descriptors of the acting generation of ``memory``. Lives in the supervisor's event loop."""

    def __init__(self, run: Path, say: Callable[[str], None]) -> None:
        self._run = run
        self._say = say
        self._pid = 0
        self._following: asyncio.Task[None] | None = None
        self._kept: dict[str, Descriptor] = {}
        self._server: DescriptorServer | None = None

    def follow(self, pid: int) -> None:
        """The process ``pid`` is the acting ``memory``: keep what it has, instead of what its predecessor had."""
        if pid != self._pid:
            self._pid = pid
            if self._following is not None:
                self._following.cancel()
            self._following = asyncio.get_running_loop().create_task(self._fetch())

    async def _fetch(self) -> None:
        while True:
            try:
                found = await asyncio.to_thread(fetch_descriptors, self._run / DEVICE_SOCKET, _FETCH_S)
            except ShmError as error:
                self._say(f"memory's device memory is not kept yet: {error}")
                await asyncio.sleep(_AGAIN_S)
                continue
            self._release()
            self._kept = found
            self._server = DescriptorServer(self._run / SPARE_SOCKET, found)
            asyncio.get_running_loop().add_reader(self._server.fd, self._server.serve)
            return

    def close(self) -> None:
        """Keep nothing any more."""
        if self._following is not None:
            self._following.cancel()
        self._release()

    def _release(self) -> None:
        if self._server is not None:
            asyncio.get_running_loop().remove_reader(self._server.fd)
            self._server.close()
            self._server = None
        for descriptor in self._kept.values():
            os.close(descriptor.fd)
        self._kept = {}
