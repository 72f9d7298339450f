"""Requests that come while a policy plans for an encoder and a prefill that each do one plan a step: who waits for how long."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mmrt.runtime.bus.messages import Generation, RequestSpec
from mmrt.runtime.controller.scheduling.facts import Cost, Facts, Objective, RequestKind
from mmrt.runtime.controller.scheduling.policy import Policy
from mmrt.runtime.controller.scheduling.types import MemberView, RequestView, SegmentStage, SegmentView, StepLimits, View

STEP_S = 0.1
SPEC = RequestSpec(Generation("r"), [1], [], 4)
ROWS, TOKENS = 64, 16  # of a segment


@dataclass
class Job:
    """A request: text, then its segments, which are decoded at its arrival."""

    key: int
    arrived_s: float
    kind: RequestKind
    text: int
    num_segments: int = 0
    ttft_s: float = 4.0
    num_encoded: int = 0
    done: int = 0
    first_token_s: float | None = None
    priority: int = 0
    has_row: bool = True
    undecoded_rows: int = 0
    arrival: int = 0
    spec: RequestSpec = field(default=SPEC)

    @property
    def objective(self) -> Objective:
        return Objective(self.ttft_s)

    @property
    def is_partial(self) -> bool:
        return self.done > 0

    @property
    def num_tokens(self) -> int:
        return self.text + TOKENS * self.num_segments

    @property
    def tokens_left(self) -> int:
        return self.num_tokens - self.done

    @property
    def rows_left(self) -> int:
        return ROWS * (self.num_segments - self.num_encoded)

    @property
    def video_rows_left(self) -> int:
        return self.undecoded_rows

    @property
    def wait_s(self) -> float:
        """Until its first token."""
        assert self.first_token_s is not None, f"{self} was never served"
        return self.first_token_s - self.arrived_s

    def view(self) -> RequestView:
        ready = self.text + TOKENS * self.num_encoded
        segments = [SegmentView(0, n, SegmentStage.PREPROCESSED, ROWS, 1, 1) for n in range(self.num_encoded, self.num_segments)]
        return RequestView(
            self.key,
            self.arrival,
            has_kv=True,
            members=(MemberView(self.done, ready, self.num_tokens),),
            segments=tuple(segments),
            arrived_s=self.arrived_s,
            kind=self.kind,
            objective=self.objective,
            video_since_s=self.arrived_s,
        )


def serve(policy: Policy, jobs: Iterable[Job], until_s: float, budget: int = 64, num_decoding: int = 1) -> None:
    """Serve jobs from second 0 on. A step prefills and encodes one plan, of at most ``budget`` tokens and twice as many rows."""
    coming = sorted(jobs, key=lambda job: (job.arrived_s, job.key))
    for number, job in enumerate(coming):
        job.arrival = number
    present: dict[int, Job] = {}
    memory: Any = None
    last = "prefill"
    cost = Cost(0.0, STEP_S / budget, budget)
    limits = StepLimits(budget, 2 * budget, budget, 2 * budget, frozenset({"encoder", "prefill"}))
    for step in range(round(until_s / STEP_S)):
        now = step * STEP_S
        while coming and coming[0].arrived_s <= now:
            job = coming.pop(0)
            present[job.key] = job
        facts = Facts(now, Cost(0.0, STEP_S / (2 * budget), 2 * budget), cost, tbt_s=STEP_S)
        order = sorted(present.values(), key=lambda job: (*policy.rank(job, facts), job.arrival))
        view = View(
            tuple(job.view() for job in order),
            facts,
            encoder_credit=1,
            prefill_credit=1,
            num_decoding=num_decoding,
            num_decode_tokens=num_decoding,
            num_embedding_pages=1000,
            num_free_embedding_pages=1000,
            last=last,  # type: ignore[arg-type]
        )
        plan, memory = policy.plan(view, limits, memory)
        last = "encode" if plan.encode else "prefill" if plan.prefill else last
        for choice in plan.encode:
            present[choice.key].num_encoded += 1
        for chunk in plan.prefill:
            job = present[chunk.key]
            job.done = chunk.end
            if job.done == job.num_tokens:
                job.first_token_s = now + STEP_S
                del present[chunk.key]
