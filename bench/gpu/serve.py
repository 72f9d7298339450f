"""``python -m mmrt.bench.gpu.serve``: whole runs on this machine's GPU, through HTTP: the same answers, how fast, and how soon again.

Three sections, with runs of their own over checkpoints of random weights that are made on the spot: ``answers`` compares a small
model's greedy text with that of a run on the CPU, both in float32; ``load`` times a model of real size; ``restart`` kills its actors.
Needs all that mmrt needs, where the kernels' bench needs torch and Triton alone. Not part of that bench's eight minutes.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import torch

from ...runtime.config import (
    ActorSection,
    ActorsSection,
    MemorySection,
    ModelSection,
    RuntimeConfig,
    SchedulingSection,
    ServerSection,
    SupervisorSection,
)
from ...shm.run_directory import RunDirectory
from ...shm.status import ActorState, ActorTable
from ..client import BenchError, find_model, open_session, stream_chat
from ..drivers import run_closed_loop
from ..environment import Environment, read_environment
from ..output import JSON_HELP, open_console, write_json
from ..own_run import OwnRun, OwnRunError, own_run
from ..record import Record
from ..render import show_environment
from ..report import summarise_groups
from ..workload import Calibration, Lengths, MediaShapes, Modality, RequestPlan, make_body, plan_steady
from .report import format_table

RESTART_TARGET_S = 3.0
COLUMNS = ("", "", "target", "", "")
_TIMEOUT_S = 600.0
_POLL_S = 0.005
_STEERED = SchedulingSection()
_UNCUT = SchedulingSection(prefill_budget_tokens=4096)  # a prompt is one chunk: cut elsewhere, its bf16 sums round differently
_LOADS: tuple[tuple[Modality, int], ...] = (("text", 1), ("text", 32), ("image", 32))  # requests at a time


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a section, or why there is none. ``target``: at most, in seconds; at least, of a share."""

    section: str
    case: str
    value: float | None = None
    unit: str = ""
    target: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "FAILED"
        if self.target is None:
            return ""
        return "reached" if (self.value <= self.target if self.unit == "s" else self.value >= self.target) else "MISSED"

    def cells(self) -> list[str]:
        value = "" if self.value is None else f"{self.value:,.4g} {self.unit}"
        target = "" if self.target is None else f"{self.target:g}"
        return [f"{self.section}: {self.case}", value, target, self.verdict, self.note]


class ServeBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    device: str
    shape: str
    figures: list[Figure]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 where a section failed, an answer differs, or there is no such device."""
    options = _parse(argv)
    if options.device != "cpu" and not torch.cuda.is_available():
        skipped = ", ".join(options.sections)
        print(f"error: {skipped} cannot run on {options.device}: torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return 1
    console = open_console(options.json)
    figures: list[Figure] = []
    with own_run() as run:
        for section in options.sections:
            print(section, file=sys.stderr, flush=True)
            try:
                figures += SECTIONS[section](run, options)
            except (OwnRunError, BenchError, OSError) as error:
                figures.append(Figure(section=section, case=section, note=str(error)))
    bench = ServeBench(environment=read_environment(), device=_device_name(options.device), shape=options.shape, figures=figures)
    show_environment(console, bench.environment)
    table = format_table(f"{bench.shape} on {bench.device}", COLUMNS, [figure.cells() for figure in figures])
    print(table, file=console.file)
    write_json(options.json, bench)
    return 1 if any(figure.value is None or figure.unit == "of 1" and figure.verdict == "MISSED" for figure in figures) else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mmrt.bench.gpu.serve", description="Whole runs of mmrt on a GPU, through HTTP.")
    add = parser.add_argument
    add("--device", default="cuda", help="cuda, cuda:N; cpu tries the bench itself (%(default)s)")
    add("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    add("--shape", choices=("tiny", "small", "3b", "7b"), default="3b", help="of the model that is timed; 7b: 17 GB (%(default)s)")
    add("--model", type=Path, metavar="DIR", help="a checkpoint that is there already, instead")
    add("--requests", type=int, default=64, help="of each load (%(default)s)")
    add("--trials", type=int, default=3, help="kills of each actor (%(default)s)")
    add("--quick", action="store_true", help="few requests and one kill of each actor")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.quick:
        options.requests, options.trials = min(options.requests, 8), 1
    if options.requests < 1 or options.trials < 1:
        parser.error("--requests and --trials must be at least 1")
    return options


def _device_name(device: str) -> str:
    return "cpu" if device == "cpu" else f"{device}, {torch.cuda.get_device_name(device)}"


def _answers(run: OwnRun, options: argparse.Namespace) -> list[Figure]:
    """Text, and a picture with text, on the CPU and on the device."""
    model = _made(run, "tiny" if options.shape == "tiny" else "small")
    plans = [*_plans("text", 12, 200, 48), *_plans("image", 4, 40, 48)]
    said = []
    for device in ("cpu", options.device):
        with _up(run, model, device, "float32") as (url, _):
            said.append(asyncio.run(_ask_all(url, plans)))
    share = statistics.mean(ours == theirs for theirs, ours in zip(*said, strict=True))
    note = f"{len(plans)} greedy answers in float32 as on the CPU"
    return [Figure(section="answers", case="equal", value=share, unit="of 1", target=1.0, note=note)]


def _load(run: OwnRun, options: argparse.Namespace) -> list[Figure]:
    """One request at a time, then many: of text, and with pictures."""
    model = _checkpoint(run, options)
    figures = []
    with _up(run, model, options.device) as (url, ready_s):
        figures.append(Figure(section="load", case="mmrt up until it is ready", value=ready_s, unit="s"))
        for media in dict.fromkeys(media for media, _ in _LOADS):
            first_s = asyncio.run(_first(url, _plans(media, 1, 200, 4)))
            figures.append(Figure(section="load", case=f"first answer with {media}", value=first_s, unit="s", note="compiles"))
        for media, concurrency in _LOADS:
            count = options.requests if concurrency > 1 else max(1, options.requests // 8)
            asyncio.run(_drive(url, _plans(media, min(count, concurrency), 200, 16), concurrency))  # graphs of these batch sizes
            records = asyncio.run(_drive(url, _plans(media, count, 512, 128), concurrency))
            figures += _latencies(f"{media}, {concurrency} at a time", records)
    return figures


def _latencies(case: str, records: list[Record]) -> list[Figure]:
    everything = summarise_groups(records)[0]
    if everything.num_failed:
        errors = {record.error for record in records if record.error}
        return [Figure(section="load", case=case, note=f"{everything.num_failed} requests failed: {'; '.join(map(str, errors))}")]
    made = partial(Figure, section="load")
    figures = [made(case=f"{case}: throughput", value=everything.output_tokens_per_s, unit="tokens/s")]
    for name, times in (("TTFT", everything.ttft), ("TBT", everything.tbt)):
        if times is not None:
            figures.append(made(case=f"{case}: {name}", value=1e3 * times.p50, unit="ms", note=f"P99 {1e3 * times.p99:.1f} ms"))
    return figures


def _restart(run: OwnRun, options: argparse.Namespace) -> list[Figure]:
    """Kill -9 an idle actor: until another is ready, until it answers, and whether it says the same."""
    model = _checkpoint(run, options)
    figures = []
    with _up(run, model, options.device, scheduling=_UNCUT) as (url, _), RunDirectory.attach(run.run) as directory:
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
                target_s = None if actor == "encoder" else RESTART_TARGET_S
                note = f"worst {max(ready_s):.2f} s of {options.trials}"
                figures += [
                    made(case=f"{actor} ready again", value=statistics.median(ready_s), unit="s", target=target_s, note=note),
                    made(case=f"{actor}: an answer", value=statistics.median(answered_s), unit="s", note="from the kill on"),
                    made(case=f"{actor}: the same answer", value=statistics.mean(same), unit="of 1", target=1.0),
                ]
    return figures


SECTIONS: dict[str, Callable[[OwnRun, argparse.Namespace], list[Figure]]] = {"answers": _answers, "load": _load, "restart": _restart}


def _checkpoint(run: OwnRun, options: argparse.Namespace) -> Path:
    path: Path | None = options.model
    return _made(run, options.shape) if path is None else path.absolute()


def _made(run: OwnRun, shape: str) -> Path:
    """A checkpoint of this shape, made when it is first asked for."""
    path = run.home / shape
    if not path.exists():
        run.command("model", "make", shape, str(path))
    return path


@contextmanager
def _up(
    run: OwnRun, model: Path, device: str, dtype: str = "auto", scheduling: SchedulingSection = _STEERED
) -> Iterator[tuple[str, float]]:
    """(where it answers, seconds until it was ready). Every death counts as a first one."""
    threads = ActorSection(threads=max(1, (os.cpu_count() or 1) // 4))
    config = RuntimeConfig(
        model=ModelSection(path=str(model), device=device, dtype="float32" if dtype == "float32" else "auto"),
        memory=MemorySection(max_sequences=64, kv_tokens=16384 if device == "cpu" else 131072),
        server=ServerSection(port=0),
        scheduling=scheduling,
        actors=ActorsSection(decode=threads) if device == "cpu" else ActorsSection(),
        supervisor=SupervisorSection(restart_limit=1 << 30, backoff_s=0.05, backoff_max_s=0.05, ready_timeout_s=_TIMEOUT_S),
    )
    ready_s = run.up(config)
    try:
        yield run.report().endpoint, ready_s
    finally:
        run.down()


def _plans(media: Modality, count: int, num_input_tokens: int, max_tokens: int) -> list[RequestPlan]:
    lengths = Lengths(input_low=num_input_tokens, input_high=num_input_tokens, max_tokens=max_tokens)
    return plan_steady({"text": 1.0} if media == "text" else {"text": 1.0, media: 1.0}, count, lengths, seed=0)


def _body(plan: RequestPlan, model: str) -> bytes:
    return make_body(plan, MediaShapes(), Calibration(), model)


async def _drive(url: str, plans: Sequence[RequestPlan], concurrency: int) -> list[Record]:
    async with open_session(_TIMEOUT_S) as session:
        model = await find_model(session, url)
        bodies = {plan.index: _body(plan, model) for plan in plans}

        async def send(plan: RequestPlan, record: Record) -> None:
            await stream_chat(session, url, bodies[plan.index], record)

        return await run_closed_loop(plans, concurrency, send, lambda record: None)


async def _first(url: str, plans: Sequence[RequestPlan]) -> float:
    """Seconds that one answer took. Raises: BenchError if there was none."""
    (record,) = await _drive(url, plans, 1)
    if record.error is not None:
        raise BenchError(f"a first request failed: {record.error}")
    return record.e2e_s


async def _ask_all(url: str, plans: Sequence[RequestPlan]) -> list[str]:
    """The greedy texts, one after another. Raises: BenchError."""
    async with open_session(_TIMEOUT_S) as session:
        model = await find_model(session, url)
        return [await _ask(session, url, json.loads(_body(plan, model))) for plan in plans]


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


if __name__ == "__main__":
    sys.exit(main())
