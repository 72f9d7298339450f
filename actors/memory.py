"""The memory actor: makes every segment, loads the weights once, and owns all bytes that must outlive an actor.

Segments are files: when this process dies nothing is lost, and a new generation finds everything made and only watches. On CUDA the
weights and the pools that kernels work on lie on the device (``DeviceStore``): they have no name, and live with the descriptors that
this process holds and hands out, and with their copies in the supervisor. A generation that replaces it takes them over from it; one
after its death takes them from the supervisor, and without one the run has to end. It runs no kernels: on the device it only
copies and clears.
"""

import logging

import msgspec
import torch

from ..models.checkpoint.weights import Buffer, write_weights
from ..models.config import facts_of
from ..models.lm.decode_graphs import MAX_ROWS
from ..runtime.bus.request_keys import deltas_of
from ..runtime.environment import read_environment
from ..runtime.errors import ConfigError, UserError
from ..runtime.process.device_room import DeviceRoom
from ..runtime.process.host_room import read_host_room
from ..runtime.process.memory_layout import (
    DELTA_RING_BYTES,
    DEVICE_SOCKET,
    PLAN_SLOTS,
    ROW_DEFINITION_BYTES,
    ROW_STATE_BYTES,
    SPARE_SOCKET,
    MemoryLayout,
    plan_layout,
    read_layout,
    write_layout,
)
from ..runtime.process.processors import read_processors
from ..runtime.stage_table import MAX_INSTANCES, SUPERVISOR, stage_of
from ..shm.controller_stats import ControllerStats
from ..shm.descriptors import Descriptor, DescriptorServer, fetch_descriptors
from ..shm.errors import MissingError
from ..shm.flight_recorder import FlightRecorder
from ..shm.key_use import KeyUse
from ..shm.layer_progress import LayerProgress
from ..shm.plan_table import PlanTable
from ..shm.pool import PagePool
from ..shm.ring import Ring
from ..shm.segment import HEADER_BYTES, Segment
from ..shm.sequence_table import SequenceTable
from ..shm.status import ActorTable
from ..shm.step_gaps import StepGaps
from ..shm.turns import Turns
from .host.actor import POLL_S, Actor, Ending
from .host.device import check_fp8, open_device, sharing_of
from .host.pipeline import open_streams
from .host.shared_tensors import FETCH_S, WEIGHTS_INDEX, WEIGHTS_SEGMENT, tensor_over
from .page_store import PageStore

log = logging.getLogger(__name__)

IDLE_S = 0.5
LOADING_S = 60.0  # for one tensor: longer is a hang


def main(actor: Actor) -> None:
    """Entry of the memory process."""
    server: DescriptorServer | None = None
    pages: PageStore | None = None
    while read_layout(actor.run.path) is None:
        if actor.role.try_acquire():
            server, pages = build(actor)
        else:
            actor.pause(POLL_S)
    inherited = take_over(actor) if server is None and actor.config.model.on_cuda else {}
    actor.become_active()
    if pages is None:
        pages = open_pages(actor, read_layout(actor.run.path))
    if inherited:
        server = DescriptorServer(actor.run.path / DEVICE_SOCKET, inherited)
    if pages is not None:
        pages.start()
    actor.serving()
    while not actor.ending:
        actor.receive()
        actor.wait(IDLE_S, [] if server is None else [server.fd])
        if server is not None:
            server.serve()
    if pages is not None:
        pages.close()


def build(actor: Actor) -> tuple[DescriptorServer | None, PageStore | None]:
    """Make all segments and fill the weights and the pages that have outlived earlier runs; redo what a killed predecessor left
    half-made. Returns the server of descriptors of device memory and the store of pages, where there are any.

    Raises: ConfigError, DeviceError, CheckpointError, SpaceError, Ending.
    """
    model = actor.model
    facts = facts_of(model, actor.config.memory.kv_page_tokens, actor.config.memory.kv_transfer_dtype)
    layout = plan_layout(actor.config, facts, model.dtype)
    if actor.config.model.on_cuda and model.null is not None:
        raise ConfigError(f"model.device is {actor.config.model.device!r}, but the null model computes nothing: it has to be 'cpu'")
    if actor.config.model.on_cuda and 2 * layout.num_rows > MAX_ROWS:
        most = f"at most {MAX_ROWS // 2} on CUDA: a step has {MAX_ROWS} rows, and a guidance pair takes two"
        raise ConfigError(f"memory.max_sequences is {layout.num_rows}, {most}")
    device = open_device(actor.config.model)
    if device.type == "cuda" and model.kv_dtype == "fp8":
        check_fp8(torch.cuda.get_device_capability(device))
    clear(actor)
    store = DeviceStore(device) if device.type == "cuda" else None
    if store is None:
        layout = plan_layout(actor.config, facts, model.dtype, read_host_room(actor.run.path))
        make_tables(actor, layout)
        load_weights(actor)
    else:  # pools get what the weights leave of the device
        load_weights(actor, store)
        layout = plan_layout(actor.config, facts, model.dtype, store.room())
        make_tables(actor, layout)
    server = None
    if store is not None:
        for name, pool in layout.pools.items():
            if pool.on_device:
                store.allocate(name, pool.num_bytes)
        server = DescriptorServer(actor.run.path / DEVICE_SOCKET, store.descriptors())
    sharing = sharing_of(device, read_environment().mps_pipe, actor.config.actors.layout)
    layout = msgspec.structs.replace(layout, sharing=sharing)
    pages = open_pages(actor, layout)
    write_layout(actor.run.path, layout)
    return server, pages


