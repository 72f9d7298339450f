"""Sections of ``serve``: each drives whole runs over checkpoints of random weights through HTTP, and gives figures.

``answers`` compares a small model's greedy text with that of a run on the CPU, both in float32; ``load`` times a model of real size,
``stall`` its text streams while pictures come, ``restart`` kills its actors, ``transformers`` answers the same requests by that
library on the same device, ``together`` is ``stall`` with the stages as streams of one process (TI5), and ``mps`` is ``stall`` with
their processes under CUDA's multi-process service, started for it.
"""

import argparse
import asyncio
import gc
import json
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

import aiohttp
import msgspec
import torch

from mmrt.bench.own_run import OwnRun
from mmrt.bench.serve.client import find_model, open_session, stream_chat
from mmrt.bench.serve.drivers import run_closed_loop
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.record import Record
from mmrt.bench.serve.report import StallSummary, summarise_groups, summarise_stall
from mmrt.bench.serve.stall import StallPlan, run_stall
from mmrt.bench.serve.workload import Calibration, Lengths, MediaShapes, Modality, RequestPlan, make_body, plan_steady
from mmrt.models.config import load_model_config
from mmrt.runtime.config.sections import SchedulingSection
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.status import ActorState, ActorTable

from ..extras import need_extra
from ..versus_transformers import answers_of_transformers, measure_server, send_all
from .figures import Figure
from .mps import MPS_CONTROL, multi_process_service
from .serving import TIMEOUT_S, checkpoint_of, end, made_of_shape, serving, target_of

RESTART_TARGET_S = 3.0
STALL_TARGET = 2.0
_POLL_S = 0.005
_UNCUT = SchedulingSection(prefill_budget_tokens=4096)  # a prompt is one chunk: cut elsewhere, its bf16 sums round differently
_LOADS: tuple[tuple[Modality, int], ...] = (("text", 1), ("text", 32), ("image", 32))  # requests at a time
_MEGAPIXEL = MediaShapes(image_size=(1024, 1024))
_STREAMS = 8
_TOKENS_BESIDE = 64  # of each answer, in both
_PICTURE_S = 0.5  # between the pictures that come while texts stream


def _answers(run: OwnRun, options: argparse.Namespace) -> Iterator[Figure]:
    """Text, and a picture with text, on the CPU and on the device."""
    model = made_of_shape(run, "tiny" if options.shape == "tiny" else "small")
    plans = [*_plans("text", 12, 200, 48), *_plans("image", 4, 40, 48)]
    said = []
    for device in ("cpu", options.device):
        with serving(run, model, device, "float32") as (url, _):
            said.append(asyncio.run(_ask_all(url, plans)))
    share = statistics.mean(ours == theirs for theirs, ours in zip(*said, strict=True))
    note = f"{len(plans)} greedy answers in float32 as on the CPU"
    yield Figure(section="answers", case="equal", value=share, unit="of 1", target=1.0, note=note)


