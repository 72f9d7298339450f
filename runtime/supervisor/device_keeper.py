"""Keep the device memory of ``memory`` for its next generation, in the supervisor, without CUDA.

An allocation lives as long as a process has it mapped or holds its descriptor (``shm.device_memory``). The supervisor holds the
descriptors too, and hands them to a ``memory`` that finds its predecessor dead.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from ...shm.descriptors import Descriptor, DescriptorServer, fetch_descriptors
from ...shm.errors import ShmError
from ..process.memory_layout import DEVICE_SOCKET, SPARE_SOCKET

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
        """Follow process ``pid``, the acting ``memory``: keep its descriptors instead of its predecessor's."""
        if pid != self._pid:
            self._pid = pid
            self._following = asyncio.get_running_loop().create_task(self._fetch(pid))

    async def _fetch(self, pid: int) -> None:
        """Fetch the descriptors of ``pid``, unless another process replaces it meanwhile; then close all received ones."""
        is_said = False
        while pid == self._pid:
            try:
                found = await asyncio.to_thread(fetch_descriptors, self._run / DEVICE_SOCKET, _FETCH_S)
            except (ShmError, OSError) as error:
                if not is_said:
                    self._say(f"memory's device memory is not kept yet: {error}")
                    is_said = True
                await asyncio.sleep(_AGAIN_S)
                continue
            if pid == self._pid:
                self._keep(found)
            else:
                _close(found)
            return

    def _keep(self, found: dict[str, Descriptor]) -> None:
        try:
            server = DescriptorServer(self._run / SPARE_SOCKET, found)
        except OSError as error:
            self._say(f"memory's device memory is not kept: {error}")
            _close(found)
            return
        self._release()
        self._kept, self._server = found, server
        asyncio.get_running_loop().add_reader(server.fd, server.serve)

    async def close(self) -> None:
        """Stop keeping descriptors."""
        self._pid = 0
        if self._following is not None:
            await self._following  # a fetch that has begun ends within its limit, and what came of it is closed
        self._release()

    def _release(self) -> None:
        if self._server is not None:
            asyncio.get_running_loop().remove_reader(self._server.fd)
            self._server.close()
            self._server = None
        _close(self._kept)
        self._kept = {}


def _close(descriptors: dict[str, Descriptor]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor.fd)
