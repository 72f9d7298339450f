"""``mmrt bench bus``: latency of a small message and throughput of pages, over our bus and ring, beside ZeroMQ, Queue and memcpy.

All in one run, taking turns round by round, so that other load on the machine affects all of them alike; figures are medians
over rounds, ratios medians of ratios within a round. Every peer is a real process.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, run_bench
from mmrt.bench.render import show_table, show_targets
from mmrt.bench.serve.report import Distribution, distribution
from mmrt.shm.errors import ShmError
from mmrt.shm.run_directory import RunDirectory

from .links import LINKS, MAX_SLOTS, MESSAGE_BYTES, WORKING_SET_BYTES, Link, PageLink, PeerError

LATENCY_TARGET_S = 100e-6  # one way, P50
BULK_TARGET_RATIO = 0.9  # of memcpy
SIZES = (1 << 20, 8 << 20, 32 << 20)
GAP_S = 0.003  # a receiver has gone to sleep by then, as it has between real steps


class LatencyResult(msgspec.Struct, frozen=True, kw_only=True):
    """One-way seconds, all rounds together: ping after ping, and after a gap in which the receiver went to sleep."""

    name: str
    hot: Distribution
    after_gap: Distribution


class BulkResult(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over rounds. ``ratio`` is to memcpy, in the same round."""

    name: str
    num_bytes: int
    bytes_per_s: float
    ratio: float


class BusReport(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    rounds: int
    gap_s: float
    latency: list[LatencyResult]
    bulk: list[BulkResult]
    targets: dict[str, bool]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, also when a target is missed: it is a measurement, not a test."""
    parser = argparse.ArgumentParser(prog="mmrt bench bus", description="Bus, ring and pages beside ZeroMQ, queues and memcpy.")
    add = parser.add_argument
    add("--rounds", type=int, default=7)
    add("--pings", type=int, default=300, help="per round and link (%(default)s)")
    add("--megabytes", type=int, default=128, help="moved per round, size and link (%(default)s)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if min(options.rounds, options.pings, options.megabytes) < 1:
        parser.error("--rounds, --pings and --megabytes must be at least 1")
    errors = ShmError, PeerError, OSError, TimeoutError
    num_bytes = options.megabytes << 20
    bench = run_bench("bus", options.json, errors, lambda _: measure(options.rounds, options.pings, num_bytes), show)
    return 1 if bench is None else 0


def measure(rounds: int, num_pings: int, num_bytes: int) -> BusReport:
    """Everything; ``num_bytes`` are moved per round, size and link. Raises: PeerError, ShmError, OSError, TimeoutError."""
    environment = read_environment()
    with _all_links() as links:
        latency = measure_latency(links, rounds, num_pings)
        bulk = [result for size in SIZES for result in measure_bulk(links, size, rounds, max(2, num_bytes // size))]
    return BusReport(environment=environment, rounds=rounds, gap_s=GAP_S, latency=latency, bulk=bulk, targets=judge(latency, bulk))


@contextmanager
def _all_links() -> Iterator[list[Link]]:
    """Each link in its own run directory, beside any run that is up; removed at the end."""
    with ExitStack() as stack:
        links = []
        for index, make in enumerate(LINKS):
            run = RunDirectory.create(RunDirectory.default_path().parent / f"bench-bus-{os.getpid()}-{index}", {})
            stack.callback(run.destroy)
            links.append(make(run))
            stack.callback(links[-1].close)
        yield links


def measure_latency(links: Sequence[Link], rounds: int, num_pings: int) -> list[LatencyResult]:
    hot: dict[str, list[float]] = {link.name: [] for link in links}
    after_gap: dict[str, list[float]] = {link.name: [] for link in links}
    for _ in range(rounds):
        for link in links:
            hot[link.name] += link.ping(num_pings, 0.0)
            after_gap[link.name] += link.ping(max(1, num_pings // 5), GAP_S)
    results = []
    for name, times_s in hot.items():
        quick, slow = distribution(times_s), distribution(after_gap[name])
        assert quick is not None and slow is not None
        results.append(LatencyResult(name=name, hot=quick, after_gap=slow))
    return results


def measure_bulk(links: Sequence[Link], num_bytes: int, rounds: int, count: int) -> list[BulkResult]:
    """Payloads of one size over all links, and within this process into the same kind of memory (memcpy)."""
    payloads = make_payloads(num_bytes)
    target = next(link for link in links if isinstance(link, PageLink)).pool.data.reshape(-1)

    def memcpy(payloads: Sequence[memoryview], count: int) -> None:
        for number in range(count):
            slot = number % len(payloads)
            np.copyto(target[slot * num_bytes : (slot + 1) * num_bytes], payloads[slot])

    ways: dict[str, Callable[[Sequence[memoryview], int], None]] = {"memcpy": memcpy, **{link.name: link.move for link in links}}
    seconds: dict[str, list[float]] = {name: [] for name in ways}  # per payload
    for move in ways.values():
        move(payloads, min(len(payloads), count))
    for _ in range(rounds):
        for name, move in ways.items():
            start_s = time.perf_counter()
            move(payloads, count)
            seconds[name].append((time.perf_counter() - start_s) / count)
    return [
        BulkResult(
            name=name,
            num_bytes=num_bytes,
            bytes_per_s=num_bytes / statistics.median(times_s),
            ratio=statistics.median(base / own for base, own in zip(seconds["memcpy"], times_s, strict=True)),
        )
        for name, times_s in seconds.items()
    ]


def make_payloads(num_bytes: int) -> list[memoryview]:
    """Different ones, together larger than the caches."""
    count = max(2, min(MAX_SLOTS, WORKING_SET_BYTES // num_bytes))
    source = np.random.default_rng(0).integers(0, 256, (count, num_bytes), dtype=np.uint8)
    return [row.data for row in source]


def judge(latency: Sequence[LatencyResult], bulk: Sequence[BulkResult]) -> dict[str, bool]:
    """Which targets were reached: ours alone have any."""
    targets = {}
    for result in latency:
        if result.name.startswith("mmrt"):
            targets[f"{result.name}: P50 <= {LATENCY_TARGET_S * 1e6:.0f} us"] = result.hot.p50 <= LATENCY_TARGET_S
    for moved in bulk:
        if moved.name.startswith("mmrt"):
            name = f"pages + {moved.name}, {moved.num_bytes >> 20} MiB: >= {BULK_TARGET_RATIO:.0%} of memcpy"
            targets[name] = moved.ratio >= BULK_TARGET_RATIO
    return targets


def show(console: Console, report: BusReport) -> None:
    """The two tables and the targets."""
    rows = []
    for result in report.latency:
        hot, gap = result.hot, result.after_gap
        figures = (hot.p50, hot.p90, hot.p99, gap.p50, gap.p90, gap.p99)
        rows.append([result.name, *(f"{1e6 * value:.0f}" for value in figures)])
    columns = ["", "P50", "P90", "P99", f"{report.gap_s * 1000:g} ms idle: P50", "P90", "P99"]
    show_table(console, f"one-way latency of {MESSAGE_BYTES} bytes, µs", columns, rows)
    rows = [
        [f"{moved.num_bytes >> 20} MiB", moved.name, f"{moved.bytes_per_s / 1e9:.2f}", f"{moved.ratio:.2f}"] for moved in report.bulk
    ]
    show_table(console, "payloads", ["size", "", "GB/s", "of memcpy"], rows)
    show_targets(console, report.targets)
