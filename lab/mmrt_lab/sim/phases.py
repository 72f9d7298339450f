"""The loads of ``mmrt bench profile``, and how they are driven: each stage alone with works of several sizes, and stages together,
above all as they work when requests with answers are served.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from mmrt.bench.serve.drivers import new_record
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.record import Record
from mmrt.bench.serve.target import Target
from mmrt.bench.serve.workload import Lengths, MediaShapes, Modality, RequestPlan, plan_steady
from mmrt.runtime.supervisor.processes import cpu_seconds

from .processor_use import read_use, share_of_others

NUM_STREAMS = 4  # beside which stages are measured
_STEPS = (1, 2, NUM_STREAMS, 8, 16)  # sequences of steps that are measured
STREAM_INPUT, STREAM_TOKENS = 16, 128  # short, so that their mean tells how many tokens they have
SETTLE_S = 0.5
_MOST_S = 3.0  # of a phase: the controller writes some thousand flight records per second, and 16,384 are kept
_NUM_PROMPTS = 16  # that requests with answers have in turn: how many tokens come together depends on the answer
MAX_CONTEXT_SHARE = 8  # long prompts take this part of the context at most


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """``num_at_once`` requests at a time for ``seconds``, of each kind in turn, beside ``num_streams`` text streams. Prompts have
    ``least_input_tokens`` (0: as many as) to ``num_input_tokens``."""

    name: str
    seconds: float
    kinds: tuple[Modality, ...] = ("text",)
    num_at_once: int = 1
    num_input_tokens: int = 16
    least_input_tokens: int = 0
    max_tokens: int = 1
    num_items: int = 1  # media of a request
    shapes: MediaShapes = MediaShapes()
    num_streams: int = 0

    @property
    def serves(self) -> bool:
        """Prompts and answers of several requests overlap, as they do in a load."""
        return self.name == "together" and self.num_at_once > 1 and self.max_tokens > 1


class PhaseRun(msgspec.Struct, frozen=True):
    """What a phase did. Times are ns of CLOCK_MONOTONIC. ``records``: without those of streams. ``cpu_s``: processor time that each
    process of the run took. ``others``: the share of the processors' time that was neither the run's nor its client's."""

    phase: Phase
    begin_ns: int
    end_ns: int
    records: list[Record]
    cpu_s: dict[str, float]
    others: float = 0.0


