"""Section ``sweep``: other tile sizes and stages than the shipped ones. Prints the best and changes nothing."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from ...triton_kernels.launch import Launch
from ...triton_kernels.paged_decode.config import decode_launch
from ...triton_kernels.paged_extend.config import extend_launch
from .case import Timing
from .counts import HEADS_7B, HEADS_8B, Heads
from .paged_decode import time_decode
from .paged_extend import time_extend
from .results import Row
from .timing import Clock, Timed

Measure = Callable[[Clock, Launch], Timed]

_DECODE_TILES, _DECODE_STAGES = (32, 64, 128), (3, 5, 7)
_SPANS = ((8192, 10240),)
_EXTEND_TILES = (  # rows, tokens, warps, stages
    (128, 64, 8, 3),
    (128, 64, 8, 5),
    (128, 64, 8, 7),
    (128, 128, 8, 3),
    (128, 32, 8, 5),
    (64, 64, 4, 5),
    (64, 128, 4, 3),
)


def timings(quick: bool) -> Iterator[Timing]:
    """Decode with 16-bit and INT8 caches and with one row, and extend; after each group the best beside the shipped launch."""
    if quick:
        return
    yield from _group("decode, bf16, 64 x 8192", _decode_launches(HEADS_7B, 2), partial(_decode, 64, HEADS_7B, torch.bfloat16, 1))
    yield from _group("extend, bf16, 2048 on 8192", _extend_launches(), _extend)
    yield from _group("decode, int8, 64 x 8192", _decode_launches(HEADS_7B, 1), partial(_decode, 64, HEADS_7B, torch.int8, 1))
    yield from _group("decode, bf16, 1 x 8192", _decode_launches(HEADS_8B, 2), partial(_decode, 1, HEADS_8B, torch.bfloat16, 16))


def describe(launch: Launch) -> str:
    tiles = ", ".join(f"{name} {size}" for name, size in launch.tiles.items())
    return f"{tiles}, {launch.num_warps} warps, {launch.num_stages} stages"


def _decode_launches(heads: Heads, value_bytes: int) -> list[Launch]:
    """The shipped one first."""
    shipped = decode_launch(heads.head_dim, heads.num_heads // heads.num_kv_heads, value_bytes)
    others = [
        Launch({**shipped.tiles, "TILE": tile}, num_warps=shipped.num_warps, num_stages=stages)
        for tile, stages in product(_DECODE_TILES, _DECODE_STAGES)
    ]
    return [shipped, *(launch for launch in others if launch != shipped)]


def _extend_launches() -> list[Launch]:
    start, end = _SPANS[0]
    group = HEADS_7B.num_heads // HEADS_7B.num_kv_heads
    shipped = extend_launch(HEADS_7B.head_dim, group, end - start, torch.bfloat16.itemsize)
    others = [
        Launch({"BLOCK_M": rows, "TILE": tile}, num_warps=warps, num_stages=stages) for rows, tile, warps, stages in _EXTEND_TILES
    ]
    return [shipped, *(launch for launch in others if launch != shipped)]


def _decode(num_rows: int, heads: Heads, values: torch.dtype, num_copies: int, clock: Clock, launch: Launch) -> Timed:
    return time_decode(clock, [8192] * num_rows, heads, values, num_copies=num_copies, launch=launch)


def _extend(clock: Clock, launch: Launch) -> Timed:
    return time_extend(clock, _SPANS, HEADS_7B, torch.bfloat16, launch)


def _group(name: str, launches: list[Launch], measure: Measure) -> Iterator[Timing]:
    """Launches that a device has no room for are notes."""
    times: dict[str, float] = {}
    for launch in launches:
        yield Timing(f"{name}: {describe(launch)}", partial(_one, times, launch, measure), is_peer=launch is not launches[0])
    yield Timing(f"{name}: best", partial(_best, times, describe(launches[0])))


def _one(times: dict[str, float], launch: Launch, measure: Measure, clock: Clock) -> list[Row]:
    timed = measure(clock, launch)
    times[describe(launch)] = timed.time_us
    return [timed.row()]


def _best(times: dict[str, float], shipped: str, clock: Clock) -> list[Row]:
    del clock
    if not times:
        return [Row(note="nothing was timed in this process")]
    best = min(times, key=times.__getitem__)
    if best == shipped:
        return [Row(time_us=times[best], note="as shipped")]
    if shipped not in times:
        return [Row(time_us=times[best], note=f"{best}; the shipped launch was not timed in this process")]
    gain = times[shipped] / times[best]
    return [Row(time_us=times[best], note=f"{best}: {gain:.2f} times as fast as the shipped launch")]
