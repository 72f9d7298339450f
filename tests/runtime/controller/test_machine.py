"""The controller's machine, message by message: answers, phases, and every way in which a request can end."""

import random
from collections.abc import Callable, Collection

import msgspec
import pytest

from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.bus.media_work import estimated_work, is_large
from mmrt.runtime.bus.request_keys import random_key
from mmrt.runtime.controller.machine import LOOK_S, SOON_S, Controller
from mmrt.runtime.controller.rows.kv_manager import wanted_kv
from mmrt.runtime.controller.rows.lifecycle import preempt, reset_media
from mmrt.runtime.controller.rows.progress import WINDOW_S
from mmrt.runtime.controller.scheduling.budgets import lone_units, prefill_budget, update
from mmrt.runtime.controller.scheduling.costs import Costs
from mmrt.runtime.controller.scheduling.facts import Cost
from mmrt.runtime.controller.scheduling.types import Limits
from mmrt.runtime.controller.state.effects import (
    AppendPages,
    BeginRow,
    ClearPages,
    Effect,
    Send,
    SetPageGenerations,
    SetPhase,
    SetPrefilled,
    WriteJournal,
    WritePlan,
    WriteSpec,
    WriteState,
)
from mmrt.runtime.controller.state.records import Ended, Refused, Rehomed, Submitted
from mmrt.runtime.controller.state.request import Request
from mmrt.runtime.stage_table import InstanceId, actors_of, number_of
from mmrt.schema.media import ItemShape, MediaSpan, SegmentShape
from mmrt.schema.outage import Outage
from mmrt.schema.rows import Phase

IMAGE, FILM = 900, 901
KEY, OTHER_KEY = 7, 8
SHAPE = ItemShape("image", (1, 4, 4), 6, [SegmentShape("image", (1, 4, 4), 16, 4, 6)])


def limits(**changes: object) -> Limits:
    values: dict[str, object] = dict(
        num_rows=2, max_context=64, kv_page_tokens=4, num_kv_pages=32, media_page_bytes=8, num_media_pages=8, patch_page_bytes=16,
        num_patch_pages=8, embedding_page_tokens=4, num_embedding_pages=8, placeholder_ids={"image": IMAGE}, num_plan_slots=8,
        prefill_budget=16, encode_budget=16,
    )  # fmt: skip
    return Limits(**(values | changes))  # type: ignore[arg-type]


class Driver:
    """A machine with all actors at generation 1, and what it sent."""

    def __init__(self, **changes: object) -> None:
        self.machine = Controller.start(limits(**changes), epoch=3)
        self.state = self.machine.state
        self.now = 100.0
        self.effects: list[Effect] = []
        self.counts: dict[int, tuple[int, int]] = {}
        for actor in ("gateway", "video", "encoder", "prefill", "decode"):
            self.receive(actor, m.Hello(actor, 1, 1, True))

    def receive(self, actor: str, message: m.ToController, generation: int = 1) -> "Driver":
        self.effects += self.machine.on_message(InstanceId(actor), generation, message, self.now)
        return self

    def tick(self, seconds: float = 0.0, gone: Collection[InstanceId] = ()) -> list[Effect]:
        """One tick ``seconds`` later; returns all effects since the last one."""
        self.now += seconds
        progress = [(row, generation, *self.counts.get(row, (0, 0))) for row, generation in self.machine.watched()]
        new_ids = [(span, [500 + n for n in range(span.first, span.last)]) for span in self.machine.wanted_ids(progress)]
        effects, self.effects = self.effects + self.machine.tick(self.now, progress, new_ids, (), gone), []
        for pool in self.state.pools.values():
            pool.check()
        return effects

    def submit(self, spec: m.RequestSpec, key: int = KEY) -> list[Effect]:
        self.receive("gateway", m.Submit(1, key, spec))
        return self.tick()

    def plan(self, actor: str) -> tuple[int, p.Plan]:
        """The actor's oldest unacknowledged plan."""
        found = next(p for p in self.state.plans.values() if p.actor == actor)
        return found.plan_id, found.plan

    def done(self, actor: str, result: m.Result | None = None) -> list[Effect]:
        plan_id, _ = self.plan(actor)
        self.receive(actor, m.PlanDone(actor, 1, plan_id, 0.01, result or m.Done()))
        return self.tick()

    @property
    def is_empty(self) -> bool:
        state = self.state
        pages = all(pool.num_used == 0 for pool in state.pools.values())
        return pages and not state.requests and not state.plans and state.rows == [None] * len(state.rows)


def text(num_tokens: int = 6, max_new: int | None = 4, **more: object) -> m.RequestSpec:
    return m.RequestSpec(m.Generation("r"), list(range(1, num_tokens + 1)), [], max_new, **more)  # type: ignore[arg-type]


def image(**more: object) -> m.RequestSpec:
    return m.RequestSpec(m.Generation("r"), [1, 2, IMAGE, 3, 4], [m.MediaItem("image", 10)], 4, **more)  # type: ignore[arg-type]


def sent(effects: list[Effect], kind: type) -> list[m.ToActor]:
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def phases(effects: list[Effect]) -> list[Phase]:
    return [effect.phase for effect in effects if isinstance(effect, SetPhase)]


def index(effects: list[Effect], kind: type) -> int:
    """Where the first effect, or message, of this kind stands."""
    return next(n for n, e in enumerate(effects) if isinstance(e, kind) or isinstance(e, Send) and isinstance(e.message, kind))


# the life of a request


def test_work_that_overran_its_estimate_is_done_again_as_a_large_one() -> None:
    driver = Driver()
    (granted,) = sent(driver.submit(image()), m.Granted)
    driver.receive("gateway", m.Filled(1, KEY))
    driver.tick()
    _, first = driver.plan("video")
    driver.done("video", m.Overran())
    _, again = driver.plan("video")
    assert isinstance(first, p.Analyse) and isinstance(again, p.Analyse)
    assert not is_large(estimated_work(first.media)) and is_large(estimated_work(again.media))
    assert again.source == granted.runs[0] and len(driver.state.plans) == 1


def test_a_text_request() -> None:
    driver = Driver()
    effects = driver.submit(text())
    order = [WriteJournal, BeginRow, WriteState, SetPhase, WriteSpec, SetPageGenerations, AppendPages, WritePlan, m.Run]
    positions = [index(effects, kind) for kind in (*order, m.Prepared)]
    assert positions == sorted(positions), "memory and journal before messages"
    assert sent(effects, m.Prepared) == [m.Prepared(3, KEY, 6)]
    _, plan = driver.plan("prefill")
    assert plan == p.Prefill([p.PrefillChunk(0, 1, 0, 0, 5, [])])  # all but the last prompt token
    effects = driver.done("prefill")
    assert index(effects, SetPrefilled) < index(effects, SetPhase) < index(effects, m.Admit)
    assert phases(effects) == [Phase.DECODE] and sent(effects, m.Admit) == [m.Admit(3, 0, 1)]
    driver.counts[0] = (4, 2)
    driver.receive("decode", m.SequenceEnded(1, 0, 1))
    effects = driver.tick()
    (drop,) = sent(effects, m.Drop)
    assert driver.state.pools["kv"].num_used > 0, "decode has not let go yet"
    assert isinstance(drop, m.Drop)
    driver.receive("decode", m.Dropped(1, 0, 1, drop.ticket))
    driver.tick()
    assert driver.state.pools["kv"].num_used == 0, "KV pages go at the end of decode, not of delivery"
    effects = driver.receive("gateway", m.Delivered(1, KEY)).tick()
    assert phases(effects) == [Phase.ENDING, Phase.FREE]
    assert index(effects, WriteJournal) < index(effects, SetPhase)
    assert sent(effects, m.Released) == [m.Released(3, KEY)] and driver.is_empty