def make_phases(kinds: Sequence[Modality], max_context: int, seconds: float) -> list[Phase]:
    """The phases of a pass for a model that takes these kinds, of so many seconds together."""
    long_tokens = min(1024, max_context // MAX_CONTEXT_SHARE)
    alone = [
        *(Phase(name="prefill", num_input_tokens=tokens, seconds=1) for tokens in (32, long_tokens // 4, long_tokens)),
        *(Phase(name="decode", num_at_once=count, num_input_tokens=16, max_tokens=64, seconds=1.5) for count in _STEPS),
        *(
            Phase(name="decode", num_at_once=count, num_input_tokens=long_tokens, max_tokens=64, seconds=1.5)
            for count in (1, NUM_STREAMS)
        ),
    ]
    pictures = [MediaShapes(image_size=(side, side)) for side in (112, 336, 560)]
    # of several sizes and lengths: some models make frames equally large, others cut a clip into parts equally long
    clips = [MediaShapes(video_size=(side, side), video_s=clip_s, video_fps=8) for side, clip_s in ((224, 2.0), (560, 2.0), (224, 6.0))]
    sounds = [MediaShapes(audio_s=duration_s) for duration_s in (1.0, 4.0)]
    media: dict[Modality, list[MediaShapes]] = {"image": pictures, "video": clips, "audio": sounds}
    for kind, sizes in media.items():
        if kind in kinds:
            alone += [Phase(name="media", kinds=(kind,), shapes=shapes, seconds=1.2) for shapes in sizes]
            alone.append(
                Phase(name="media", kinds=(kind,), num_items=4, shapes=sizes[0], seconds=1.5)
            )  # batches, where sizes are alike
    serving = Phase(name="together", num_at_once=NUM_STREAMS, num_input_tokens=128, least_input_tokens=16, max_tokens=48, seconds=4)
    together = [
        serving,
        Phase(name="together", num_input_tokens=long_tokens // 2, num_at_once=2, num_streams=NUM_STREAMS, seconds=1.5),
    ]
    if "image" in kinds:
        shown = msgspec.structs.replace(serving, shapes=pictures[1])
        together += [
            msgspec.structs.replace(shown, kinds=("image", "text"), seconds=5),
            msgspec.structs.replace(shown, kinds=("image",), num_at_once=1, max_tokens=32, seconds=1.5),
            Phase(name="together", kinds=("image",), num_at_once=3, num_streams=NUM_STREAMS, shapes=pictures[1], seconds=1.5),
            Phase(name="together", kinds=("image",), num_at_once=4, shapes=pictures[1], seconds=1.5),
            Phase(name="together", kinds=("image", "text"), num_at_once=4, num_input_tokens=long_tokens // 2, seconds=1.5),
        ]
    phases = [*alone, *together]
    scale = seconds / sum(phase.seconds for phase in phases)
    return [part for phase in phases for part in _divided(phase, phase.seconds * scale)]


def _divided(phase: Phase, seconds: float) -> list[Phase]:
    """The phase over so many seconds, in parts that the flight recorders can hold."""
    count = math.ceil(seconds / _MOST_S)
    return [msgspec.structs.replace(phase, seconds=seconds / count)] * count


async def drive(target: Target, phase: Phase, pids: Mapping[int, str], own: Collection[int]) -> PhaseRun:
    """Drive a phase, after a request of each kind to warm up. The caches of the run are off: requests repeat. ``pids``: the processes
    of the run with an actor each, by its name; ``own``: all that are not others.

    Raises: BenchError if a request fails.
    """
    target.options = msgspec.structs.replace(target.options, shapes=phase.shapes)
    numbers = range(_NUM_PROMPTS if phase.max_tokens > 1 else 1)
    plans = [_plan(phase, kind, phase.max_tokens, number) for number in numbers for kind in phase.kinds]
    short = msgspec.structs.replace(phase, num_input_tokens=STREAM_INPUT, least_input_tokens=0, num_items=1)
    stream = _plan(short, "text", STREAM_TOKENS, 0)
    target.prepare([*plans, stream])
    for plan in plans[: len(phase.kinds)]:
        await _ask(target, plan)
    streams = [asyncio.create_task(_keep(target, itertools.repeat(stream), math.inf)) for _ in range(phase.num_streams)]
    try:
        await asyncio.sleep(SETTLE_S)
        begin_ns, before, used = time.monotonic_ns(), _cpu_s(pids), read_use(own)
        turns = itertools.cycle(plans)
        found = await asyncio.gather(*(_keep(target, turns, phase.seconds) for _ in range(phase.num_at_once)))
        end_ns, after = time.monotonic_ns(), _cpu_s(pids)
        others = share_of_others(used, read_use(own), (end_ns - begin_ns) / 1e9)
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    cpu_s = {name: after[name] - before[name] for name in after}
    return PhaseRun(phase, begin_ns, end_ns, [record for records in found for record in records], cpu_s, others)


def _cpu_s(pids: Mapping[int, str]) -> dict[str, float]:
    return {name: cpu_seconds(pid) or 0.0 for pid, name in pids.items()}


async def _keep(target: Target, plans: Iterator[RequestPlan], seconds: float) -> list[Record]:
    """One request after the other, as long as a next one may begin."""
    end_s = time.monotonic() + seconds
    records: list[Record] = []
    while not records or time.monotonic() < end_s:
        records.append(await _ask(target, next(plans)))
    return records


async def _ask(target: Target, plan: RequestPlan) -> Record:
    record = new_record(plan, time.monotonic())
    await target.send(plan, record)
    if record.error is not None:
        raise BenchError(f"a {plan.group} request failed: {record.error}")
    return record


def _plan(phase: Phase, kind: Modality, max_tokens: int, number: int) -> RequestPlan:
    least_tokens = phase.least_input_tokens or phase.num_input_tokens
    lengths = Lengths(input_low=least_tokens, input_high=phase.num_input_tokens, max_tokens=max_tokens)
    (plan,) = plan_steady({kind: 1.0}, 1, lengths, number)
    seed = f"profile/{phase.name}/{kind}/{phase.num_input_tokens}/{max_tokens}/{phase.num_items}/{number}"
    return msgspec.structs.replace(plan, seed=seed, media=plan.media * phase.num_items)
