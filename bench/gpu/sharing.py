"""Section ``sharing``: the mutual slowdown of phases on separate streams of one device, and two streams against taking turns.

Fig. 6 and Fig. 12 of the published measurements (US10, TI24) on the hardware that is there: by how much a decode step is slowed by an
encode or a prefill beside it, and these by it; and how long encoding and decoding take on two streams beside one after the other.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from .case import Check, Size, Timing, missing_memory, num_multiprocessors
from .counts import SHAPE_7B, Shape
from .results import Row
from .stack import DecodeStep, PrefillChunk, Stack
from .timing import Clock, Launch

_ROWS, _TOKENS = 32, 1024  # of a decode step
_CHUNK = 1024
_LONGER = 3  # what runs beside a phase outlasts it so many times


class Phase(NamedTuple):
    name: str
    launch: Launch


def checks(device: torch.device, size: Size) -> Iterator[Check]:
    """None of its own: the kernels have theirs."""
    yield from ()


def timings(quick: bool) -> Iterator[Timing]:
    """Each pair of phases of the 7B shape; quickly: decode beside encode alone."""
    for name in ("encode",) if quick else ("encode", "prefill"):
        yield Timing(f"decode beside {name}", partial(_pair, SHAPE_7B, name))


def _pair(shape: Shape, name: str, clock: Clock) -> list[Row]:
    num_bytes = shape.step_bytes([_TOKENS] * _ROWS) + 2 * shape.hidden * shape.vocabulary
    if name == "prefill":
        num_bytes += shape.step_bytes([_CHUNK]) + 2 * shape.hidden * shape.vocabulary + _CHUNK * 12 * shape.intermediate
    if (row := missing_memory(num_bytes)) is not None:
        return [row]
    decode = Phase(f"decode {_ROWS} x {_TOKENS}", _decode(shape, clock.device))
    other = _encode(shape, clock.device) if name == "encode" else _prefill(shape, clock.device)
    alone_us = [clock.time([phase.launch]).time_us for phase in (decode, other)]
    return [
        slowed(clock, decode, alone_us[0], other, alone_us[1]),
        slowed(clock, other, alone_us[1], decode, alone_us[0]),
        _two_streams(clock, decode, alone_us[0], other, alone_us[1]),
    ]


def slowed(clock: Clock, phase: Phase, alone_us: float, other: Phase, other_us: float) -> Row:
    """US10's degradation factor: time beside the other over time alone."""
    num_others = math.ceil(_LONGER * alone_us / other_us)
    beside = clock.beside(phase.launch, 1, other.launch, num_others)
    note = f"alone {alone_us:,.0f} us; times slower (US10)"
    return Row(case=f"{phase.name} beside {other.name}", time_us=beside.first_us, rate=beside.first_us / alone_us, unit="x", note=note)


def _two_streams(clock: Clock, phase: Phase, alone_us: float, other: Phase, other_us: float) -> Row:
    """TI24: as much time of each, on two streams, beside one after the other."""
    counts = max(1, round(other_us / alone_us)), max(1, round(alone_us / other_us))
    both_us = clock.beside(phase.launch, counts[0], other.launch, counts[1]).both_us
    in_turn_us = counts[0] * alone_us + counts[1] * other_us
    case = f"{phase.name} and {other.name}, two streams over taking turns"
    return Row(
        case=case, time_us=both_us, rate=in_turn_us / both_us, unit="x", note=f"in turn {in_turn_us:,.0f} us; times faster (TI24)"
    )


def _decode(shape: Shape, device: torch.device) -> Launch:
    stack = Stack.make(shape, [_TOKENS] * _ROWS, torch.bfloat16, device)
    return DecodeStep.make(stack, num_multiprocessors(device)).forward


def _encode(shape: Shape, device: torch.device) -> Phase:
    from .tower import Tower

    return Phase("encode 1 MP", Tower.make(shape, device).forward)


def _prefill(shape: Shape, device: torch.device) -> Phase:
    stack = Stack.make(shape, [_CHUNK], torch.bfloat16, device)
    return Phase(f"prefill {_CHUNK}", PrefillChunk.make(stack, 0, _CHUNK).forward)