def _load(run: OwnRun, options: argparse.Namespace) -> Iterator[Figure]:
    """One request at a time, then many: of text, and with pictures."""
    begun_s, shapes = time.monotonic(), MediaShapes()
    model = checkpoint_of(run, options)
    if options.model is None:
        yield Figure(section="load", case="mmrt model make", value=time.monotonic() - begun_s, unit="s")
    with serving(run, model, options.device, anew=True) as (url, ready_s):
        yield Figure(section="load", case="mmrt up until it is ready", value=ready_s, unit="s")
        for media in dict.fromkeys(media for media, _ in _LOADS):
            first_s = asyncio.run(_first(url, _plans(media, 1, 200, 4)))
            yield Figure(section="load", case=f"first answer with {media}", value=first_s, unit="s", note="compiles")
        for media, concurrency in _LOADS:
            count = options.requests if concurrency > 1 else max(1, options.requests // 8)
            asyncio.run(
                send_all(url, _plans(media, min(count, concurrency), 200, 16), shapes, concurrency)
            )  # graphs of these batch sizes
            records = asyncio.run(send_all(url, _plans(media, count, 512, 128), shapes, concurrency))
            yield from _latencies(f"{media}, {concurrency} at a time", records)


def _latencies(case: str, records: list[Record]) -> list[Figure]:
    everything = summarise_groups(records)[0]
    if everything.num_failed:
        errors = {record.error for record in records if record.error}
        return [Figure(section="load", case=case, note=f"{everything.num_failed} requests failed: {'; '.join(map(str, errors))}")]
    made = partial(Figure, section="load")
    figures = [made(case=f"{case}: throughput", value=everything.output_tokens_per_s, unit="tokens/s")]
    if (ttft := everything.ttft) is not None:
        figures.append(made(case=f"{case}: TTFT", value=1e3 * ttft.p50, unit="ms", note=f"P99 {1e3 * ttft.p99:.1f} ms"))
    if (tbt := everything.tbt) is not None:  # the median is 0 where tokens come in pairs
        figures.append(made(case=f"{case}: TBT", value=1e3 * tbt.mean, unit="ms", note=f"the mean; P99 {1e3 * tbt.p99:.1f} ms"))
    return figures


def _restart(run: OwnRun, options: argparse.Namespace) -> Iterator[Figure]:
    """Kill -9 an idle actor: until another is ready, until it answers, and whether it says the same."""
    model = checkpoint_of(run, options)
    with serving(run, model, options.device, scheduling=_UNCUT) as (url, _), RunDirectory.attach(run.run) as directory:
        plans = _plans("image", 1, 200, 32)
        expected = asyncio.run(_ask_all(url, plans))
        with closing(ActorTable.attach(directory, writable=False)) as table:
            for actor in ("decode", "prefill", "encoder"):
                ready_s, answered_s, same = [], [], []
                for _ in range(options.trials):
                    start_s = time.monotonic()
                    ready_s.append(_kill(table, actor))
                    same.append(asyncio.run(_ask_all(url, plans)) == expected)
                    answered_s.append(time.monotonic() - start_s)
                made = partial(Figure, section="restart")
                target_s = None if actor == "encoder" else target_of(RESTART_TARGET_S, model)
                note = f"worst {max(ready_s):.2f} s of {options.trials}"
                yield from (
                    made(case=f"{actor} ready again", value=statistics.median(ready_s), unit="s", target=target_s, note=note),
                    made(case=f"{actor}: an answer", value=statistics.median(answered_s), unit="s", note="from the kill on"),
                    made(case=f"{actor}: the same answer", value=statistics.mean(same), unit="of 1", target=1.0),
                )


def _stall(section: str, layout: str, run: OwnRun, options: argparse.Namespace) -> Iterator[Figure]:
    """P99 of the times between tokens of text streams while pictures of a megapixel come, as a multiple of that without them."""
    model = checkpoint_of(run, options)
    count = max(4, options.requests // 4)
    with serving(run, model, options.device, layout=layout) as (url, _):
        stalled = asyncio.run(_stream_beside_pictures(url, count))
    made = partial(Figure, section=section)
    if stalled.alone is None or stalled.with_fresh is None or stalled.p99_ratio is None or stalled.fresh_ttft is None:
        yield made(case="pictures beside streams", note="no times between tokens, or no picture was answered")
        return
    note = f"P99 {1e3 * stalled.alone.p99:.1f} ms alone, {1e3 * stalled.with_fresh.p99:.1f} ms with {count} pictures"
    case = f"TBT of {_STREAMS} streams with pictures"
    yield made(case=case, value=stalled.p99_ratio, unit="times", target=target_of(STALL_TARGET, model), note=note)
    yield made(case="TTFT of the pictures", value=1e3 * stalled.fresh_ttft.p50, unit="ms")


async def _stream_beside_pictures(url: str, count: int) -> StallSummary:
    """Raises: BenchError when the streams keep failing, or the picture that warms up does."""
    texts = _plans("text", 4 * _STREAMS, 200, 512)
    pictures = _plans("image", count + 1, 40, 16)
    async with open_session(TIMEOUT_S) as session:
        model = await find_model(session, url)
        bodies = {plan.seed: make_body(plan, _MEGAPIXEL, Calibration(), model) for plan in [*texts, *pictures]}

        async def send(plan: RequestPlan, record: Record) -> None:
            await stream_chat(session, url, bodies[plan.seed], record)

        warm_up = [*texts[:_STREAMS], pictures[0]]  # all at once: steps of so many rows are captured
        for record in await run_closed_loop(warm_up, len(warm_up), send, lambda _: None):
            if record.error is not None:
                raise BenchError(f"a first request failed: {record.error}")
        plan = StallPlan(num_streams=_STREAMS, phase_s=count * _PICTURE_S, interval_s=_PICTURE_S, fresh=tuple(pictures[1:]))
        run = await run_stall(plan, lambda number: texts[number % len(texts)], send, lambda _: None)
        if errors := {record.error for record in run.fresh if record.error}:
            raise BenchError(f"pictures failed: {'; '.join(errors)}")
        return summarise_stall(run)


def _mps(run: OwnRun, options: argparse.Namespace) -> Iterator[Figure]:
    if options.device == "cpu" or shutil.which(MPS_CONTROL) is None:
        why = "the service is for CUDA" if options.device == "cpu" else f"there is no {MPS_CONTROL}"
        yield Figure(section="mps", case="pictures beside streams", note=why, in_time=False)
        return
    end(run)
    with multi_process_service() as environment:
        served = OwnRun(run.home, run.run, environment)
        try:
            yield from _stall("mps", "E+P+D", served, options)
        finally:
            end(served)


def _transformers(run: OwnRun, options: argparse.Namespace) -> Iterator[Figure]:
    """Pictures with text: all at once here, one after the other there, and one by one in both. Raises: BenchError."""
    need_extra("reference", "transformers")
    model = checkpoint_of(run, options)
    plans = _plans("image", max(4, options.requests // 4), 40, _TOKENS_BESIDE)
    shapes = MediaShapes()
    with serving(run, model, options.device) as (url, _):
        alone = measure_server(url, plans[:1], shapes)
        few = [msgspec.structs.replace(plan, seed=f"first/{plan.seed}", max_tokens=8) for plan in plans]
        measure_server(url, few, shapes)  # graphs of these batch sizes
        together = measure_server(url, plans, shapes)
    end(run)
    dtype = load_model_config(model).dtype
    asked = [msgspec.structs.replace(plan, max_tokens=count) for plan in plans[:2] for count in (1, _TOKENS_BESIDE)]
    there = answers_of_transformers(model, dtype, asked, shapes, options.device)
    if options.device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()  # later runs need the memory
    first_s, whole_s = (statistics.mean(seconds for _, seconds in there[start::2]) for start in (0, 1))
    assert alone.ttft is not None and together.ttft is not None
    yield from _one_request("one request", alone.num_tokens, alone.duration_s, alone.ttft.p50)
    yield from _one_request("one request, transformers", _TOKENS_BESIDE, whole_s, first_s)
    made = partial(Figure, section="transformers")
    note = f"{together.tokens_per_s * whole_s / _TOKENS_BESIDE:.3g} times transformers, one by one"
    yield made(case=f"{len(plans)} requests at once: throughput", value=together.tokens_per_s, unit="tokens/s", note=note)
    yield made(case=f"{len(plans)} requests at once: TTFT", value=1e3 * together.ttft.p50, unit="ms")


def _one_request(case: str, num_tokens: int, whole_s: float, first_s: float) -> Iterator[Figure]:
    """From the time of an answer and that of its first token."""
    made = partial(Figure, section="transformers")
    yield made(case=f"{case}: throughput", value=num_tokens / whole_s, unit="tokens/s")
    yield made(case=f"{case}: TTFT", value=1e3 * first_s, unit="ms", note="preparing the picture included")
    yield made(case=f"{case}: TBT", value=1e3 * (whole_s - first_s) / max(1, num_tokens - 1), unit="ms", note="the mean")


SECTIONS: dict[str, Callable[[OwnRun, argparse.Namespace], Iterator[Figure]]] = {
    "load": _load,
    "stall": partial(_stall, "stall", "E+P+D"),
    "mps": _mps,
    "together": partial(_stall, "together", "EPD"),
    "restart": _restart,
    "transformers": _transformers,
    "answers": _answers,
}


def _plans(media: Modality, count: int, num_input_tokens: int, max_tokens: int) -> list[RequestPlan]:
    lengths = Lengths(input_low=num_input_tokens, input_high=num_input_tokens, max_tokens=max_tokens)
    return plan_steady({"text": 1.0} if media == "text" else {"text": 1.0, media: 1.0}, count, lengths, seed=0)


async def _first(url: str, plans: Sequence[RequestPlan]) -> float:
    """Seconds that one answer took. Raises: BenchError if there was none."""
    (record,) = await send_all(url, plans, MediaShapes(), 1)
    if record.error is not None:
        raise BenchError(f"a first request failed: {record.error}")
    return record.e2e_s


async def _ask_all(url: str, plans: Sequence[RequestPlan]) -> list[str]:
    """The greedy texts, one after another. Raises: BenchError."""
    async with open_session(TIMEOUT_S) as session:
        model = await find_model(session, url)
        return [await _ask(session, url, json.loads(make_body(plan, MediaShapes(), Calibration(), model))) for plan in plans]


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> str:
    del body["stream_options"]
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body | {"stream": False}) as response:
            answer = await response.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BenchError(f"no answer from {url}: {error}") from None
    if response.status != 200:
        raise BenchError(f"HTTP {response.status}: {answer}")
    text: str = answer["choices"][0]["message"]["content"]
    return text


def _kill(table: ActorTable, actor: str) -> float:
    """Seconds from SIGKILL until another process serves. Raises: BenchError after a minute."""
    before = table.read(actor).pid
    start_s = time.monotonic()
    os.kill(before, signal.SIGKILL)
    while (now := table.read(actor)).pid == before or now.state is not ActorState.ACTIVE:
        if time.monotonic() > start_s + 60.0:
            raise BenchError(f"{actor} has not come back within 60 s")
        time.sleep(_POLL_S)
    return time.monotonic() - start_s
