"""The data of the live page: the state of the run as one JSON object, from shared memory alone.

A reply costs a few milliseconds, and only while somebody asks. Viewers share one look at the processes; each gets the requests
that have changed since its own last reply. Times are milliseconds of CLOCK_MONOTONIC.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from ....runtime.observe.flight import PLAN_NAMES
from ....runtime.observe.live import LiveRequest, LiveRequests
from ....runtime.observe.trace_requests import PlanSpan
from ....runtime.stage_table import STAGES, stage_of
from ....runtime.supervisor.processes import cpu_seconds
from ....shm.controller_stats import StatsSnapshot
from ....shm.role_lock import RoleLock
from ....shm.run_directory import RunDirectory
from ....shm.status import ActorReading, ActorState, ActorTable

SHARED_S = 0.4  # for which a look at the processes serves all viewers
MAX_REQUESTS = 48  # of one reply, and those that changed with the last of them; a viewer gets the others with its next
MAX_WORK = 200  # pieces of a request's work in one reply, the latest


class Feed:
    """Makes the replies. Maps what it needs at the first look."""

    def __init__(
        self,
        run: RunDirectory,
        actors: ActorTable,
        stats: Callable[[], StatsSnapshot],
        can_command: Callable[[], bool],
        keeps_connections: bool,
    ) -> None:
        """``keeps_connections``: those of a gateway that dies go on with the next one."""
        self._run = run
        self._actors = actors
        self._stats = stats
        self._began_ns = time.time_ns()  # the generation will not do: a run that is started anew begins with the same one
        self._can_command = can_command
        self._keeps_connections = keeps_connections
        self._live: LiveRequests | None = None
        self._looked_s = -SHARED_S
        self._shared: dict[str, Any] = {}

    def close(self) -> None:
        if self._live is not None:
            self._live.close()

    def reply(self, after: int) -> bytes:
        """Return the state, with what has changed since revision ``after`` of an earlier reply; 0 is everything known."""
        live = self._look()
        changed, revision = sorted(live.changed(after), key=lambda request: request.revision), live.revision
        if len(changed) > MAX_REQUESTS:
            revision = changed[MAX_REQUESTS - 1].revision
            changed = [request for request in changed if request.revision <= revision]
        return msgspec.json.encode(
            {
                **self._shared,
                "revision": revision,
                "requests": [_request(request) for request in changed],
                "events": [
                    {"at": event.time_ns / 1e6, "actor": event.actor, "text": event.text}
                    for event in live.events
                    if event.revision > after
                ],
            }
        )

    def window_of(self, key: int) -> tuple[int, int, str] | None:
        """Return begin and end of a request, and its id; the end is 0 while it lives. None if it is not known (any more)."""
        request = self._look().requests.get(key)
        return None if request is None else (request.span.begin_ns, request.span.end_ns, request.span.name)

    def _look(self) -> LiveRequests:
        if self._live is None:
            self._live = LiveRequests(self._run, self._actors.actors)
        now_s = time.monotonic()
        if now_s - self._looked_s >= SHARED_S:
            self._looked_s = now_s
            self._live.follow(self._actors.actors)
            self._live.look()
            self._shared = self._state(self._live)
        return self._live

    def _state(self, live: LiveRequests) -> dict[str, Any]:
        stats = self._stats()
        return {
            "now": time.monotonic_ns() / 1e6,
            "epoch": f"{self._began_ns:x}.{live.num_gaps}",  # of revisions: in another one they count anew
            "commands": self._can_command(),
            "keeps_connections": self._keeps_connections,
            "actors": [self._actor(name, stats, live) for name in self._actors.present],
            "pools": stats.pools,
            "counts": {"waiting": stats.waiting, "preparing": stats.preparing, "running": stats.running},
            "budgets": {"prefill_tokens": stats.prefill_budget, "encode_rows": stats.encode_budget, "tbt_ms": 1000 * stats.tbt_s},
            "totals": {
                "tokens": live.num_tokens,  # of an epoch: those of requests that run count as well
                "finished": stats.finished_total,
                "failed": stats.failed_total,
            },
        }

    def _actor(self, name: str, stats: StatsSnapshot, live: LiveRequests) -> dict[str, Any]:
        row, holder = self._actors.read(name), RoleLock.holder(self._run, name)
        stage = STAGES[stage_of(name)]
        return {
            "name": name,
            "stage": stage.name,
            "state": _state_of(row, holder, name in stats.broken),
            "broken": stats.broken.get(name, ""),
            "pid": holder,
            "generation": row.generation,
            "restarts": live.num_ends[name],
            "last_end": live.last_end.get(name, ""),
            "inputs": stage.inputs,
            "output": stage.output,
            "queue": row.queue_depth if row.pid == holder else 0,
            "steps": row.steps,
            "busy_ms": row.busy_ns / 1e6,
            "cpu_ms": 1000 * (cpu_seconds(holder) or 0.0) if holder else 0.0,
            "up_ms": (time.monotonic_ns() - row.started_ns) / 1e6 if row.pid == holder and row.started_ns else 0.0,
        }


def _state_of(row: ActorReading, holder: int | None, is_broken: bool) -> str:
    """A dead process cannot change its words: they count while their writer holds the role."""
    if holder and holder == row.pid:
        return row.state.name.lower()
    if holder:
        return ActorState.STARTING.name.lower()
    return "broken" if is_broken else ActorState.ABSENT.name.lower()


def _request(request: LiveRequest) -> dict[str, Any]:
    span = request.span
    work = sorted(
        [
            *(["fetch", write.begin_ns / 1e6, write.end_ns / 1e6, 0.0, write.num_bytes, "gateway"] for write in request.writes),
            *(_piece(plan) for plan in request.plans.values() if plan.begin_ns),
        ],
        key=lambda piece: piece[1],
    )
    return {
        "key": f"{span.key:x}",
        "id": span.name,
        "begin": span.begin_ns / 1e6,
        "end": span.end_ns / 1e6 if span.end_ns else None,
        "stages": [[stage.name, stage.begin_ns / 1e6, stage.end_ns / 1e6 if stage.end_ns else None] for stage in span.stages],
        "marks": [[text, time_ns / 1e6] for text, time_ns in span.marks],
        "prompt_tokens": span.num_prompt_tokens,
        "cached_tokens": span.num_cached_tokens,
        "sent_tokens": span.num_sent,
        "status": span.status,
        "lost": span.is_lost,
        "work": work[-MAX_WORK:],
        "left_out": max(0, len(work) - MAX_WORK),
    }


def _piece(plan: PlanSpan) -> list[Any]:
    """[kind, begin, end, ms in the actor's queue, units, actor]."""
    waited_ns = max(0, plan.begin_ns - plan.arrived_ns)
    return [PLAN_NAMES[plan.kind], plan.begin_ns / 1e6, plan.end_ns / 1e6, waited_ns / 1e6, plan.units, plan.actor]
