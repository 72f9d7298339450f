"""``mmrt bench burst``: many requests at once beside streams under way, with a model that computes nothing.

Starts runs with the null model, lets some streams run in each, and sends all other requests at one moment, from a process of its own.
What a client sees is measured: when first texts come, how long the streams under way are silent, tokens per second; and what a request
costs each process, beyond what the streams cost it before. With ``--beside`` a second installation of mmrt is measured in turns, and
with ``--rate`` requests come one after the other. Without streams (``--streams 0``) processor time holds nothing but the requests.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import uvloop
from rich.console import Console

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, progress, run_bench
from mmrt.bench.own_run import OwnRun, OwnRunError, own_run, processes_of
from mmrt.bench.render import show_table
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.record import Record
from mmrt.bench.serve.report import percentile
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import MemorySection, ModelSection, ServerSection
from mmrt.runtime.supervisor.processes import cpu_seconds

from .raw_client import RawStream, open_streams
from .runtime import make_bodies, make_null_checkpoint

_CALM_S = 2.0  # of the streams alone, before the burst
_SETTLE_S = 0.5
_TIMEOUT_S = 120.0
_PROMPT_TOKENS = 32


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """One burst. Seconds; ``silent_s``: the longest time without a chunk of any one stream under way; ``calm_s``: as much before the
    burst. ``tokens_per_s``: of all, until the last answer of the burst. ``cost_s``: processor time per request, by process."""

    state: str
    num_failed: int
    ttft_p50_s: float
    ttft_p99_s: float
    silent_s: float
    calm_s: float
    tokens_per_s: float
    load: float
    cost_s: dict[str, float]


class BurstBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    num_requests: int
    num_streams: int
    rate: float
    bursts: list[Burst]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when a request failed or nothing could be measured."""
    parser = argparse.ArgumentParser(prog="mmrt bench burst", description="Many requests at once beside streams under way.")
    add = parser.add_argument
    add("--requests", type=int, default=1000, help="at once (%(default)s)")
    add(
        "--rate",
        type=float,
        default=0.0,
        help="requests per second, whether or not others have been answered; 0: at once (%(default)s)",
    )
    add("--streams", type=int, default=32, help="under way; with 0 processor time is steadiest (%(default)s)")
    add("--tokens", type=int, default=16, help="of each request (%(default)s)")
    add("--step-ms", type=float, default=10.0, help="step time of the null model (%(default)s)")
    add("--rounds", type=int, default=3, help="bursts of each state, in turns (%(default)s)")
    add("--beside", type=Path, metavar="PYTHON", help="of an environment with another mmrt")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if min(options.requests, options.tokens, options.rounds) < 1 or min(options.step_ms, options.rate, options.streams) < 0:
        parser.error("--requests, --tokens and --rounds must be at least 1, --step-ms, --rate and --streams at least 0")
    bench = run_bench("burst", options.json, (BenchError, OwnRunError, OSError), lambda console: measure(console, options), show)
    return 1 if bench is None or any(burst.num_failed for burst in bench.bursts) else 0


def measure(console: Console, options: argparse.Namespace) -> BurstBench:
    """Everything. Raises: BenchError, OwnRunError, OSError."""
    environment, bursts = read_environment(), list[Burst]()
    states = {"this": sys.executable, **({"beside": str(options.beside)} if options.beside else {})}
    context = multiprocessing.get_context("spawn")
    with progress(console) as tell, ProcessPoolExecutor(1, mp_context=context) as senders, own_run() as run:
        config = _config(run, options)
        for number in range(options.rounds):
            for state, python in list(states.items())[:: -1 if number % 2 else 1]:
                tell(f"round {number + 1} of {options.rounds}: {state}")
                run.python = python
                run.up(config)
                try:
                    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                        bursts.append(runner.run(_burst(run, state, options, senders)))
                finally:
                    run.down()
    sizes = {"num_requests": options.requests, "num_streams": options.streams}
    return BurstBench(environment=environment, rate=options.rate, bursts=bursts, **sizes)


def _config(run: OwnRun, options: argparse.Namespace) -> RuntimeConfig:
    checkpoint = make_null_checkpoint(run.home / "null", options.step_ms)
    rows = options.requests + options.streams
    memory = MemorySection(max_sequences=rows, kv_tokens=options.requests * (options.tokens + 64) + options.streams * 32768)
    return RuntimeConfig(model=ModelSection(path=str(checkpoint), name="null"), server=ServerSection(port=0), memory=memory)