def test_prefill_draws_the_first_token() -> None:
    """Its chunk ends where the prompt does; decode gets the row once the token has been read, and an answer of one token not at all."""
    driver = Driver(first_tokens=True)
    driver.submit(text())
    assert driver.plan("prefill")[1] == p.Prefill([p.PrefillChunk(0, 1, 0, 0, 6, [])])
    driver.counts[0] = (1, 0)
    effects = driver.done("prefill")
    assert index(effects, SetPrefilled) < index(effects, SetPhase) < index(effects, m.Admit)
    assert driver.state.rows[0] is not None and driver.state.rows[0].answer.committed == 1
    driver.submit(text(max_new=1), OTHER_KEY)
    driver.counts[1] = (1, 2)
    effects = driver.done("prefill")
    assert phases(effects) == [Phase.DECODE] and not sent(effects, m.Admit), "the detokenizer finds its end"
    effects = driver.receive("gateway", m.Delivered(1, OTHER_KEY)).tick()
    assert phases(effects) == [Phase.ENDING, Phase.FREE]


def test_a_prefill_of_an_earlier_version_draws_nothing() -> None:
    """The row is prefilled again, but for its last token, which is decode's."""
    driver = Driver(first_tokens=True)
    driver.submit(text())
    driver.done("prefill")
    driver.tick()
    assert driver.plan("prefill")[1] == p.Prefill([p.PrefillChunk(0, 1, 0, 0, 5, [])])
    assert sent(driver.done("prefill"), m.Admit)


@pytest.mark.parametrize("what", ["companion", "grammar", "prefill alone", "no answer"])
def test_who_gets_the_first_token_from_decode(what: str) -> None:
    driver = Driver(first_tokens=True)
    spec = text(companion_ids=[5, 6, 7]) if what == "companion" else text(max_new=0 if what == "no answer" else 4)
    if what == "grammar":
        spec = spec.asking(sampling=m.Sampling(grammar="a"))
    driver.submit(spec.asking(pooling="last") if what == "prefill alone" else spec)
    plan = driver.plan("prefill")[1]
    assert isinstance(plan, p.Prefill) and plan.chunks[0].end == (6 if what == "prefill alone" else 5)


def test_a_prompt_that_a_cache_has_but_for_its_last_token_needs_no_prefill() -> None:
    driver = Driver(first_tokens=True, prefix_cache=True)
    for key in (KEY, OTHER_KEY):
        driver.submit(text(9), key)
        driver.counts[key - KEY] = (1, 0)
        assert key == OTHER_KEY or driver.done("prefill")
    assert not driver.state.plans and driver.state.rows[1] is not None and driver.state.rows[1].phase == Phase.DECODE


def test_an_image_request() -> None:
    driver = Driver()
    (granted,) = sent(driver.submit(image()), m.Granted)
    assert isinstance(granted, m.Granted) and len(granted.runs[0].pages) == 2
    assert not driver.state.plans, "nothing is analysed before the bytes are there"
    driver.receive("gateway", m.Filled(1, KEY)).tick()
    _, plan = driver.plan("video")
    assert plan == p.Analyse(0, 1, 0, m.MediaItem("image", 10), granted.runs[0])
    effects = driver.done("video", m.Analysed(SHAPE))
    assert sent(effects, m.Prepared) == [m.Prepared(3, KEY, 10)]
    written = next(effect for effect in effects if isinstance(effect, WriteSpec))
    assert written.prompts == ([1, 2, *[IMAGE] * 6, 3, 4],)
    spec = m.decode_sequence_spec(written.spec)
    assert spec.spans == [MediaSpan(2, SHAPE)] and spec.num_prompt_tokens == 10
    _, chunk = driver.plan("prefill")
    assert isinstance(chunk, p.Prefill) and (chunk.chunks[0].start, chunk.chunks[0].end) == (0, 2)  # the ready prefix
    _, segment = driver.plan("video")
    assert isinstance(segment, p.PreprocessSegment) and len(segment.target.pages) == 4
    driver.done("prefill")
    driver.done("video")
    _, encode = driver.plan("encoder")
    assert isinstance(encode, p.Encode) and encode.parts[0].source == segment.target
    driver.done("encoder")
    assert driver.state.pools["patch"].num_used == 0, "patch pages have done their service"
    _, rest = driver.plan("prefill")
    assert isinstance(rest, p.Prefill)
    assert rest.chunks == [p.PrefillChunk(0, 1, 0, 2, 9, [p.EmbeddingSpan(2, 6, 0, encode.parts[0].target)])]
    assert phases(driver.done("prefill")) == [Phase.DECODE]
    assert driver.state.pools["embedding"].num_used == 0 and driver.state.pools["media"].num_used == 2


def test_embedding_pages_go_as_they_are_used_up() -> None:
    driver = Driver(prefill_budget=4)
    driver.submit(image())
    driver.receive("gateway", m.Filled(1, KEY)).tick()
    driver.done("video", m.Analysed(SHAPE))
    driver.done("prefill")
    driver.done("video")
    driver.done("encoder")
    used = []
    while any(plan.actor == "prefill" for plan in driver.state.plans.values()):
        driver.done("prefill")
        used.append(driver.state.pools["embedding"].num_used)
    assert used == [1, 0], "tokens 2..6 were on the first page, 6..8 on the second"


def test_a_pair_is_prefilled_as_a_whole_before_decode() -> None:
    driver = Driver(prefill_budget=8)
    effects = driver.submit(text(10, companion_ids=[1, 2, 3]))
    appended = [effect for effect in effects if isinstance(effect, AppendPages)]
    assert [effect.member for effect in appended] == [0, 1]
    _, plan = driver.plan("prefill")
    assert isinstance(plan, p.Prefill)
    assert [(c.member, c.start, c.end) for c in plan.chunks] == [(0, 0, 7), (1, 0, 1)]
    assert not phases(driver.done("prefill"))
    _, plan = driver.plan("prefill")
    assert isinstance(plan, p.Prefill)
    assert [(c.member, c.start, c.end) for c in plan.chunks] == [(0, 7, 9), (1, 1, 2)]
    assert phases(driver.done("prefill")) == [Phase.DECODE]


def test_one_token_prompts_have_pages_and_no_prefill() -> None:
    driver = Driver()
    effects = driver.submit(text(1, companion_ids=[5]))
    assert Phase.DECODE in phases(effects) and not driver.state.plans
    assert [effect.member for effect in effects if isinstance(effect, AppendPages)] == [0, 1]


# refusals


def refused(effects: list[Effect]) -> m.Failed:
    (failed,) = sent(effects, m.Failed)
    assert isinstance(failed, m.Failed)
    return failed


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (text(0), "no tokens"),
        (text(64), "messages: prompt is too long: 64 tokens > 63 maximum"),
        (text(60, 5), "max_tokens: is 5; with the prompt it exceeds the context window"),
        (m.RequestSpec(m.Generation("r"), [1, IMAGE, 2], [], 4), "placeholders for .'image'., the request has none"),
        (m.RequestSpec(m.Generation("r"), [1, 2], [m.MediaItem("image", 1)], 4), "placeholders for no media"),
        (m.RequestSpec(m.Generation("r"), [1, IMAGE], [m.MediaItem("image", 1)], 4), "ends in media"),
        (m.RequestSpec(m.Generation("r"), [IMAGE, 1], [m.MediaItem("audio", 1)], 4), "placeholders for"),
    ],
)
def test_what_can_never_run_is_refused_at_once(spec: m.RequestSpec, words: str) -> None:
    driver = Driver()
    effects = driver.submit(spec)
    failed = refused(effects)
    assert failed.status == 400 and words.replace(".'image'.", "['image']") in failed.message
    assert not any(isinstance(effect, WriteJournal) for effect in effects) and driver.is_empty
    effects = driver.receive("gateway", m.Delivered(1, KEY)).tick()
    assert sent(effects, m.Released)


def test_a_prompt_that_grows_beyond_the_context_fails_after_analysis() -> None:
    driver = Driver()
    driver.submit(image())
    driver.receive("gateway", m.Filled(1, KEY)).tick()
    big = ItemShape("image", (1, 20, 20), 60, [SegmentShape("image", (1, 20, 20), 16, 4, 60)])
    failed = refused(driver.done("video", m.Analysed(big)))
    assert failed.status == 400 and failed.code == "context_length_exceeded" and "64 tokens > 63" in failed.message
    driver.receive("gateway", m.Delivered(1, KEY)).tick()
    assert driver.is_empty