def open_pages(actor: Actor, layout: MemoryLayout | None) -> PageStore | None:
    """Open the store of pages, if the run has one."""
    if layout is None or not actor.config.cache.dir:
        return None
    actor.notifier.status("reading weights for cache.dir")
    return PageStore.open(actor.run, actor.config, layout, actor.model_path, lambda: go_on(actor))


def go_on(actor: Actor) -> None:
    """Say that loading goes on, while it takes long. Raises: Ending."""
    if actor.ending:
        raise Ending
    actor.notifier.extend(LOADING_S)


def take_over(actor: Actor) -> dict[str, Descriptor]:
    """Take over device memory from the generation about to be replaced or, if it is dead, from the supervisor.

    Raises: UserError if neither has it: then it is lost.
    """
    for name in (DEVICE_SOCKET, SPARE_SOCKET):
        try:
            return fetch_descriptors(actor.run.path / name, FETCH_S)
        except MissingError:
            continue
    raise UserError(f"memory died; its weights and pages on {actor.config.model.device} are lost: start the run again")


class DeviceStore:
    """This process's allocations on the device, by name. One lives as long as a process has it mapped or holds its descriptor."""

    def __init__(self, device: torch.device) -> None:
        from ..shm.device_memory import DeviceMemory  # needs cuda-bindings

        self._device = device
        self._allocate = DeviceMemory.allocate
        self._memories: dict[str, DeviceMemory] = {}

    def allocate(self, name: str, num_bytes: int) -> torch.Tensor:
        """Allocate zeros, uint8 [num_bytes]. Raises: DeviceError."""
        self._memories[name] = memory = self._allocate(self._device.index, num_bytes)
        memory.clear()
        return tensor_over(memory, self._device)

    def room(self) -> DeviceRoom:
        """The device's memory, and how much of it is free now."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return DeviceRoom(total_bytes, free_bytes)

    def descriptors(self) -> dict[str, Descriptor]:
        """The descriptors for others to map, once all writes have arrived."""
        torch.cuda.synchronize(self._device)
        return {name: memory.descriptor for name, memory in self._memories.items()}


def clear(actor: Actor) -> None:
    """Remove segments of a predecessor that died before it published the layout."""
    for path in actor.run.path.glob(f"*.{actor.run.run_id}"):
        path.unlink()


def make_tables(actor: Actor, layout: MemoryLayout) -> None:
    run = actor.run
    actors = actor.config.instances
    ActorTable.create(run, actors, {name: device for name, device in actor.config.actor_devices.items()})
    ControllerStats.create(run)
    StepGaps.create(run, MAX_INSTANCES)
    if actor.config.num_kv_pools > 1:
        LayerProgress.create(run)
    if actor.config.actors.turns != "off":
        for device in range(actor.config.num_kv_pools):
            Turns.create(run, device)
    for name in (*actors, SUPERVISOR):
        FlightRecorder.create(run, name)
    for name, pool in layout.pools.items():
        _tell_reserved(actor, 0 if pool.on_device else pool.num_bytes, f"the {name} pool")
        PagePool.create(run, name, pool.num_pages, pool.page_bytes, on_device=pool.on_device)
    SequenceTable.create(
        run,
        layout.num_rows,
        layout.max_context,
        layout.max_pages,
        max_spec_bytes=ROW_DEFINITION_BYTES,
        max_state_bytes=ROW_STATE_BYTES,
    )
    PlanTable.create(run, PLAN_SLOTS, layout.plan_slot_bytes)
    if actor.config.scheduling.prefill_pipeline:
        open_streams(run, actor.config, actor.model, writable=True).create()
    if actor.config.num_gateways > 1:
        KeyUse.create(run)
    for gateway in (name for name in actors if stage_of(name) == "gateway"):
        Ring.create(run, deltas_of(gateway), DELTA_RING_BYTES)


def _tell_reserved(actor: Actor, num_bytes: int, what: str) -> None:
    """Tell what is reserved next, if that takes noticeable time."""
    if num_bytes >= 1 << 30:
        go_on(actor)
        actor.notifier.status(f"reserving {num_bytes / 1e6:.0f} MB for {what}")


def load_weights(actor: Actor, store: DeviceStore | None = None) -> None:
    """Write the weights in the layout that is computed with, into a segment or to the device, and publish them with their index."""
    segment: Segment | None = None

    def allocate(num_bytes: int) -> Buffer:
        nonlocal segment
        if store is not None:
            return store.allocate(WEIGHTS_SEGMENT, num_bytes)
        path = actor.run.segment_path(WEIGHTS_SEGMENT)
        _tell_reserved(actor, num_bytes, "weights")
        segment = Segment.create(path, HEADER_BYTES + num_bytes, kind="raw", publish=False)
        num_huge = segment.use_huge_pages(lambda: go_on(actor))
        log.info("%.0f of %.0f MB for weights are in huge pages", num_huge / 1e6, segment.num_bytes / 1e6)
        return segment.buf[HEADER_BYTES:]

    def progress(done_bytes: int, total_bytes: int) -> None:
        go_on(actor)
        percent = 100 * done_bytes // max(1, total_bytes)
        actor.notifier.status(f"loading weights {percent} % of {total_bytes / 1e6:.0f} MB")

    index = write_weights(actor.model_path, actor.model, allocate, progress, read_processors().num_cores)
    if segment is not None:
        segment.publish(sealed=True)
    (actor.run.path / WEIGHTS_INDEX).write_bytes(msgspec.msgpack.encode(index))
