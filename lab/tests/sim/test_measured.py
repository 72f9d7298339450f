"""From flight records to a cost model: what made records is found again, on a quiet machine and on a busy one."""

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from mmrt.bench.environment import read_environment
from mmrt.bench.serve.record import Chunk, Record
from mmrt.bench.serve.workload import MediaShapes
from mmrt.lab.tests.sim.made_costs import demo_model, make_costs
from mmrt.runtime.bus.plan_base import PlanKind
from mmrt.runtime.observe.flight import FlightRecord, Kind, pack_pair, pack_plan, unpack_id
from mmrt.runtime.supervisor.processes import cpu_seconds
from mmrt_lab.sim.costs import Costs, Delays, Line, Overheads, encode_squares, load_costs, prefill_squares, step_seconds
from mmrt_lab.sim.measured import Machine, fit, plans_together
from mmrt_lab.sim.observation import Observation
from mmrt_lab.sim.overheads import fit_delays, fit_egress
from mmrt_lab.sim.phases import Phase, PhaseRun, make_phases
from mmrt_lab.sim.processor_use import read_use, share_of_others
from mmrt_lab.sim.profiling import undisturbed
from mmrt_lab.sim.requests import make_sample

THREADS = dict.fromkeys(("video", "encoder", "prefill", "decode"), 1)
TRUE = make_costs(
    analyse={"image": Line(fixed_s=0.002, per_unit_s=2e-8)},
    preprocess={"image": Line(fixed_s=0.001, per_unit_s=1e-6)},
    encode={"image": Line(fixed_s=0.004, per_unit_s=2e-5)},
    prefill=Line(fixed_s=0.004, per_unit_s=3e-5, per_square_s=1e-8),
    decode_wake_s=0.0015,
    decode=Line(points=((1, 0.004), (4, 0.0042), (16, 0.012))),  # up to four sequences read the weights in nearly equal time
    overheads=Overheads(
        ingress_s=0.003,
        ingress_token_s=2e-6,
        ingress_byte_s=1e-8,
        fill_byte_s=1e-9,
        egress_s=0.001,
        message_s=0.0002,
        tick_s=0.0003,
    ),
    interference={},
)


