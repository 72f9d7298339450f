"""What the actors' recorders say: plans with their waits and results, a controller's decisions, messages that did not leave."""

from pathlib import Path

import pytest

from mmrt.actors.controller.counts import stats_of
from mmrt.actors.controller.flight import ControllerFlight, _sides
from mmrt.actors.gateway.answers.flight import GatewayFlight
from mmrt.actors.host.actor import Actor
from mmrt.actors.host.plan_flight import UNWANTED, PlanFlight
from mmrt.runtime.bus.copy_plans import Load, LoadChunk, LoadPart, LoadSegments
from mmrt.runtime.bus.messages import (
    Delivered,
    Done,
    Filled,
    Generation,
    Hello,
    ItemError,
    Loaded,
    MediaItem,
    PageRun,
    RequestSpec,
    Skipped,
    Submit,
    ToController,
)
from mmrt.runtime.bus.plan_base import PlanKind
from mmrt.runtime.bus.plans import Prefill, PrefillChunk
from mmrt.runtime.bus.transport import ActorSocket
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.controller.machine import Controller
from mmrt.runtime.controller.scheduling.types import Limits
from mmrt.runtime.controller.state.effects import BeginRow, ClearPlan, Effect, SetPhase, WriteJournal, WritePlan, WriteSpec
from mmrt.runtime.observe.flight import FlightRecord, Kind, merge, unpack_id, unpack_pair, unpack_plan
from mmrt.runtime.stage_table import ACTORS, InstanceId
from mmrt.schema.media import ItemShape, SegmentShape, View
from mmrt.schema.rows import Phase
from mmrt.shm.controller_stats import StatsSnapshot
from mmrt.shm.flight_recorder import FlightRecorder
from mmrt.shm.run_directory import RunDirectory

LIMITS = Limits(
    num_rows=2, max_context=64, kv_page_tokens=4, num_kv_pages=32, media_page_bytes=8, num_media_pages=4,
    patch_page_bytes=8, num_patch_pages=4, embedding_page_tokens=4, num_embedding_pages=4,
)  # fmt: skip


def records(recorder: FlightRecorder) -> list[FlightRecord]:
    return merge({"controller": recorder.read()})


@pytest.fixture
def recorder(run: RunDirectory) -> FlightRecorder:
    return FlightRecorder.create(run, "controller", 1024)


def test_plans_with_waits_and_results(recorder: FlightRecorder) -> None:
    flight = PlanFlight(recorder.writer(1))
    plan = Prefill([PrefillChunk(0, 1, 0, 10, 42, [])])
    flight.arrived(7)
    flight.arrived(8)
    (arrived_ns,) = {flight._arrived[7]}
    flight.done(7, plan, arrived_ns + 500, Done(), 1)
    flight.done(8, plan, flight._arrived[8] + 1, ItemError(422, "bad"), 0)
    flight.skipped(9)
    flight.done(9, plan, arrived_ns, Skipped(), 0)
    found = {record.key: record for record in records(recorder)}
    assert (unpack_plan(found[7].a), found[7].b, found[7].c) == ((PlanKind.PREFILL, 0, 1), 32, 500)
    assert unpack_plan(found[8].a) == (PlanKind.PREFILL, 422, 0)
    assert (unpack_plan(found[9].a)[1], found[9].c) == (UNWANTED, 0)
    assert found[7].time_ns == arrived_ns + 500 and not flight._arrived


def test_of_a_plan_to_load_pages_what_was_loaded_counts(recorder: FlightRecorder) -> None:
    plan = Load([LoadChunk(0, 1, 0, 16, 64, [bytes(16)] * 3, [1, 2, 3]), LoadChunk(0, 1, 1, 0, 16, [bytes(16)], [4])])
    PlanFlight(recorder.writer(1)).done(7, plan, 500, Loaded([48, 0], [False, False]), 0)
    (found,) = records(recorder)
    assert (unpack_plan(found.a)[0], found.b) == (PlanKind.LOAD, 32)


