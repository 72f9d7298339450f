"""``mmrt bench bus``: latency and throughput of our bus, ring and pools beside plain ZeroMQ, multiprocessing.Queue and memcpy.

All in one run, taking turns round by round, so that whatever else the machine does falls on all of them alike; figures are medians
over rounds, ratios medians of ratios within a round. Every peer is a real process.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from ...shm.errors import ShmError
from ...shm.run_directory import RunDirectory
from ..environment import Environment, read_environment
from ..output import JSON_HELP, open_console, write_json
from ..render import show_environment, show_table
from ..serve.report import Distribution, distribution
from .bus_latency import LATENCIES, MESSAGE_BYTES, Latency, PeerError
from .bus_throughput import BULKS, RATES, Memcpy, Payloads, Throughput

LATENCY_TARGET_S = 100e-6  # descriptor one-way, P50, between asyncio processes
BULK_TARGET_RATIO = 0.9  # of memcpy, from BULK_TARGET_BYTES on
BULK_TARGET_BYTES = 1 << 20
_WARMUP_PINGS = 20


class LatencyResult(msgspec.Struct, frozen=True, kw_only=True):
    """One-way seconds, all rounds together: ping after ping, and after a gap in which the receiver went to sleep."""

    name: str
    wakes_loop: bool
    hot: Distribution
    after_gap: Distribution


class ThroughputResult(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over rounds. ``ratio``: to memcpy, in the same round; None for message rates.

    ``best_ratio`` is of the fastest rounds, which other work on the machine disturbs least.
    """

    name: str
    num_bytes: int
    messages_per_s: float
    bytes_per_s: float
    ratio: float | None
    best_ratio: float | None


