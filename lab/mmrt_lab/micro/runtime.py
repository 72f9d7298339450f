"""``mmrt bench runtime``: the cost of the runtime itself, with a model that computes nothing.

Starts a run with the null model through the command line and lets many text streams run: tokens per second through decode,
detokenizer and gateway, tokens per chunk, the host cost of a decode step, and who used the processors. One measurement per step
time: with 0 decode runs as fast as it can and its consumers are the limit; with a real one the host cost of a step is isolated.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, run_bench
from mmrt.bench.own_run import OwnRun, OwnRunError, own_run, processes_of
from mmrt.bench.render import show_table, show_targets
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.record import Record
from mmrt.bench.serve.report import Distribution, distribution
from mmrt.bench.serve.workload import Calibration, Lengths, MediaShapes, make_body, plan_steady
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import MemorySection, ModelSection, ServerSection
from mmrt.runtime.supervisor.processes import cpu_seconds
from mmrt.runtime.supervisor.run_report import RunReport
from mmrt.shm.errors import ShmError
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.status import ActorTable

from .raw_client import RawStream, open_streams

TOKENS_TARGET_PER_S = 20_000
HOST_TARGET_S = 0.3e-3
_SAMPLE_S = 0.05
_PROMPT_TOKENS = 32
_KV_SPARE_TOKENS = 256
_START_TIMEOUT_S = 60.0
_STREAM_TIMEOUT_S = 600.0


class Sample(msgspec.Struct, frozen=True):
    """One look at decode's status words and the processor time of every process, all in seconds."""

    time_s: float
    steps: int
    busy_s: float
    cpu_s: dict[str, float]


class RuntimeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Of the window in which all streams ran. Host costs are seconds per decode step, the step time itself taken off.

    ``host_s``: inside the step as decode counts it; ``loop_s``: of the whole loop by the wall clock, waiting for a processor
    included; ``cpu_s``: processor time of the decode process. ``tokens_per_s`` is what arrived at the clients in the window.
    """

    step_ms: float
    num_streams: int
    num_failed: int
    window_s: float
    tokens_per_s: float
    tokens_per_chunk: float
    steps_per_s: float
    host_s: float
    loop_s: float
    cpu_s: float
    cpu_share: dict[str, float]  # of one processor, by process; "client" is this bench
    gap: Distribution | None  # between chunks of a stream


class RuntimeBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    results: list[RuntimeResult]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when a stream failed or nothing could be measured."""
    about = "What the runtime itself costs, with a model that computes nothing."
    parser = argparse.ArgumentParser(prog="mmrt bench runtime", description=about)
    add = parser.add_argument
    add("--streams", type=int, default=64)
    add("--tokens", type=int, default=5000, help="per stream, at step time 0 (%(default)s)")
    add("--seconds", type=float, default=4.0, help="to run with a step time above 0 (%(default)s)")
    add("--step-ms", type=float, nargs="+", default=[0.0, 10.0], help="step times of the null model (0 10)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.streams < 1 or options.tokens < 1 or min(options.step_ms) < 0:
        parser.error("--streams and --tokens must be at least 1, --step-ms at least 0")
    errors = BenchError, OwnRunError, ShmError, OSError
    bench = run_bench("runtime", options.json, errors, lambda _: measure_all(options), show)
    return 1 if bench is None or any(result.num_failed for result in bench.results) else 0


def measure_all(options: argparse.Namespace) -> RuntimeBench:
    """One run for each step time. Raises: BenchError, OwnRunError, ShmError, OSError."""
    environment = read_environment()
    results = []
    with own_run() as run:
        for step_ms in options.step_ms:
            tokens = options.tokens if step_ms == 0 else max(50, round(options.seconds * 1000 / step_ms))
            results.append(measure(run, step_ms, options.streams, tokens))
    return RuntimeBench(environment=environment, results=results)


def measure(run: OwnRun, step_ms: float, num_streams: int, num_tokens: int) -> RuntimeResult:
    """Start the null model, stream, and stop it again. Raises: BenchError, OwnRunError, ShmError."""
    checkpoint = make_null_checkpoint(run.home / f"null-{step_ms:g}", step_ms)
    kv_tokens = num_streams * (num_tokens + _PROMPT_TOKENS + _KV_SPARE_TOKENS)
    run.up(
        RuntimeConfig(
            model=ModelSection(path=str(checkpoint), name="null"),
            server=ServerSection(port=0),
            memory=MemorySection(max_sequences=num_streams, kv_tokens=kv_tokens),
        )
    )
    try:
        report = run.report()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            streams, samples = runner.run(_stream(run.run, report, make_bodies(num_streams, num_tokens)))
    finally:
        run.down()
    records = [stream.record(index) for index, stream in enumerate(streams)]
    return evaluate(records, samples, step_ms)


def make_null_checkpoint(path: Path, step_ms: float) -> Path:
    """A checkpoint of the null family with this step time. Raises: OSError."""
    make_checkpoint("tiny", path, family="null")
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "step_ms": step_ms}))
    return path


def make_bodies(num_streams: int, num_tokens: int) -> list[bytes]:
    """Text requests that all end after exactly ``num_tokens``."""
    lengths = Lengths(input_low=_PROMPT_TOKENS, input_high=_PROMPT_TOKENS, max_tokens=num_tokens)
    plans = plan_steady({"text": 1.0}, num_streams, lengths, 0)
    return [make_body(plan, MediaShapes(), Calibration(tokens_per_word=2.0), "null") for plan in plans]


