"""``mmrt bench gateway``: the time that the gateway adds to a request, and the processor time of the page's feed.

Starts a run with the null model and sends it short requests at a steady rate. The flight recorders say of each when the gateway
handed it to the controller, and when it got its first text; the client knows when it was sent and when that text was there. What
lies before the one and behind the other is the gateway's, the way through the kernel and the client's own share included. Then the
page's feed is asked, each time after as many requests as come in a second, while nothing else runs.
"""

import argparse
import asyncio
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
import uvloop
from rich.console import Console

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, run_bench
from mmrt.bench.own_run import OwnRun, OwnRunError, own_run, processes_of
from mmrt.bench.render import show_table, show_targets
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.report import Distribution, distribution
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import MemorySection, ModelSection, ServerSection
from mmrt.runtime.observe.flight import Kind, merge, unpack_id
from mmrt.shm.errors import ShmError
from mmrt.shm.flight_recorder import read_recorders
from mmrt.shm.run_directory import RunDirectory

from .raw_client import RawStream, open_streams
from .runtime import make_bodies, make_null_checkpoint

ADDED_TARGET_S = 1e-3
FEED_TARGET = 0.01
_ROWS = 64
_WARM_S = 1.0
_WINDOW_S = 5.0  # after which the recorder is read: it keeps the latest records
_SETTLE_S = 0.3
_POLL_S = 1.0  # between two questions of a page
_END_S = 30.0
_ID = re.compile(rb'"id":"(chatcmpl-[0-9a-f]+)"')


