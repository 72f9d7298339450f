"""A recorded run: the machine with seeded traffic, modelled actors, faults and new controllers, and a digest of all that it decides.

``test_recorded_run`` compares the digests with the stored ones, second by second, so that a change that must not change decisions is
known not to. After one that must: ``python -m mmrt.tests.runtime.controller.recorded_run --store``. To find a difference, run
``--dump FILE`` before and after and compare the files.
"""

import argparse
import hashlib
import heapq
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.controller.machine import Controller
from mmrt.runtime.controller.recovery import PlanSnapshot, RowSnapshot, RunSnapshot, recover
from mmrt.runtime.controller.scheduling.types import Limits
from mmrt.runtime.controller.state import effects as e
from mmrt.runtime.controller.state.records import JournalState
from mmrt.runtime.controller.state.row_record import decode_record
from mmrt.runtime.pools import PoolName, pools_of
from mmrt.runtime.stage_table import InstanceId
from mmrt.schema.media import ItemShape, MediaKind, SegmentShape
from mmrt.schema.outage import Outage
from mmrt.schema.rows import EndCode, Phase

STORED = Path(__file__).with_name("recorded_run.json")
IMAGE, VIDEO, AUDIO = 901, 902, 903
PLACEHOLDERS = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}
STEP_S = 0.02  # of decode
TURN_S = 0.004
WORKERS = ("video", "encoder", "prefill")


@dataclass(frozen=True)
class Scenario:
    """Limits of the run, how much comes (requests per second), and how much goes wrong (faults per second)."""

    limits: Limits
    requests_per_s: float
    media_share: float
    faults_per_s: float
    loss: float
    seconds: float = 20.0


def make_limits(**changes: Any) -> Limits:
    values: dict[str, Any] = dict(
        num_rows=6, max_context=64, kv_page_tokens=4, num_kv_pages=14, media_page_bytes=8, num_media_pages=14, patch_page_bytes=16,
        num_patch_pages=8, embedding_page_tokens=4, num_embedding_pages=4, placeholder_ids=PLACEHOLDERS, max_waiting=12,
        num_plan_slots=8, patience_s=0.1, silence_s=2.0, prefill_budget=16, encode_budget=8,
    )  # fmt: skip
    return Limits(**(values | changes))


ROOMY = make_limits(
    num_rows=24, num_kv_pages=260, num_media_pages=60, num_patch_pages=40, num_embedding_pages=60, max_waiting=64, prefill_budget=0,
    encode_budget=0, num_plan_slots=32,
)  # fmt: skip
SCENARIOS = {
    "crowded": Scenario(make_limits(ahead_pages=0, ahead_s=0.0), 12.0, 0.3, 0.0, 0.0),
    "crowded media": Scenario(
        make_limits(num_kv_pages=30, num_embedding_pages=4, patience_s=0.03, prefill_budget=2, ahead_pages=0), 8.0, 0.9, 0.0, 0.0
    ),
    "crowded, with faults": Scenario(make_limits(ahead_pages=0, patience_s=0.05), 8.0, 0.4, 2.0, 0.05),
    "texts that wait": Scenario(make_limits(num_rows=16, num_kv_pages=50, max_waiting=100), 50.0, 0.05, 0.5, 0.0, 10.0),
    "media that wait": Scenario(
        replace(ROOMY, num_rows=12, num_embedding_pages=5, num_patch_pages=6, patience_s=0.03), 12.0, 0.9, 0.5, 0.01
    ),
    "roomy": Scenario(ROOMY, 40.0, 0.3, 0.8, 0.01, 12.0),
    "steered": Scenario(replace(ROOMY, tbt_factor=1.5, num_kv_pages=120), 20.0, 0.3, 0.8, 0.02),
}


