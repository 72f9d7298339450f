"""The stages of a request until its first text, and until its end: finer than the eight parts, and cut by the same rules (pure).

``breakdown.stretches`` cuts the time into stretches of which each belongs to one stage, so stages sum to the time. The gateway's
metrics add them up to the first text (``mmrt_ttft_stage_seconds``); its traces show each as a span.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ..bus.plan_base import PlanKind
from .breakdown import Stretch, Work, stretches
from .trace_requests import PlanSpan, RequestSpan

STEPS = ("admission", "media_write", "media_decode", "encode", "prefill", "first_step", "text", "decode", "delivery")
"""In the order of the pipeline. A wait belongs to the step that comes next."""

TTFT_STAGES = (
    "admission",
    "media_write",
    "media_decode_queue",
    "media_decode",
    "encode_queue",
    "encode",
    "prefill_queue",
    "prefill",
    "first_step_queue",
    "first_step",
    "text",
)
_STEP_OF_PLAN = {
    PlanKind.ANALYSE: "media_decode",
    PlanKind.PREPROCESS: "media_decode",
    PlanKind.ENCODE: "encode",
    PlanKind.PREFILL: "prefill",
    PlanKind.LOAD: "prefill",
    PlanKind.LOAD_SEGMENTS: "encode",
    PlanKind.TRANSFER: "prefill",
}
_STEP_OF_STAGE = {
    "submitted": "admission",
    "queued": "admission",
    "fetching": "media_write",
    "decoding": "decode",
    "delivering": "delivery",
}


class FirstText(NamedTuple):
    """The step of decode that made a request's first token, and when its text was there; ns."""

    step_begin_ns: int
    step_end_ns: int
    time_ns: int


def stages_to_first_text(span: RequestSpan, plans: Iterable[PlanSpan], first: FirstText) -> dict[str, float]:
    """Seconds of the time to the first text by stage; all of ``TTFT_STAGES``, 0 for those that it did not pass."""
    found = dict.fromkeys(TTFT_STAGES, 0.0)
    for stretch in stretches(span.begin_ns, first.time_ns, _works(span, plans, first, first.time_ns), "first_step", STEPS):
        found[stage_of_stretch(stretch)] += (stretch.end_ns - stretch.begin_ns) / 1e9
    return found


def stages_to_end(span: RequestSpan, plans: Iterable[PlanSpan], first: FirstText | None, end_ns: int) -> list[Stretch]:
    """The stretches of a whole request, in order of time. ``first``: None for one that got no text."""
    return stretches(span.begin_ns, end_ns, _works(span, plans, first, end_ns), "delivery" if first else "first_step", STEPS)


def stage_of_stretch(stretch: Stretch) -> str:
    """The name of a stretch's stage: that of its step, with ``_queue`` for a wait before a step that has a queue."""
    name = f"{stretch.step}_queue"
    return name if stretch.state == "queue" and name in TTFT_STAGES else stretch.step


def _works(span: RequestSpan, plans: Iterable[PlanSpan], first: FirstText | None, now_ns: int) -> list[Work]:
    """``now_ns``: of what is not over."""

    def work(step: str, begin_ns: int, end_ns: int) -> Work:
        return Work(step, begin_ns, end_ns, end_ns)

    works = [work(_STEP_OF_PLAN[plan.kind], plan.begin_ns, plan.end_ns) for plan in plans if plan.begin_ns and not plan.status]
    text_ns = now_ns if first is None else first.time_ns
    for stage in span.stages:
        step, end_ns = _STEP_OF_STAGE.get(stage.name, ""), stage.end_ns or now_ns
        if step in ("decode", "delivery"):  # a short answer may end in decode before its first text is there
            works.append(work(step, max(stage.begin_ns, text_ns), max(end_ns, text_ns)))
        elif step:
            works.append(work(step, stage.begin_ns, end_ns))
    if first is not None:
        works.append(work("first_step", first.step_begin_ns, first.step_end_ns))
        works.append(work("text", first.step_end_ns, first.time_ns))
    return works