@dataclass
class Tape:
    """Records of one phase after another, made with the times of ``costs``; all work takes ``slow`` times its processor time."""

    costs: Costs
    slow: float = 1.0
    now_ns: int = 1_000_000_000
    number: int = 0
    records: list[FlightRecord] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(THREADS, 0.0))

    def add(self, actor: str, kind: Kind, duration_s: float = 0.0, key: int = 0, a: int = 0, b: int = 0, c: int = 0) -> None:
        duration_ns = round(1e9 * duration_s)
        self.records.append(FlightRecord(actor, 1, kind, self.now_ns, duration_ns, key, a, b, c))
        self.now_ns += duration_ns

    def wait(self, seconds: float) -> None:
        self.now_ns += round(1e9 * seconds)

    def work(self, stage: str, seconds: float) -> float:
        self.cpu_s[stage] += seconds
        return seconds * self.slow

    def plan(self, stage: str, kind: PlanKind, seconds: float, units: int, tokens: tuple[int, int] | None = None) -> None:
        self.number += 1
        self.add("controller", Kind.ISSUED, key=self.number)
        if tokens:
            self.add("controller", Kind.PLAN_REQUEST, key=99, a=self.number, b=pack_pair(*tokens))
        self.wait(self.costs.overheads.message_s)
        self.add(stage, Kind.PLAN, self.work(stage, seconds), self.number, pack_plan(kind, 0, 0), units)
        self.wait(self.costs.overheads.message_s)
        self.add("controller", Kind.ACKNOWLEDGED, key=self.number)
        self.add("controller", Kind.TICK, self.costs.overheads.tick_s, a=1)

    def steps(self, count: int, num_rows: int, num_tokens: int) -> None:
        for number in range(count):
            self.number += 1
            seconds = step_seconds(self.costs, num_rows, num_rows * num_tokens) + self.costs.decode_wake_s * (number == 0)
            if self.slow == 1.0 and self.number % 8 == 0:
                seconds *= 1.5
            self.add("decode", Kind.STEP, self.work("decode", seconds), self.number, num_rows)

    def request(self, phase: Phase) -> Record:
        self.number += 1
        key, row = self.number, self.number
        request_id = unpack_id(0, key)
        costs, record = self.costs, Record(index=0, group="", request_id=request_id, scheduled_s=0.0, sent_s=self.now_ns / 1e9)
        tokens = phase.num_input_tokens
        num_bytes = 0
        self.wait(costs.overheads.ingress_s + costs.overheads.ingress_token_s * phase.num_input_tokens)
        if phase.kinds == ("image",):
            item, shape = make_sample(demo_model(), "image", phase.shapes)
            (segment,), num_bytes = shape.segments, item.num_bytes
            self.wait(costs.overheads.ingress_byte_s * num_bytes)
        self.add("gateway", Kind.RECEIVED, key=key, b=key)
        self.add("controller", Kind.SUBMITTED, key=key, a=phase.num_input_tokens, b=len(phase.kinds) if num_bytes else 0)
        self.add("controller", Kind.ROW, key=key, a=row, b=1)
        if num_bytes:
            self.add("gateway", Kind.WRITTEN, costs.overheads.fill_byte_s * num_bytes, c=num_bytes)
            rows = segment.num_rows
            self.plan("video", PlanKind.ANALYSE, costs.analyse["image"].seconds(item.work), num_bytes)
            self.plan("video", PlanKind.PREPROCESS, costs.preprocess["image"].seconds(rows), rows)
            self.plan("encoder", PlanKind.ENCODE, costs.encode["image"].seconds(rows, encode_squares(rows)), rows)
            tokens += segment.num_tokens
        self.plan("prefill", PlanKind.PREFILL, costs.prefill.seconds(tokens, prefill_squares(0, tokens)), tokens, (0, tokens))
        self.steps(phase.max_tokens if phase.name == "decode" else 1, phase.num_at_once, tokens)
        commits = [r.end_ns / 1e9 for r in self.records if r.kind == Kind.STEP][-phase.max_tokens :]
        record.chunks = [Chunk(at_s + costs.overheads.egress_s + 0.0005 * (at % 2), 1) for at, at_s in enumerate(commits)]
        self.add("decode", Kind.ROW_ENDED, key=row, a=1)
        self.wait(0.01)
        record.end_s, record.num_prompt_tokens = self.now_ns / 1e9, tokens
        return record

    def seen(self, phase: Phase) -> Observation:
        """80 requests of a phase, one after the other."""
        begin_ns, self.records = self.now_ns, []
        before = dict(self.cpu_s)
        records = [self.request(phase) for _ in range(80)]
        cpu_s = {stage: self.cpu_s[stage] - before[stage] for stage in before}
        return Observation(PhaseRun(phase, begin_ns, self.now_ns, records, cpu_s), self.records)


def phases() -> Iterator[Phase]:
    for tokens in (32, 256, 1024):
        yield Phase(name="prefill", seconds=1, num_input_tokens=tokens)
    for count, tokens in ((1, 2000), (4, 2000), (16, 2000), (4, 6000)):
        yield Phase(name="decode", seconds=1, num_at_once=count, num_input_tokens=tokens, max_tokens=64)
    for side in (150, 160, 170):
        yield Phase(name="media", seconds=1, kinds=("image",), shapes=MediaShapes(image_size=(side, side)))