@dataclass
class Row:
    """The words of a row that the machine or decode writes."""

    generation: int = 0
    phase: Phase = Phase.FREE
    block_tables: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    prefilled: list[int] = field(default_factory=lambda: [0, 0])
    committed: int = 0
    end_code: int = 0
    state: bytes | None = None
    decode: InstanceId | None = None
    spec: m.SequenceSpec | None = None
    key: int = 0

    @property
    def is_live(self) -> bool:
        return self.phase in (Phase.PREPARE, Phase.DECODE)


class Memory:
    """What effects leave for others and for the next controller."""

    def __init__(self, limits: Limits) -> None:
        self.rows = [Row() for _ in range(limits.num_rows)]
        self.plans: dict[int, PlanSnapshot] = {}
        self.journal = JournalState()
        sizes = (limits.num_media_pages, limits.num_patch_pages, limits.num_embedding_pages, limits.num_kv_pages)
        self.generations = {name: [0] * size for name, size in zip(pools_of(1), sizes, strict=True)}
        self.keys: dict[PoolName, dict[int, tuple[int, bytes]]] = {name: {} for name in pools_of(1)}

    def apply(self, effect: e.Effect) -> None:
        match effect:
            case e.WriteJournal(record):
                self.journal.apply(record)
            case e.SetPageGenerations(pool, run):
                for page, generation in zip(run.pages, run.generations, strict=True):
                    self.generations[pool][page] = generation
            case e.SetPageKeys(pool, run, keys, _):
                self.keys[pool].update(zip(run.pages, zip(run.generations, keys, strict=True), strict=True))
            case e.BeginRow(row, generation):
                self.rows[row] = Row(generation)
            case e.WriteState(row, state):
                self.rows[row].state, self.rows[row].key = state, decode_record(state).key
            case e.WriteSpec(row, spec, _):
                self.rows[row].spec = m.decode_sequence_spec(spec)
            case e.AppendPages(row, member, pages):
                self.rows[row].block_tables[member].extend(pages)
            case e.ClearPages(row):
                self.rows[row].block_tables, self.rows[row].prefilled = ([], []), [0, 0]
            case e.SetPrefilled(row, member, num_tokens):
                self.rows[row].prefilled[member] = num_tokens
            case e.SetPhase(row, phase):
                self.rows[row].phase = phase
            case e.SetOwner(row, decode):
                self.rows[row].decode = decode
            case e.WritePlan(slot, plan_id, actor, payload):
                self.plans[slot] = PlanSnapshot(slot, plan_id, actor, payload)
            case e.ClearPlan(slot):
                del self.plans[slot]

    def snapshot(self, actors: dict[str, int]) -> RunSnapshot:
        rows = [
            RowSnapshot(
                index, row.generation, row.phase, (list(row.block_tables[0]), list(row.block_tables[1])),
                (row.prefilled[0], row.prefilled[1]), row.committed, row.end_code, row.state, decode=row.decode,
            )
            for index, row in enumerate(self.rows)
            if row.phase != Phase.FREE
        ]  # fmt: skip
        generations = {name: list(pool) for name, pool in self.generations.items()}
        row_generations = [row.generation for row in self.rows]
        plans = [self.plans[slot] for slot in sorted(self.plans)]
        keys = {
            name: {page: key for page, (generation, key) in pool.items() if generation == generations[name][page]}
            for name, pool in self.keys.items()
        }
        return RunSnapshot(self.journal, rows, row_generations, plans, generations, actors, keys)


@dataclass
class Client:
    """A request as the gateway knows it: ``next`` is what it says again and again, from ``say_s`` on, until there is an answer."""

    spec: m.RequestSpec
    shapes: list[ItemShape]
    length: int
    cancel_s: float
    next: str = "submit"
    say_s: float = 0.0