async def _stream(path: Path, report: RunReport, bodies: list[bytes]) -> tuple[list[RawStream], list[Sample]]:
    """Run all streams to their end, looking at the run every few ms."""
    with RunDirectory.attach(path) as run:
        probe = _Probe(ActorTable.attach(run, writable=False), report)
        warm = await open_streams(report.endpoint, bodies[:1])
        await _wait_for_first_tokens(warm)
        warm[0].abort()
        streams = await open_streams(report.endpoint, bodies)
        samples = []
        deadline_s = time.monotonic() + _STREAM_TIMEOUT_S
        while not all(stream.finished.done() for stream in streams):
            if time.monotonic() > deadline_s:
                raise BenchError(f"the streams did not end within {_STREAM_TIMEOUT_S:g} s")
            samples.append(probe.look())
            await asyncio.sleep(_SAMPLE_S)
        samples.append(probe.look())
        probe.close()
    return streams, samples


async def _wait_for_first_tokens(streams: Sequence[RawStream]) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while not all(stream.has_begun for stream in streams):
        if any(stream.finished.done() for stream in streams) or time.monotonic() > deadline_s:
            raise BenchError(f"a first request failed: {streams[0].record(0).error}")
        await asyncio.sleep(_SAMPLE_S)


class _Probe:
    """Reads the status words and /proc."""

    def __init__(self, table: ActorTable, report: RunReport) -> None:
        self._table = table
        self._pids = processes_of(report)

    def look(self) -> Sample:
        decode = self._table.read("decode")
        cpu_s: dict[str, float] = {"client": time.process_time()}
        for pid, name in self._pids.items():
            cpu_s[name] = cpu_s.get(name, 0.0) + (cpu_seconds(pid) or 0.0)
        return Sample(time.monotonic(), decode.steps, decode.busy_ns / 1e9, cpu_s)

    def close(self) -> None:
        self._table.close()


def evaluate(records: Sequence[Record], samples: Sequence[Sample], step_ms: float) -> RuntimeResult:
    """The figures of the window from the last stream's first token to the first stream's last one.

    Raises: BenchError when it is empty.
    """
    good = [record for record in records if record.is_success and record.chunks]
    if not good:
        raise BenchError(f"no stream went well; the first failed with: {records[0].error}")
    start_s = max(record.chunks[0].time_s for record in good)
    end_s = min(record.chunks[-1].time_s for record in good)
    inside = [sample for sample in samples if start_s <= sample.time_s <= end_s]
    if len(inside) < 2 or inside[-1].steps == inside[0].steps:
        raise BenchError(f"the streams ran together for {max(0.0, end_s - start_s):.2f} s only: ask for more tokens")
    first, last = inside[0], inside[-1]
    window_s, steps = last.time_s - first.time_s, last.steps - first.steps
    chunks = [chunk for record in good for chunk in record.chunks if first.time_s < chunk.time_s <= last.time_s]
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    shares = {name: (used_s - first.cpu_s.get(name, 0.0)) / window_s for name, used_s in last.cpu_s.items()}
    return RuntimeResult(
        step_ms=step_ms,
        num_streams=len(records),
        num_failed=len(records) - len(good),
        window_s=window_s,
        tokens_per_s=num_tokens / window_s,
        tokens_per_chunk=num_tokens / max(1, len(chunks)),
        steps_per_s=steps / window_s,
        host_s=(last.busy_s - first.busy_s) / steps - step_ms / 1000,
        loop_s=window_s / steps - step_ms / 1000,
        cpu_s=shares["decode"] * window_s / steps,
        cpu_share=shares,
        gap=distribution(gap_s for record in good for time_s, gap_s in record.timed_gaps() if first.time_s < time_s <= last.time_s),
    )


def show(console: Console, bench: RuntimeBench) -> None:
    """The table, and what was to be reached."""
    figures: list[tuple[str, Callable[[RuntimeResult], str]]] = [
        ("streams", lambda result: str(result.num_streams)),
        ("window, s", lambda result: f"{result.window_s:.1f}"),
        ("tokens/s at the clients", lambda result: f"{result.tokens_per_s:.0f}"),
        ("tokens per chunk", lambda result: f"{result.tokens_per_chunk:.2f}"),
        ("decode steps/s", lambda result: f"{result.steps_per_s:.0f}"),
        ("host time of a step, ms", lambda result: f"{result.host_s * 1000:.3f}"),
        ("host time of the whole loop, ms", lambda result: f"{result.loop_s * 1000:.3f}"),
        ("processor time of the loop, ms", lambda result: f"{result.cpu_s * 1000:.3f}"),
        ("gap between chunks P50, ms", lambda result: f"{result.gap.p50 * 1000:.1f}" if result.gap else ""),
        ("gap between chunks P99, ms", lambda result: f"{result.gap.p99 * 1000:.1f}" if result.gap else ""),
    ]
    columns = ["step time", *(f"{result.step_ms:g} ms" for result in bench.results)]
    show_table(console, "null model", columns, [[name, *map(figure, bench.results)] for name, figure in figures])
    names = sorted({name for result in bench.results for name in result.cpu_share})
    rows = [[name, *(f"{result.cpu_share.get(name, 0):.0%}" for result in bench.results)] for name in names]
    show_table(console, "share of one processor", columns, rows)
    tokens_per_s = max(result.tokens_per_s for result in bench.results)
    cpu_s = min(result.cpu_s for result in bench.results)
    tokens = f"tokens/s: {tokens_per_s:.0f}, target {TOKENS_TARGET_PER_S}"
    host = f"decode loop CPU per step: {cpu_s * 1000:.3f} ms, target {HOST_TARGET_S * 1000:g} ms"
    show_targets(console, {tokens: tokens_per_s >= TOKENS_TARGET_PER_S, host: cpu_s <= HOST_TARGET_S})
