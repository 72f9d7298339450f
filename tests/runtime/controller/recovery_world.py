"""A whole run in one thread: the real machine, journal and tables; simulated actors; a network that loses, repeats and
reorders; a clock of our own; crashes of every actor anywhere and of the controller between any two effects; requests that kill
the actor that works on them.

What must hold: nothing reads what was not written for it, nobody writes a page that was given away meanwhile, a sequence
decodes only over its own complete KV, every request ends as it would have ended without all that, only those that kill are given
up, and nothing is held at the end. ``test_recovery_world`` lives through it by random seeds, ``test_protocol_machine`` step by step.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mmrt.actors.controller.io import ControllerIO, perform_all
from mmrt.actors.controller.journal import Journal
from mmrt.actors.host.plan_checks import still_wanted
from mmrt.actors.host.solo_trials import SoloTrials, solo_step
from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.bus.copy_plans import Load, LoadChunk, LoadPart, LoadSegments, Transfer
from mmrt.runtime.bus.wire import encode
from mmrt.runtime.controller.caches.embedding_cache import page_keys
from mmrt.runtime.controller.recovery import recover
from mmrt.runtime.controller.rows.absence import AWAY_S
from mmrt.runtime.controller.rows.expansion import expand
from mmrt.runtime.controller.rows.instances import drained
from mmrt.runtime.controller.rows.intake import check_segments
from mmrt.runtime.controller.rows.lifecycle import preempt, reset_media
from mmrt.runtime.controller.rows.ownership import take_back
from mmrt.runtime.controller.scheduling.admission import check_lengths
from mmrt.runtime.controller.scheduling.routing import Routing
from mmrt.runtime.controller.scheduling.types import Limits
from mmrt.runtime.controller.state.effects import SetPageGenerations
from mmrt.runtime.controller.state.embedding_tracker import lay_out
from mmrt.runtime.controller.state.row_record import decode_record
from mmrt.runtime.controller.state.state import owner
from mmrt.runtime.errors import RequestError
from mmrt.runtime.pools import kind_of_pool, kv_pool, log_pool, pools_of, state_pool
from mmrt.runtime.process.crash_cause import Death
from mmrt.runtime.stage_table import InstanceId, actors_of, devices_of, number_of, stage_of
from mmrt.schema.media import ItemShape, SegmentShape
from mmrt.schema.outage import Outage
from mmrt.schema.rows import EndCode, Phase
from mmrt.shm.plan_table import PlanTable
from mmrt.shm.pool import PagePool
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable
from mmrt.shm.step_gaps import StepGaps
from mmrt.tests.runtime.controller.kept_values import check_kept
from mmrt.tests.runtime.controller.kv_contents import AUDIO, IMAGE, VIDEO, KVContents, make_text, positions
from mmrt.tests.runtime.controller.pipeline_contents import LAYERS, STREAM, PipelineContents
from mmrt.tests.runtime.controller.state_contents import StateContents
from mmrt.tests.runtime.controller.window_contents import READ, WindowContents

CALM_S = 60.0
LONGEST_PICTURE = 9  # tokens of a segment
LAYOUTS = (
    "E+P+D",
    "E+P+2D",
    "2E+P+D",
    "2E+3P+3D",
    "EP@0+D@1",
    "EPD@0+EPD@1",
    "E@0+2P@0+P@1+2D@1",
    "EPD@0+P@1+D@1",
    "P@0+EPD@1",
    "2E@0+P@0+P@1+D@0+D@1",
)


class Crashed(Exception):
    """The controller was killed before its next effect."""


@dataclass
class Wanted:
    """A request and what must come of it."""

    key: int
    spec: m.RequestSpec
    shapes: list[ItemShape]
    broken: int | None  # an item that analysis refuses
    eos_at: int | None
    stop_at: int | None  # the detokenizer finds a stop string after so many tokens
    cancel_s: float | None
    poison: str = ""  # "video", "segment", "encoder", "prefill" or "decode": who dies of it

    def token(self, index: int) -> int:
        return (self.key * 31 + index * 7) % 50 + 100

    def length(self, max_new_tokens: int) -> int:
        return min(max_new_tokens, self.eos_at or max_new_tokens)

    def medium(self, item: int, era: bytes) -> tuple:
        """What its patches and embeddings are of: nobody else's, unless content, salt and era are the same."""
        content = self.spec.items[item].content
        return (era, self.spec.salt, content) if content else (self.key, item)


@dataclass
class AtGateway:
    wanted: Wanted
    state: str = "new"  # new, granted, waiting, done
    sent_s: float = -9.0
    filled: bool = False
    runs: list | None = None  # granted pages that are being filled
    outcome: str = ""
    cancelled: bool = False
    began_s: float = 0.0
    known: bool = True  # the controller has answered this generation of the gateway


@dataclass
class Process:
    """One actor: ``generation`` 0 while it is down."""

    generation: int = 0
    last_generation: int = 0
    up_s: float = 0.0
    hello_s: float = -9.0
    queue: list = field(default_factory=list)
    done: OrderedDict = field(default_factory=OrderedDict)
    step: object = None  # work begun and not finished
    transfer: object = None  # a decode's, likewise
    step_name: int = 0  # decode: what its status words would say
    death: Death | None = None  # of the generation before
    trials: SoloTrials | None = None  # a decode's, as the next two
    members: dict[int, int] = field(default_factory=dict)
    scan_s: float = 0.0
    broken_until_s: float = 0.0  # the supervisor has given it up until then
    code: int = 1