def test_media_that_cannot_be_used_fails_alone() -> None:
    driver = Driver()
    item = m.MediaItem("image", 10, path="messages[0].content[2].image_url.url")
    driver.submit(msgspec.structs.replace(image(), items=[item]))
    driver.submit(text(), key=8)
    driver.receive("gateway", m.Filled(1, KEY)).tick()
    failed = refused(driver.done("video", m.ItemError(422, "not an image")))
    assert (failed.key, failed.status, failed.message, failed.param) == (KEY, 422, "not an image", item.path)
    assert driver.state.requests[8].failure is None
    # told again for as long as the gateway asks, also by a Filled that was lost before
    for again in (m.Query(1, KEY), m.Filled(1, KEY), m.Submit(1, KEY, image())):
        assert refused(driver.receive("gateway", again).tick()).status == 422


def test_a_segment_larger_than_its_pool_is_refused() -> None:
    driver = Driver()
    driver.submit(image())
    driver.receive("gateway", m.Filled(1, KEY)).tick()
    shape = ItemShape("image", (1, 9, 9), 6, [SegmentShape("image", (1, 9, 9), 81, 4, 6)])
    assert "324 decoded bytes at once, there is room for 128" in refused(driver.done("video", m.Analysed(shape))).message


def test_too_much_waiting_is_refused_with_retry_after() -> None:
    driver = Driver(num_rows=1, max_waiting=1)
    for key in (1, 2):
        driver.submit(text(), key=key)
    failed = refused(driver.submit(text(), key=3))
    assert failed.status == 503 and failed.retry_after_s is not None
    assert [request.key for request in driver.state.waiting.values()] == [2]


def test_a_plan_of_several_that_fails_is_repeated_one_by_one() -> None:
    driver = Driver(num_rows=3, num_media_pages=16)
    for key in (1, 2):
        driver.submit(image(), key=key)
        driver.receive("gateway", m.Filled(1, key)).tick()
    driver.done("video", m.Analysed(SHAPE))
    driver.done("video", m.Analysed(SHAPE))
    while any(plan.actor == "prefill" for plan in driver.state.plans.values()):
        driver.done("prefill")
    driver.state.actors.pop("encoder")  # both are decoded before either can be encoded
    driver.done("video")
    driver.done("video")
    driver.state.actors["encoder"] = 1
    driver.state.steering.encode = type(driver.state.steering.encode)(64, 16384, 1024)
    driver.tick()
    _, plan = driver.plan("encoder")
    assert isinstance(plan, p.Encode) and len(plan.parts) == 2
    assert not sent(driver.done("encoder", m.ItemError(500, "bad rows")), m.Failed)
    _, plan = driver.plan("encoder")
    assert isinstance(plan, p.Encode) and [part.row for part in plan.parts] == [0]
    assert refused(driver.done("encoder", m.ItemError(500, "bad rows"))).key == 1
    driver.done("encoder")
    assert driver.state.requests[2].failure is None and not driver.state.requests[2].record.strikes


# every way out, in every phase

STAGES = ["waiting", "filling", "analysing", "decoding media", "encoding", "prefill", "handover", "decode", "finished"]


def bring_to(driver: Driver, stage: str, spec: Callable[..., m.RequestSpec] = image) -> None:
    """Bring request KEY to a stage; outstanding plans are left outstanding."""
    if stage == "waiting":
        for key in (1, 2):
            driver.submit(image(), key=key)
    driver.submit(spec())
    if stage in ("waiting", "filling"):
        return
    driver.receive("gateway", m.Filled(1, KEY)).tick()
    if stage == "analysing":
        return
    driver.done("video", m.Analysed(SHAPE))
    driver.done("prefill")
    if stage == "decoding media":
        return
    driver.done("video")
    if stage == "encoding":
        return
    driver.done("encoder")
    if stage == "prefill":
        return
    driver.state.actors.pop("decode") if stage == "handover" else None
    driver.done("prefill")
    if stage == "finished":
        driver.counts[0] = (4, 2)
        driver.tick()


def finish_everything(driver: Driver) -> None:
    """Actors answer everything; the others that are there are cancelled."""
    driver.state.actors["decode"] = 1
    for key in list(driver.state.requests):
        driver.receive("gateway", m.Cancel(1, key))
    for _ in range(20):
        effects = driver.tick(1.0)
        for drop in sent(effects, m.Drop):
            assert isinstance(drop, m.Drop)
            driver.receive("decode", m.Dropped(1, drop.row, drop.row_generation, drop.ticket))
        for inflight in list(driver.state.plans.values()):
            result = m.Analysed(SHAPE) if isinstance(inflight.plan, p.Analyse) else m.Done()
            driver.receive(inflight.actor, m.PlanDone(inflight.actor, 1, inflight.plan_id, 0.01, result))
    assert driver.is_empty


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("message", [m.Cancel, m.Delivered])
def test_cancel_and_delivered_in_every_phase(stage: str, message: type[m.Cancel] | type[m.Delivered]) -> None:
    driver = Driver()
    bring_to(driver, stage)
    inflight = dict(driver.state.plans)
    effects = driver.receive("gateway", message(1, KEY)).tick()
    assert sent(effects, m.Released) == [m.Released(3, KEY)]
    assert [e.record for e in effects if isinstance(e, WriteJournal)] == [Ended(KEY)]
    for plan in inflight.values():  # whatever works on it still holds its pages
        for pool in driver.state.pools.values():
            pool.check()
        assert plan.plan_id in driver.state.plans
    assert sent(driver.receive("gateway", message(1, KEY)).tick(), m.Released), "repeated until the gateway has heard it"
    finish_everything(driver)


@pytest.mark.parametrize("stage", STAGES)
def test_a_new_gateway_takes_over_what_it_submits_again(stage: str) -> None:
    """It says that it has adopted when it has submitted all that goes on: only then the rest ends."""
    driver = Driver()
    bring_to(driver, stage)
    driver.submit(text(4), OTHER_KEY)
    driver.receive("gateway", m.Hello("gateway", 2, 1, True, adopted=False), 2).tick(5.0)
    assert driver.state.requests.keys() >= {KEY, OTHER_KEY}
    assert not sent(driver.receive("gateway", m.Cancel(1, KEY)).tick(), m.Released), "the gateway before has no say any more"
    effects = driver.receive("gateway", m.Submit(2, KEY, driver.state.requests[KEY].spec), 2).tick()
    assert [e.record for e in effects if isinstance(e, WriteJournal)] == [Rehomed(KEY, 2)]
    assert [e.message for e in effects if isinstance(e, Send) and getattr(e.message, "key", 0) == KEY]
    assert not [e for e in driver.receive("gateway", m.Submit(2, KEY, text()), 2).tick() if isinstance(e, WriteJournal)]
    effects = driver.receive("gateway", m.Hello("gateway", 2, 1, True), 2).tick()
    assert driver.state.requests.keys() == {KEY}
    assert Ended(OTHER_KEY) in [e.record for e in effects if isinstance(e, WriteJournal)]
    assert sent(driver.receive("gateway", m.Delivered(2, KEY), 2).tick(), m.Released) == [m.Released(3, KEY)]
    finish_everything(driver)


def test_each_request_is_its_own_gateways() -> None:
    """The second gateway's successor ends what that one had, and nothing of the first."""
    driver, second, key = Driver(), "gateway.1", random_key("gateway.1")
    driver.submit(text(4), KEY)
    driver.receive(second, m.Hello(second, 1, 1, True), 1)
    sends = [e for e in driver.receive(second, m.Submit(1, key, text()), 1).tick() if isinstance(e, Send)]
    assert [e.actor for e in sends if getattr(e.message, "key", 0) == key] == [second]
    assert not [e for e in driver.receive("gateway", m.Cancel(1, key)).tick() if isinstance(e, WriteJournal)], "it is not its request"
    driver.receive(second, m.Hello(second, 2, 1, True), 2).tick(5.0)
    assert driver.state.requests.keys() == {KEY}


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_deadlines_in_every_phase(stage: str) -> None:
    driver = Driver()
    bring_to(driver, stage, lambda: image().asking(deadline_s=110.0))
    assert not sent(driver.tick(5.0), m.Failed)
    effects = driver.tick(6.0)
    failed = refused(effects)
    assert (failed.key, failed.status) == (KEY, 504)
    assert [e.record for e in effects if isinstance(e, WriteJournal)] == [Refused(KEY, failed)]
    assert phases(effects)[:1] == ([] if stage in ("waiting", "filling") else [Phase.ENDING])
    driver.receive("gateway", m.Delivered(1, KEY)).tick()
    finish_everything(driver)