class GatewayBench(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that the gateway adds to each request: ``before`` it is the controller's, ``behind`` its first text, and ``added``, both
    together. ``cpu_per_request_s``: the gateway's. ``reply_s``: processor time of a reply of the feed, which a page asks for once a
    second; ``reply_bytes``: of the largest one."""

    environment: Environment
    requests_per_s: float
    num_requests: int
    num_failed: int
    before: Distribution | None
    behind: Distribution | None
    added: Distribution | None
    cpu_per_request_s: float
    reply_s: float
    reply_bytes: int


class Added(msgspec.Struct, frozen=True):
    """The gateway's time of one request, in seconds."""

    before_s: float
    behind_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when a request failed or nothing could be measured."""
    about = "What the gateway adds to a request, and what the page's feed costs."
    parser = argparse.ArgumentParser(prog="mmrt bench gateway", description=about)
    add = parser.add_argument
    add("--rate", type=float, default=200.0, help="requests per second (%(default)s)")
    add("--seconds", type=float, default=10.0, help="of requests (%(default)s)")
    add("--replies", type=int, default=15, help="of the page's feed (%(default)s)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if not (0 < options.rate <= 1000 and 0 < options.seconds <= 60 and options.replies >= 1):
        parser.error("--rate must be at most 1000, --seconds at most 60, both above 0, and --replies at least 1")
    errors = BenchError, OwnRunError, ShmError, OSError
    bench = run_bench("gateway", options.json, errors, lambda _: measure(options.rate, options.seconds, options.replies), show)
    return 1 if bench is None or bench.num_failed else 0


def measure(rate: float, seconds: float, num_replies: int) -> GatewayBench:
    """Everything. Raises: BenchError, OwnRunError, ShmError, OSError."""
    environment = read_environment()
    memory = MemorySection(max_sequences=_ROWS, kv_tokens=65536)
    with own_run() as run:
        model = ModelSection(path=str(make_null_checkpoint(run.home / "null", 0.0)), name="null")
        run.up(RuntimeConfig(model=model, server=ServerSection(port=0), memory=memory))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_measure(run, environment, rate, seconds, num_replies))


async def _measure(run: OwnRun, environment: Environment, rate: float, seconds: float, num_replies: int) -> GatewayBench:
    report = run.report()
    (pid,) = [pid for pid, name in processes_of(report).items() if name == "gateway"]
    url, body = report.endpoint, make_bodies(1, 1)[0]
    await _load(url, body, rate, _WARM_S)
    streams, found, used_s = list[RawStream](), list[Added](), 0.0
    for left_s in (*[_WINDOW_S] * int(seconds // _WINDOW_S), seconds % _WINDOW_S):
        before_s = _processor_s(pid)
        sent = await _load(url, body, rate, left_s) if left_s else []
        used_s += _processor_s(pid) - before_s
        streams += sent
        found += _added(run.run, sent)
    replies = await _ask_the_feed(url, pid, lambda: _load(url, body, rate, 1.0), num_replies)
    return GatewayBench(
        environment=environment,
        requests_per_s=rate,
        num_requests=len(streams),
        num_failed=sum(_text_of(stream) is None for stream in streams),
        before=distribution(one.before_s for one in found),
        behind=distribution(one.behind_s for one in found),
        added=distribution(one.before_s + one.behind_s for one in found),
        cpu_per_request_s=used_s / max(1, len(streams)),
        reply_s=statistics.median(cost_s for cost_s, _ in replies),
        reply_bytes=max(num_bytes for _, num_bytes in replies),
    )


async def _ask_the_feed(url: str, pid: int, load: Callable[[], Awaitable[object]], num: int) -> list[tuple[float, int]]:
    """Ask as an open page does; (processor time, bytes) of each reply, the first left out, which has everything known."""
    parts, after, found = urlsplit(url), 0, list[tuple[float, int]]()
    async with aiohttp.ClientSession() as session:
        for _ in range(1 + num):
            await load()
            await asyncio.sleep(_SETTLE_S)
            before_s = _processor_s(pid)
            async with session.get(f"http://{parts.netloc}/page/state?after={after}") as answer:
                data = await answer.read()
            found.append((_processor_s(pid) - before_s, len(data)))
            after = msgspec.json.decode(data)["revision"]
    return found[1:]


def _processor_s(pid: int) -> float:
    """Processor time that a process has used, to the nanosecond: Linux names its clock so. Raises: OSError if it is gone."""
    return time.clock_gettime(~pid << 3 | 2)


async def _load(url: str, body: bytes, rate: float, seconds: float) -> list[RawStream]:
    """Send requests at even intervals, whether or not earlier ones are answered. Raises: BenchError."""
    loop, streams = asyncio.get_running_loop(), list[RawStream]()
    began_s = loop.time()
    for number in range(max(1, round(rate * seconds))):
        await asyncio.sleep(max(0.0, began_s + number / rate - loop.time()))
        streams += await open_streams(url, [body])
    ends = [stream.finished for stream in streams]
    _, late = await asyncio.wait(ends, timeout=_END_S)
    if late:
        raise BenchError(f"{len(late)} of {len(streams)} requests were not answered within {_END_S:g} s")
    return streams


def _added(path: Path, streams: Sequence[RawStream]) -> list[Added]:
    """Pair requests with what the gateway's flight recorder has of them."""
    with RunDirectory.attach(path) as directory:
        records = merge(read_recorders(directory, ("gateway",)))
    keys = {unpack_id(record.a, record.b): record.key for record in records if record.kind is Kind.RECEIVED}
    handed_ns = {record.key: record.time_ns for record in records if record.kind is Kind.RECEIVED}
    text_ns = {record.key: record.time_ns for record in records if record.kind is Kind.FIRST_TEXT}
    found = []
    for stream in streams:
        if (text := _text_of(stream)) and (key := keys.get(text[1])) in text_ns:
            assert key is not None
            found.append(Added(handed_ns[key] / 1e9 - stream.sent_s, text[0] - text_ns[key] / 1e9))
    return found


def _text_of(stream: RawStream) -> tuple[float, str] | None:
    """Return when its first text came, and its id; None for a request without one. A null model's text comes with the role."""
    for time_s, data in stream.pieces:
        if (id := _ID.search(data)) is not None:
            return time_s, id[1].decode()
    return None


def show(console: Console, bench: GatewayBench) -> None:
    """The table, and what was to be reached."""
    rows = [
        [name, *(f"{1000 * value:.2f}" for value in (part.min, part.p50, part.p90, part.p99))]
        for name, part in (("before the controller", bench.before), ("behind the first text", bench.behind), ("added", bench.added))
        if part is not None
    ]
    show_table(console, f"{bench.num_requests} requests, {bench.requests_per_s:g}/s", ["ms", "least", "P50", "P90", "P99"], rows)
    added_s = bench.added.p50 if bench.added else float("inf")
    cpu = f"gateway, processor time per request: {1000 * bench.cpu_per_request_s:.2f} ms"
    console.print(f"{cpu}; per reply of the page's feed: {1000 * bench.reply_s:.1f} ms, {bench.reply_bytes / 1024:.0f} KiB")
    share = bench.reply_s / _POLL_S
    added = f"added P50: {1000 * added_s:.2f} ms, target {1000 * ADDED_TARGET_S:g} ms"
    feed = f"page's feed: {share:.2%} of a core, target {FEED_TARGET:.0%}"
    show_targets(console, {added: added_s <= ADDED_TARGET_S, feed: share <= FEED_TARGET})
