"""``mmrt bench controller``: the cost of a controller tick.

The machine of ``runtime/controller`` alone, without tables and sockets, is brought to a state with so many requests running, preparing
and waiting, and kept there: in every turn each running row has one more token, one of the actors finishes a plan, and for every
request that ends a new one comes. A tick is the controller's work after it has recorded the messages: it decides, and chooses when it
looks again and at which rows. ``plan`` is the policy alone, over the whole state, as if every actor were idle.
"""

import argparse
import gc
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, run_bench
from mmrt.bench.render import show_table
from mmrt.runtime.bus.messages import (
    Analysed,
    Delivered,
    Done,
    Drop,
    Dropped,
    Filled,
    Generation,
    Granted,
    Hello,
    MediaItem,
    PlanDone,
    RequestSpec,
    Run,
    Submit,
    ToController,
)
from mmrt.runtime.controller.machine import Controller
from mmrt.runtime.controller.plans.planner import make_view
from mmrt.runtime.controller.scheduling.policy import POLICIES, UNIFIED
from mmrt.runtime.controller.scheduling.types import Limits, StepLimits
from mmrt.runtime.controller.state.effects import BeginRow, Effect, Send
from mmrt.runtime.stage_table import WORKERS, InstanceId
from mmrt.schema.gap_buckets import NUM_BUCKETS, bucket_of
from mmrt.schema.media import ItemShape, SegmentShape
from mmrt.schema.rows import EndCode, Phase

STATES = ((64, 0, 0, 0.3), (64, 0, 256, 0.6), (256, 256, 256, 2.0))  # running, preparing, waiting, target in ms
PLAN_TARGET_MS = 1.0
_STEP_S = 0.02
_END_EVERY = 10  # turns
_IMAGE = 150_000
_PICTURE = ItemShape("image", (1, 32, 32), 256, [SegmentShape("image", (1, 32, 32), 1024, 4704, 256)])


class StateCost(msgspec.Struct, frozen=True, kw_only=True):
    """Of one state: P50 and P99, in ms. ``cpu_ms`` is processor time of the tick, which others on the machine do not lengthen."""

    running: int
    preparing: int
    waiting: int
    tick_ms: tuple[float, float]
    cpu_ms: tuple[float, float]
    plan_ms: tuple[float, float]
    target_ms: float


class ControllerBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    policy: str = UNIFIED.name
    states: list[StateCost]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 if a state could not be kept."""
    parser = argparse.ArgumentParser(prog="mmrt bench controller", description="What a tick of the controller costs.")
    parser.add_argument("--turns", type=int, default=500, help="that are timed, per state (%(default)s)")
    parser.add_argument("--policy", choices=list(POLICIES), default=UNIFIED.name, help="the scheduling policy (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.turns < 1:
        parser.error(f"--turns {options.turns} must be at least 1")
    bench = run_bench("controller", options.json, (), lambda _: measure_all(options.turns, options.policy), show)
    if options.json is None:
        print(msgspec.json.encode(bench).decode())
    return 0


def measure_all(num_turns: int, policy: str = UNIFIED.name) -> ControllerBench:
    """Each state."""
    environment = read_environment()
    return ControllerBench(environment=environment, policy=policy, states=[measure(*state, num_turns, policy) for state in STATES])


def show(console: Console, bench: ControllerBench) -> None:
    """One line for each state."""
    columns = ["requests", "P50", "P99", "CPU P50", "CPU P99", "plan P50", "plan P99", "target"]
    rows = []
    for state in bench.states:
        times = [f"{value:.2f}" for value in (*state.tick_ms, *state.cpu_ms, *state.plan_ms)]
        rows.append([f"{state.running}, {state.preparing}, {state.waiting}", *times, f"{state.target_ms:g}"])
    title = f"a tick with so many running, preparing and waiting; ms ({bench.policy}'s plan: target {PLAN_TARGET_MS:g})"
    show_table(console, title, columns, rows)


def measure(running: int, preparing: int, waiting: int, target_ms: float, num_turns: int, policy: str = UNIFIED.name) -> StateCost:
    """Bring a machine to this state and time ticks in it."""
    drive = Drive(running, preparing, waiting, policy)
    drive.settle()
    gc.collect()
    gc.freeze()
    ticks_s, cpu_s, plans_s = [], [], []
    try:
        for turn in range(num_turns):
            drive.turn((WORKERS[turn % 3],))
            ticks_s.append(drive.tick_s)
            cpu_s.append(drive.cpu_s)
            plans_s.append(drive.time_plan())
    finally:
        gc.unfreeze()
    return StateCost(
        running=running,
        preparing=preparing,
        waiting=waiting,
        tick_ms=_percentiles(ticks_s),
        cpu_ms=_percentiles(cpu_s),
        plan_ms=_percentiles(plans_s),
        target_ms=target_ms,
    )


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """P50 and P99, in ms."""
    p50, p99 = 1000 * np.percentile(seconds, (50, 99))
    return float(p50), float(p99)


class Drive:
    """A machine with actors that are function calls. All rows are taken, and texts wait. Where media prepare, every other
    waiting request has a picture."""

    def __init__(self, running: int, preparing: int, waiting: int, policy: str = UNIFIED.name) -> None:
        self.running, self.preparing, self.waiting = running, preparing, waiting
        num_rows = running + preparing
        self.limits = Limits(
            policy=policy,
            num_rows=num_rows,
            max_context=8192,
            kv_page_tokens=16,
            num_kv_pages=200 * num_rows,
            media_page_bytes=1 << 16,
            num_media_pages=8 * (preparing + waiting) + 8,
            patch_page_bytes=1 << 20,
            num_patch_pages=512,
            embedding_page_tokens=64,
            num_embedding_pages=512,
            placeholder_ids={"image": _IMAGE},
            max_waiting=num_rows + waiting,
            prefill_budget=512,
            encode_budget=4096,
            prefix_cache=True,
        )
        self.controller = Controller.start(self.limits, 1)
        self.now = 100.0
        self.num_turns = self.num_requests = 0
        self.plans: dict[str, deque[int]] = {actor: deque() for actor in WORKERS}
        self.committed, self.end_codes = [0] * num_rows, [0] * num_rows
        self.gaps = [0] * NUM_BUCKETS
        self.tick_s = self.cpu_s = 0.0
        for actor in ("gateway", *WORKERS, "decode"):
            self.tell(actor, Hello(actor, 1, 1, True))

    def settle(self) -> None:
        """Submit all requests, and let the preparing ones proceed as far as memory for their media allows."""
        for _ in range(self.running):
            self.submit(is_picture=False)
        while self.num_decoding < self.running:
            self.turn(WORKERS)
        for _ in range(self.preparing):
            self.submit(is_picture=True)
        for _ in range(2):
            self.turn(())
        while self.plans["video"]:
            self.turn(("video",))
        for index in range(self.waiting):
            self.submit(self.preparing > 0 and index % 2 > 0)
        for index in range(9):
            self.turn((WORKERS[index % 3],))

    def submit(self, is_picture: bool) -> None:
        self.num_requests += 1
        ids = [(7919 * self.num_requests + index) % 100_000 for index in range(100)]
        items = [MediaItem("image", 200_000, work=1 << 20)] if is_picture else []
        spec = RequestSpec(Generation("r"), [*ids[:50], _IMAGE, *ids[50:]] if items else ids, items, 4096)
        self.tell("gateway", Submit(1, self.num_requests, spec))

    def tell(self, actor: str, message: ToController) -> None:
        self._perform(self.controller.on_message(InstanceId(actor), 1, message, self.now))

    def turn(self, working: Sequence[str]) -> None:
        """A token for every row, one plan of each of these actors is done, maybe one request ends; and a tick, which is timed."""
        self.now += _STEP_S
        self.num_turns += 1
        decoding = [request for request in self.controller.state.rows if request is not None and request.phase == Phase.DECODE]
        for request in decoding:
            self.committed[request.row] += 1
        self.gaps[bucket_of(int(1e9 * _STEP_S))] += len(decoding)
        if len(decoding) > self.running or self.num_turns % _END_EVERY == 0 and len(decoding) == self.running:
            self.end_codes[min(decoding, key=lambda request: request.arrival).row] = EndCode.LENGTH
        for actor in working:
            if self.plans[actor]:
                self._finish(actor, self.plans[actor].popleft())
        progress = [(row, at, self.committed[row], self.end_codes[row]) for row, at in self.controller.watched()]
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        new_ids = [(span, range(span.first, span.last)) for span in self.controller.wanted_ids(progress)]
        effects = self.controller.tick(self.now, progress, new_ids, list(self.gaps))
        self.controller.next_tick_s()
        self.controller.watched()
        self.tick_s, self.cpu_s = time.perf_counter() - began_s, time.thread_time() - began_cpu_s
        self._perform(effects)

    def time_plan(self) -> float:
        """Seconds of the policy, as if every actor were idle."""
        view = msgspec.structs.replace(
            make_view(self.controller.state),
            video_credit=2,
            encoder_credit=2,
            prefill_credit=2,
            encode_in_flight=0,
            prefill_in_flight=0,
        )
        began_s = time.perf_counter()
        self.controller.state.policy.plan(view, StepLimits(2048, 8192, max_encode_rows=8192), None)
        return time.perf_counter() - began_s

    @property
    def num_decoding(self) -> int:
        return sum(request is not None and request.phase == Phase.DECODE for request in self.controller.state.rows)

    def _finish(self, actor: str, plan_id: int) -> None:
        is_analysis = self.controller.state.plans[plan_id].plan.analysed_item is not None
        self.tell(actor, PlanDone(actor, 1, plan_id, 0.1, Analysed(_PICTURE) if is_analysis else Done()))

    def _perform(self, effects: Sequence[Effect]) -> None:
        """Give the answers of the other actors at once."""
        for effect in effects:
            if isinstance(effect, BeginRow):
                self.committed[effect.row] = self.end_codes[effect.row] = 0
            elif not isinstance(effect, Send):
                continue
            elif isinstance(effect.message, Run) and effect.message.plan_id not in self.plans[effect.actor]:
                self.plans[effect.actor].append(effect.message.plan_id)
            elif isinstance(effect.message, Granted):
                self.tell("gateway", Filled(1, effect.message.key))
            elif isinstance(effect.message, Drop):
                drop = effect.message
                request = self.controller.state.rows[drop.row]
                self.tell("decode", Dropped(1, drop.row, drop.row_generation, drop.ticket))
                if request is not None:
                    self.tell("gateway", Delivered(1, request.key))
                    self.submit(self.preparing > 0 and self.num_requests % 2 > 0)