def test_media_pages_stay_the_gateways_until_it_answers() -> None:
    """It may be writing into them when the request fails."""
    driver = Driver()
    bring_to(driver, "filling", lambda: image().asking(deadline_s=110.0))
    refused(driver.tick(11.0))
    assert driver.state.pools["media"].num_used == 2
    driver.receive("gateway", m.Delivered(1, KEY)).tick()
    assert driver.is_empty


@pytest.mark.parametrize("stage", STAGES)
def test_a_new_gateway_cancels_what_older_ones_submitted(stage: str) -> None:
    driver = Driver()
    bring_to(driver, stage)
    driver.receive("gateway", m.Hello("gateway", 2, 1, True), generation=2).tick()
    assert not driver.state.requests
    finish_everything(driver)


# actors that come and go


def test_generations() -> None:
    driver = Driver()
    driver.submit(text())
    plan_id, _ = driver.plan("prefill")
    run = driver.state.plans[plan_id]
    assert not sent(driver.tick(0.1), m.Run)
    assert sent(driver.tick(0.15), m.Run) == [m.Run(3, run.slot, plan_id)], "sent again until it is answered"
    driver.receive("prefill", m.Hello("prefill", 2, 1, False), generation=2)
    assert not sent(driver.tick(), m.Run), "a standby gets no work"
    driver.receive("prefill", m.Hello("prefill", 2, 1, True), generation=2)
    effects = driver.tick()
    assert [(e.generation, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, m.Run)] == [
        (2, m.Run(3, run.slot, plan_id))
    ]
    driver.receive("prefill", m.PlanDone("prefill", 1, plan_id, 0.01, m.Done()), generation=1).tick()
    assert plan_id in driver.state.plans, "an older generation is not believed"
    driver.receive("prefill", m.PlanDone("prefill", 2, plan_id, 0.01, m.Done()), generation=2).tick()
    assert plan_id not in driver.state.plans
    before = dict(driver.state.plans)
    driver.receive("prefill", m.PlanDone("prefill", 2, plan_id, 0.01, m.Done()), generation=2).tick()
    driver.receive("prefill", m.Hello("prefill", 1, 1, True), generation=1).tick()
    assert driver.state.actors["prefill"] == 2 and driver.state.plans == before


def test_the_membership_ends_by_the_ticket_of_its_own_drop() -> None:
    driver = Driver()
    bring_to(driver, "decode")
    (first,) = sent(driver.receive("gateway", m.Cancel(1, KEY)).tick(), m.Drop)
    assert isinstance(first, m.Drop)
    driver.receive("decode", m.Dropped(1, 0, 1, first.ticket - 1)).tick()
    driver.receive("decode", m.Dropped(1, 0, 2, first.ticket)).tick()
    assert driver.state.pools["kv"].num_used
    (again,) = sent(driver.receive("decode", m.Hello("decode", 2, 1, True), generation=2).tick(), m.Drop)
    assert again == first
    driver.receive("decode", m.Dropped(1, 0, 1, first.ticket), generation=1).tick()
    assert driver.state.pools["kv"].num_used, "the old decode's word does not bind the new one, which found the row in the table"
    driver.receive("decode", m.Dropped(2, 0, 1, first.ticket), generation=2).tick()
    assert driver.is_empty


def test_submits_are_taken_once_and_not_after_the_end() -> None:
    driver = Driver()
    driver.submit(text())
    effects = driver.submit(text())
    assert not any(isinstance(effect, WriteJournal) for effect in effects) and sent(effects, m.Prepared)
    driver.receive("gateway", m.Cancel(1, KEY)).tick()
    assert sent(driver.submit(text()), m.Released)
    driver.receive("gateway", m.Cancel(1, 99)).tick()
    assert sent(driver.submit(text(), key=99), m.Released), "a Cancel that overtook its Submit"
    assert sent(driver.receive("gateway", m.Query(1, 55)).tick(), m.Unknown) == [m.Unknown(3, 55)]


def test_the_gateway_is_told_of_requests_that_it_does_not_ask_about() -> None:
    driver = Driver()
    driver.submit(text())
    assert not sent(driver.tick(14.0), m.Prepared)
    driver.receive("gateway", m.Query(1, KEY)).tick()
    assert not sent(driver.tick(14.0), m.Prepared)
    assert sent(driver.tick(2.0), m.Prepared)
    assert not sent(driver.tick(2.0), m.Prepared)


def test_queue_positions() -> None:
    driver = Driver(num_rows=1)
    driver.submit(text(), key=1)
    assert sent(driver.submit(text(), key=2), m.Queued) == [m.Queued(3, 2, 0)]
    effects = driver.submit(text(), key=3)
    assert sent(effects, m.Queued) == [m.Queued(3, 3, 1)]
    assert [e.record.arrival for e in effects if isinstance(e, WriteJournal) and isinstance(e.record, Submitted)] == [2]
    driver.receive("gateway", m.Cancel(1, 1))
    finish = driver.plan("prefill")[0]
    driver.receive("prefill", m.PlanDone("prefill", 1, finish, 0.01, m.Done()))
    assert {p.key for p in sent(driver.tick(), m.Prepared) if isinstance(p, m.Prepared)} == {2}


# pages


def test_growth_keeps_two_pages_and_two_seconds_ahead() -> None:
    driver = Driver(num_kv_pages=64, max_context=256, spare_ahead_s=0.0)
    driver.submit(text(6, 200))
    driver.done("prefill")
    table = driver.state.requests[KEY].kv.tables[0]
    assert len(table) == 2 + 2
    driver.counts[0] = (0, 0)
    driver.tick()
    driver.counts[0] = (5, 0)
    effects = driver.tick(0.5)  # 10 tokens/s: 20 tokens ahead are five pages and a bit
    assert [len(e.pages) for e in effects if isinstance(e, AppendPages)] == [3 + 6 - 4]


def test_a_row_with_all_its_pages_is_looked_at_no_earlier() -> None:
    driver = Driver(num_kv_pages=64, max_context=256)
    driver.submit(text(6, 8))
    driver.done("prefill")
    for committed in (0, 3, 7):
        driver.counts[0] = (committed, 0)
        driver.tick(0.3)
        assert driver.machine.next_tick_s() == LOOK_S, "its pages are used up with its answer"


def test_a_new_row_has_pages_for_six_seconds_while_half_of_the_pool_is_free() -> None:
    driver = Driver(num_rows=3, num_kv_pages=512, max_context=1024)
    driver.submit(text(6, 1000), key=1)
    effects = driver.done("prefill")
    first = driver.state.requests[1]
    assert index(effects, AppendPages) < index(effects, m.Admit), "decode finds them with the row"
    assert len(first.kv.tables[0]) == 2 + 151, "600 tokens, as nothing is known of the run"
    assert driver.machine.next_tick_s() == SOON_S, "its rate is to be measured, however many pages it has"
    driver.counts[0] = (0, 0)
    driver.tick()
    driver.counts[0] = (5, 0)
    driver.tick(0.5)  # 10 tokens/s
    assert driver.machine.next_tick_s() == LOOK_S
    driver.submit(text(6, 1000), key=2)
    driver.done("prefill")
    second = driver.state.requests[2]
    assert second.answer.rate == 0 and len(second.kv.tables[0]) == 2 + 16, "61 tokens at the other's rate"
    driver.submit(text(6, 1000), key=3)
    driver.state.steering.undisturbed_s = 0.001
    driver.done("prefill")
    assert driver.state.pools["kv"].num_free == 256, "of 6,000 tokens it gets what leaves half of the pool"