class BusReport(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    rounds: int
    gap_s: float
    latency: list[LatencyResult]
    rate: list[ThroughputResult]
    bulk: list[ThroughputResult]
    targets: dict[str, bool]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, also when a target is missed: it is a measurement, not a test."""
    parser = argparse.ArgumentParser(
        prog="mmrt bench bus", description="Bus, ring and pools beside ZeroMQ, multiprocessing.Queue and memcpy."
    )
    add = parser.add_argument
    add(
        "--sizes",
        type=_sizes,
        default=(1 << 16, 1 << 20, 8 << 20, 32 << 20),
        metavar="BYTES,…",
        help="of payloads; K and M are 2^10 and 2^20 (64K,1M,8M,32M)",
    )
    add("--rounds", type=_positive, default=7)
    add("--pings", type=_positive, default=300, help="per round and transport (%(default)s)")
    add("--gap-ms", type=float, default=3.0, help="pause before a ping in the second latency column (%(default)s)")
    add("--messages", type=_positive, default=3000, help=f"of {MESSAGE_BYTES} bytes, per round (%(default)s)")
    add("--megabytes", type=_positive, default=128, help="moved per round, size and transport (%(default)s)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    console = open_console(options.json)
    try:
        with _run_directory() as run:
            report = measure(run, options)
    except (ShmError, PeerError, OSError, TimeoutError) as error:
        print(f"mmrt bench bus: {error}", file=sys.stderr)
        return 1
    show(console, report)
    write_json(options.json, report)
    return 0


def measure(run: RunDirectory, options: argparse.Namespace) -> BusReport:
    """Everything. Raises: PeerError, ShmError, OSError."""
    environment = read_environment()
    latency = measure_latency(run, options.rounds, options.pings, options.gap_ms / 1000)
    rate = measure_throughput(run, RATES, MESSAGE_BYTES, options.rounds, options.messages)
    bulk = []
    for num_bytes in options.sizes:
        num_messages = max(4, (options.megabytes << 20) // num_bytes)
        bulk += measure_throughput(run, BULKS, num_bytes, options.rounds, min(num_messages, options.messages))
    return BusReport(
        environment=environment,
        rounds=options.rounds,
        gap_s=options.gap_ms / 1000,
        latency=latency,
        rate=rate,
        bulk=bulk,
        targets=judge(latency, bulk),
    )


def measure_latency(run: RunDirectory, rounds: int, num_pings: int, gap_s: float) -> list[LatencyResult]:
    """All transports, in turns."""
    with ExitStack() as stack:
        transports: list[Latency] = []
        for make in LATENCIES:
            transports.append(make(run))
            stack.callback(transports[-1].close)
        hot: dict[str, list[float]] = {transport.name: [] for transport in transports}
        after_gap: dict[str, list[float]] = {transport.name: [] for transport in transports}
        for transport in transports:
            transport.measure(min(_WARMUP_PINGS, num_pings), 0.0)
        for _ in range(rounds):
            for transport in transports:
                hot[transport.name] += transport.measure(num_pings, 0.0)
                after_gap[transport.name] += transport.measure(max(1, num_pings // 5), gap_s)
    results = []
    for transport in transports:
        quick, slow = distribution(hot[transport.name]), distribution(after_gap[transport.name])
        assert quick is not None and slow is not None
        results.append(LatencyResult(name=transport.name, wakes_loop=transport.wakes_loop, hot=quick, after_gap=slow))
    return results


def measure_throughput(
    run: RunDirectory,
    makes: Sequence[Callable[[RunDirectory, Payloads], Throughput]],
    num_bytes: int,
    rounds: int,
    num_messages: int,
) -> list[ThroughputResult]:
    """All transports with payloads of one size, in turns."""
    payloads = Payloads(num_bytes)
    seconds: dict[str, list[float]] = {}  # per message
    with _scratch(run) as directory, ExitStack() as stack:
        transports: list[Throughput] = []
        for make in makes:
            transports.append(make(directory, payloads))
            stack.callback(transports[-1].close)
        for transport in transports:
            transport.transfer(payloads, min(payloads.num_slots, num_messages))
        for _ in range(rounds):
            for transport in transports:
                count = max(2, round(num_messages * transport.share))
                start_s = time.perf_counter()
                transport.transfer(payloads, count)
                seconds.setdefault(transport.name, []).append((time.perf_counter() - start_s) / count)
    base = seconds.get(Memcpy.name)
    return [
        ThroughputResult(
            name=name,
            num_bytes=num_bytes,
            messages_per_s=1 / statistics.median(times),
            bytes_per_s=num_bytes / statistics.median(times),
            ratio=statistics.median(mine / own for mine, own in zip(base, times, strict=True)) if base else None,
            best_ratio=min(base) / min(times) if base else None,
        )
        for name, times in seconds.items()
    ]


def judge(latency: Sequence[LatencyResult], bulk: Sequence[ThroughputResult]) -> dict[str, bool]:
    """Which targets were reached: ours alone have any."""
    targets = {}
    for result in latency:
        if result.name.startswith("mmrt"):
            targets[f"{result.name}: P50 <= {LATENCY_TARGET_S * 1e6:.0f} us"] = result.hot.p50 <= LATENCY_TARGET_S
    for throughput in bulk:
        if throughput.name.startswith("mmrt") and throughput.ratio is not None and throughput.num_bytes >= BULK_TARGET_BYTES:
            name = f"{throughput.name}, {show_size(throughput.num_bytes)}: >= {BULK_TARGET_RATIO:.0%} of memcpy"
            targets[name] = throughput.ratio >= BULK_TARGET_RATIO
    return targets


def show(console: Console, report: BusReport) -> None:
    """The three tables and the targets."""
    show_environment(console, report.environment)
    rows = []
    for result in report.latency:
        hot, gap = result.hot, result.after_gap
        figures = (hot.p50, hot.p90, hot.p99, gap.p50, gap.p90, gap.p99)
        rows.append([result.name, "asyncio" if result.wakes_loop else "blocking", *(f"{1e6 * value:.0f}" for value in figures)])
    columns = ["", "ends", "P50", "P90", "P99", f"{report.gap_s * 1000:g} ms idle: P50", "P90", "P99"]
    show_table(console, f"one-way latency of {MESSAGE_BYTES} bytes, µs", columns, rows)
    rows = [[result.name, f"{result.messages_per_s / 1000:.0f}"] for result in report.rate]
    show_table(console, f"messages of {MESSAGE_BYTES} bytes", ["", "1000/s"], rows)
    rows = [
        [
            show_size(result.num_bytes),
            result.name,
            f"{result.bytes_per_s / 1e9:.2f}",
            f"{result.messages_per_s:.0f}",
            "" if result.ratio is None else f"{result.ratio:.2f}",
            "" if result.best_ratio is None else f"{result.best_ratio:.2f}",
        ]
        for result in report.bulk
    ]
    show_table(console, "payloads", ["size", "", "GB/s", "1/s", "of memcpy", "at best"], rows)
    for name, reached in report.targets.items():
        console.print(f"{'reached' if reached else 'MISSED '}  {name}", style="green" if reached else "red", highlight=False)


def show_size(num_bytes: int) -> str:
    """64 KiB, 1 MiB."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes} B"


@contextmanager
def _run_directory() -> Iterator[RunDirectory]:
    """A run directory of our own, beside any run that is up; gone at the end."""
    with ExitStack() as stack:
        path = RunDirectory.default_path().parent / f"bench-bus-{os.getpid()}"
        run = RunDirectory.create(path, {})
        stack.callback(run.destroy)
        yield run


@contextmanager
def _scratch(run: RunDirectory) -> Iterator[RunDirectory]:
    """Another run directory beside it, so that each size starts with fresh segments."""
    other = RunDirectory.create(run.path.with_name(f"{run.path.name}s"), {})
    try:
        yield other
    finally:
        other.destroy()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    sizes = []
    for part in text.split(","):
        unit = {"K": 1 << 10, "M": 1 << 20}.get(part[-1:].upper(), 1)
        number = part if unit == 1 else part[:-1]
        if not number.isdigit() or int(number) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is no size")
        sizes.append(int(number) * unit)
    return tuple(sizes)


if __name__ == "__main__":
    sys.exit(main())