class World:
    def __init__(
        self,
        rng: random.Random,
        place: Path,
        crowded: bool,
        faults: bool = True,
        policy: str = "unified",
        layouts: Sequence[str] = (),
        *,
        has_states: bool = False,
        has_windows: bool = False,
        sees_pictures: bool = False,
        routing: Routing = "least_load",
        first_tokens: bool = False,
        has_pipeline: bool = False,
        has_breaks: bool = False,
    ) -> None:
        """``crowded``: much less memory than work: preemption and eviction all the time. Without ``faults`` others bring them.
        ``has_states``: the model has recurrent states. ``has_windows``: layers with a window have pages of their own.
        ``sees_pictures``: a chunk has all of a picture, or none. ``first_tokens``: prefill draws them, where there is one device.
        ``has_pipeline``: prefill's actors are its stages. ``has_breaks``: prefill does plans within others."""
        self.random = rng
        self.now = 1000.0
        self.crowded = crowded
        layout = rng.choice(layouts or ([one for one in LAYOUTS if not devices_of(one)] if has_breaks else LAYOUTS))
        devices = devices_of(layout)
        self.limits = Limits(
            policy="overlap" if has_breaks else policy,  # without turns, so prefill has several plans more often
            actors=actors_of(layout),
            num_devices=2 if devices else 1,
            devices={actor: int(device) for actor, device in devices.items()},
            num_rows=rng.randint(4, 6) if self.crowded else rng.randint(1, 6),
            max_context=64,
            kv_page_tokens=4,
            num_kv_pages=rng.choice((10, 12, 14)) if self.crowded else rng.choice((8, 12, 20, 40)),
            media_page_bytes=8,
            num_media_pages=rng.randint(3, 14),
            patch_page_bytes=16,
            num_patch_pages=rng.choice((4, 5, 8, 12)),
            embedding_page_tokens=4,
            num_embedding_pages=rng.choice((3, 4)) if self.crowded else rng.choice((3, 6, 10)),
            placeholder_ids={"image": IMAGE, "video": VIDEO, "audio": AUDIO},
            max_waiting=rng.choice((2, 50)),
            num_plan_slots=16,
            prefill_budget=rng.choice((0, 1, 3, 16)),
            encode_budget=rng.choice((0, 1, 8)),
            ahead_s=rng.choice((0.0, 2.0)),
            ahead_pages=rng.choice((0, 2)),
            patience_s=rng.choice((0.05, 0.5)),
            embedding_cache=rng.random() < 0.8,
            prefix_cache=rng.random() < 0.9,
            positions=positions,
            routing=routing,
            sees_pictures=sees_pictures,
            first_tokens=first_tokens and not devices,
            has_breaks=has_breaks,
            prefill_ranks=sum(stage_of(actor) == "prefill" for actor in actors_of(layout)) if has_pipeline else 1,
        )
        if has_states:
            self.limits = with_states(rng, self.limits)
        if has_windows:
            self.limits = with_windows(rng, self.limits)
        self.saves_pages = rng.random() < 0.6
        limits = self.limits
        self.run = RunDirectory.create(place / "run", {})
        self.table = SequenceTable.create(
            self.run, limits.num_rows, limits.max_context, limits.max_context // 4, max_spec_bytes=8192, max_state_bytes=16384
        )
        self.gaps = StepGaps.create(self.run, 1)
        self.plans = PlanTable.create(self.run, limits.num_plan_slots, 16384)
        sizes = {
            "media": limits.num_media_pages,
            "patch": limits.num_patch_pages,
            "embedding": limits.num_embedding_pages,
            "kv": limits.num_kv_pages,
            "state": limits.num_state_pages,
            "log": limits.num_log_pages,
            "window": limits.num_window_pages,
        }
        names = pools_of(limits.num_devices, has_states, has_windows)
        self.pools = {name: PagePool.create(self.run, name, sizes[kind_of_pool(name)], 8) for name in names}
        self.content: dict[str, list[dict]] = {name: [{} for _ in range(pool.num_pages)] for name, pool in self.pools.items()}
        self.kv = KVContents()
        self.states = StateContents(self.table, self.pools, self.content) if has_states else None
        self.windows = WindowContents(self.table, self.pools, self.content, limits) if has_windows else None
        pool = kv_pool(limits.devices.get(InstanceId("prefill"), 0))
        self.pipeline = PipelineContents(limits.prefill_ranks, pool, self.content[pool]) if has_pipeline else None
        kinds = ("kv", "embedding", "state", "window")
        self.saved: dict[str, dict[bytes, tuple[int, dict]]] = {kind: {} for kind in kinds}  # pages in files: key -> slot, contents
        self.damaged: set[tuple[str, bytes]] = set()  # of them: they cannot be read
        self.looked_up: set[tuple[int, int]] = set()  # rows that were compared with the files of an earlier run
        self.network: list[tuple[float, str, int, bytes]] = []  # (not before, to, generation of the actor, message)
        self.storm = True
        self.loss = rng.choice((0.0, 0.1, 0.3)) if faults else 0.0
        self.crash_rate = rng.choice((0.0, 0.1, 0.5)) if faults else 0.0  # per second and actor
        self.break_share = rng.choice((0.0, 0.0, 0.3)) if faults else 0.0  # of crashes: the actor is gone for long, and said to be
        self.slow_share = rng.choice((0.0, 0.0, 0.5)) if faults else 0.0  # of starts: others of its stage get what it had (``absence``)
        self.has_been_broken = False
        self.notices: list[tuple[float, list[Outage]]] = [(0.0, [])]  # of the supervisor about broken actors, and when they arrive
        self.devices = dict(limits.devices)
        self.leaving: set[InstanceId] = set()
        self.gone: set[InstanceId] = set()  # they have left
        self.num_left = 0
        self.controller_crash_rate = rng.choice((0.0, 0.003, 0.02)) if faults else 0.0  # per effect
        self.crash_at = -1  # the controller dies before this effect of those that it does next; -1: it does not
        self.num_handed_over = 0
        simulated = ("video", "encoder", "prefill", "decode", "gateway")
        self.processes = {name: Process() for name in limits.actors if stage_of(name) in simulated}
        for process in self.processes.values():
            self.start(process)
        self.io: ControllerIO | None = None
        self.epoch = 0
        self.controller_up_s = 0.0
        self.tick_s = 0.0
        self.wanted: dict[int, Wanted] = {}
        self.gateway: dict[int, AtGateway] = {}
        self.outcomes: dict[int, str] = {}
        self.computed: dict[tuple[int, int], set[int]] = {}  # tokens of which prefill has had hidden states, by row and generation
        self.num_crashes = self.num_preempted = self.num_evicted = self.num_cached = self.num_loaded = self.num_loaded_segments = (
            self.num_fetched
        ) = 0
        self.num_transferred = self.num_loaded_windows = self.num_loaded_states = self.num_first_tokens = self.num_followed = (
            self.num_breaks
        ) = 0
        self.done_plans: set[int] = set()  # of workers, as the words say that others follow

    # ------------------------------------------------------------------------------------------------ plumbing

    def close(self) -> None:
        self.lose_controller()
        for part in (self.table, self.plans, self.gaps, *self.pools.values()):
            part.close()
        self.run.destroy()

    def start(self, process: Process) -> None:
        process.broken_until_s = 0.0
        process.last_generation += 1
        process.generation = process.last_generation
        process.hello_s = -9.0
        process.code += self.storm and self.random.random() < 0.03  # somebody has edited it

    def to_controller(self, name: str, message: m.ToController) -> None:
        process = self.processes[name]
        self.post("controller", process.generation, encode((name, encode(message))))

    def to_actor(self, name: str, generation: int, message: m.ToActor) -> None:
        if name != "cache":
            self.post(name, generation, encode(message))

    def post(self, to: str, generation: int, data: bytes) -> None:
        copies = 1
        if self.storm:
            copies = 0 if self.random.random() < self.loss else 2 if self.random.random() < self.loss else 1
        for _ in range(copies):
            late_s = self.random.expovariate(1.0) if self.storm and self.random.random() < self.loss / 2 else 0.0
            self.network.append((self.now + late_s, to, generation, data))

    def deliver(self) -> None:
        due = [sent for sent in self.network if sent[0] <= self.now]
        if self.storm and self.loss:
            self.random.shuffle(due)
        due = due[: self.random.randint(0, len(due))] if self.storm else due
        self.network = [sent for sent in self.network if sent not in due]
        for _, to, generation, data in due:
            if to == "controller":
                self.controller_receives(generation, data)
            elif self.processes[to].generation == generation:
                message = m.decode_to_actor(data)
                if to == "gateway":
                    self.gateway_receives(message)
                elif stage_of(to) == "decode":
                    self.decode_receives(to, message)
                elif isinstance(message, m.Run):
                    self.worker_receives(to, message)

    # ---------------------------------------------------------------------------------------------- controller

    def lose_controller(self) -> None:
        self.crash_at = -1
        if self.io is not None:
            self.num_preempted += self.controller.state.totals.preempted
            self.num_evicted += self.controller.state.totals.evicted
            self.num_cached += self.controller.state.totals.cached_tokens
            self.num_handed_over += self.controller.state.totals.handed_over
            self.io.close()
            self.journal.close()
            self.io = None
            self.controller_up_s = self.now + self.random.random()

    def start_controller(self) -> None:
        self.epoch += 1
        kinds = {"has_states": self.states is not None, "has_windows": self.windows is not None}
        self.io = ControllerIO(self.run, self.limits.actors, self.limits.num_devices, **kinds)
        self.journal, state = Journal.open(self.run.path, compact_bytes=self.random.choice((300, 100_000)))
        known = {InstanceId(name): p.generation for name, p in self.processes.items() if p.generation and self.random.random() < 0.8}
        self.controller = recover(self.limits, self.epoch, self.io.snapshot(state, known))
        self.tell_instances()
        for pool in self.controller.state.pools.values():
            pool.check()
        self.perform(self.controller._take_effects(), 5 * self.controller_crash_rate)

    def perform(self, effects: list, crash_rate: float | None = None) -> None:
        rate = self.controller_crash_rate if crash_rate is None else crash_rate

        def crashing():
            for effect in effects:
                if self.crash_at == 0 or self.storm and self.random.random() < rate:
                    raise Crashed
                self.crash_at = max(-1, self.crash_at - 1)
                yield effect

        try:
            perform_all(crashing(), self.io, self.journal, self.to_actor)
        except Crashed:
            self.num_crashes += 1
            self.lose_controller()

    def controller_receives(self, generation: int, data: bytes) -> None:
        if self.io is None:
            return
        name, inner = m.msgspec.msgpack.decode(data, type=tuple[str, bytes])
        message = m.decode_to_controller(inner)
        words = self.io.progress(self.controller.ended_by(message))
        ids = self.io.ids(self.controller.wanted_ids(words, all_of_them=True))
        self.perform(self.controller.on_message(InstanceId(name), generation, message, self.now, words, ids))

    def controller_turn(self) -> None:
        if self.io is None:
            if self.now >= self.controller_up_s:
                self.start_controller()
            return
        if self.storm and self.crowded and self.random.random() < 0.02:
            self.take_pages()
            if self.io is None:
                return
        if self.storm and self.random.random() < 0.03:
            self.take_row()
            if self.io is None:
                return
        if self.storm and self.random.random() < 0.002:  # `mmrt cache clear`
            self.perform(self.controller.on_message(InstanceId("cache"), 1, m.ClearCaches(), self.now))
            if self.io is None:
                return
        if self.saves_pages and self.random.random() < 0.3:
            self.save_pages()
            if self.random.random() < 0.3:
                self.forget_pages(self.random.choice(self.kinds_of_pages))
            if self.io is None:
                return
            self.find_pages_of_an_earlier_run()
            if self.random.random() < 0.5:
                self.look_for_pages()
        if self.now >= self.tick_s or self.random.random() < 0.5:
            self.controller.set_outages(self.said_broken())
            self.scale()
            progress = self.io.progress(self.controller.watched())
            gone = [name for name in self.controller.unanswering() if not self.processes[name].generation]
            self.controller.set_absent([name for name in self.controller.twins() if not self.processes[name].generation])
            self.perform(self.controller.tick(self.now, progress, self.io.ids(self.controller.wanted_ids(progress)), (), gone))
            if self.io is not None:
                wait_s = self.controller.next_tick_s()
                assert 0 < wait_s <= 1.0
                self.tick_s = self.now + wait_s
                for pool in self.controller.state.pools.values():
                    pool.check()
                self.check_media_pages()
                totals = self.controller.state.totals
                assert self.limits.policy == "toy" or totals.overruled == totals.illegal == 0
                check_kept(self.controller.state)
                for name in self.pools:
                    if kind_of_pool(name) in ("kv", "state", "window"):
                        self.kv.check_index(self.controller.state, self.pools[name], self.content[name])
                self.check_sources()

    def check_sources(self) -> None:
        """Rows own the pages of their source tables, of another pool than their own, and none of them in decode."""
        state = self.controller.state
        for request in state.rows:
            if request is None or request.ending or request.record.evicting:
                continue
            for name in [pool for kv in state.kv_pools for pool in state.pools_beside(kv)]:
                assert state.pools[name].owned_by(owner(request)) == request.pages_in(name), f"{request.key} owns others of {name}"
            if self.states is not None:
                wanted = [request.has_kv, request.has_kv and len(request.kv.lengths) > 1]
                assert [pages.is_whole for pages in request.kv.states] == wanted, "a row lacks states, or has too many"
                theirs = [pages.is_whole for pages in request.kv.source_states]
                needs_both = request.record.source_pool is not None
                assert theirs == [needs_both and want for want in wanted], "a row has states of one pool alone"
            if request.record.source_pool is None or not request.has_kv:
                assert not request.kv.has_source, "pages of another pool are held for nothing"
                continue
            assert request.phase == Phase.PREPARE and request.record.source_pool != request.kv_pool
            needs = [-(-target // 4) for target in request.targets]
            assert [len(table) for table in request.kv.source_tables][: len(needs)] == needs, "a row has pages of one pool alone"

    def kv_of(self, name: str) -> str:
        """Return the KV pool of an actor's device; all stages of a pipeline have one."""
        if self.pipeline is not None and stage_of(name) == "prefill":
            return self.pipeline.pool
        return kv_pool(self.devices.get(InstanceId(name), 0))

    def scale(self) -> None:
        """Actors leave, go once the controller says that they hold nothing, and come back, perhaps on another device."""
        for name in drained(self.controller.state):
            if name in self.leaving and self.random.random() < 0.3:
                self.leaving.discard(name)
                self.gone.add(name)
                self.num_left += 1
                if (process := self.processes[name]).generation:
                    self.crash(name, process)
                process.up_s = math.inf
        for name in list(self.gone if not self.storm or self.random.random() < 0.01 else ()):
            self.gone.discard(name)
            self.processes[name].up_s = self.now
            if name in self.devices and self.random.random() < 0.5:
                self.devices[name] = self.random.randrange(self.limits.num_devices)
        if not self.storm:
            self.leaving.clear()
        elif self.random.random() < 0.06:
            name = self.random.choice(self.limits.actors)
            staying = [n for n in self.limits.actors if stage_of(n) == stage_of(name) and n not in self.leaving | self.gone | {name}]
            if self.random.random() < 0.3:
                self.leaving.discard(name)
            elif staying and name not in self.gone and (self.pipeline is None or stage_of(name) != "prefill"):
                self.leaving.add(name)
        self.tell_instances()

    def tell_instances(self) -> None:
        present = [name for name in self.limits.actors if name not in self.gone]
        self.controller.set_instances(present, self.leaving, dict(self.devices))

    def check_media_pages(self) -> None:
        """Rows own the patch and embedding pages that their segments name, and none in decode."""
        state = self.controller.state
        for request in state.rows:
            if request is None or request.ending:
                continue
            sampling = request.spec.generation.sampling
            is_asked_for_all = sampling.prompt_logprobs is not None and not sampling.prompt_logprobs_last
            assert not is_asked_for_all or not request.caches.num_cached[0], "cached pages have no logits"
            patch: set[int] = set()
            embedding: set[int] = set()
            for index, item in enumerate(request.record.items):
                for number, segment in enumerate(item.segments):
                    patch.update(segment.patch.pages if segment.patch is not None else ())
                    if segment.embedding is not None:
                        embedding.update(segment.embedding.pages[request.media.num_consumed.get((index, number), 0) :])
            assert state.pools["patch"].owned_by(owner(request)) == patch, "a row owns foreign patches, or lacks its own"
            assert state.pools["embedding"].owned_by(owner(request)) == embedding, "a row owns foreign embeddings, or lacks its own"
            assert request.phase != Phase.DECODE or request.is_finished or not patch | embedding

    def outages(self) -> list[Outage]:
        """What the supervisor says: a broken actor is that until its next generation serves."""
        broken = [name for name, process in self.processes.items() if process.broken_until_s and not process.generation]
        return [Outage(name, "it crashes", self.processes[name].broken_until_s) for name in broken]

    def said_broken(self) -> list[Outage]:
        """What the controller has been told: it may be late."""
        if (outages := self.outages()) != self.notices[-1][1]:
            late_s = self.random.choice((0.0, 1.0, 6.0)) if self.storm else 0.0
            self.notices.append((max(self.notices[-1][0], self.now + late_s), outages))
        while len(self.notices) > 1 and (self.notices[1][0] <= self.now or not self.storm):
            del self.notices[0]
        return self.notices[0][1]

    def break_actor(self, name: str, for_s: float) -> None:
        """It dies, and does not come back for a while."""
        process = self.processes[name]
        if process.generation:
            self.crash(name, process)
        process.up_s = process.broken_until_s = self.now + for_s
        self.has_been_broken = True

    def take_pages(self) -> None:
        """Preemption and eviction are harmless at any time to any row, so here they come far more often than policy has them."""
        state = self.controller.state
        rows = [r for r in state.rows if r is not None and r.has_kv and not r.ending and not r.is_finished]
        if rows:
            victim = self.random.choice(rows)
            if self.random.random() < 0.5:
                preempt(state, victim)
            else:
                reset_media(state, victim, consumed_too=False)
                state.save(victim)
            self.perform(self.controller._take_effects(), 20 * self.controller_crash_rate)

    def take_row(self) -> None:
        """A row may leave its decode for another at any time."""
        state = self.controller.state
        rows = [
            r for r in state.rows if r is not None and r.phase == Phase.DECODE and r.ownership.decode is not None and not r.is_finished
        ]
        if rows:
            take_back(state, self.random.choice(rows))
            self.perform(self.controller._take_effects(), 20 * self.controller_crash_rate)

    # ------------------------------------------------------------------------------------------------- workers

    def processes_turn(self, dt: float) -> None:
        for name, process in self.processes.items():
            rate = self.crash_rate * (0.0 if self.crowded else 0.1) if name == "gateway" else self.crash_rate
            if process.generation and self.storm and self.random.random() < rate * dt:
                self.num_crashes += 1
                if name != "gateway" and self.random.random() < self.break_share:
                    self.break_actor(name, 5 * self.random.random())
                else:
                    self.crash(name, process)
            if not process.generation:
                if self.now >= process.up_s:
                    self.start(process)
                continue
            if self.now - process.hello_s >= 1.0:
                process.hello_s = self.now
                if self.random.random() < 0.3:
                    self.to_controller(name, m.Hello(name, process.generation + 1, 1, False))  # of a standby
                has_adopted = name != "gateway" or all(request.known for request in self.gateway.values())
                self.to_controller(name, m.Hello(name, process.generation, 1, True, process.code, has_adopted))
            if name == "gateway":
                self.gateway_turn()
            elif stage_of(name) == "decode":
                self.decode_turn(name, process)
            else:
                self.worker_turn(name, process)

    def crash(self, name: str, process: Process, crashed: bool = False) -> None:
        """``crashed``: it died of what it was doing; else somebody has killed it."""
        process.death = None
        if name != "gateway" and process.step is not None:
            step = process.step_name if stage_of(name) == "decode" else process.step[0].plan_id
            process.death = Death(step, crashed, "")
        stages = ("video", "encoder") if self.states is None else ("video", "encoder", "prefill")
        if self.pipeline is not None:
            stages = *stages, "prefill"
        if stage_of(name) in stages and process.step is not None:
            self.finish_writes(process.step, self.random.random())  # some of it was written
        if self.limits.first_tokens and stage_of(name) == "prefill" and process.step is not None and self.random.random() < 0.5:
            self.finish_writes(process.step, 1.0)  # all of it was, and nobody was told
            self.draw_first_tokens(process.step[0])
        if self.states is not None and stage_of(name) == "decode" and process.step is not None:
            writes = [write for made in process.step for write in made[2]]
            self.finish_writes((None, writes, None, False), self.random.random())
        if process.transfer is not None:
            self.finish_writes(process.transfer, self.random.random())
        is_followed = self.limits.num_devices > 1 and stage_of(name) == "prefill" and process.step is not None
        if is_followed and self.random.random() < 0.3:  # all of it was written, others know, and the controller does not
            self.finish_writes(process.step, 1.0)
            self.done_plans.add(process.step[0].plan_id)
        process.generation = 0
        process.queue, process.done, process.step, process.transfer = [], OrderedDict(), None, None
        is_slow = bool(self.slow_share) and self.random.random() < self.slow_share
        process.up_s = self.now + (self.random.uniform(AWAY_S, 3 * AWAY_S) if is_slow else self.random.random())
        process.trials, process.members = None, {}
        if name == "gateway":
            before, self.gateway = self.gateway, {}
            for key, request in before.items():
                if request.outcome or key % 5 == 0:
                    self.outcomes[key] = request.outcome or "lost with its gateway"
                else:  # its connection is kept: the next generation asks for it again
                    self.gateway[key] = AtGateway(request.wanted, began_s=request.began_s, known=False)

    def worker_receives(self, name: str, command: m.Run) -> None:
        process = self.processes[name]
        death = process.death
        if death is not None and death.crashed and death.step == command.plan_id and command.plan_id not in process.done:
            done = m.PlanDone(name, process.generation, command.plan_id, 0.0, m.Died())
            process.done[command.plan_id] = done
        if command.plan_id in process.done:
            self.to_controller(name, process.done[command.plan_id])
        elif command not in process.queue and (process.step is None or process.step[0].plan_id != command.plan_id):
            process.queue.append(command)

    def worker_turn(self, name: str, process: Process) -> None:
        if process.step is None:
            self.next_step(name, process)
        elif self.limits.has_breaks and stage_of(name) == "prefill":
            if process.queue and self.random.random() < 0.5:
                self.take_break(name, process)
            elif self.random.random() < 0.1:
                self.finish_step(name, process)
        elif self.random.random() < 0.5:
            self.finish_step(name, process)

    def take_break(self, name: str, process: Process) -> None:
        """Do another plan within the one in work, which goes on unless this process dies of the other."""
        long, process.step = process.step, None
        self.next_step(name, process)
        if process.step is not None:
            self.num_breaks += 1
            self.finish_step(name, process)
        if process.generation:
            process.step = long

    def finish_step(self, name: str, process: Process) -> None:
        command, *_ = process.step
        if process.step[3]:
            self.crash(name, process, crashed=True)
            return
        result = self.finish_writes(process.step, 1.0)
        self.draw_first_tokens(command)
        self.done_plans.add(command.plan_id)
        process.step = None
        done = m.PlanDone(name, process.generation, command.plan_id, 0.01, result)
        process.done[command.plan_id] = done
        while len(process.done) > 256:
            process.done.popitem(last=False)
        self.to_controller(name, done)

    def next_step(self, name: str, process: Process) -> None:
        while process.queue:
            command = process.queue.pop(0)
            payload = self.plans.read(command.slot, command.plan_id)
            if payload is None or command.plan_id in process.done:
                continue
            plan = still_wanted(p.decode_plan(payload), self.table)
            is_stale = self.pipeline is not None and isinstance(plan, p.Prefill) and self.pipeline.is_stale(plan, self.table)
            if plan is None or is_stale or 0 < command.deadline_s <= self.now:
                done = m.PlanDone(name, process.generation, command.plan_id, 0.0, m.Skipped())
                process.done[command.plan_id] = done
                self.to_controller(name, done)
                continue
            self.done_plans.discard(command.plan_id)
            process.step = (command, *self.begin(plan, self.kv_of(name)), self.is_poisonous(plan))
            return

    def draw_first_tokens(self, command: m.Run) -> None:
        """What prefill does once a plan is written: first tokens are committed, unless they were."""
        payload = self.plans.read(command.slot, command.plan_id)
        plan = None if payload is None else p.decode_plan(payload)
        draws = self.limits.first_tokens and isinstance(plan, p.Prefill) and plan.rank == self.limits.prefill_ranks - 1
        for chunk in plan.chunks if draws else ():
            place = chunk.row, chunk.row_generation
            if self.table.phase(chunk.row)[0] != chunk.row_generation or self.table.committed(*place):
                continue
            spec = m.decode_sequence_spec(self.table.read_spec(*place))
            wanted = self.wanted[spec.key]
            is_plain = not spec.num_companion_tokens and spec.generation.pooling is None and spec.max_new_tokens > 0
            if is_plain and chunk.end == spec.num_prompt_tokens:
                self.num_first_tokens += 1
                self.table.commit(*(np.array([value]) for value in (*place, wanted.token(0))))
                if wanted.eos_at == 1 or spec.max_new_tokens == 1:
                    self.table.set_end(*place, EndCode.STOP if wanted.eos_at == 1 else EndCode.LENGTH)

    def is_poisonous(self, plan: p.Plan) -> bool:
        """Whether the worker dies of this plan."""
        if isinstance(plan, p.Analyse | p.PreprocessSegment):
            poison = self.read_media(plan.source, plan.item).poison
            return poison == "video" or poison == "segment" and isinstance(plan, p.PreprocessSegment) and plan.segment > 0
        if isinstance(plan, LoadSegments):
            return False
        if isinstance(plan, p.Encode):
            keys = {self.content["patch"][part.source.pages[0]][0][-1] for part in plan.parts}
            return any(self.wanted[key].poison == "encoder" for key in keys)
        specs = (m.decode_sequence_spec(self.table.read_spec(chunk.row)) for chunk in plan.chunks)
        return any(self.wanted[spec.key].poison == "prefill" for spec in specs)

    def check_run(self, pool: str, run: m.PageRun) -> None:
        self.pools[pool].check(run.pages, run.generations)

    def begin(self, plan: p.Plan, kv: str) -> tuple[list, m.Result]:
        """Check what a plan reads. ``kv``: the pool of the actor's device. Returns what it will write, as (pool, page, generation,
        slot, value), and its result."""
        writes: list = []
        if isinstance(plan, p.Analyse):
            wanted = self.read_media(plan.source, plan.item)
            if wanted.broken == plan.item:
                return writes, m.ItemError(422, "broken")
            return writes, m.Analysed(wanted.shapes[plan.item])
        if isinstance(plan, p.PreprocessSegment):
            wanted = self.read_media(plan.source, plan.item)
            assert plan.shape == wanted.shapes[plan.item]
            self.check_run("patch", plan.target)
            eras = {self.era(row) for row, generation in plan.rows if self.table.phase(row)[0] == generation}
            medium = wanted.medium(plan.item, *eras)
            for index, (page, generation) in enumerate(zip(plan.target.pages, plan.target.generations, strict=True)):
                writes.append(("patch", page, generation, 0, (medium, plan.segment, index, plan.item, wanted.key)))
        elif isinstance(plan, p.Encode):
            for part in plan.parts:
                self.check_run("patch", part.source)
                self.check_run("embedding", part.target)
                medium, segment, _, item, key = self.content["patch"][part.source.pages[0]][0]
                for index, page in enumerate(part.source.pages):
                    assert self.content["patch"][page][0][:3] == (medium, segment, index), "encoder reads foreign patches"
                shape = self.wanted[key].shapes[item].segments[segment]
                assert shape == part.shape
                for index, (page, generation) in enumerate(zip(part.target.pages, part.target.generations, strict=True)):
                    writes.append(("embedding", page, generation, 0, (medium, segment, index)))
        elif isinstance(plan, Load):
            found = [self.begin_load(chunk, kv, writes, plan.source) for chunk in plan.chunks]
            ends, more, states = map(list, zip(*found, strict=True))
            return writes, m.Loaded(ends, more, len(writes) if plan.source else 0, states)
        elif isinstance(plan, LoadSegments):
            found = [self.begin_segment(part, writes, at) for at, part in enumerate(plan.parts)]
            return writes, m.Loaded([end for end, _ in found], [more for _, more in found])
        else:
            assert isinstance(plan, p.Prefill)
            pictures = [run for chunk in plan.chunks if chunk.member == 0 for run in self.pictures_of(chunk)]
            if self.limits.prefill_budget and not (pictures and len(plan.chunks) == 1):
                assert sum(chunk.end - chunk.start for chunk in plan.chunks) <= self.limits.prefill_budget  # US9
            for chunk in plan.chunks:
                self.begin_chunk(plan, chunk, kv, writes)
        return writes, m.Done()

    def read_media(self, run: m.PageRun, item: int) -> Wanted:
        self.check_run("media", run)
        key = self.content["media"][run.pages[0]][0][0]
        for index, page in enumerate(run.pages):
            assert self.content["media"][page][0] == (key, item, index), "video reads foreign media"
        return self.wanted[key]

    def tokens_of(self, row: int, spec: m.SequenceSpec, member: int) -> list[int]:
        length = spec.num_companion_tokens if member else spec.num_prompt_tokens
        generation = int(self.table.generation[row])
        return (
            self.table.prompt_ids(row, member, length).tolist() + self.table.ids[row, : self.table.committed(row, generation)].tolist()
        )

    def era(self, row: int) -> bytes:
        """Return the era of a row: what is computed for it counts as other than for equal ones of another era."""
        state = self.table.read_state(row)
        assert state is not None
        return decode_record(state).era

    def begin_chunk(self, plan: p.Prefill, chunk: p.PrefillChunk, kv: str, writes: list) -> None:
        generation, phase = self.table.phase(chunk.row)
        assert generation == chunk.row_generation, "a chunk of a row that is gone"
        spec = m.decode_sequence_spec(self.table.read_spec(chunk.row, generation))
        tokens = self.tokens_of(chunk.row, spec, chunk.member)
        era = self.era(chunk.row)
        values = self.kv.values(self.wanted[spec.key].spec, spec, chunk.member, tokens, era)
        pages = self.table.prefill_pages(chunk.row, chunk.member).tolist()
        draws = self.limits.first_tokens and chunk.end == spec.num_prompt_tokens and not spec.num_companion_tokens
        assert chunk.end <= len(tokens) - (spec.generation.pooling is None and not draws), "the last token is decode's"
        self.computed.setdefault((chunk.row, generation), set()).update(range(chunk.start, chunk.end))
        media = {}
        for span in chunk.spans:
            self.check_run("embedding", span.source)
            assert span.first_row + span.num_tokens <= 4 * len(span.source.pages), "the pages of a span are those of a foreign segment"
            for offset in range(span.num_tokens):
                page, slot = divmod(span.first_row + offset, 4)
                media[span.start + offset] = (self.content["embedding"][span.source.pages[page]].get(0), slot)
        if self.pipeline is not None:
            writes += self.pipeline.chunk(plan, chunk, self.pools[kv].generations, pages, values)
        is_last = plan.rank == self.limits.prefill_ranks - 1
        for position in range(chunk.start if is_last else 0):
            self.check_kv(kv, pages, position, values[position])
        for position in range(chunk.start, chunk.end):
            place = self.media_place(spec, position) if chunk.member == 0 else None
            assert (position in media) == (place is not None), "spans do not cover the chunk's media"
            if place is not None:
                item, segment, row = place
                found, slot = media[position]
                medium = self.wanted[spec.key].medium(item, era)
                assert (found, slot) == ((medium, segment, row // 4), row % 4), "prefill reads foreign embeddings"
            page = pages[position // 4]
            if is_last:
                writes.append((kv, page, int(self.pools[kv].generations[page]), position % 4, values[position]))
        if self.states is not None:
            writes += self.states.chunk(chunk, kv, values, len(tokens) - (spec.generation.pooling is None))
        if self.windows is not None:
            writes += self.windows.chunk(chunk, kv, values)

    def begin_load(self, chunk: LoadChunk, kv: str, writes: list, source: str) -> tuple[int, bool, bool]:
        generation, _ = self.table.phase(chunk.row)
        assert generation == chunk.row_generation, "pages are loaded for a row that is gone"
        assert chunk.end - chunk.start == 4 * len(chunk.keys) and chunk.start % 4 == 0
        pages = self.table.prefill_pages(chunk.row, chunk.member).tolist()[chunk.start // 4 :]
        found, more = 0, True
        for page, key, slot in zip(pages, chunk.keys, chunk.slots, strict=False):
            if found and self.random.random() < 0.1:  # time is short
                break
            if source:
                assert self.pools[source].read_keys().get(slot) == key, "a page of another pool was given away while a plan reads it"
            contents = self.content[source][slot] if source else self.read_saved("kv", key, slot)
            if contents is None:
                more = False
                break
            writes += [(kv, page, int(self.pools[kv].generations[page]), slot, value) for slot, value in contents.items()]
            found += 1
            self.num_fetched += bool(source)
        self.num_loaded += found
        is_whole = found == len(chunk.keys)
        has_state = is_whole and chunk.state is not None and self.begin_load_of_state(chunk, kv, writes, source)
        if self.windows is not None and is_whole and (entries := self.windows.load(chunk, source, kv, self.read_saved)) is not None:
            writes += entries
            self.num_loaded_windows += 1
            has_state = True
        return chunk.start + 4 * found, more, has_state

    def begin_load_of_state(self, chunk: LoadChunk, kv: str, writes: list, source: str) -> bool:
        loaded, pool = chunk.state, state_pool(kv)
        assert self.states is not None and loaded is not None and loaded.key == chunk.keys[-1]
        self.states.check_load(chunk)
        if source:
            keys = self.pools[state_pool(source)].read_keys()
            assert keys.get(loaded.slot) == loaded.key, "a state was given away while a plan reads it"
        contents = self.content[state_pool(source)][loaded.slot] if source else self.read_saved("state", loaded.key, loaded.slot)
        if contents is None:
            return False
        for page in (loaded.target, loaded.snapshot) if loaded.snapshot >= 0 else (loaded.target,):
            writes.append((pool, page, int(self.pools[pool].generations[page]), 0, contents[0]))
        self.num_loaded_states += 1
        return True

    def begin_segment(self, part: LoadPart, writes: list, at: int) -> tuple[int, bool]:
        self.check_run("embedding", part.target)
        assert len(part.keys) == len(part.target.pages) == -(-part.num_tokens // 4)
        if at and self.random.random() < 0.2:  # time is short
            return 0, True
        for page, generation, key, slot in zip(part.target.pages, part.target.generations, part.keys, part.slots, strict=True):
            if (contents := self.read_saved("embedding", key, slot)) is None:
                return 0, False
            writes.append(("embedding", page, generation, 0, contents[0]))
        self.num_loaded_segments += 1
        return part.num_tokens, False

    def read_saved(self, pool: str, key: bytes, slot: int) -> dict | None:
        found, contents = self.saved[pool].get(key, (-1, None))
        return contents if found == slot and (pool, key) not in self.damaged else None

    def save_pages(self, share: float = 0.5) -> None:
        """Some of the pages with keys are written to files, again where they were damaged. Some there are overwritten, or damaged."""
        for pool, saved in self.saved.items():
            for name in self.of_all_devices(pool):
                for page, key in self.pools[name].read_keys().items():
                    if self.random.random() < share:
                        if (pool, key) in self.damaged:
                            self.damaged.discard((pool, key))
                            saved.pop(key, None)
                        self.keep(pool, key, dict(self.content[name][page]))
            if self.storm:
                for key in [key for key in saved if self.random.random() < 0.01]:
                    del saved[key]
                self.damaged.update([(pool, key) for key in saved if self.random.random() < 0.03])

    def find_pages_of_an_earlier_run(self) -> None:
        """Files have what some rows are about to make."""
        state = self.controller.state
        for request in state.preparing():
            if not request.record.prepared or request.key_in_table in self.looked_up:
                continue
            self.looked_up.add(request.key_in_table)
            wanted, era = self.wanted[request.key], request.record.era
            spec = m.decode_sequence_spec(self.table.read_spec(request.row, request.row_generation))
            if self.random.random() < 0.5:
                for (item, segment), _ in request.record.segments():
                    for index, key in enumerate(page_keys(state, request, (item, segment))):
                        self.keep("embedding", key, {0: (wanted.medium(item, era), segment, index)})
            for member, keys in enumerate(request.caches.keys):
                tokens = self.tokens_of(request.row, spec, member)
                values = self.kv.values(wanted.spec, spec, member, tokens, era)
                for page, key in enumerate(keys.up_to(len(tokens)) if self.random.random() < 0.5 else ()):
                    self.keep("kv", key, dict(enumerate(values[4 * page : 4 * page + 4])))
                    if self.states is not None and self.random.random() < 0.5:
                        self.keep("state", key, {0: values[4 * page + 3]})
                    if self.windows is not None and self.random.random() < 0.8:
                        self.keep("window", key, dict(enumerate(values[4 * page : 4 * page + 4])))

    @property
    def kinds_of_pages(self) -> Sequence[str]:
        """Of pages with keys."""
        beside = (("state", self.states), ("window", self.windows))
        return ("kv", "embedding", *(kind for kind, its in beside if its is not None))

    def of_all_devices(self, pool: str) -> Sequence[str]:
        return [name for name in self.pools if kind_of_pool(name) == pool]

    def keep(self, pool: str, key: bytes, contents: dict) -> None:
        self.saved[pool].setdefault(key, (len(self.saved[pool]), contents))

    def look_for_pages(self) -> None:
        """The controller learns what the files have, which may be otherwise soon."""
        self.controller.set_saved({pool: {key: slot for key, (slot, _) in saved.items()} for pool, saved in self.saved.items()})

    def forget_pages(self, pool: str) -> None:
        """Idle pages are evicted: only files have them."""
        for name in self.of_all_devices(pool):
            run = self.controller.state.pools[name].forget_idle()
            if run.pages:
                self.controller.state.emit(SetPageGenerations(name, run))
        self.perform(self.controller._take_effects(), 20 * self.controller_crash_rate)

    def pictures_of(self, chunk: p.PrefillChunk) -> list[tuple[int, int]]:
        """Return the pictures that a chunk must hold and does, whole but for what is prefilled already."""
        if not self.limits.sees_pictures:
            return []
        spec = m.decode_sequence_spec(self.table.read_spec(chunk.row))
        parts = [part for part in lay_out([its.start for its in spec.spans], [its.shape for its in spec.spans]) if not part.is_sound]
        num_tokens = len(self.tokens_of(chunk.row, spec, chunk.member))
        for part in parts:
            ends_within = part.start < chunk.end < part.end and chunk.end < num_tokens - 1
            assert not ends_within, f"a chunk ends at {chunk.end}, within a picture of tokens {part.start} to {part.end}"
        return [(part.start, part.end) for part in parts if part.start < chunk.end and chunk.start < part.end]

    @staticmethod
    def media_place(spec: m.SequenceSpec, position: int) -> tuple[int, int, int] | None:
        for item, span in enumerate(spec.spans):
            start = span.start
            for segment, shape in enumerate(span.shape.segments):
                if start <= position < start + shape.num_tokens:
                    return item, segment, position - start
                start += shape.num_tokens
        return None

    def check_kv(self, kv: str, pages: list[int], position: int, value: int) -> None:
        found = self.content[kv][pages[position // 4]].get(position % 4)
        assert found == value, f"KV holds {found} where {value} should be"

    def begin_transfer(self, plan: Transfer, kv: str, follows: bool = False) -> list:
        """Return what a decode will write to copy pages, as ``begin`` does. All that it copies must be there. ``follows``: those that
        the plan before has filled."""
        writes = []
        for chunk in plan.chunks:
            generation, phase = self.table.phase(chunk.row)
            assert (generation, phase) == (chunk.row_generation, Phase.PREPARE), "pages are copied for a row that is gone, or decodes"
            spec = m.decode_sequence_spec(self.table.read_spec(chunk.row, generation))
            tokens, era = self.tokens_of(chunk.row, spec, chunk.member), self.era(chunk.row)
            values = self.kv.values(self.wanted[spec.key].spec, spec, chunk.member, tokens, era)
            assert plan.source != kv and chunk.start % 4 == 0 and (chunk.end % 4 == 0 or chunk.end == len(tokens) - 1)
            source = self.table.source_pages(chunk.row, chunk.member).tolist()
            assert plan.behind is None or chunk.start <= chunk.filled <= chunk.end
            assert plan.behind is None or chunk.filled % 4 == 0 or chunk.filled == chunk.end
            start = chunk.filled if follows else chunk.start
            end = chunk.end if follows or plan.behind is None else chunk.filled
            copied = {(plan.source, page) for page in source[start // 4 : -(-end // 4)]}
            for pool_beside, pages in ((state_pool, chunk.state), (log_pool, chunk.log)):
                copied |= {(pool_beside(plan.source), pages[0])} if pages is not None else set()
            for process in self.processes.values():
                if process.step is not None and process.step_name == 0:  # of a worker
                    assert not copied & {write[:2] for write in process.step[1]}, "a page is copied while prefill writes it"
            target = self.table.pages(chunk.row, chunk.member).tolist()
            for position in range(start, end):
                self.check_kv(plan.source, source, position, values[position])
                page = target[position // 4]
                writes.append((kv, page, int(self.pools[kv].generations[page]), position % 4, values[position]))
            if self.states is not None and end == chunk.end:
                writes += self.states.transfer(chunk, plan.source, kv, values, len(tokens) - 1)
            if self.windows is not None:
                writes += self.windows.transfer(chunk, plan.source, kv, values[: len(tokens)], start, end)
        return writes

    def finish_writes(self, step: tuple, share: float) -> m.Result:
        _, writes, result, _ = step
        is_chunk = self.pipeline is not None and isinstance(result, m.Done)
        for pool, page, generation, slot, value in writes[: int(len(writes) * share)]:
            if slot == READ:
                assert int(self.pools[pool].generations[page]) == generation, f"{pool} page {page} was given away while a plan read it"
                continue
            if self.pipeline is not None:
                if pool in (LAYERS, STREAM):
                    generations = self.pools[self.pipeline.pool].generations
                    assert pool == STREAM or int(generations[page]) == generation, "a page was given away in a plan"
                    self.pipeline.write(pool, page, generation, slot, value)
                    continue
                if is_chunk and pool == self.pipeline.pool:
                    self.pipeline.check_whole(page, slot, value)
            assert page not in self.pools[pool].read_keys(), f"a plan writes {pool} page {page}, which has a key"
            assert int(self.pools[pool].generations[page]) == generation, f"{pool} page {page} was given away while a plan wrote it"
            self.content[pool][page][slot] = value
        return result

    # -------------------------------------------------------------------------------------------------- decode

    def decode_receives(self, name: str, message: m.ToActor) -> None:
        process = self.processes[name]
        if isinstance(message, m.Admit):
            is_mine = self.table.owner(message.row, message.row_generation) == number_of(name)
            if is_mine and self.table.phase(message.row) == (message.row_generation, Phase.DECODE):
                self.join(process, message.row, message.row_generation)
        elif isinstance(message, m.Drop):
            process.queue.append(message)
        elif isinstance(message, m.Run):
            self.transfer_receives(name, process, message)

    def transfer_receives(self, name: str, process: Process, command: m.Run) -> None:
        if command.plan_id in process.done:
            self.to_controller(name, process.done[command.plan_id])
        elif process.transfer is None and (payload := self.plans.read(command.slot, command.plan_id)) is not None:
            plan = still_wanted(p.decode_plan(payload), self.table)
            if plan is None or 0 < command.deadline_s <= self.now:
                process.transfer = (command, [], m.Skipped(), plan)
            else:
                assert isinstance(plan, Transfer)
                writes = self.begin_transfer(plan, self.kv_of(name))
                process.transfer = (command, writes, m.Transferred(len(writes)) if plan.behind is None else None, plan)

    def transfer_turn(self, name: str, process: Process) -> None:
        """Copy between two steps, at some time."""
        if process.transfer is None or self.random.random() < 0.5:
            return
        if process.transfer[2] is None:
            process.transfer = self.follow(self.kv_of(name), *process.transfer)
            if process.transfer[2] is None:
                return
        command, *_ = step = process.transfer
        process.transfer = None
        result = self.finish_writes(step, 1.0)
        self.num_transferred += len(step[1])
        process.done[command.plan_id] = m.PlanDone(name, process.generation, command.plan_id, 0.01, result)
        while len(process.done) > 256:
            process.done.popitem(last=False)
        self.to_controller(name, process.done[command.plan_id])

    def follow(self, kv: str, command: m.Run, writes: list, result: m.Result | None, plan: Transfer) -> tuple:
        """Go on with a copy behind a prefill: all layers, if that is done, or some. Returns what is known of it now."""
        assert plan.behind is not None
        plan_id, slot = plan.behind
        if plan_id in self.done_plans:
            more = [] if still_wanted(plan, self.table) is None else self.begin_transfer(plan, kv, follows=True)
            self.num_followed += len(more)
            return command, [*writes, *more], m.Transferred(len(writes) + len(more)), plan
        if self.plans.read(slot, plan_id) is None:
            return command, [], m.Skipped(), plan
        for chunk in plan.chunks:
            pages = self.table.pages(chunk.row, chunk.member).tolist()[chunk.filled // 4 : -(-chunk.end // 4)]
            some = [(kv, page, int(self.pools[kv].generations[page]), slot, "some layers") for page in pages for slot in range(4)]
            self.finish_writes((command, some, result, plan), self.random.random())
        return command, writes, None, plan

    def join(self, process: Process, row: int, generation: int) -> None:
        if self.table.end(row, generation) == EndCode.NONE:
            key = m.decode_sequence_spec(self.table.read_spec(row, generation)).key
            assert not self.wanted[key].spec.is_prefill_only, "decode runs a row that has no answer"
            process.members[row] = generation

    def decode_turn(self, name: str, process: Process) -> None:
        kv = self.kv_of(name)
        self.transfer_turn(name, process)
        if process.trials is None:
            process.trials = SoloTrials(process.death, self.table.rows_of(number_of(name)))
            guilty = process.trials.guilty
            if guilty is not None and self.table.owner(*guilty) == number_of(name) and self.table.end(*guilty) == EndCode.NONE:
                self.table.set_end(*guilty, EndCode.ERROR)
        if process.step is not None:
            if any(self.wanted[key].poison == "decode" for *_, key in process.step):
                self.crash(name, process, crashed=True)
                return
        if process.step is not None:  # the forward pass that has begun is written, then everything else comes
            for row, generation, writes, token, code, _ in process.step:
                for pool, page, page_generation, slot, value in writes:
                    assert int(self.pools[pool].generations[page]) == page_generation, "decode uses a page that was given away"
                    if slot == READ:
                        continue
                    self.kv.check_writable(self.pools[pool], page)
                    self.content[pool][page][slot] = value
                others = [other for at, other in self.processes.items() if at != name and other.members.get(row) == generation]
                assert not others, "two decodes run a row"
                counts = self.table.commit(np.array([row]), np.array([generation]), np.array([token]))
                assert counts[0] > 0, "decode commits to a row that is gone"
                if code is not None:
                    self.table.set_end(row, generation, code)
                    del process.members[row]
                    self.to_controller(name, m.SequenceEnded(process.generation, row, generation))
            process.step = None
        for drop in process.queue:
            if process.members.get(drop.row) == drop.row_generation:
                del process.members[drop.row]
            self.to_controller(name, m.Dropped(process.generation, drop.row, drop.row_generation, drop.ticket))
        process.queue = []
        if self.now >= process.scan_s or not process.members:
            process.scan_s = self.now + 0.5
            for row, generation in self.table.rows_of(number_of(name)):
                self.join(process, row, generation)
        self.begin_step(process, kv)

    def begin_step(self, process: Process, kv: str) -> None:
        """One suspect alone, or all that are none, in turn."""
        trials = process.trials
        assert trials is not None
        trials.suspects = [place for place in trials.suspects if process.members.get(place[0]) == place[1]]
        for place in trials.suspects if self.random.random() < 0.5 else ():
            if (made := self.begin_token(*place, kv)) is not None:
                process.step, process.step_name = [made], solo_step(place)
                trials.passed(place)
                return
        held = trials.held
        step = [made for row, at in process.members.items() if row not in held and (made := self.begin_token(row, at, kv)) is not None]
        process.step, process.step_name = step or None, 1

    def begin_token(self, row: int, generation: int, kv: str) -> tuple | None:
        spec = m.decode_sequence_spec(self.table.read_spec(row, generation))
        wanted = self.wanted[spec.key]
        writes = []
        for member in range(2 if spec.num_companion_tokens else 1):
            tokens = self.tokens_of(row, spec, member)
            values = self.kv.values(wanted.spec, spec, member, tokens, self.era(row))
            pages = self.table.pages(row, member).tolist()
            if len(pages) * 4 < len(tokens):
                return None  # out of pages: both members leave the batch
            for position in range(len(tokens) - 1):
                self.check_kv(kv, pages, position, values[position])
            position = len(tokens) - 1
            page = pages[position // 4]
            writes.append((kv, page, int(self.pools[kv].generations[page]), position % 4, values[position]))
            if self.states is not None:
                writes += self.states.token(row, member, kv, values[: len(tokens)])
            if self.windows is not None:
                if (entries := self.windows.token(row, member, kv, values[: len(tokens)])) is None:
                    return None
                writes += entries
        count = self.table.committed(row, generation)
        code = None
        if wanted.eos_at == count + 1:
            code = EndCode.STOP
        elif count + 1 == spec.max_new_tokens:
            code = EndCode.LENGTH
        return row, generation, writes, wanted.token(count), code, wanted.key

    # ------------------------------------------------------------------------------------------------- gateway

    def submit(self, wanted: Wanted) -> None:
        self.wanted[wanted.key] = wanted
        self.gateway[wanted.key] = AtGateway(wanted, began_s=self.now)

    def gateway_turn(self) -> None:
        generation = self.processes["gateway"].generation
        for key, request in list(self.gateway.items()):
            cancel_s = request.wanted.cancel_s
            if cancel_s is not None and self.now - request.began_s > cancel_s and not request.outcome:
                request.outcome, request.cancelled, request.sent_s = "cancelled", True, -9.0
            if not request.outcome:
                self.detokenize(key, request)
            if request.runs is not None and not request.outcome and self.random.random() < 0.3:
                self.fill(key, request)
            if self.now - request.sent_s < 1.0:
                continue
            request.sent_s = self.now
            if request.outcome:
                self.to_controller("gateway", (m.Cancel if request.cancelled else m.Delivered)(generation, key))
            elif request.state == "new":
                self.to_controller("gateway", m.Submit(generation, key, request.wanted.spec))
            elif request.state == "granted" and request.filled:
                self.to_controller("gateway", m.Filled(generation, key))
            else:
                self.to_controller("gateway", m.Query(generation, key))

    def gateway_receives(self, message: m.ToActor) -> None:
        request = self.gateway.get(getattr(message, "key", -1))
        if request is None:
            if not isinstance(message, m.Welcome | m.Released | m.Unknown):
                self.to_controller("gateway", m.Cancel(self.processes["gateway"].generation, message.key))
            return
        request.known = True
        key = request.wanted.key
        if isinstance(message, m.Released):
            assert request.outcome, f"request {key} was released before it was delivered"
            self.outcomes[key] = request.outcome
            del self.gateway[key]
        elif request.outcome:
            return
        elif isinstance(message, m.Failed):
            request.outcome, request.sent_s = f"failed {message.status}", -9.0
        elif isinstance(message, m.Unknown):
            assert request.state == "new", "the controller has forgotten a request that it acknowledged"
        elif isinstance(message, m.Queued):
            request.state = "waiting" if request.state == "new" else request.state
        elif isinstance(message, m.Granted):
            if not request.filled:
                request.runs = message.runs
            if request.state != "prepared":
                request.state = "granted"
        elif isinstance(message, m.Prepared):
            request.state = "prepared"
        elif isinstance(message, m.Computed):
            self.check_computed(request.wanted.spec, message)
            request.outcome, request.sent_s = "finished", -9.0

    def check_computed(self, spec: m.RequestSpec, message: m.Computed) -> None:
        """The row has had all hidden states that the request asks for."""
        assert spec.is_prefill_only
        length, last = message.num_prompt_tokens, spec.generation.sampling.prompt_logprobs_last
        needed = set()
        if spec.generation.sampling.prompt_logprobs is not None:
            needed |= {*range(length - 1 - last if last else 0, length - 1)}
        if spec.generation.pooling is not None:
            needed |= {*range(0 if spec.generation.pooling == "mean" else length - 1, length)}
        assert needed <= self.computed.get((message.row, message.row_generation), set())

    def fill(self, key: int, request: AtGateway) -> None:
        """Nobody takes pages from the gateway before it has answered Delivered or Cancel."""
        for item, run in enumerate(request.runs or ()):
            self.check_run("media", run)
            for index, page in enumerate(run.pages):
                self.content["media"][page][0] = (key, item, index)
        request.filled, request.runs, request.sent_s = True, None, -9.0

    def detokenize(self, key: int, request: AtGateway) -> None:
        """What the detokenizer does, as far as it matters here: it looks at the table and tells the gateway of the end."""
        for row in range(self.limits.num_rows):
            generation, phase = self.table.phase(row)
            if phase not in (Phase.DECODE, Phase.PREPARE):
                continue
            if not self.table.committed(row, generation) and self.table.end(row, generation) == EndCode.NONE:
                continue
            spec = m.decode_sequence_spec(self.table.read_spec(row, generation))
            if spec.key != key:
                continue
            ended = phase == Phase.DECODE and self.table.end(row, generation) != EndCode.NONE
            ids = self.table.ids[row, : self.table.committed(row, generation)].tolist()
            assert ids == [request.wanted.token(index) for index in range(len(ids))]
            if ended and self.table.end(row, generation) == EndCode.ERROR:
                request.outcome, request.sent_s = "failed 500", -9.0
                return
            stopped = request.wanted.stop_at is not None and len(ids) >= request.wanted.stop_at
            if ended and not stopped:
                assert len(ids) == request.wanted.length(spec.max_new_tokens), "a text has the wrong length"
            if ended or stopped:
                request.outcome, request.sent_s = "stopped" if stopped else "finished", -9.0

    # ---------------------------------------------------------------------------------------------------- time

    def turn(self) -> None:
        dt = self.random.choice((0.002, 0.01, 0.05))
        self.now += dt
        self.deliver()
        self.processes_turn(dt)
        self.controller_turn()

    def calm_down(self) -> None:
        """No faults any more: everything must end well, and nothing be held."""
        self.storm, self.crash_at = False, -1
        end_s = self.now + CALM_S
        while not self.is_idle():
            self.turn()
            assert self.now < end_s, f"not done after {CALM_S} calm seconds: {describe(self)}"
        for wanted in self.wanted.values():
            check_outcome(self, wanted)
        assert not self.plans.live()
        assert all(self.table.phase(row)[1] == Phase.FREE for row in range(self.limits.num_rows))

    def is_idle(self) -> bool:
        if self.io is None or self.gateway:
            return False
        state = self.controller.state
        free = all(pool.num_used == 0 for pool in state.pools.values())
        return free and not state.requests and not state.plans and all(row is None for row in state.rows)


def with_states(rng: random.Random, limits: Limits) -> Limits:
    """The limits of a run whose model has recurrent states: often few of them."""
    members = rng.choice((2, 2, 3, 5, 12))
    budget = rng.choice((0, 4, 5, 16))
    pages = {"num_state_pages": 2 * members + rng.choice((0, 0, 1, 2, 5)), "num_log_pages": members}
    return replace(limits, prefill_budget=budget, snapshot_tokens=8, learnt_tokens=(4, 12)[members % 2], **pages)


def with_windows(rng: random.Random, limits: Limits) -> Limits:
    """The limits of a run whose layers with a window have pages of their own: often hardly enough for a guidance pair."""
    window, chunk = rng.choice((1, 3, 6, 8, 13)), LONGEST_PICTURE if limits.sees_pictures else rng.choice((4, 5, 8, 16))
    pages = 2 * -(-window // 4) + -(-chunk // 4) + 8 + rng.choice((0, 0, 1, 4, 20))
    return replace(limits, window_tokens=window, window_chunk=chunk, num_window_pages=min(pages, limits.num_kv_pages))


def make_request(
    rng: random.Random,
    key: int,
    now: float,
    crowded: bool,
    earlier: Sequence[Wanted] = (),
    *,
    has_media: bool = True,
    goes_on: float = 0.3,
    repeats_media: bool = False,
) -> Wanted:
    """``earlier``: requests that it may continue, as the next turn of a chat does. ``goes_on``: how often. ``repeats_media``: a medium
    often comes again, at once or after others."""
    ids: list[int] = make_text(rng, rng.choice((0, 1, 5, 12)))
    items, shapes = [], []
    poison = rng.choice(("video", "segment", "encoder", "prefill", "decode")) if rng.random() < 0.05 else ""
    broken = rng.random() < 0.05
    for item in range(rng.choice((0, 0, 0, 1, 1, 2)) if has_media else 0):
        content, dice = b"", rng
        if rng.random() < 0.7:  # one of a few media that many requests have; not one that kills, which all of them would die of
            number = rng.randrange(6)
            content = b"broken %d %d" % (key, item) if poison or broken else b"content %d" % number
            dice = random.Random((3, 5, 7)[number // 2])  # one more looks like it, and differs
        medium, shape = make_medium(dice, content)
        items.append(medium)
        shapes.append(shape)
        ids += [IMAGE if shape.kind == "image" else VIDEO, rng.randint(1, 99)]
    while repeats_media and items and not broken and len(items) < 5 and rng.random() < 0.5:
        again = rng.randrange(len(items))
        items.append(items[again])
        shapes.append(shapes[again])
        ids[-1:] = [IMAGE if shapes[again].kind == "image" else VIDEO, *make_text(rng, rng.choice((1, 2, 4)))]
    ids = ids or [rng.randint(1, 99)]
    salt = rng.choice((b"", b"", b"other"))
    continued = [] if poison or broken else [before for before in earlier if not before.poison and before.broken is None]
    if continued and rng.random() < goes_on:
        before = rng.choice(continued)
        is_choice = rng.random() < 0.4  # another choice of the same answer
        more = [] if is_choice else [*map(before.token, range(rng.randint(0, 12))), rng.randint(1, 99)]
        ids = [*before.spec.prompt_ids, *more]
        items, shapes, salt = list(before.spec.items), list(before.shapes), before.spec.salt
        if rng.random() < 0.3:  # the same text about media that look like those
            items = [m.MediaItem(item.kind, item.num_bytes, content=look_alike(item.content)) for item in items]
    companion = make_text(rng, rng.choice((1, 3, 8))) if rng.random() < (0.1 if crowded else 0.25) else None
    max_new = rng.choice((20, 25)) if crowded else rng.choice((1, 3, 10, 30, None))
    deadline_s = now + rng.uniform(0.1, 8) if not crowded and rng.random() < 0.1 else 0.0
    sampling = m.Sampling(prompt_logprobs=0 if rng.random() < 0.1 else None)
    pooling: m.Pooling | None = None
    dice = random.Random(f"{key} {ids}")
    if companion is None and dice.random() < 0.15:  # no answer
        max_new, pooling = 0, dice.choice((None, "last", "mean"))
        last = dice.randint(0, len(ids) - 1)
        sampling = m.Sampling(prompt_logprobs=0, prompt_logprobs_last=last) if pooling is None else m.Sampling()
    spec = m.RequestSpec(
        m.Generation(str(key), sampling, deadline_s=deadline_s, pooling=pooling),
        ids,
        items,
        max_new,
        companion_ids=companion,
        salt=salt,
        borders=(dice.randint(0, len(ids)), dice.randint(0, len(ids)), dice.randint(0, len(ids))),
    )
    return Wanted(
        key,
        spec,
        shapes,
        broken=rng.randrange(len(items)) if items and broken else None,
        eos_at=rng.randint(1, 25 if crowded else 12) if rng.random() < 0.5 else None,
        stop_at=rng.randint(1, 8) if rng.random() < 0.1 else None,
        cancel_s=rng.uniform(0, 4) if not crowded and rng.random() < 0.15 else None,
        poison=poison,
    )


def look_alike(content: bytes) -> bytes:
    """Return the contents of the other medium of equal shape. Empty stays empty."""
    return b"content %d" % (int(content.removeprefix(b"content ")) ^ 1) if content else b""


def make_medium(rng: random.Random, content: bytes) -> tuple[m.MediaItem, ItemShape]:
    kind = rng.choice(("image", "video"))
    segments = []
    for _ in range(1 if kind == "image" else rng.randint(1, 5)):
        part = "audio" if kind == "video" and rng.random() < 0.3 else kind
        segments.append(SegmentShape(part, (1, 1, 1), rng.randint(1, 14), 4, rng.randint(1, 9)))
    medium = m.MediaItem(kind, rng.randint(1, 24), content=content)
    return medium, ItemShape(kind, (1, 1, 1), sum(s.num_tokens for s in segments), segments)


def refusal(wanted: Wanted, limits: Limits) -> int | None:
    """The status with which the request must be refused, if it must."""
    spec = wanted.spec
    pages = sum(-(-item.num_bytes // limits.media_page_bytes) for item in spec.items)
    if pages > limits.num_media_pages:
        return 413
    try:
        short = tuple(map(len, filter(None, (spec.prompt_ids, spec.companion_ids))))
        check_lengths(spec, short, limits)
        if wanted.broken is not None:
            return 422
        prompt, starts = expand(spec, wanted.shapes, limits)
        check_lengths(spec, (len(prompt), *short[1:]), limits)
        check_segments(starts, wanted.shapes, limits)
    except RequestError as error:
        return error.status
    return None


def kills(wanted: Wanted) -> bool:
    """Whether some actor comes to the poison, if nothing else ends the request before."""
    lengths = [len(ids) for ids in (wanted.spec.prompt_ids, wanted.spec.companion_ids) if ids]
    match wanted.poison:
        case "video" | "encoder":
            return bool(wanted.shapes)
        case "segment":
            return any(len(shape.segments) > 1 for shape in wanted.shapes)
        case "prefill":
            return bool(wanted.shapes) or max(lengths) > 1 or wanted.spec.generation.pooling is not None
    return wanted.poison == "decode" and not wanted.spec.is_prefill_only


def check_outcome(world: World, wanted: Wanted) -> None:
    outcome = world.outcomes[wanted.key]
    allowed = {"lost with its gateway"}
    if (status := refusal(wanted, world.limits)) is not None:
        allowed.add(f"failed {status}")
        if wanted.poison == "video":
            allowed.add("failed 500")  # what it would be refused for is found by the video actor
    else:
        allowed.add("failed 500" if kills(wanted) else "finished")
        if wanted.poison == "prefill":
            allowed.add("failed 500")  # a prompt of one token is prefilled after a preemption only
        if world.limits.first_tokens and wanted.poison == "decode" and 1 in (wanted.eos_at, wanted.spec.max_new_tokens):
            allowed.add("finished")  # prefill has drawn all of its answer
        of_media = world.limits.embedding_cache and wanted.poison in ("encoder", "segment")
        if of_media or world.limits.prefix_cache and wanted.poison in ("encoder", "segment", "prefill"):
            allowed.add("finished")  # all that it would have done is in a cache, or in files of an earlier run
    if wanted.stop_at is not None:
        allowed.add("stopped")
    if wanted.cancel_s is not None:
        allowed.add("cancelled")
    if wanted.spec.generation.deadline_s:
        allowed.add("failed 504")
    if world.limits.max_waiting == 2 or world.has_been_broken:
        allowed.add("failed 503")
    assert outcome in allowed, f"request {wanted.key} {outcome}, not one of {allowed}"


def describe(world: World) -> str:
    state = world.controller.state
    lines = [f"limits {world.limits}", f"waiting {list(state.waiting)}", f"plans {[(p.actor, p.plan) for p in state.plans.values()]}"]
    lines += [f"{name}: {pool.num_used} of {pool.num_pages}" for name, pool in state.pools.items()]
    lines += [f"row: {row}" for row in state.rows if row is not None]
    lines += [f"gateway {key}: {request}" for key, request in world.gateway.items()]
    return "\n".join(lines)