def together(tape: Tape) -> Observation:
    """decode beside the encoder, at rates 0.6 and 0.7, for a while."""
    phase = Phase(name="together", seconds=1, kinds=("image",), num_streams=4, shapes=MediaShapes(image_size=(160, 160)))
    rows = make_sample(demo_model(), "image", phase.shapes)[1].segments[0].num_rows
    encode_ns, begin_ns = round(1e9 * TRUE.encode["image"].seconds(rows, encode_squares(rows)) / 0.7), tape.now_ns
    step_ns, records = round(1e9 * step_seconds(TRUE, 4, 4 * 100) / 0.6), []
    for number in range(400):
        at_ns = begin_ns + number * encode_ns
        records.append(FlightRecord("encoder", 1, Kind.PLAN, at_ns, encode_ns, number, pack_plan(PlanKind.ENCODE, 0, 0), rows, 0))
    for number in range(400 * encode_ns // step_ns):
        records.append(FlightRecord("decode", 1, Kind.STEP, begin_ns + number * step_ns, step_ns, number, 4, 0, 4))
    made = [Record(index=0, group="", scheduled_s=0.0, num_prompt_tokens=100)]
    return Observation(PhaseRun(phase, begin_ns, begin_ns + 400 * encode_ns, made, {}), records)


def fitted(slow: float) -> Costs:
    tape = Tape(TRUE, slow)
    return fit_seen([*(tape.seen(phase) for phase in phases()), together(tape)])


def fit_seen(seen: Sequence[Observation]) -> Costs:
    return fit("found", demo_model(), Machine(read_environment(), 2, THREADS, {"encoder": 5}), seen)


def assert_found(costs: Costs) -> None:
    assert costs.prefill.seconds(500, 125_000) == pytest.approx(TRUE.prefill.seconds(500, 125_000), rel=0.01)
    for work in ("analyse", "preprocess", "encode"):
        found, true = getattr(costs, work)["image"], getattr(TRUE, work)["image"]
        units = 25_600 if work == "analyse" else 144
        assert found.seconds(units, units**2) == pytest.approx(true.seconds(units, units**2), rel=0.05), work
    for count, context in ((1, 2000), (8, 16_000), (4, 24_000)):
        assert step_seconds(costs, count, context) == pytest.approx(step_seconds(TRUE, count, context), rel=0.05)
    for name, value in {"ingress_s": 0.003, "ingress_token_s": 2e-6, "egress_s": 0.001, "message_s": 0.0002, "tick_s": 0.0003}.items():
        assert getattr(costs.overheads, name) == pytest.approx(value, rel=0.05), name


def test_a_quiet_machine_is_found_again() -> None:
    costs = fitted(1.0)
    assert_found(costs)
    assert costs.note == "" and costs.nice == {"encoder": 5} and costs.environment is not None
    assert costs.interference["decode+encoder"] == pytest.approx({"decode": 0.6, "encoder": 0.7}, abs=0.03)
    assert costs.decode_wake_s == pytest.approx(0.0015, abs=3e-4)  # of a step of 4 ms, fitted within 5 %
    steps = costs.spreads["decode"]["decode"]
    assert len(steps) == 100 and steps == sorted(steps)
    assert statistics.fmean(steps) == pytest.approx(1 + 0.5 / 8, abs=0.03) and steps[80] == pytest.approx(1.0, abs=0.05)
    assert steps[99] == pytest.approx(1.5, abs=0.08)
    assert costs.spreads["decode+encoder"]["encoder"][50] == pytest.approx(1.0, abs=0.05)
    for delays in (costs.alone, costs.beside):
        medians = [statistics.median(times) for times in (delays.ingress_s, delays.message_s, delays.tick_s)]
        assert medians == pytest.approx([0.003, 0.0002, 0.0003], rel=0.01)
    assert costs.egress[:4] == pytest.approx([0.001, 0.0015, 0.001, 0.0015], rel=0.01)  # in their order


def test_steps_whose_prompts_are_all_alike_do_not_tell_what_a_token_costs() -> None:
    tape = Tape(TRUE)
    seen = [tape.seen(phase) for phase in phases() if phase.num_input_tokens != 6000]
    with pytest.raises(ValueError, match="too few steps of decode to tell what tokens in the KV cache cost: --seconds is too short"):
        fit_seen(seen)


def test_one_disturbed_phase_does_not_make_a_machine_busy() -> None:
    quiet, busy = Tape(TRUE), Tape(TRUE, slow=4.0, now_ns=10**15)
    first, *rest = phases()
    costs = fit_seen([quiet.seen(first), busy.seen(first), *(quiet.seen(phase) for phase in (first, *rest)), together(quiet)])
    assert costs.note == "" and costs.interference != {}
    assert_found(costs)


def test_rates_are_not_of_disturbed_phases() -> None:
    tape = Tape(TRUE)
    alone = [tape.seen(phase) for phase in phases()]
    good = together(tape)
    slow = good._replace(run=msgspec.structs.replace(good.run, others=0.06), records=[r for r in good.records if r.actor == "decode"])
    costs = fit_seen([*alone, good, slow])
    assert costs.interference["decode+encoder"] == pytest.approx({"decode": 0.6, "encoder": 0.7}, abs=0.03)
    assert "1 of 2 phases with several stages others had more than 5% of the processors" in costs.note
    assert fit_seen([*alone, slow]).interference == {}


def test_ways_beside_decode_are_those_of_phases_that_serve() -> None:
    tape = Tape(TRUE)
    alone = [tape.seen(phase) for phase in phases()]
    other = Tape(msgspec.structs.replace(TRUE, overheads=msgspec.structs.replace(TRUE.overheads, ingress_s=0.009)), now_ns=10**15)
    serving = Phase(name="decode", seconds=1, num_at_once=4, num_input_tokens=64, least_input_tokens=16, max_tokens=48)
    seen = other.seen(serving)
    seen = seen._replace(run=msgspec.structs.replace(seen.run, phase=msgspec.structs.replace(serving, name="together")))
    costs = fit_seen([*alone, seen])
    assert statistics.median(costs.beside.ingress_s) == pytest.approx(0.009, rel=0.01)
    assert statistics.median(costs.alone.ingress_s) == pytest.approx(0.003, rel=0.01)


def test_a_disturbed_phase_is_taken_again_and_the_least_disturbed_counts() -> None:
    phase = Phase(name="together", seconds=1)

    def taken(shares: list[float], num_more: int) -> tuple[float, int]:
        coming = iter(shares)

        async def take() -> Observation:
            return Observation(PhaseRun(phase, 0, 1, [], {}, next(coming)), [])

        one, count = asyncio.run(undisturbed(take, num_more))
        return one.run.others, count

    assert taken([0.01, 0.5], 3) == (0.01, 1)
    assert taken([0.5, 0.2, 0.02], 3) == (0.02, 3)
    assert taken([0.5, 0.2, 0.3, 0.0], 2) == (0.2, 3)


def test_what_others_use_is_seen() -> None:
    before, begin_s = read_use([os.getpid()]), time.monotonic()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            while (cpu_seconds(other.pid) or 0.0) < 0.3:
                time.sleep(0.02)
            with_it, without = read_use([os.getpid(), other.pid]), read_use([os.getpid()])
        finally:
            other.kill()
    seconds = time.monotonic() - begin_s
    num_cores = len(os.sched_getaffinity(0))
    assert share_of_others(before, without, seconds) >= 0.25 / seconds / num_cores
    assert with_it.own_s - without.own_s == pytest.approx(0.3, abs=0.1)


def test_requests_at_the_same_time_go_in_one_after_the_other() -> None:
    """Four at once, and one in a hundred stalls: the typical time is found, not the time in the queue, nor that of the stalls."""
    records, asked, now_ns = [], [], 1_000_000_000
    for turn in range(100):
        sent_ns = now_ns
        for number in range(4):
            key = 4 * turn + number + 1
            now_ns += 2_000_000 + 40_000_000 * (key % 100 == 0)
            records.append(FlightRecord("gateway", 1, Kind.RECEIVED, now_ns, 0, key, 0, key, 0))
            records.append(FlightRecord("controller", 1, Kind.SUBMITTED, now_ns, 0, key, 0, 0, 0))
            asked.append(Record(index=key, group="", scheduled_s=0.0, sent_s=sent_ns / 1e9, request_id=unpack_id(0, key)))
        now_ns += 50_000_000
    phase = Phase(name="decode", seconds=1, num_at_once=4)
    found = fit_delays(demo_model(), [Observation(PhaseRun(phase, 0, now_ns, asked, {}), records)], Overheads())
    assert found.ingress_s[:99] == pytest.approx([0.002] * 99) and found.ingress_s[99] == pytest.approx(0.042)


def test_a_message_to_an_actor_at_work_is_not_measured() -> None:
    """Its command waits in the actor's socket until the plan before it is done."""
    records = []
    for key, (issued_ms, begin_ms, end_ms) in enumerate(((0, 1, 101), (5, 102, 110), (120, 122, 130)), 1):
        records.append(FlightRecord("controller", 1, Kind.ISSUED, issued_ms * 10**6, 0, key, 0, 0, 0))
        kind = pack_plan(PlanKind.PREFILL, 0, 0)
        records.append(FlightRecord("prefill", 1, Kind.PLAN, begin_ms * 10**6, (end_ms - begin_ms) * 10**6, key, kind, 1, 0))
        records.append(FlightRecord("controller", 1, Kind.ACKNOWLEDGED, (end_ms + 3) * 10**6, 0, key, 0, 0, 0))
    seen = Observation(PhaseRun(Phase(name="decode", seconds=1), 0, 10**9, [], {}), records)
    assert fit_delays(demo_model(), [seen], Overheads()).message_s == pytest.approx([0.001, 0.002, 0.003, 0.003, 0.003])


def test_a_plan_that_others_interrupted_is_not_measured() -> None:
    """Short plans in the breaks of the first; behind it one in none, and one of another prefill at the same time."""
    places = [("prefill", 0, 100), ("prefill", 10, 30), ("prefill", 50, 60), ("prefill", 100, 150), ("prefill.1", 5, 95)]
    records = [
        FlightRecord(actor, 1, Kind.PLAN, begin_ns, end_ns - begin_ns, number, pack_plan(PlanKind.PREFILL, 0, 0), 8, 0)
        for number, (actor, begin_ns, end_ns) in enumerate(places)
    ]
    seen = Observation(PhaseRun(Phase(name="together", seconds=1), 0, 10**9, [], {}), records)
    assert [work.begin_ns for work in plans_together(demo_model(), TRUE, seen)] == [10, 50, 100, 5]


def test_a_stall_delays_consecutive_tokens_and_some_come_with_the_next() -> None:
    phase, tape = Phase(name="decode", seconds=1, num_at_once=4, max_tokens=64), Tape(TRUE)
    seen = tape.seen(phase)
    for record in seen.run.records[::8]:
        record.chunks[20:24] = [msgspec.structs.replace(chunk, time_s=chunk.time_s + 0.03) for chunk in record.chunks[20:24]]
        record.chunks[40:42] = [Chunk(record.chunks[41].time_s, 2)]
    times = fit_egress([seen])
    late = [at for at, seconds in enumerate(times) if seconds is not None and seconds > 0.02]
    assert [at for at, seconds in enumerate(times[:64]) if seconds is None] == [40]
    assert len(times) <= 2048 and late[:4] == [20, 21, 22, 23] and len(late) == pytest.approx(len(times) / 64 / 8 * 4, abs=8)


def test_on_a_busy_machine_processor_time_counts() -> None:
    costs = fitted(4.0)
    assert_found(costs)
    assert (
        costs.interference == costs.spreads == {}
        and costs.egress == []
        and costs.alone == costs.beside == Delays()
        and "stages alone had a processor for 25% of their time" in costs.note
    )


def test_phases_take_the_time_that_is_asked_for_and_only_media_that_the_model_takes() -> None:
    made = make_phases(("image",), 8192, 120.0)
    assert sum(phase.seconds for phase in made) == pytest.approx(120)
    assert {phase.kinds for phase in made if phase.serves} == {("text",), ("image", "text")}
    assert {kind for phase in made for kind in phase.kinds} == {"text", "image"}
    assert max(phase.num_input_tokens for phase in made) == 1024 and {p.name for p in make_phases((), 512, 9.0)} == {
        "prefill",
        "decode",
        "together",
    }


@pytest.mark.parametrize("costs", ["demo-cpu", "small-cpu", "qwen2.5-vl-7b-h200"])
def test_clips_and_pictures_are_of_several_sizes_also_after_their_scaling(costs: str) -> None:
    """Videos below a number of pixels are enlarged, those above another one shrunk; clips that were all of one size after that told
    nothing of how the time grows."""
    model = load_costs(costs).model
    for kind in ("video",) if costs == "demo-cpu" else ("image", "video"):  # the demo model makes all pictures equally large
        made = {phase.shapes for phase in make_phases((kind,), 8192, 60.0) if phase.name == "media"}
        assert len({make_sample(model, kind, shapes)[1].segments[0].num_rows for shapes in made}) > 1
