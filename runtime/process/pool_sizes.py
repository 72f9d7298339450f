"""Sizes of the pools of embeddings, of KV and of recurrent states: as configured, else a share of the memory that they lie in (pure).

Pools cannot grow later, and their memory is reserved at the start. Running requests need the least sizes; what is above them keeps
pages for requests to come, so it is bounded by use: a share of what is free, and no more than conversations will fill.
"""

from bisect import bisect_right
from typing import NamedTuple

from ...schema.model_facts import ModelFacts
from ..config.runtime_config import RuntimeConfig
from ..errors import ConfigError
from ..stage_table import STAGES, parse_layout
from .device_room import DeviceRoom, pool_bytes, working_bytes
from .host_room import HostRoom

HOST_SHARE = 0.25  # of free memory after the weights: the rest is for processes, their activations, and whatever else the machine does
KV_TOKENS = 65536  # least, or all contexts that can run where that is less; fewer, down to one context, where memory is scarce
SCARCE_SHARE = 0.5  # of free memory after the weights, which the least may take
HOST_CONTEXTS = 16  # most, on the host
QUICK_BYTES = 512 << 20  # most above the least, on the host, or half of the weights: reserving a GiB costs 0.3 s of the start
EMBEDDING_TOKENS, MAX_EMBEDDING_TOKENS = 16384, 131072  # least, most; the largest picture that Qwen's processors make has the former
MAX_EMBEDDING_BYTES = 1 << 30  # most above the least: rows of a model with deepstack are several times as wide
NO_MEDIA = "the model takes text alone"  # reason of the size of a pool for media
EMBEDDING_SHARE = 0.02  # of the memory available to both pools
STATE_SHARE = 0.25  # likewise
LEAST_MEMBERS, MOST_MEMBERS = 2, 16  # sequences with states that run at once: a guidance pair; on a host
WINDOWS_SHARE = 0.5  # of a KV pool's tokens, which the pool of windows has at most: requests that are shorter than a window use as many
WINDOW_PAGES = 8  # that a guidance pair has beside window and chunk: those not yet whole, and those ahead of decode
LEAST_SNAPSHOTS, MOST_SNAPSHOTS = 2, 256  # states that the prefix cache keeps beside theirs: those that a guidance pair begins from


class PoolSize(NamedTuple):
    """``reason``: of the size, for users."""

    tokens: int
    reason: str


class StateSize(NamedTuple):
    """``members``: sequences that run at once on a device, of which a guidance pair has two. ``snapshots``: states that the prefix
    cache can have beside theirs. ``reason``: of the former, for users."""

    members: int
    reason: str
    snapshots: int = 0


class PoolSizes(NamedTuple):
    """Sizes of the embedding pool, of each KV pool, and of each device's pools beside it."""

    embedding: PoolSize
    kv: PoolSize
    states: StateSize = StateSize(0, "")
    window_tokens: int = 0  # of the pool for layers with a window; 0: there is none


def has_windows_apart(config: RuntimeConfig, facts: ModelFacts) -> bool:
    """Return whether layers with a window get pages of their own: where a context is longer than such a row needs, and no pages go
    packed to other pools."""
    is_packed = config.memory.kv_transfer_dtype != "auto"
    return saves_by_windows(config, facts) and not is_packed and not config.model.on_cuda


def saves_by_windows(config: RuntimeConfig, facts: ModelFacts) -> bool:
    """Return whether a context is longer than what a row needs of pages of windows."""
    return 0 < facts.window_page_bytes and _window_row(config, facts) < facts.max_context


def _window_row(config: RuntimeConfig, facts: ModelFacts) -> int:
    """Return the tokens that a guidance pair needs of the pool of windows, one being prefilled in the longest chunks."""
    return 2 * facts.window_tokens + facts.window_chunk_tokens + WINDOW_PAGES * config.memory.kv_page_tokens