def test_a_row_keeps_six_seconds_ahead_while_half_of_the_pool_is_free() -> None:
    driver = Driver(num_kv_pages=512, max_context=1024)
    driver.submit(text(6, 1000))
    driver.state.steering.undisturbed_s = 0.1
    driver.done("prefill")
    table = driver.state.requests[KEY].kv.tables[0]
    assert len(table) == 2 + 16, "61 tokens at 10 tokens/s"
    driver.counts[0] = (0, 0)
    driver.tick()
    for committed in (5, 10, 15, 20):
        driver.counts[0] = (committed, 0)
        driver.tick(0.5)
        assert len(table) == -(-(6 + committed) // 4) + 16


def test_a_run_begins_with_the_rate_of_an_earlier_one() -> None:
    driver = Driver(num_kv_pages=512, max_context=2048)
    driver.state.costs = Costs({"decode": Cost(0.05, 0.0, 1)})
    driver.submit(text(6, 1000), key=1)
    driver.done("prefill")
    assert len(driver.state.requests[1].kv.tables[0]) == 2 + 31, "121 tokens at 20 tokens/s"
    for committed, seconds in ((0, 0.0), (5, 0.5), (10, 0.5)):
        driver.counts[0] = (committed, 0)
        driver.tick(seconds)
    assert driver.state.costs.by_stage["decode"] == Cost(0.1, 0.0, 1), "what this run has measured is kept for the next"


@pytest.mark.parametrize("seed", range(8))
def test_no_row_reaches_further_than_two_seconds_into_the_second_half_of_a_pool(seed: int) -> None:
    rng = random.Random(seed)
    num_pages = rng.choice((40, 90, 400))
    driver = Driver(num_rows=4, num_kv_pages=num_pages, max_context=512)
    state = driver.state
    for step in range(60):
        if len(state.requests) < 4:
            pair = {"companion_ids": [1] * 5} if rng.random() < 0.3 else {}
            driver.submit(text(rng.randint(1, 20), rng.choice((4, 100, 400)), **pair), key=step + 1)
        before = {request.row: [*map(len, request.kv.tables)] for request in state.live()}
        if any(inflight.actor == "prefill" for inflight in state.plans.values()) and rng.random() < 0.6:
            driver.done("prefill")
        for request in state.decoding():
            room = min(len(table) * 4 - n for table, n in zip(request.kv.tables, request.kv.lengths, strict=False))
            committed = min(
                request.answer.committed + rng.randint(0, 30), max(room, request.answer.committed), request.record.max_new_tokens
            )
            driver.counts[request.row] = (committed, 1 if committed == request.record.max_new_tokens else 0)
        for drop in sent(driver.tick(rng.uniform(0, 0.4)), m.Drop):
            assert isinstance(drop, m.Drop)
            driver.receive("decode", m.Dropped(1, drop.row, drop.row_generation, drop.ticket))
            driver.counts.pop(drop.row, None)
        for request in state.live():
            near = wanted_kv(state, request.kv.lengths, request.answer.committed, request.record.max_new_tokens, request.answer.rate)
            grown = [a > b for a, b in zip(map(len, request.kv.tables), before.get(request.row, [999] * 2), strict=False)]
            if any(now and len(table) > count for now, table, count in zip(grown, request.kv.tables, near, strict=False)):
                assert state.pools["kv"].num_free >= num_pages // 2


def test_what_the_next_token_needs_goes_before_what_is_taken_ahead() -> None:
    driver = Driver(num_kv_pages=24, ahead_pages=3, ahead_s=0.0)
    driver.submit(text(8, 40, companion_ids=[1] * 8), key=1)
    driver.submit(text(20, 20), key=2)
    while any(plan.actor == "prefill" for plan in driver.state.plans.values()):
        driver.done("prefill")
    pair, young = driver.state.requests[1], driver.state.requests[2]
    driver.counts[0] = (5, 0)
    driver.tick()
    assert [len(table) for table in pair.kv.tables] == [7, 7] and driver.state.pools["kv"].num_free == 2
    driver.counts[0] = (22, 0)  # each member needs an eighth page, and would like three more
    driver.tick()
    assert [len(table) for table in pair.kv.tables] == [8, 8] and young.phase == Phase.DECODE


def test_budgets_are_steered_once_per_window_however_rows_are_staggered() -> None:
    driver = Driver(num_kv_pages=64, max_context=256, tbt_target_s=0.05)
    shares = [driver.state.steering.share]
    for key in (1, 2):
        driver.submit(text(6, 200), key=key)
        driver.done("prefill")
        driver.tick(WINDOW_S / 2)
    for step in range(1, 7):  # three windows
        driver.counts[0] = driver.counts[1] = (step, 0)
        driver.tick(WINDOW_S / 2)
        if driver.state.steering.share != shares[-1]:
            shares.append(driver.state.steering.share)
    assert 2 <= len(shares) - 1 <= 3


def test_an_objective_that_follows_the_undisturbed_step() -> None:
    """Windows during which something was prefilled tell nothing about it."""
    driver = Driver(num_kv_pages=512, max_context=512, tbt_target_s=0.05, tbt_factor=2.0)
    assert driver.state.tbt_target_s == 0.05
    driver.submit(text(6, 400), key=1)
    driver.done("prefill")
    driver.tick(WINDOW_S)
    committed = 0
    for _ in range(3):
        committed += 50
        driver.counts[0] = (committed, 0)
        driver.tick(WINDOW_S)
    undisturbed = WINDOW_S / 50
    assert driver.state.tbt_target_s == pytest.approx(2 * undisturbed)
    driver.submit(text(6, 100), key=2)  # its prefill is under way from here on
    driver.plan("prefill")
    for _ in range(3):
        committed += 10
        driver.counts[0] = (committed, 0)
        driver.tick(WINDOW_S)
    assert driver.state.steering.tbt_s == pytest.approx(WINDOW_S / 10)
    assert driver.state.tbt_target_s == pytest.approx(2 * undisturbed)
    fixed = Driver(num_kv_pages=64, max_context=512, tbt_target_s=0.05)
    fixed.state.steering.undisturbed_s = undisturbed
    assert fixed.state.tbt_target_s == 0.05


def test_the_youngest_is_preempted_and_comes_back() -> None:
    driver = Driver(num_kv_pages=8, ahead_pages=0, ahead_s=0.0)
    for key in (1, 2):
        driver.submit(text(8, 20), key=key)
    driver.done("prefill")
    old, young = driver.state.requests[1], driver.state.requests[2]
    while young.phase != Phase.DECODE:
        driver.done("prefill")
    for count in range(1, 13):
        driver.counts[0] = driver.counts[1] = (count, 0)
        effects = driver.tick(0.01)
        if young.phase == Phase.PREPARE:
            break
    assert young.phase == Phase.PREPARE and old.phase == Phase.DECODE, "the oldest is never a victim"
    assert young.record.evicting
    (drop,) = sent(effects, m.Drop)
    assert isinstance(drop, m.Drop)
    driver.counts[1] = (count + 1, 0)  # decode went on until the drop reached it
    effects = driver.receive("decode", m.Dropped(1, young.row, 1, drop.ticket)).tick()
    assert any(isinstance(effect, ClearPages) for effect in effects) and not young.kv.tables[0]
    driver.counts[0] = (20, 2)
    (drop,) = sent(driver.tick(), m.Drop)
    assert isinstance(drop, m.Drop)
    driver.receive("decode", m.Dropped(1, old.row, 1, drop.ticket)).tick()
    _, plan = driver.plan("prefill")
    assert isinstance(plan, p.Prefill)
    chunks = [(chunk.start, chunk.end) for chunk in plan.chunks]
    driver.done("prefill")
    while young.phase != Phase.DECODE:
        _, plan = driver.plan("prefill")
        assert isinstance(plan, p.Prefill)
        chunks += [(chunk.start, chunk.end) for chunk in plan.chunks]
        driver.done("prefill")
    assert chunks[-1][1] == 8 + count + 1 - 1, "prompt and generated ids, minus the last"


def test_what_ends_while_it_is_preempted_is_shown_as_ended() -> None:
    driver = Driver()
    bring_to(driver, "decode")
    preempt(driver.state, driver.state.requests[KEY])
    (drop,) = sent(driver.tick(), m.Drop)
    assert isinstance(drop, m.Drop)
    driver.counts[0] = (3, 1)
    effects = driver.receive("decode", m.Dropped(1, 0, 1, drop.ticket)).tick()
    assert phases(effects) == [Phase.DECODE], "the detokenizer looks for ends at DECODE rows"
    assert not driver.state.plans and not driver.state.pools["kv"].num_used
    driver.receive("gateway", m.Delivered(1, KEY)).tick()
    assert driver.is_empty


def test_a_preempted_row_is_prefilled_again_from_its_media() -> None:
    driver = Driver()
    bring_to(driver, "prefill")
    request = driver.state.requests[KEY]
    preempt(driver.state, request)
    stale, plan = driver.plan("prefill")
    assert isinstance(plan, p.Prefill)
    driver.tick()
    assert request.record.evicting and driver.state.pools["kv"].num_used, "the plan still writes its KV pages"
    driver.receive("prefill", m.PlanDone("prefill", 1, stale, 0.01, m.Done()))
    driver.tick()
    driver.tick()
    assert request.kv.prefilled == [0, 0] and request.has_kv
    _, again = driver.plan("video")
    assert isinstance(again, p.PreprocessSegment) and again.segment == 0
    driver.done("video")
    driver.done("encoder")
    while driver.state.plans:
        driver.done("prefill")
    assert request.phase == Phase.DECODE


def test_the_oldest_gets_kv_pages_from_younger_ones_after_a_while() -> None:
    driver = Driver(num_kv_pages=8, ahead_s=0.0, patience_s=0.5)
    driver.submit(image(), key=1)
    driver.submit(text(20, 8), key=2)  # takes most of the pool while the image is analysed
    driver.receive("gateway", m.Filled(1, 1)).tick()
    driver.done("video", m.Analysed(SHAPE))
    old, young = driver.state.requests[1], driver.state.requests[2]
    assert young.has_kv and not old.has_kv
    driver.tick(0.1)
    assert not young.record.evicting
    driver.tick(0.6)
    assert young.record.evicting
    driver.done("prefill")
    driver.tick()
    assert old.has_kv and not young.has_kv


def test_timers_sleep_while_nothing_is_outstanding() -> None:
    driver = Driver()
    driver.tick()
    assert driver.machine.next_tick_s() == 1.0
    driver.submit(text())
    assert driver.machine.next_tick_s() == pytest.approx(0.2)
    driver.done("prefill")
    assert 0.01 <= driver.machine.next_tick_s() <= 0.2


# what must not end the controller, nor keep anybody waiting for ever


def test_a_record_that_outgrows_its_row_is_refused_as_the_shapes_come() -> None:
    """Else the row could not be written, by this controller or by any that follows it."""
    driver = Driver(max_state_bytes=300)
    driver.submit(image())
    driver.receive("gateway", m.Filled(1, KEY)).tick()
    segments = [SegmentShape("image", (1, 2, 2), 4, 4, 1)] * 40
    effects = driver.done("video", m.Analysed(ItemShape("image", (40, 2, 2), 40, segments)))
    assert "the record of the request's media takes" in refused(effects).message
    assert all(len(effect.data) <= 300 for effect in effects if isinstance(effect, WriteState))


def test_a_large_text_request_is_not_passed_for_ever_by_younger_media() -> None:
    """It waits for nine of ten KV pages while images that need five keep coming."""
    driver = Driver(num_rows=2, num_kv_pages=10, num_media_pages=16)
    image_key = iter(range(100, 200))

    def send_image() -> int:
        key = next(image_key)
        driver.submit(image(), key=key)
        driver.receive("gateway", m.Filled(1, key)).tick()
        return key

    send_image()
    driver.submit(text(33, 1), key=1)
    for _ in range(30):
        if driver.state.requests[1].has_row:
            break
        if len(driver.state.requests) < 4:
            send_image()
        finish_a_step(driver)
    assert driver.state.requests[1].has_row


def test_a_large_text_request_that_waits_stops_nobody_for_ever() -> None:
    """It keeps a row and waits for KV pages of a row in preparation, which shares patch pages with younger ones behind it."""
    driver = Driver(num_rows=5, num_kv_pages=60, max_context=256, num_plan_slots=16, num_media_pages=32)

    def analysed(num_segments: int) -> m.Analysed:
        segments = [SegmentShape("image", (1, 4, 4), 16, 4, 6)] * num_segments
        return m.Analysed(ItemShape("image", (num_segments, 4, 4), 6 * num_segments, segments))

    driver.submit(text(10, 4), key=1)
    driver.done("prefill")
    driver.submit(image(), key=5)
    driver.receive("gateway", m.Filled(1, 5)).tick()
    driver.submit(m.RequestSpec(m.Generation("r"), [1] * 220, [], 4), key=2)
    for key in (3, 4):
        driver.submit(image(), key=key)
    driver.done("video", analysed(30))
    driver.counts[0] = (4, 2)
    driver.receive("decode", m.SequenceEnded(1, 0, 1))
    (drop,) = sent(driver.tick(), m.Drop)
    assert isinstance(drop, m.Drop)
    driver.receive("decode", m.Dropped(1, 0, 1, drop.ticket))
    driver.tick()
    assert driver.state.requests[5].has_kv and 2 in driver.state.waiting
    driver.receive("gateway", m.Delivered(1, 1)).tick()
    driver.counts.clear()
    for key in (3, 4):
        driver.receive("gateway", m.Filled(1, key)).tick()
    while any(isinstance(plan.plan, p.Analyse) for plan in driver.state.plans.values()):
        plan = next(plan for plan in driver.state.plans.values() if isinstance(plan.plan, p.Analyse))
        driver.receive("video", m.PlanDone("video", 1, plan.plan_id, 0.01, analysed(10)))
        driver.tick()
    for _ in range(400):
        finish_a_step(driver)
    assert not driver.state.requests


def finish_a_step(driver: Driver) -> None:
    """Whatever is asked of an actor is done, and every row that decodes comes to its end."""
    for plan in list(driver.state.plans.values()):
        result = m.Analysed(SHAPE) if isinstance(plan.plan, p.Analyse) else m.Done()
        driver.receive(plan.actor, m.PlanDone(plan.actor, 1, plan.plan_id, 0.01, result))
    for row, request in enumerate(driver.state.rows):
        if request is not None and request.phase == Phase.DECODE:
            driver.counts[row] = (4, 2)
            driver.receive("decode", m.SequenceEnded(1, row, request.row_generation))
    for drop in sent(driver.tick(0.3), m.Drop):
        assert isinstance(drop, m.Drop)
        driver.counts.pop(drop.row, None)
        driver.receive("decode", m.Dropped(1, drop.row, drop.row_generation, drop.ticket))
    for request in list(driver.state.requests.values()):
        if request.is_finished:
            driver.receive("gateway", m.Delivered(1, request.key))
    driver.tick()


def encoding_beside_decode() -> Driver:
    """One row decodes, the encoder works for another, and a third waits for its prefill: no two of the stages beside decode."""
    driver = Driver(num_rows=3)
    driver.submit(text(), key=1)
    driver.done("prefill")
    driver.submit(image(), key=2)
    driver.receive("gateway", m.Filled(1, 2)).tick()
    driver.done("video", m.Analysed(SHAPE))
    while any(plan.actor == "prefill" for plan in driver.state.plans.values()):
        driver.done("prefill")
    driver.done("video")
    assert any(plan.actor == "encoder" for plan in driver.state.plans.values())
    driver.submit(text(), key=3)
    assert not any(plan.actor == "prefill" for plan in driver.state.plans.values())
    return driver


def test_an_encoder_that_hangs_keeps_no_text_from_its_prefill() -> None:
    driver = encoding_beside_decode()
    driver.tick(6.0)
    assert any(plan.actor == "prefill" for plan in driver.state.plans.values())


def test_a_new_encoder_begins_anew() -> None:
    driver = encoding_beside_decode()
    driver.now += 6.0
    driver.receive("encoder", m.Hello("encoder", 2, 1, True), generation=2).tick()
    assert not any(plan.actor == "prefill" for plan in driver.state.plans.values())
    driver.tick(6.0)
    assert any(plan.actor == "prefill" for plan in driver.state.plans.values()), "it hangs, too"


def test_time_out_of_decode_is_no_time_between_tokens() -> None:
    driver = Driver()
    driver.submit(text(6, 40))
    driver.done("prefill")
    for count in range(1, 10):
        driver.counts[0] = (count, 0)
        driver.tick(0.1)
    rate = driver.state.requests[KEY].answer.rate
    assert rate == pytest.approx(10, rel=0.2)
    preempt(driver.state, driver.state.requests[KEY])
    (drop,) = sent(driver.tick(), m.Drop)
    assert isinstance(drop, m.Drop)
    driver.receive("decode", m.Dropped(1, 0, 1, drop.ticket))
    driver.tick(5.0)
    while any(plan.actor == "prefill" for plan in driver.state.plans.values()):
        driver.done("prefill")
    for count in range(10, 16):
        driver.counts[0] = (count, 0)
        driver.tick(0.1)
        assert driver.state.requests[KEY].answer.rate == pytest.approx(10, rel=0.2)


def test_who_comes_for_a_free_row_does_not_wait() -> None:
    driver = Driver(num_rows=2, max_waiting=0)
    driver.receive("gateway", m.Submit(1, 1, text()))
    driver.receive("gateway", m.Submit(1, 2, text()))
    effects = driver.tick()
    assert not sent(effects, m.Failed) and all(request.has_row for request in driver.state.requests.values())
    assert refused(driver.submit(text(), key=3)).status == 503


def test_budgets_shrink_as_soon_as_somebody_decodes() -> None:
    driver = Driver(tbt_target_s=0.05, prefill_budget=0, max_context=4096, num_kv_pages=4000)
    driver.submit(m.RequestSpec(m.Generation("r"), [1] * 3000, [], 64), key=1)
    for _ in range(8):
        if any(plan.actor == "prefill" for plan in driver.state.plans.values()):
            plan_id, plan = driver.plan("prefill")
            assert isinstance(plan, p.Prefill)
            units = sum(chunk.end - chunk.start for chunk in plan.chunks)
            driver.receive("prefill", m.PlanDone("prefill", 1, plan_id, units * 1e-4, m.Done())).tick()
    idle = driver.state.steering.prefill.units
    assert driver.state.requests[1].phase == Phase.DECODE and idle > 600
    driver.submit(m.RequestSpec(m.Generation("r"), [1] * 3000, [], 64), key=2)
    _, plan = driver.plan("prefill")
    assert isinstance(plan, p.Prefill) and sum(chunk.end - chunk.start for chunk in plan.chunks) <= 500


def test_a_request_alone_has_one_plan_where_others_need_not_wait_for_it() -> None:
    """While another is there, or where prefill has no breaks, plans are as short as ever: 0.2 s."""

    def units(*keys: int, has_breaks: bool) -> list[int]:
        """Of the first plan of each row, while those before are in work."""
        driver = Driver(tbt_target_s=0.05, prefill_budget=0, max_context=4096, num_kv_pages=4000, has_breaks=has_breaks)
        learned = prefill_budget(0)
        for num_tokens in (256, 512, 1500):
            learned = update(learned, num_tokens, num_tokens * 3.9e-4, 0.2)
        driver.state.steering.prefill = learned
        for key in keys:
            driver.submit(m.RequestSpec(m.Generation("r"), [1] * 1200, [], 64), key=key)
        return [inflight.plan.units for inflight in driver.state.plans.values() if inflight.actor == "prefill"]

    assert units(1, 2, has_breaks=False) == [512, 512]
    assert units(1, 2, has_breaks=True) == [1199, 512], "the last token is decode's"


@pytest.mark.parametrize(("target_s", "plan_s"), [(0.05, 1.0), (0.2, 2.0), (0.6, 2.4)])
def test_a_plan_of_a_request_alone_has_a_limit(target_s: float, plan_s: float) -> None:
    learned = prefill_budget(0)
    for num_tokens in (256, 512, 1500):
        learned = update(learned, num_tokens, num_tokens * 1e-3, 0.2)
    assert lone_units(learned, target_s) == pytest.approx(plan_s / 1e-3, rel=0.02)


# actors that are broken

VIDEO_BROKEN = Outage("video", "exit status 1", 120.0)


def broken(effects: list[Effect]) -> m.Failed:
    """The one answer, which says 503 and when to come again."""
    failed = refused(effects)
    assert failed.status == 503 and failed.retry_after_s and "broken: exit status 1" in failed.message
    return failed


NEEDED = {  # by stage of ``bring_to``: which actors a request with media still needs
    "waiting": {"video", "encoder", "prefill", "decode", "detokenizer"},
    "filling": {"video", "encoder", "prefill", "decode", "detokenizer"},
    "analysing": {"video", "encoder", "prefill", "decode", "detokenizer"},
    "decoding media": {"video", "encoder", "prefill", "decode", "detokenizer"},
    "encoding": {"encoder", "prefill", "decode", "detokenizer"},
    "prefill": {"prefill", "decode", "detokenizer"},
    "handover": {"decode", "detokenizer"},
    "decode": {"decode", "detokenizer"},
    "finished": {"detokenizer"},
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("actor", ["video", "encoder", "prefill", "decode", "detokenizer"])
def test_who_needs_what_is_broken_ends_at_once_and_nobody_else(stage: str, actor: str) -> None:
    driver = Driver()
    bring_to(driver, stage)
    driver.machine.set_outages([Outage(actor, "exit status 1", driver.now + 4.5)])
    failed = sent(driver.tick(), m.Failed)
    if actor in NEEDED[stage]:
        assert {one.key for one in failed} == ({1, 2, KEY} if stage == "waiting" else {KEY})  # type: ignore[union-attr]
        assert all((one.status, one.retry_after_s) == (503, 6) for one in failed)  # type: ignore[union-attr]
        assert all(one.message.startswith(f"{actor} is broken: exit status 1") for one in failed)  # type: ignore[union-attr]
    else:
        assert not failed
    driver.machine.set_outages([])
    finish_everything(driver)


@pytest.mark.parametrize("actor", ["video", "encoder"])
def test_text_goes_on_without_media_actors(actor: str) -> None:
    driver = Driver()
    driver.machine.set_outages([Outage(actor, "exit status 1", 120.0)])
    failed = broken(driver.submit(image(), key=1))
    assert "requests without media are served" in failed.message
    assert not driver.state.requests, "it was never accepted"
    assert sent(driver.submit(text(), key=2), m.Prepared)
    assert Phase.DECODE in phases(driver.done("prefill"))
    driver.machine.set_outages([])
    assert sent(driver.submit(image(), key=3), m.Granted), "mended"


def test_what_is_being_decoded_goes_on_without_prefill() -> None:
    driver = Driver()
    bring_to(driver, "decode")
    driver.machine.set_outages([Outage("prefill", "exit status 1")])
    assert not sent(driver.tick(), m.Failed)
    assert broken(driver.submit(text(), key=1)).retry_after_s == 30, "nobody knows when"
    assert Phase.DECODE in phases(driver.submit(text(1), key=2)), "one token has no prefill"
    preempt(driver.state, driver.state.requests[KEY])
    assert broken(driver.tick()).key == KEY, "it would have to be prefilled again"


def test_the_rows_of_a_broken_actor_are_free_once_it_is_back() -> None:
    """Only its next generation can say that the last one writes no more."""
    driver = Driver()
    bring_to(driver, "analysing")
    driver.machine.set_outages([VIDEO_BROKEN])
    broken(driver.tick())
    driver.receive("gateway", m.Delivered(1, KEY)).tick()
    assert not driver.is_empty and not driver.state.requests
    driver.receive("video", m.Hello("video", 2, 1, True), generation=2)
    driver.machine.set_outages([])
    plan_id, _ = driver.plan("video")
    driver.receive("video", m.PlanDone("video", 2, plan_id, 0.0, m.Skipped()), generation=2).tick()
    assert driver.is_empty


# several actors of a stage


def several(layout: str, **changes: object) -> Driver:
    driver = Driver(actors=actors_of(layout), **changes)
    for actor in driver.state.limits.actors:
        if number_of(actor):
            driver.receive(actor, m.Hello(actor, 1, 1, True))
    return driver


def places(driver: Driver, stage: str) -> list[str]:
    return sorted(inflight.actor for inflight in driver.state.plans.values() if inflight.plan.STAGE == stage)


def test_no_plan_goes_to_an_actor_that_is_dead_while_another_is_there() -> None:
    driver = several("E+2P+D", num_rows=8, depth=1)
    assert driver.machine.twins() == [], "nothing to do"
    driver.machine.set_absent([InstanceId("prefill")])
    driver.submit(text(6, 9), 1)
    driver.submit(text(6, 9), 2)
    assert driver.machine.twins() == ["prefill", "prefill.1"]
    assert places(driver, "prefill") == ["prefill.1"], "one plan at a time: the other waits for this actor"
    driver.machine.set_absent([])
    driver.tick()
    assert places(driver, "prefill") == ["prefill", "prefill.1"]


def test_plans_go_to_the_least_busy_of_a_stage() -> None:
    driver = several("E+3P+D", num_rows=8, depth=2, prefill_budget=6)
    for key in range(1, 6):
        driver.submit(text(), key)
    assert places(driver, "prefill") == ["prefill", "prefill", "prefill.1", "prefill.1", "prefill.2"]
    for actor in ("prefill.1", "prefill", "prefill.1"):  # beside decode three plans at most are in flight
        driver.done(actor)
    driver.submit(text(), 7)
    assert places(driver, "prefill") == ["prefill", "prefill.1", "prefill.2"]


def film(num_bytes: int = 10) -> m.RequestSpec:
    return m.RequestSpec(m.Generation("r"), [1, 2, FILM, 3, 4], [m.MediaItem("video", num_bytes)], 4)


def test_media_go_to_the_least_busy_video_and_stay_there() -> None:
    driver = several("2V+E+P+D", num_rows=8, media_page_bytes=1024, placeholder_ids={"image": IMAGE, "video": FILM})
    for key, spec in ((1, film(1000)), (2, film()), (3, film())):
        driver.submit(spec, key)
        driver.receive("gateway", m.Filled(1, key)).tick()
    assert places(driver, "video") == ["video", "video.1"], "one plan of large work each"
    assert [driver.state.requests[key].video for key in (1, 2, 3)] == ["video", "video.1", ""]
    driver.done("video.1", m.ItemError(400, "broken"))
    assert driver.state.requests[3].video == "video.1", "it has less to do"
    driver.done("video", m.ItemError(400, "broken"))
    segment = SegmentShape("video", (1, 4, 4), 16, 4, 6)
    driver.done("video.1", m.Analysed(ItemShape("video", (2, 4, 4), 12, [segment] * 2)))
    assert places(driver, "video") == ["video.1"], "the other has nothing to do"
    driver.machine.set_outages([Outage("video.1", "it crashes", driver.now + 5)])
    driver.tick(gone={InstanceId("video.1")})
    assert driver.state.requests[3].video == "video" and places(driver, "video") == ["video"]


def test_a_second_prefill_works_while_tokens_are_generated() -> None:
    driver = several("E+2P+D", num_rows=8, prefill_budget=6)
    driver.submit(text(max_new=50), 1)
    driver.done("prefill")
    assert driver.state.num_decoding == 1
    for key in (2, 3, 4):
        driver.submit(text(), key)
    assert places(driver, "prefill") == ["prefill", "prefill.1"]


def test_a_result_of_another_than_the_plans_actor_changes_nothing() -> None:
    driver = several("E+2P+D", num_rows=8)
    driver.submit(text())
    plan_id, _ = driver.plan("prefill")
    driver.receive("prefill.1", m.PlanDone("prefill.1", 1, plan_id, 0.01, m.Done()))
    assert plan_id in driver.state.plans and not driver.state.decoding()


def test_while_one_of_a_stage_is_broken_the_other_serves() -> None:
    driver = several("E+2P+D", num_rows=8, prefill_budget=6)
    driver.submit(text(), 1)
    driver.submit(text(), 2)
    assert places(driver, "prefill") == ["prefill", "prefill.1"]
    driver.machine.set_outages([Outage("prefill.1", "it crashes", driver.now + 5)])
    assert not sent(driver.tick(), m.Failed) and driver.machine.unanswering() == {"prefill.1"}
    assert places(driver, "prefill") == ["prefill", "prefill.1"], "it may yet write the row's pages"
    assert not sent(driver.tick(gone={InstanceId("prefill.1")}), m.Failed)
    assert places(driver, "prefill") == ["prefill", "prefill"] and not driver.machine.unanswering()
    for key in (3, 4):
        assert not sent(driver.submit(text(), key), m.Failed)
    driver.machine.set_outages([Outage("prefill.1", "it crashes"), Outage("prefill", "it hangs", driver.now + 4.5)])
    all_broken = [failed for failed in sent(driver.tick(), m.Failed) if isinstance(failed, m.Failed)]
    assert {failed.key for failed in all_broken} == {1, 2, 3, 4}
    assert {(failed.message, failed.retry_after_s) for failed in all_broken} == {("prefill is broken: it hangs", 6)}, (
        "the earliest probe"
    )


def encoding(driver: Driver) -> Request:
    """A request whose image is at the first encoder."""
    driver.submit(image())
    driver.receive("gateway", m.Filled(1, KEY)).tick()
    driver.done("video", m.Analysed(SHAPE))
    driver.done("video")
    assert places(driver, "encoder") == ["encoder"]
    return driver.state.requests[KEY]


def test_a_plan_goes_to_the_actor_with_the_fewest_pending_tokens() -> None:
    """MS2: not to the one with the fewest plans."""
    driver = several("E+2P+D", num_rows=8)
    for key, num_tokens in ((1, 60), (2, 6), (3, 6)):
        driver.submit(text(num_tokens), key)
    assert places(driver, "prefill") == ["prefill", "prefill.1", "prefill.1"]


def test_a_full_actor_gets_no_plan_however_small_its_plans_are() -> None:
    driver = several("E+2P+D", num_rows=8)
    for key, num_tokens in ((1, 60), (2, 6), (3, 6), (4, 6)):
        driver.submit(text(num_tokens), key)
    assert places(driver, "prefill") == ["prefill", "prefill", "prefill.1", "prefill.1"]


def test_another_encoder_gets_the_work_of_a_broken_one() -> None:
    driver = several("2E+P+D", num_rows=8)
    request = encoding(driver)
    plan_id, first = driver.plan("encoder")
    driver.machine.set_outages([Outage("encoder", "it crashes", driver.now + 50)])
    assert not sent(driver.tick(), m.Failed) and places(driver, "encoder") == ["encoder"], "it may yet write its pages"
    driver.tick(gone={InstanceId("encoder")})
    _, second = driver.plan("encoder.1")
    assert isinstance(first, p.Encode) and isinstance(second, p.Encode) and first.parts[0].source == second.parts[0].source
    driver.receive("encoder", m.PlanDone("encoder", 1, plan_id, 0.01, m.ItemError(500, "too late"))).tick()
    driver.done("encoder.1")
    while places(driver, "prefill"):
        driver.done("prefill")
    assert request.phase == Phase.DECODE
    assert not driver.state.plans and not driver.state.pools["patch"].num_used and not driver.state.pools["embedding"].num_used


def test_an_error_in_work_that_another_encoder_has_done_fails_nobody() -> None:
    driver = several("2E+P+D", num_rows=8)
    request = encoding(driver)
    reset_media(driver.state, request, consumed_too=False)
    driver.state.save(request)
    driver.tick()
    driver.done("video")
    assert sorted(places(driver, "encoder")) == ["encoder", "encoder.1"]
    assert not sent(driver.done("encoder", m.ItemError(500, "out of memory")), m.Failed)
    assert not sent(driver.done("encoder.1"), m.Failed)
    assert places(driver, "prefill")


def test_a_stream_goes_on_whose_stale_plan_is_at_an_actor_that_breaks() -> None:
    driver = several("2E+P+D", num_rows=8)
    request = encoding(driver)
    reset_media(driver.state, request, consumed_too=False)
    driver.state.save(request)
    driver.tick()
    driver.done("video")
    driver.done("encoder.1")
    while places(driver, "prefill"):
        driver.done("prefill")
    assert request.phase == Phase.DECODE and places(driver, "encoder") == ["encoder"]
    driver.machine.set_outages([Outage("encoder", "it hangs", driver.now + 5)])
    assert not sent(driver.tick(), m.Failed), "decode has all that it needs"


def test_a_broken_prefill_does_not_hold_up_the_other_while_tokens_are_generated() -> None:
    driver = several("E+2P+D", num_rows=8, prefill_budget=6)
    driver.submit(text(max_new=50), 1)
    driver.done("prefill")
    for key in (2, 3):
        driver.submit(text(), key)
    assert places(driver, "prefill") == ["prefill", "prefill.1"], "all turns"
    driver.machine.set_outages([Outage("prefill", "it crashes", driver.now + 50)])
    driver.tick(0.1)
    driver.submit(text(), 4)
    assert places(driver, "prefill") == ["prefill", "prefill.1", "prefill.1"]