def test_of_a_plan_to_load_segments_what_was_loaded_counts(recorder: FlightRecorder) -> None:
    parts = [LoadPart(0, 1, PageRun([n], [1]), 30, [bytes(16)], [n]) for n in (3, 4)]
    PlanFlight(recorder.writer(1)).done(7, LoadSegments(parts), 500, Loaded([30, 0], [False, False]), 0)
    (found,) = records(recorder)
    assert (unpack_plan(found.a)[0], found.b) == (PlanKind.LOAD_SEGMENTS, 30)


class Machine:
    """A controller whose effects and messages are recorded, and done to nothing."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self.recorder = recorder
        self.controller = Controller.start(LIMITS, 1)
        self.flight = ControllerFlight(recorder.writer(1), self.controller.state, ACTORS)
        self.done: list[Effect] = []
        for actor in ("gateway", "prefill", "video", "decode"):
            self.take(actor, Hello(actor, 1, 100, True))

    def take(self, actor: str, message: ToController) -> None:
        self.flight.message(message)
        self.perform(self.controller.on_message(InstanceId(actor), 1, message, 1.0))

    def tick(self, now: float) -> None:
        self.perform(self.controller.tick(now))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.flight.effect(effect)
        self.done += effects

    def count(self) -> None:
        self.flight.counters(stats_of(self.controller.state, StatsSnapshot()))

    def kinds(self) -> list[Kind]:
        return [record.kind for record in records(self.recorder)]


def test_a_controllers_decisions(recorder: FlightRecorder) -> None:
    machine = Machine(recorder)
    spec = RequestSpec(Generation("chatcmpl-" + "0" * 23 + "7"), list(range(9)), [], 5)
    machine.take("gateway", Submit(1, 55, spec))
    machine.tick(2.0)
    found = records(recorder)
    kinds = [record.kind for record in found]
    assert kinds == [Kind.SUBMITTED, Kind.ROW, Kind.PHASE, Kind.PREPARED, Kind.BLOCKS, Kind.ISSUED, Kind.PLAN_REQUEST]
    assert {record.key for record in found if record.kind is not Kind.ISSUED} == {55}
    prepared, blocks, issued, share = found[3:]
    assert blocks.a and not blocks.b
    assert (prepared.a, prepared.b, prepared.c) == (9, 0, 5)
    assert (share.a, unpack_pair(share.b)) == (issued.key, (0, 8))
    wanted = (BeginRow, SetPhase, WriteSpec, WriteJournal, WritePlan)
    assert sum(isinstance(effect, wanted) for effect in machine.done) == len(found) - 2
    machine.flight.effect(ClearPlan(0))
    machine.take("gateway", Delivered(1, 55))
    assert machine.kinds()[7:] == [Kind.ENDED, Kind.PHASE]
    assert records(recorder)[-1].c == Phase.ENDING


def test_hashes_of_a_prompt_tell_nothing_without_the_runs_secret(run: RunDirectory) -> None:
    """Recordings are saved and shared: nobody can try in them what was asked."""
    found = []
    for number, secret in enumerate((b"one", b"one", b"another")):
        recorder = FlightRecorder.create(run, f"controller.{number}", 64)
        machine = Machine(recorder)
        machine.controller.state.secret = secret
        machine.take("gateway", Submit(1, 55, RequestSpec(Generation("x"), list(range(9)), [], 5)))
        machine.tick(2.0)
        found += [record.a for record in records(recorder) if record.kind is Kind.BLOCKS]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("size", [(480, 640), (720, 1280), (100, 90)])
@pytest.mark.parametrize("is_whole_first", [False, True])
def test_a_picture_that_is_cut_has_its_whole_size(size: tuple[int, int], is_whole_first: bool) -> None:
    """Some families show it as a whole besides, in the size of a tile, before its tiles or behind them, in a segment or in several."""
    whole, tile, patch = View(((56, 56),), (0, 0, 56, 56)), View(((500, 660), size), (0, 0, 56, 56)), 14
    views = (whole, tile, tile) if is_whole_first else (tile, tile, whole)
    apart = [SegmentShape("image", (1, 4, 4), 16, 8, 4, views=(view,)) for view in views]
    together = SegmentShape("image", (3, 4, 4), 48, 8, 12, views=views)
    for segments in (apart, [together]):
        assert _sides(ItemShape("image", (3, 4, 4), 12, segments)) == (size[0] // patch, size[1] // patch)
    assert _sides(ItemShape("image", (1, 4, 6), 4, [SegmentShape("image", (1, 4, 6), 24, 8, 4)])) == (4, 6)


def test_media_are_filled_once(recorder: FlightRecorder) -> None:
    machine = Machine(recorder)
    limits = {"placeholder_ids": {"image": 3}}
    machine.controller = Controller.start(Limits(**{**{n: getattr(LIMITS, n) for n in LIMITS.__slots__}, **limits}), 1)
    machine.flight = ControllerFlight(recorder.writer(1), machine.controller.state, ACTORS)
    machine.take("gateway", Hello("gateway", 1, 100, True))
    machine.take("gateway", Submit(1, 55, RequestSpec(Generation("x"), [3, 4], [MediaItem("image", 4)], 5)))
    machine.take("gateway", Filled(1, 55))  # before it has a row: nothing can be filled
    machine.tick(2.0)
    for _ in range(2):
        machine.take("gateway", Filled(1, 55))
    assert machine.kinds().count(Kind.FILLED) == 1


def test_counters_are_recorded_when_they_change(recorder: FlightRecorder) -> None:
    machine = Machine(recorder)
    machine.count()
    before = machine.kinds()
    assert before.count(Kind.POOL) == 4 and before.count(Kind.QUEUES) == before.count(Kind.BUDGETS) == 1
    machine.count()
    assert machine.kinds() == before
    machine.take("gateway", Submit(1, 55, RequestSpec(Generation("x"), list(range(9)), [], 5)))
    machine.tick(2.0)
    machine.count()
    new = [record for record in records(recorder)[len(before) :] if record.kind in (Kind.POOL, Kind.QUEUES)]
    assert [(record.kind, record.a) for record in new] == [(Kind.POOL, 3), (Kind.QUEUES, 0)]
    assert (new[1].key, new[1].b) == (1, 1)


def test_idle_ticks_are_not_recorded(recorder: FlightRecorder) -> None:
    import time

    machine = Machine(recorder)
    machine.flight.tick(time.monotonic_ns() + 10**9, 0)
    assert machine.kinds() == []
    machine.flight.tick(time.monotonic_ns(), 3)
    machine.flight.tick(time.monotonic_ns() - 10_000_000, 0)
    assert machine.kinds() == [Kind.TICK] * 2


def test_the_gateways_part(recorder: FlightRecorder) -> None:
    flight = GatewayFlight(recorder.writer(1))
    request_id = "chatcmpl-0123456789abcdef01234567"
    flight.received(9, RequestSpec(Generation(request_id), [1], [MediaItem("image", 40), MediaItem("audio", 2)], 5))
    flight.written(9, flight.now_ns(), 42)
    flight.first_text(9)
    flight.sent(9, 3)
    flight.over(9, 4, 503)
    found = records(recorder)
    assert [record.kind for record in found] == [Kind.RECEIVED, Kind.WRITTEN, Kind.FIRST_TEXT, Kind.SENT, Kind.OVER]
    assert unpack_id(found[0].a, found[0].b) == request_id and found[0].c == found[1].c == 42
    assert (found[3].a, found[4].a, found[4].b) == (3, 4, 503)


def test_a_message_that_does_not_leave_is_kept(run: RunDirectory, recorder: FlightRecorder) -> None:
    actor = Actor.__new__(Actor)
    actor._bus = ActorSocket(Path(run.path), "decode", 1)  # there is no controller
    actor._flight, actor.config = recorder.writer(1), RuntimeConfig()
    try:
        assert not actor.send(Hello("decode", 1, 100, True))
    finally:
        actor._bus.close()
    (record,) = records(recorder)
    assert (record.kind, record.a) == (Kind.UNSENT, 1)
