"""Section ``contention``: mutual slowdown of phases, over decode batches and over budgets of prefill and of encoding (US10).

The axes of Fig. 6 of the published measurements, on streams of one process, of which ``sharing`` has one point; encoding beside
prefill; and a decode step beside a process of its own that encodes, with which it takes turns unless the multi-process service runs.
"""

import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from .case import Check, Size, Timing, missing_memory, num_multiprocessors
from .counts import SHAPE_7B
from .results import Row
from .sharing import Phase, slowed
from .stack import DecodeStep, PrefillChunk, Stack
from .timing import Clock

_TOKENS = 1024  # of each row that decodes
_BATCHES, _QUICK_BATCHES = (8, 32, 128), (32,)
_CHUNKS, _QUICK_CHUNKS = (512, 2048), (2048,)
_PICTURES = (1, 4)  # of a megapixel
_LIMIT_S = 25.0  # for all batches beside one budget
_NEIGHBOUR_LIMIT_S = 40.0  # to be ready: it imports torch, and compiles what is not in the cache

MakePhase = Callable[[Stack], Phase]


class NeighbourError(Exception):
    """The encoding process does not encode."""


def checks(device: torch.device, size: Size) -> Iterator[Check]:
    """None of its own: the kernels have theirs."""
    del device, size
    return iter(())


def timings(quick: bool) -> Iterator[Timing]:
    """Timings that no other section has, then all batches beside each budget; in quick runs one beside one."""
    batches = _QUICK_BATCHES if quick else _BATCHES
    if not quick:
        yield Timing("encode beside prefill", _encode_beside_prefill)
        yield Timing("decode beside encodes of another process", _beside_another_process)
    for chunk in _QUICK_CHUNKS if quick else _CHUNKS:
        yield Timing(f"decode beside prefill {chunk}", partial(_batches, batches, partial(_prefill, chunk)))
    if quick:
        return
    for num_pictures in _PICTURES:
        yield Timing(f"decode beside encode {num_pictures} MP", partial(_batches, batches, partial(_encode, num_pictures)))


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
    return rows


def _encode_beside_prefill(clock: Clock) -> list[Row]:
    stack = _stack(1, clock.device)
    if isinstance(stack, Row):
        return [stack]
    encode, prefill = _encode(1, stack), _prefill(max(_CHUNKS), stack)
    encode_us, prefill_us = (clock.time([phase.launch]).time_us for phase in (encode, prefill))
    return [slowed(clock, encode, encode_us, prefill, prefill_us), slowed(clock, prefill, prefill_us, encode, encode_us)]


def _beside_another_process(clock: Clock) -> list[Row]:
    num_rows = _QUICK_BATCHES[0]
    stack = _stack(num_rows, clock.device)
    if isinstance(stack, Row):
        return [stack]
    decode = _decode(num_rows, stack)
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