async def _burst(run: OwnRun, state: str, options: argparse.Namespace, senders: ProcessPoolExecutor) -> Burst:
    report = run.report()
    processes = processes_of(report)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(senders, os.getpid)  # its start takes processor time
    await _ended(await open_streams(report.endpoint, make_bodies(1, 1)))
    streams = await open_streams(report.endpoint, make_bodies(options.streams, 30_000))
    await asyncio.sleep(_SETTLE_S)
    calm = _Used.read(processes)
    await asyncio.sleep(_CALM_S)
    began = _Used.read(processes)
    body = make_bodies(1, options.tokens)[0]
    records = await loop.run_in_executor(senders, send, report.endpoint, body, options.requests, options.rate)
    load = os.getloadavg()[0]
    ended = _Used.read(processes)
    for stream in streams:
        stream.abort()
    good = [record for record in records if record.is_success]
    if not good or not all(stream.has_begun for stream in streams):
        raise BenchError(f"no request went well; the first: {records[0].error}")
    last_s = max(record.end_s for record in good)
    running = [stream.record(0) for stream in streams]
    ttfts = sorted(record.ttft_s or 0.0 for record in good)
    return Burst(
        state=state,
        num_failed=len(records) - len(good),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        silent_s=_longest(running, began.time_s, last_s),
        calm_s=_longest(running, calm.time_s, began.time_s),
        tokens_per_s=sum(_tokens(record, began.time_s, last_s) for record in [*good, *running]) / (last_s - began.time_s),
        load=load,
        cost_s=_costs(calm, began, ended, options.requests),
    )


def send(url: str, body: bytes, number: int, rate: float) -> list[Record]:
    """Send so many requests, ``rate`` each second (0: at once), and return their records. Runs in a process of its own."""

    async def one(delay_s: float) -> list[RawStream]:
        await asyncio.sleep(delay_s)
        return await open_streams(url, [body])

    async def all_of_them() -> list[Record]:
        delays_s = [index / rate if rate else 0.0 for index in range(number)]
        streams = [stream for some in await asyncio.gather(*map(one, delays_s)) for stream in some]
        await _ended(streams)
        return [stream.record(index) for index, stream in enumerate(streams)]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(all_of_them())


async def _ended(streams: Sequence[RawStream]) -> None:
    _, late = await asyncio.wait([stream.finished for stream in streams], timeout=_TIMEOUT_S)
    if late:
        raise BenchError(f"{len(late)} of {len(streams)} requests were not answered within {_TIMEOUT_S:g} s")


class _Used(NamedTuple):
    """Processor time that processes have used up to a moment."""

    time_s: float
    by_name: dict[str, float]

    @classmethod
    def read(cls, processes: dict[int, str]) -> Self:
        used: dict[str, float] = {}
        for pid, name in processes.items():
            used[name] = used.get(name, 0.0) + (cpu_seconds(pid) or 0.0)
        return cls(time.monotonic(), used)


def _costs(calm: _Used, began: _Used, ended: _Used, number: int) -> dict[str, float]:
    """Return what was used from ``began`` to ``ended``, beyond what ``calm`` to ``began`` leads to expect; per request."""
    costs = {}
    for name, used_s in ended.by_name.items():
        before_s = (began.by_name[name] - calm.by_name[name]) / (began.time_s - calm.time_s) * (ended.time_s - began.time_s)
        costs[name] = (used_s - began.by_name[name] - before_s) / number
    return costs


def _longest(records: Sequence[Record], start_s: float, end_s: float) -> float:
    """Return the longest time between two chunks of a stream within these times, a time that is not over included."""
    longest = 0.0  # of no stream
    for record in records:
        times = [start_s, *(chunk.time_s for chunk in record.chunks if start_s < chunk.time_s < end_s), end_s]
        longest = max(longest, *(after - before for before, after in zip(times, times[1:], strict=False)))
    return longest


def _tokens(record: Record, start_s: float, end_s: float) -> int:
    return sum(chunk.num_tokens for chunk in record.chunks if start_s < chunk.time_s <= end_s)


def show(console: Console, bench: BurstBench) -> None:
    """The tables: of each state the median of its bursts, and the worst silence."""
    states = list(dict.fromkeys(burst.state for burst in bench.bursts))
    of = {state: [burst for burst in bench.bursts if burst.state == state] for state in states}

    def line(name: str, figure: Callable[[Burst], float], unit: float = 1000.0, digits: int = 0) -> list[str]:
        return [name, *(", ".join(f"{figure(burst) * unit:.{digits}f}" for burst in of[state]) for state in states)]

    rows = [
        line("TTFT P50, ms", lambda burst: burst.ttft_p50_s),
        line("TTFT P99, ms", lambda burst: burst.ttft_p99_s),
        line("longest silence of a stream, ms", lambda burst: burst.silent_s),
        line("the same before, ms", lambda burst: burst.calm_s),
        line("tokens/s", lambda burst: burst.tokens_per_s, 1.0),
        line("load average", lambda burst: burst.load, 1.0, 1),
    ]
    title = f"{bench.num_requests} requests {f'at {bench.rate:g}/s' if bench.rate else 'at once'} beside {bench.num_streams} streams"
    show_table(console, title, ["each burst", *states], rows)
    names = sorted({name for burst in bench.bursts for name in burst.cost_s})
    costs = [[name, *(_median_and_spread(of[state], name) for state in states)] for name in names]
    show_table(console, "processor time of a request", ["ms: median (least to most)", *states], costs)


def _median_and_spread(bursts: Sequence[Burst], name: str) -> str:
    costs_ms = [burst.cost_s.get(name, 0.0) * 1000 for burst in bursts]
    return f"{statistics.median(costs_ms):.2f} ({min(costs_ms):.2f} to {max(costs_ms):.2f})"
