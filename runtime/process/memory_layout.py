"""The layout of a run's shared memory: sizes of pools and tables, computed once by ``memory`` from configuration and model facts.

``memory`` writes the layout into the run directory last, when every segment exists; the other actors wait for it.
"""

import os
from pathlib import Path

import msgspec

from ...schema.model_facts import ModelFacts
from ...shm.flight_recorder import NUM_RECORDS, RECORD_BYTES
from ..config.runtime_config import MAX_UNANSWERED, RuntimeConfig
from ..config.toml_text import show
from ..errors import ConfigError
from ..pools import kv_pool, log_pool, packed_pool, state_pool, window_pool
from ..stage_table import ACTORS, device_pools
from .device_room import DeviceRoom
from .host_room import HostRoom
from .pool_sizes import NO_MEDIA, size_for_device, size_for_host

LAYOUT_NAME = "layout"
DEVICE_SOCKET = "device"  # here memory hands out descriptors of device memory
SPARE_SOCKET = "device.spare"  # here the supervisor does, to a memory whose predecessor is dead

MEDIA_PAGE_BYTES = 64 * 1024
PATCH_PAGE_ROWS = 256
EMPTY_PAGE_BYTES = 64  # of a page that holds nothing: a pool's have some
EMBEDDING_PAGE_TOKENS = 32
CPU_SEQUENCES, CUDA_SEQUENCES = 64, 256  # rows where memory.max_sequences is 0
ROW_DEFINITION_BYTES = 64 * 1024
ROW_STATE_BYTES = 128 * 1024
PLAN_SLOTS = 64
PLAN_BASE_BYTES = 128 * 1024  # of a plan, without the pages that it names
PAGE_NAME_BYTES = 14  # a page number and a generation in MessagePack, at most
DELTA_RING_BYTES = 4 << 20


class PoolLayout(msgspec.Struct, frozen=True):
    """``on_device``: its pages lie on the CUDA device, and only their generations in shared memory. ``reason``: of its size."""

    num_pages: int
    page_bytes: int
    on_device: bool = False
    reason: str = ""

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes


class MemoryLayout(msgspec.Struct, frozen=True):
    """Sizes of everything in shared memory, and the model's device and dtype. Pools are by name: media, patch, embedding, and the KV
    pools of all devices, which have one size, each with one of packed pages where ``memory.kv_transfer_dtype`` has them.
    ``sharing``: see ``report.ComputeReport``."""

    num_rows: int
    max_context: int
    max_pages: int  # length of one block table
    kv_page_tokens: int
    pools: dict[str, PoolLayout]
    dtype: str
    kv_dtype: str
    device: str
    weights: str = ""  # format of the language model's matrices; "": dtype
    sharing: str = ""
    num_recorders: int = len(ACTORS) + 1  # one per actor, and the supervisor's
    stream_bytes: int = 0  # between the stages of prefill's pipeline, at most: the file takes them as they are written

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent states."""
        return "state" in self.pools

    @property
    def has_windows(self) -> bool:
        """Whether layers with a window have pages of their own."""
        return "window" in self.pools

    @property
    def plan_slot_bytes(self) -> int:
        """Room for a plan that names every page of all pools whose pages plans name."""
        return PLAN_BASE_BYTES + PAGE_NAME_BYTES * sum(self.pools[name].num_pages for name in ("media", "patch", "embedding"))

    @property
    def num_bytes(self) -> int:
        """Shared memory of pools and tables, without the weights."""
        pools = sum(pool.num_bytes for pool in self.pools.values() if not pool.on_device)
        rows = self.num_rows * (12 * self.max_context + 24 * self.max_pages + ROW_DEFINITION_BYTES + 2 * ROW_STATE_BYTES)
        records = self.num_recorders * NUM_RECORDS * RECORD_BYTES
        return pools + rows + PLAN_SLOTS * self.plan_slot_bytes + DELTA_RING_BYTES + records + self.stream_bytes


_decode = msgspec.json.Decoder(MemoryLayout).decode


def plan_layout(config: RuntimeConfig, facts: ModelFacts, dtype: str, room: DeviceRoom | HostRoom | None = None) -> MemoryLayout:
    """Divide memory. ``room``: memory of the CUDA device of the model's pools, once the weights are loaded; or of the host, before.
    Without it pools have their least sizes. Raises ConfigError when the KV pool is too small."""
    memory = config.memory
    page, mebibyte = memory.kv_page_tokens, 1 << 20
    num_rows = memory.max_sequences or (CUDA_SEQUENCES if config.model.on_cuda else CPU_SEQUENCES)
    _check_model(config, facts)
    if isinstance(room, DeviceRoom):
        embedding, kv, states, window_tokens = size_for_device(config, facts, room, num_rows)
    else:
        embedding, kv, states, window_tokens = size_for_host(config, facts, room, num_rows)
    if kv.tokens < 2 * page:
        raise ConfigError(f"memory.kv_tokens is {kv.tokens}, at least two pages ({2 * page} tokens) are needed")
    patch_page_bytes = PATCH_PAGE_ROWS * facts.patch_row_bytes
    media_mib, patch_mib, reason = (memory.media_mib, memory.patch_mib, "") if facts.takes_media else (0, 0, NO_MEDIA)
    pools = {
        "media": PoolLayout(max(1, media_mib * mebibyte // MEDIA_PAGE_BYTES), MEDIA_PAGE_BYTES, reason=reason),
        "patch": PoolLayout(max(1, patch_mib * mebibyte // patch_page_bytes), patch_page_bytes, reason=reason),
        "embedding": PoolLayout(
            max(1, embedding.tokens // EMBEDDING_PAGE_TOKENS),
            EMBEDDING_PAGE_TOKENS * facts.embedding_row_bytes,
            reason=embedding.reason,
        ),
    }
    for device in range(config.num_kv_pools):
        if states.members:
            pools[state_pool(kv_pool(device))] = PoolLayout(
                2 * states.members + states.snapshots, facts.state_bytes, reason=states.reason
            )
            pools[log_pool(kv_pool(device))] = PoolLayout(states.members, facts.log_bytes, reason=states.reason)
        apart = facts.window_page_bytes if window_tokens else 0
        num_bytes = facts.kv_page_bytes - apart or EMPTY_PAGE_BYTES
        pools[kv_pool(device)] = PoolLayout(-(-kv.tokens // page), num_bytes, reason=kv.reason)
        if apart:
            size = "of all requests or half of the KV pool's tokens" if not facts.are_all_windows else "sized as one pool is"
            reason = f"windows of {facts.window_tokens} tokens, {size}"
            pools[window_pool(kv_pool(device))] = PoolLayout(-(-window_tokens // page), apart, reason=reason)
        if facts.packed_page_bytes:
            pools[packed_pool(kv_pool(device))] = PoolLayout(
                -(-kv.tokens // page), facts.packed_page_bytes, reason="memory.kv_transfer_dtype"
            )
    if config.model.on_cuda:
        pools |= {name: msgspec.structs.replace(pools[name], on_device=True) for name in device_pools()}
    return MemoryLayout(
        num_rows=num_rows,
        max_context=facts.max_context,
        max_pages=-(-facts.max_context // page),
        kv_page_tokens=page,
        pools=pools,
        dtype=dtype,
        weights=dtype if config.model.weights == "auto" else config.model.weights,
        kv_dtype=dtype if memory.kv_dtype == "auto" else memory.kv_dtype,
        device=config.model.device,
        num_recorders=len(config.instances) + 1,
        stream_bytes=_num_streams(config) * config.max_prefill_tokens * facts.stream_token_bytes,
    )


def _num_streams(config: RuntimeConfig) -> int:
    """Return the number of streams that a pipeline keeps: of each plan that may be in it, those behind all stages but the last."""
    ranks = config.prefill_ranks
    return MAX_UNANSWERED * ranks * (ranks - 1)


def _check_model(config: RuntimeConfig, facts: ModelFacts) -> None:
    """Raise ConfigError for a model that a run with this configuration cannot have."""
    if config.model.on_cuda and facts.gpu_fault:
        raise ConfigError(f"model.device is {config.model.device!r}, but the model has {facts.gpu_fault}: it runs on a CPU only")
    if config.scheduling.prefill_pipeline and facts.pipeline_fault:
        raise ConfigError(
            f"scheduling.prefill_pipeline: the model has {facts.pipeline_fault}, its layers cannot be divided: leave it out"
        )
    if config.scheduling.prefill_pipeline and config.prefill_ranks > facts.num_layers:
        raise ConfigError(
            f"scheduling.prefill_pipeline: actors.layout = {show(config.actors.layout)} has {config.prefill_ranks} stages of prefill,"
            f" the model has {facts.num_layers} layers: have {facts.num_layers} or fewer"
        )
    if facts.state_grid:
        _check_states(config, facts.state_grid)


def _check_states(config: RuntimeConfig, grid: int) -> None:
    """Check what a model with recurrent states asks of a run, whose states are kept every ``grid`` tokens. Raises: ConfigError."""
    if config.memory.kv_page_tokens != grid:
        raise ConfigError(f"memory.kv_page_tokens is {config.memory.kv_page_tokens}: the model's recurrent states need {grid}")
    budget = config.scheduling.prefill_budget_tokens
    if 0 < budget < grid:
        raise ConfigError(f"scheduling.prefill_budget_tokens is {budget}: the model's recurrent states need {grid} at least")


def write_layout(run: Path, layout: MemoryLayout) -> None:
    """Publish the layout, atomically."""
    part = run / f"{LAYOUT_NAME}.part"
    part.write_bytes(msgspec.json.encode(layout))
    os.replace(part, run / LAYOUT_NAME)


def read_layout(run: Path) -> MemoryLayout | None:
    """Read the layout; None while ``memory`` has not finished."""
    try:
        return _decode((run / LAYOUT_NAME).read_bytes())
    except FileNotFoundError:
        return None