class Run:
    """One scenario, turn by turn. All dice are one seeded generator, so equal decisions give an equal run."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.limits, self.random = scenario, scenario.limits, random.Random(seed)
        self.now = self.began_s = 100.0
        self.memory = Memory(self.limits)
        self.generations = dict.fromkeys(("gateway", *WORKERS, "decode"), 1)
        self.network: list[tuple[float, int, str, int, m.ToActor | m.ToController]] = []
        self.num_messages = self.num_controllers = 0
        self.queues: dict[str, list[m.Run]] = {name: [] for name in WORKERS}
        self.working: dict[str, tuple[float, m.Run, float, m.Result]] = {}
        self.results: dict[str, dict[int, m.PlanDone]] = {name: {} for name in WORKERS}
        self.members: dict[int, int] = {}
        self.step_s = self.tick_s = 0.0
        self.clients: dict[int, Client] = {}
        self.shapes: dict[int, list[ItemShape]] = {}
        self.num_requests = 0
        self.crash_after = -1  # effects
        self.outages: list[Outage] = []
        self.digests: list[str] = []
        self.effects: list[tuple[float, Any]] = []
        self._digest = hashlib.blake2b(digest_size=8)
        self.totals: dict[str, int] = {}
        self.begin_controller()

    # ------------------------------------------------------------------------------------------------ recording

    def note(self, what: Any) -> None:
        data = type(what).__name__.encode() + msgspec.msgpack.encode(what, enc_hook=str)
        self._digest.update(data)
        self.effects.append((self.now, what))

    def perform(self, effects: Sequence[e.Effect]) -> None:
        """Do effects in order; the controller may die between two."""
        for effect in effects:
            if self.crash_after == 0:
                self.begin_controller()
                return
            self.crash_after = max(-1, self.crash_after - 1)
            self.note(effect)
            if isinstance(effect, e.Send):
                self.post(effect.actor, effect.generation, effect.message)
            else:
                self.memory.apply(effect)

    def begin_controller(self) -> None:
        """A new controller continues from what is in memory; it may not know yet who is there."""
        if self.num_controllers:
            self.count()
        self.crash_after = -1
        self.num_controllers += 1
        known = {InstanceId(name): generation for name, generation in self.generations.items() if self.random.random() < 0.8}
        self.machine: Controller = recover(self.limits, self.num_controllers, self.memory.snapshot(known))
        self.machine.set_outages(self.outages)
        self.tick_s = self.now
        self.hello_s = self.now + 0.3

    def count(self) -> None:
        for name in ("admitted", "finished", "failed", "preempted", "evicted", "quarantined"):
            self.totals[name] = self.totals.get(name, 0) + getattr(self.machine.state.totals, name)

    # -------------------------------------------------------------------------------------------------- network

    def post(self, to: str, generation: int, message: m.ToActor | m.ToController) -> None:
        if self.random.random() < self.scenario.loss:
            return
        self.num_messages += 1
        late_s = self.random.choice((0.0, 0.001, 0.003))
        heapq.heappush(self.network, (self.now + late_s, self.num_messages, to, generation, message))

    def say(self, name: str, message: m.ToController) -> None:
        """To the controller, from this actor's generation of now."""
        self.post(f"controller<{name}", self.generations[name], message)

    def deliver(self) -> bool:
        """Hand over what is due. True if the controller got anything."""
        had_any = False
        while self.network and self.network[0][0] <= self.now:
            _, _, to, generation, message = heapq.heappop(self.network)
            if to.startswith("controller"):
                self.perform(self.machine.on_message(InstanceId(to.partition("<")[2]), generation, message, self.now))  # type: ignore[arg-type]
                had_any = True
            elif self.generations[to] != generation:
                continue
            elif to == "gateway":
                self.tell_client(message)
            elif to == "decode":
                self.tell_decode(message)
            elif isinstance(message, m.Run):
                self.tell_worker(to, message)
        return had_any

    # -------------------------------------------------------------------------------------------------- workers

    def tell_worker(self, name: str, run: m.Run) -> None:
        if run.plan_id in self.results[name]:
            self.say(name, self.results[name][run.plan_id])
        elif name in self.working and self.working[name][1].plan_id == run.plan_id:
            pass
        elif all(queued.plan_id != run.plan_id for queued in self.queues[name]):
            self.queues[name].append(run)

    def work(self, name: str) -> None:
        """Finish what is due and begin the next."""
        if name in self.working:
            until_s, run, elapsed_s, result = self.working[name]
            if self.now < until_s:
                return
            del self.working[name]
            done = self.results[name][run.plan_id] = m.PlanDone(name, self.generations[name], run.plan_id, elapsed_s, result)
            self.say(name, done)
        while self.queues[name] and name not in self.working:
            run = self.queues[name].pop(0)
            written = self.memory.plans.get(run.slot)
            if written is not None and written.plan_id == run.plan_id:
                units, result = self.outcome(p.decode_plan(written.payload), run)
                elapsed_s = 0.002 + 0.001 * units * self.random.uniform(0.8, 1.3)
                self.working[name] = (self.now + elapsed_s, run, elapsed_s, result)

    def outcome(self, plan: p.Plan, run: m.Run) -> tuple[float, m.Result]:
        """Units of work, and what comes of it."""
        if isinstance(plan, p.Encode):
            places = [(part.row, part.row_generation) for part in plan.parts]
            units = 1.0 * sum(part.shape.num_rows for part in plan.parts)
        elif isinstance(plan, p.Prefill):
            places = [(chunk.row, chunk.row_generation) for chunk in plan.chunks]
            units = 0.3 * sum(chunk.end - chunk.start for chunk in plan.chunks)
        else:
            places, units = [(plan.row, plan.row_generation)], 10.0 if plan.media.kind == "video" else 4.0
        live = [row for row, generation in places if self.memory.rows[row].is_live and self.memory.rows[row].generation == generation]
        if not live or 0 < run.deadline_s <= self.now:
            return 0.0, m.Skipped()
        dice = self.random.random()
        if self.scenario.faults_per_s and any(self.memory.rows[row].key % 40 == 0 for row in live):
            return units, m.Died()
        if self.scenario.faults_per_s and dice < 0.02:
            return units, self.random.choice((m.ItemError(422, "broken"), m.ItemError(500, "failed"), m.Died(), m.Died()))
        if not isinstance(plan, p.Analyse | p.PreprocessSegment):
            return units, m.Done()
        if dice > 0.97 and plan.media.kind == "image" and plan.media.work < 1 << 24:
            return units, m.Overran()
        if isinstance(plan, p.PreprocessSegment):
            return units, m.Done()
        return units, m.Analysed(self.shapes[self.memory.rows[plan.row].key][plan.item])

    # --------------------------------------------------------------------------------------------------- decode

    def tell_decode(self, message: m.ToActor) -> None:
        if isinstance(message, m.Admit):
            self.join(message.row, message.row_generation)
        elif isinstance(message, m.Drop):
            if self.members.get(message.row) == message.row_generation:
                del self.members[message.row]
            self.say("decode", m.Dropped(self.generations["decode"], message.row, message.row_generation, message.ticket))

    def join(self, row: int, generation: int) -> None:
        words = self.memory.rows[row]
        if (words.generation, words.phase, words.end_code) == (generation, Phase.DECODE, 0):
            self.members[row] = generation

    def decode(self) -> None:
        """One step of the running set."""
        if self.now < self.step_s:
            return
        self.step_s = self.now + STEP_S * self.random.choice((1, 1, 1, 2))
        if self.random.random() < 0.05:
            for row, words in enumerate(self.memory.rows):
                self.join(row, words.generation)
        for row, generation in list(self.members.items()):
            words = self.memory.rows[row]
            spec = words.spec
            assert spec is not None and words.generation == generation
            lengths = [length for length in (spec.num_prompt_tokens, spec.num_companion_tokens) if length]
            room = self.limits.kv_page_tokens
            if any(len(words.block_tables[n]) * room < length + words.committed for n, length in enumerate(lengths)):
                continue
            words.committed += 1
            length = self.clients[spec.key].length if spec.key in self.clients else 1
            if words.committed >= min(spec.max_new_tokens, length):
                words.end_code = EndCode.LENGTH if words.committed == spec.max_new_tokens else EndCode.STOP
                del self.members[row]
                self.say("decode", m.SequenceEnded(self.generations["decode"], row, generation))

    # -------------------------------------------------------------------------------------------------- gateway

    def arrive(self) -> None:
        """A new request now and then: a text, a picture, a video, several media, a guidance pair."""
        rng = self.random
        if rng.random() >= self.scenario.requests_per_s * TURN_S:
            return
        self.num_requests += 1
        ids = [rng.randint(1, 99) for _ in range(rng.choice((1, 4, 9, 20)))]
        items: list[m.MediaItem] = []
        shapes: list[ItemShape] = []
        for _ in range(rng.choice((1, 1, 2)) if rng.random() < self.scenario.media_share else 0):
            kind: MediaKind = rng.choice(("image", "image", "video"))
            segments = [
                SegmentShape(
                    rng.choice((kind, "audio")) if kind == "video" else kind, (1, 1, 1), rng.randint(1, 14), 4, rng.randint(1, 7)
                )
                for _ in range(rng.randint(1, 4) if kind == "video" else 1)
            ]
            items.append(m.MediaItem(kind, rng.randint(1, 24), work=rng.choice((100, 1000))))
            shapes.append(ItemShape(kind, (1, 1, 1), sum(segment.num_tokens for segment in segments), segments))
            ids += [IMAGE if kind == "image" else VIDEO, rng.randint(1, 99)]
        companion = [rng.randint(1, 99) for _ in range(rng.choice((1, 5)))] if rng.random() < 0.15 else None
        max_new = rng.choice((2, 20, 25, None))
        deadline_s = self.now + rng.uniform(0.2, 5.0) if rng.random() < 0.1 else 0.0
        spec = m.RequestSpec(m.Generation(str(self.num_requests), deadline_s=deadline_s), ids, items, max_new, companion_ids=companion)
        cancel_s = self.now + rng.uniform(0.0, 3.0) if rng.random() < 0.1 else 1e9
        self.clients[self.num_requests] = Client(spec, shapes, rng.choice((3, 20, 40)), cancel_s, say_s=self.now)
        self.shapes[self.num_requests] = shapes

    def tell_client(self, message: m.ToActor) -> None:
        key = getattr(message, "key", 0)
        client = self.clients.get(key)
        if client is None:
            if not isinstance(message, m.Welcome | m.Released | m.Unknown):
                self.say("gateway", m.Cancel(self.generations["gateway"], key))
        elif isinstance(message, m.Released):
            del self.clients[key]
        elif client.next in ("deliver", "cancel"):
            pass
        elif isinstance(message, m.Failed):
            client.next, client.say_s = "deliver", self.now + 0.01
        elif isinstance(message, m.Granted) and client.next in ("submit", "wait"):
            client.next, client.say_s = "fill", self.now + self.random.choice((0.0, 0.02, 0.2))
        elif isinstance(message, m.Queued | m.Prepared):
            client.next, client.say_s = "wait", self.now + self.random.choice((0.5, 1.0, 9.0))

    def speak(self) -> None:
        """Everything that clients have to say now."""
        ended = {row.key for row in self.memory.rows if row.phase == Phase.DECODE and row.end_code}
        generation = self.generations["gateway"]
        for key, client in self.clients.items():
            if self.now >= client.cancel_s and client.next not in ("deliver", "cancel"):
                client.next, client.say_s = "cancel", self.now
            elif key in ended and client.next not in ("deliver", "cancel"):
                client.next, client.say_s = "deliver", self.now + self.random.choice((0.0, 0.01, 0.3))
            if self.now < client.say_s:
                continue
            client.say_s = self.now + 1.0
            kinds = {"fill": m.Filled, "wait": m.Query, "deliver": m.Delivered, "cancel": m.Cancel}
            if client.next == "submit":
                self.say("gateway", m.Submit(generation, key, client.spec))
            else:
                self.say("gateway", kinds[client.next](generation, key))

    # --------------------------------------------------------------------------------------------------- faults

    def break_something(self) -> None:
        rng = self.random
        if rng.random() >= self.scenario.faults_per_s * TURN_S:
            return
        what = rng.choice((*WORKERS, "decode", "gateway", "controller", "controller", "outage"))
        if what == "controller":
            self.crash_after = rng.randint(0, 12)
        elif what == "outage":
            self.outages = [Outage(rng.choice(WORKERS), "it crashes", self.now + 0.5)]
            self.machine.set_outages(self.outages)
        else:
            self.generations[what] += 1
            if what in WORKERS:
                self.queues[what], self.results[what] = [], {}
                self.working.pop(what, None)
            elif what == "decode":
                self.members = {}
            else:
                self.clients = {}
            self.hello_s = self.now

    # ----------------------------------------------------------------------------------------------------- time

    def turn(self, is_open: bool) -> None:
        self.now += TURN_S
        if is_open:
            self.arrive()
            self.break_something()
        if self.outages and not (is_open and self.now < self.outages[0].next_probe_s):
            self.outages = []
            self.machine.set_outages([])
        if self.now >= self.hello_s:
            self.hello_s = self.now + 1.0
            for name, generation in self.generations.items():
                self.say(name, m.Hello(name, generation, 1, True))
        self.speak()
        for name in WORKERS:
            self.work(name)
        self.decode()
        if self.deliver() or self.now >= self.tick_s:
            progress = [
                (row, generation, self.memory.rows[row].committed, self.memory.rows[row].end_code)
                for row, generation in self.machine.watched()
            ]
            self.perform(self.machine.tick(self.now, progress))
            wait_s = self.machine.next_tick_s()
            self.note(wait_s)
            self.tick_s = self.now + wait_s

    def play(self) -> None:
        """To the end: new requests for ``seconds``, then until all are done."""
        second = 0
        while (elapsed_s := self.now - self.began_s) < self.scenario.seconds or not self.is_idle:
            self.turn(elapsed_s < self.scenario.seconds)
            assert elapsed_s < 3 * self.scenario.seconds, f"not done after {elapsed_s:.0f} s"
            if elapsed_s >= second + 1:
                second += 1
                self.end_segment()
        self.end_segment()
        self.count()

    def end_segment(self) -> None:
        self.digests.append(self._digest.hexdigest())
        self._digest = hashlib.blake2b(digest_size=8)

    @property
    def is_idle(self) -> bool:
        state = self.machine.state
        free = all(pool.num_used == 0 for pool in state.pools.values())
        return not self.clients and free and not state.requests and not state.plans


def play(name: str, seed: int = 1) -> Run:
    """One scenario to its end."""
    run = Run(SCENARIOS[name], seed)
    run.play()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description="Play the recorded run.")
    parser.add_argument("--store", action="store_true", help="take what is decided now for right")
    parser.add_argument("--dump", type=Path, metavar="FILE", help="write all effects as text")
    options = parser.parse_args()
    runs = {name: play(name) for name in SCENARIOS}
    for name, run in runs.items():
        print(f"{name}: {len(run.effects)} effects, {run.num_requests} requests, {run.num_controllers} controllers, {run.totals}")
    if options.store:
        stored = {name: {"totals": run.totals, "digests": run.digests} for name, run in runs.items()}
        STORED.write_text(json.dumps(stored, indent=1) + "\n")
    if options.dump:
        with options.dump.open("w") as file:
            for name, run in runs.items():
                file.writelines(f"{name}: {now:.3f} {what!r}\n" for now, what in run.effects)


if __name__ == "__main__":
    main()