def window_pool_tokens(config: RuntimeConfig, facts: ModelFacts, kv_tokens: int, num_rows: int) -> int:
    """Return the tokens of the pool of windows beside a KV pool: for all rows at once, or a share of the KV pool's where that is less,
    and for a guidance pair at least. By this share only requests of less than two windows can wait for pages of windows. Most bytes are
    those of layers with a window, so that one pool of the same memory has room for hardly more of them."""
    least = _window_row(config, facts)
    of_row = facts.window_tokens + WINDOW_PAGES // 2 * config.memory.kv_page_tokens
    return min(kv_tokens, max(least, min(least + (num_rows - 1) * of_row, int(WINDOWS_SHARE * kv_tokens))))


def _kv_places(config: RuntimeConfig, facts: ModelFacts, window_tokens: int, num_rows: int) -> int:
    """Return the tokens of a KV pool whose pages hold nothing, since all layers have a window: contexts of as many rows as have room in
    the pool of windows, two for each row, which may be a guidance pair, and no fewer than that pool. They keep places and keys."""
    if window_tokens < _window_row(config, facts):
        return window_tokens
    return max(window_tokens, min(2 * num_rows * facts.max_context, window_tokens * facts.max_context // facts.window_tokens))


def size_for_host(config: RuntimeConfig, facts: ModelFacts, room: HostRoom | None, num_rows: int) -> PoolSizes:
    """Return the sizes in host memory; without ``room`` the least ones."""
    memory, context = config.memory, facts.max_context
    free = room.num_bytes if room is not None else 0
    left = int(HOST_SHARE * max(0, free - facts.weight_bytes))
    share = f"{HOST_SHARE:.0%} of the memory available, {free >> 20} MiB, less weights"
    embedding = _embedding_size(config, facts, left)
    states = _state_size(config, facts, left)
    apart = has_windows_apart(config, facts) and not facts.are_all_windows
    if memory.kv_tokens:
        return _pool_sizes(config, facts, num_rows, embedding, PoolSize(memory.kv_tokens, "memory.kv_tokens"), states)

    def kv_bytes(num_pages: int) -> int:
        """Return what so many pages of a KV pool take, with those of windows beside them."""
        whole, page = num_pages * facts.kv_room_bytes, memory.kv_page_tokens
        left = num_pages * page - window_pool_tokens(config, facts, num_pages * page, num_rows) if apart else 0
        return whole - left // page * facts.window_page_bytes

    def most_tokens(num_bytes: int) -> int:
        """Return the tokens of a KV pool of so many bytes."""
        most = num_bytes // (facts.kv_room_bytes - (facts.window_page_bytes if apart else 0))
        return max(0, bisect_right(range(most + 1), num_bytes, key=kv_bytes) - 1) * memory.kv_page_tokens

    def affordable_of(num_bytes: int) -> int:
        """Return the tokens of each pool that all pools' memory has room for."""
        of_each = max(0, num_bytes - embedding.tokens * facts.embedding_row_bytes) // config.num_kv_pools
        return most_tokens(max(0, of_each - states.members * facts.member_bytes - states.snapshots * facts.state_bytes))

    affordable, least = affordable_of(left), min(KV_TOKENS, num_rows * context)
    if room is not None:
        least = min(least, affordable_of(int(SCARCE_SHARE * max(0, free - facts.weight_bytes))))
    least = max(least, context)
    num_quick = most_tokens(max(QUICK_BYTES, facts.weight_bytes // 2) // config.num_kv_pools)
    kv = _within(least, affordable, max(least, min(HOST_CONTEXTS * context, least + num_quick)), share)
    return _pool_sizes(config, facts, num_rows, embedding, kv, states)


def _pool_sizes(
    config: RuntimeConfig, facts: ModelFacts, num_rows: int, embedding: PoolSize, kv: PoolSize, states: StateSize
) -> PoolSizes:
    """Return the sizes with those of the pool of windows, if there is one."""
    if not has_windows_apart(config, facts):
        return PoolSizes(embedding, kv, states)
    if facts.are_all_windows:
        places = _kv_places(config, facts, kv.tokens, num_rows)
        return PoolSizes(embedding, PoolSize(places, "places of tokens alone: all layers have a window"), states, kv.tokens)
    return PoolSizes(embedding, kv, states, window_pool_tokens(config, facts, kv.tokens, num_rows))


def size_for_device(config: RuntimeConfig, facts: ModelFacts, room: DeviceRoom, num_rows: int) -> PoolSizes:
    """Return the sizes of the embedding and the KV pool on a CUDA device. A guidance pair is two rows of a step.

    Raises: ConfigError where no whole context fits.
    """
    memory, page = config.memory, config.memory.kv_page_tokens
    computing = [process for process in parse_layout(config.actors.layout) if STAGES[process.stages[0]].has_device]
    num_processes = sum(process.count for process in computing) + config.media.decodes_on_gpu
    working = working_bytes(num_processes, facts.prefill_token_bytes, facts.logits_bytes, 2 * num_rows, facts.step_bytes)
    left = pool_bytes(room, memory.gpu_memory_utilization, working)
    embedding = _embedding_size(config, facts, left)
    affordable = max(0, left - embedding.tokens * facts.embedding_row_bytes) // facts.kv_page_bytes * page
    if memory.kv_tokens:
        return PoolSizes(embedding, PoolSize(memory.kv_tokens, "memory.kv_tokens"))
    if affordable < facts.max_context:
        raise ConfigError(
            f"{config.model.device} has {room.free_bytes >> 20} of {room.total_bytes >> 20} MiB free beside the weights; of "
            f"memory.gpu_memory_utilization = {memory.gpu_memory_utilization:g} they leave room for {affordable} tokens of KV cache, "
            f"one context has {facts.max_context}: lower model.max_context, or set memory.kv_dtype or memory.kv_tokens"
        )
    return PoolSizes(embedding, PoolSize(affordable, f"what is left of {memory.gpu_memory_utilization:.0%} of the device's memory"))


def _embedding_size(config: RuntimeConfig, facts: ModelFacts, left: int) -> PoolSize:
    if not facts.takes_media:
        return PoolSize(0, NO_MEDIA)
    if config.memory.embedding_tokens:
        return PoolSize(config.memory.embedding_tokens, "memory.embedding_tokens")
    affordable = int(EMBEDDING_SHARE * left) // facts.embedding_row_bytes
    most = max(EMBEDDING_TOKENS, min(MAX_EMBEDDING_TOKENS, MAX_EMBEDDING_BYTES // facts.embedding_row_bytes))
    return _within(EMBEDDING_TOKENS, affordable, most, f"{EMBEDDING_SHARE:.0%} of the memory for pools")


def _state_size(config: RuntimeConfig, facts: ModelFacts, left: int) -> StateSize:
    if not facts.state_grid:
        return StateSize(0, "")
    share = int(STATE_SHARE * left) // config.num_kv_pools
    size = _running_size(config, share // facts.member_bytes)
    if not config.memory.prefix_cache:
        return size
    quick = max(QUICK_BYTES, facts.weight_bytes // 2) // config.num_kv_pools
    room = min(share - size.members * facts.member_bytes, quick)
    return size._replace(snapshots=max(LEAST_SNAPSHOTS, min(MOST_SNAPSHOTS, room // facts.state_bytes)))


def _running_size(config: RuntimeConfig, affordable: int) -> StateSize:
    """``affordable``: sequences whose states the share has room for."""
    if config.memory.max_sequences:
        return StateSize(max(LEAST_MEMBERS, config.memory.max_sequences), "memory.max_sequences")
    if affordable >= MOST_MEMBERS:
        return StateSize(MOST_MEMBERS, f"{MOST_MEMBERS}, the most unless memory.max_sequences is set")
    if affordable <= LEAST_MEMBERS:
        return StateSize(LEAST_MEMBERS, f"{LEAST_MEMBERS}, the least")
    return StateSize(affordable, f"{STATE_SHARE:.0%} of the memory for pools")


def _within(least: int, affordable: int, most: int, share: str) -> PoolSize:
    if affordable <= least:
        return PoolSize(least, f"{least} tokens, the least")
    return PoolSize(most, f"{most} tokens, the most") if affordable >= most else PoolSize(affordable, share)
