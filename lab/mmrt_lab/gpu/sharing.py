"""Section ``sharing``: mutual slowdown of phases that share a device, and two streams against taking turns (US10, TI24).

The axes of Fig. 6 of the published measurements on streams of one process: a decode step, over batches, beside budgets of prefill and
of encoding; encoding beside prefill; and a decode step beside a process of its own that encodes, with which it takes turns unless the
multi-process service runs. Fig. 12: how long two phases take on two streams beside one after the other.
"""

import math
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from .case import Timing, missing_memory, num_multiprocessors
from .counts import SHAPE_7B
from .results import Row
from .stack import DecodeStep, PrefillChunk, Stack
from .timing import Clock, Launch

_TOKENS = 1024  # of each row that decodes
_BATCHES, _BATCH = (8, 32, 128), 32  # the latter in quick runs, and on two streams
_CHUNKS, _PICTURES = (2048, 512), (1, 4)  # tokens; of a megapixel
_LONGER = 3  # what runs beside a phase outlasts it so many times
_LIMIT_S = 25.0  # for all batches beside one budget
_NEIGHBOUR_LIMIT_S = 40.0  # to be ready: it imports torch, and compiles what is not in the cache


class Phase(NamedTuple):
    name: str
    launch: Launch


MakePhase = Callable[[Stack], Phase]


class NeighbourError(Exception):
    """The encoding process does not encode."""


def timings(quick: bool) -> Iterator[Timing]:
    """Batches beside each budget, and what is not beside decode in this process; in quick runs one beside one."""
    batches, num_budgets = ((_BATCH,), 1) if quick else (_BATCHES, 2)
    for num_pictures in _PICTURES[:num_budgets]:
        yield Timing(f"decode beside encode {num_pictures} MP", partial(_batches, batches, partial(_encode, num_pictures)))
    for chunk in _CHUNKS[:num_budgets]:
        yield Timing(f"decode beside prefill {chunk}", partial(_batches, batches, partial(_prefill, chunk)))
    if not quick:
        yield Timing("encode beside prefill", _encode_beside_prefill)
        yield Timing("decode beside encodes of another process", _beside_another_process)


def _batches(batches: Sequence[int], make_other: MakePhase, clock: Clock) -> list[Row]:
    """Time both directions, as far as time allows."""
    end_s = time.monotonic() + _LIMIT_S
    stack = _stack(max(batches), clock.device)
    if isinstance(stack, Row):
        return [stack]
    other = make_other(stack)
    other_us = clock.time([other.launch]).time_us
    rows: list[Row] = []
    for num_rows in batches:
        decode = _decode(num_rows, stack)
        if time.monotonic() > end_s:
            rows.append(Row(case=f"{decode.name} beside {other.name}", note="not run: no time left"))
            continue
        decode_us = clock.time([decode.launch]).time_us
        rows += [slowed(clock, decode, decode_us, other, other_us), slowed(clock, other, other_us, decode, decode_us)]
        if num_rows == _BATCH:
            rows.append(two_streams(clock, decode, decode_us, other, other_us))
    return rows


def slowed(clock: Clock, phase: Phase, alone_us: float, other: Phase, other_us: float) -> Row:
    """US10's degradation factor: time beside the other over time alone."""
    num_others = math.ceil(_LONGER * alone_us / other_us)
    beside = clock.beside(phase.launch, 1, other.launch, num_others)
    note = f"alone {alone_us:,.0f} us; times slower (US10)"
    return Row(case=f"{phase.name} beside {other.name}", time_us=beside.first_us, rate=beside.first_us / alone_us, unit="x", note=note)


def two_streams(clock: Clock, phase: Phase, alone_us: float, other: Phase, other_us: float) -> Row:
    """TI24: as much time of each, on two streams, beside one after the other."""
    counts = max(1, round(other_us / alone_us)), max(1, round(alone_us / other_us))
    both_us = clock.beside(phase.launch, counts[0], other.launch, counts[1]).both_us
    in_turn_us = counts[0] * alone_us + counts[1] * other_us
    case = f"{phase.name} and {other.name}, two streams over taking turns"
    note = f"in turn {in_turn_us:,.0f} us; times faster (TI24)"
    return Row(case=case, time_us=both_us, rate=in_turn_us / both_us, unit="x", note=note)


def _encode_beside_prefill(clock: Clock) -> list[Row]:
    stack = _stack(1, clock.device)
    if isinstance(stack, Row):
        return [stack]
    encode, prefill = _encode(1, stack), _prefill(max(_CHUNKS), stack)
    encode_us, prefill_us = (clock.time([phase.launch]).time_us for phase in (encode, prefill))
    return [slowed(clock, encode, encode_us, prefill, prefill_us), slowed(clock, prefill, prefill_us, encode, encode_us)]


def _beside_another_process(clock: Clock) -> list[Row]:
    stack = _stack(_BATCH, clock.device)
    if isinstance(stack, Row):
        return [stack]
    decode = _decode(_BATCH, stack)
    alone_us = clock.time([decode.launch]).time_us
    with neighbour():
        beside_us = clock.time([decode.launch]).time_us
    note = f"alone {alone_us:,.0f} us; times slower (US10)"
    case = f"{decode.name} beside encodes of another process"
    return [Row(case=case, time_us=beside_us, rate=beside_us / alone_us, unit="x", note=note)]


@contextmanager
def neighbour(command: Sequence[str] = (sys.executable, "-m", f"{__package__}.neighbour")) -> Iterator[None]:
    """A process that encodes meanwhile. Raises: NeighbourError where it does not begin to."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if not select.select([process.stdout], [], [], _NEIGHBOUR_LIMIT_S)[0] or process.stdout.readline() != b"ready\n":
                raise NeighbourError(f"it was not ready within {_NEIGHBOUR_LIMIT_S:g} s, or has ended")
            yield
            if process.poll() is not None:
                raise NeighbourError(f"it ended meanwhile, with status {process.returncode}")
        finally:
            process.kill()


def _stack(num_rows: int, device: torch.device) -> Stack | Row:
    """The 7B shape with so many rows that decode, and one for prefill at its end, over the same weights; or why there is none."""
    lengths = [_TOKENS] * num_rows + [max(_CHUNKS)]
    ends = 2 * SHAPE_7B.hidden * SHAPE_7B.vocabulary
    activations = max(_CHUNKS) * 12 * SHAPE_7B.intermediate
    return missing_memory(SHAPE_7B.step_bytes(lengths) + ends + activations) or Stack.make(SHAPE_7B, lengths, torch.bfloat16, device)


def _decode(num_rows: int, stack: Stack) -> Phase:
    rows = replace(stack, table=stack.table[:num_rows], lengths=stack.lengths[:num_rows])
    return Phase(f"decode {num_rows} x {_TOKENS}", DecodeStep.make(rows, num_multiprocessors(stack.table.device)).forward)


def _prefill(chunk: int, stack: Stack) -> Phase:
    row = replace(stack, table=stack.table[-1:], lengths=stack.lengths[-1:])
    return Phase(f"prefill {chunk}", PrefillChunk.make(row, 0, chunk).forward)


def _encode(num_pictures: int, stack: Stack) -> Phase:
    from .tower import Tower

    tower = Tower.make(SHAPE_7B, stack.table.device)

    def launch() -> None:
        for _ in range(num_pictures):
            tower.forward()

    return Phase(f"encode {num_pictures} MP", launch)
