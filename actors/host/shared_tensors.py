"""Weights and pages made by ``memory``, as tensors on the run's device. Nothing is copied.

A thread of a process of several actors gets a CUDA stream of its own (TI5), and decode's goes first.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from numpy.typing import NDArray

from ...models.checkpoint.weights import WeightIndex, attach_weights
from ...runtime.observe.replay_capture import DevicePages
from ...runtime.process.memory_layout import DEVICE_SOCKET
from ...runtime.stage_table import stage_of
from ...shm.descriptors import Descriptor, fetch_descriptors
from ...shm.errors import MissingError
from ...shm.pool import PagePool
from ...shm.segment import HEADER_BYTES, Segment
from .actor import POLL_S, Actor
from .device import open_device

if TYPE_CHECKING:  # needs cuda-bindings, which is there on CUDA alone
    from ...shm.device_memory import DeviceMemory

WEIGHTS_SEGMENT = "weights"
WEIGHTS_INDEX = "weights.index"
_URGENT = -1  # launches of such a stream go before those of others
_decode_index = msgspec.msgpack.Decoder(WeightIndex).decode
FETCH_S = 10.0  # for ``memory`` to answer; its loop turns twice a second at least


class SharedTensors:
    """Weights and pages of the run. On CUDA: ``memory``'s allocations, those that are asked for mapped here."""

    def __init__(self, actor: Actor) -> None:
        """Call it when the layout is there. Raises: ConfigError, DeviceError, ShmError, Ending."""
        self._actor = actor
        self.device = open_device(actor.config.model)
        self._descriptors: dict[str, Descriptor] = {}
        self._device_pages: dict[str, Callable[[list[int]], NDArray[Any]]] = {}
        if self.device.type == "cuda":
            if actor.shares_process:
                stream = torch.cuda.Stream(self.device, priority=_URGENT if stage_of(actor.name) == "decode" else 0)  # type: ignore[no-untyped-call]
                torch.cuda.set_stream(stream)
            self._descriptors = wait_for_descriptors(actor)

    def weights(self) -> dict[str, torch.Tensor]:
        """Views of the weights, by name."""
        run = self._actor.run
        index = _decode_index((run.path / WEIGHTS_INDEX).read_bytes())
        if self.device.type == "cuda":
            return attach_weights(self._mapped(WEIGHTS_SEGMENT, writable=False), index)
        segment = Segment.attach(run.segment_path(WEIGHTS_SEGMENT), writable=False)
        return attach_weights(segment.buf[HEADER_BYTES:], index)

    def pages(self, pool: PagePool) -> torch.Tensor:
        """The pool's pages, uint8 [num_pages, page_bytes], written in place."""
        if not pool.on_device:
            return torch.from_numpy(pool.data)
        pages = self._mapped(pool.name).view(pool.num_pages, pool.page_bytes)
        self._device_pages[pool.name] = partial(copy_pages, pages)
        return pages

    @property
    def device_pages(self) -> DevicePages:
        """The pages of the requested pools on the device."""
        return self._device_pages

    def close(self) -> None:
        """Close the descriptors. What is mapped stays, and stays ``memory``'s."""
        for descriptor in self._descriptors.values():
            os.close(descriptor.fd)
        self._descriptors.clear()

    def _mapped(self, name: str, writable: bool = True) -> torch.Tensor:
        from ...shm.device_memory import DeviceMemory

        return tensor_over(DeviceMemory.attach(self.device.index, self._descriptors[name], writable), self.device)


def copy_pages(pages: torch.Tensor, numbers: list[int]) -> NDArray[Any]:
    """Copy some of ``pages``, as they are when all launches on the current stream are done."""
    copied: NDArray[Any] = pages[torch.tensor(numbers, dtype=torch.int64, device=pages.device)].cpu().numpy()
    return copied


def wait_for_descriptors(actor: Actor) -> dict[str, Descriptor]:
    """Fetch the descriptors of ``memory``, even while it is being replaced. Raises: MissingError after FETCH_S, ShmError, Ending."""
    until_s = time.monotonic() + FETCH_S
    while True:
        try:
            return fetch_descriptors(actor.run.path / DEVICE_SOCKET, FETCH_S)
        except MissingError:
            if time.monotonic() > until_s:
                raise
            actor.pause(POLL_S)


def tensor_over(memory: "DeviceMemory", device: torch.device) -> torch.Tensor:
    """Uint8 [num_bytes] over device memory, which stays mapped while the tensor or a view of it is there."""
    tensor: torch.Tensor = torch.as_tensor(memory, device=device)
    return tensor
