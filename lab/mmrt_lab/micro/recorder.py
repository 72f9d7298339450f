"""``mmrt bench recorder``: the cost of a journal record per request and a flight record per step.

Costs are counted, not guessed from two runs of different luck: what one note takes by itself, times how many are written per second
of a busy run with the null model, which does nothing but what the runtime itself does. The product is a share of one processor; a
real model writes far less.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from mmrt.actors.controller.journal import Journal
from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, run_bench
from mmrt.bench.own_run import OwnRun, OwnRunError, own_run
from mmrt.bench.render import show_table, show_targets
from mmrt.bench.serve.errors import BenchError
from mmrt.runtime.bus.messages import Generation, RequestSpec
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import MemorySection, ModelSection, ServerSection
from mmrt.runtime.controller.state.records import Ended, JournalRecord, Submitted
from mmrt.runtime.stage_table import ACTORS, SUPERVISOR
from mmrt.shm.errors import ShmError
from mmrt.shm.flight_recorder import FlightRecorder
from mmrt.shm.run_directory import RunDirectory

from .raw_client import open_streams
from .runtime import make_bodies, make_null_checkpoint

JOURNAL_TARGET = 0.02
RECORD_TARGET_S = 2e-6
RECORDER_TARGET = 0.01
_PROMPTS = (32, 512, 4096)
_NUM_REQUESTS = 5000
_SHORT_STREAMS, _SHORT_TOKENS, _SHORT_ROUNDS = 64, 32, 5
_NUM_RECORDS = 100_000
_TRIALS = 7
_TIMEOUT_S = 300.0
_SPARE_TOKENS = 512


class RequestCost(msgspec.Struct, frozen=True, kw_only=True):
    """Both journal records of one request, in seconds. ``without_s``: the same loop over a journal that does nothing."""

    prompt_tokens: int
    with_s: float
    without_s: float
    compactions: int

    @property
    def cost_s(self) -> float:
        return self.with_s - self.without_s


class RecorderBench(msgspec.Struct, frozen=True, kw_only=True):
    """``journal_share``: at ``requests_per_s``, of short requests. ``shares``: of each process's time, at ``tokens_per_s``."""

    environment: Environment
    requests: list[RequestCost]
    requests_per_s: float
    journal_share: float
    record_s: float
    read_s: float
    tokens_per_s: float
    records_per_s: dict[str, float]
    shares: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when nothing could be measured."""
    parser = argparse.ArgumentParser(prog="mmrt bench recorder", description="What the journal and the flight recorders cost.")
    add = parser.add_argument
    add("--streams", type=int, default=32, help="of the null model (%(default)s)")
    add("--tokens", type=int, default=3000, help="per stream (%(default)s)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.streams < 1 or options.tokens < 1:
        parser.error(f"--streams {options.streams} and --tokens {options.tokens} must be at least 1")
    errors = BenchError, OwnRunError, ShmError, OSError
    bench = run_bench("recorder", options.json, errors, lambda _: measure(options.streams, options.tokens), show)
    return 1 if bench is None else 0


def measure(num_streams: int, num_tokens: int) -> RecorderBench:
    """Everything. Raises: BenchError, OwnRunError, ShmError, OSError."""
    environment = read_environment()
    tmpfs = RunDirectory.default_path().parent.parent
    requests = [measure_request(tmpfs, prompt, _NUM_REQUESTS) for prompt in _PROMPTS]
    record_s, read_s = measure_record(tmpfs)
    rows = max(num_streams, _SHORT_STREAMS)
    memory = MemorySection(max_sequences=rows, kv_tokens=rows * (num_tokens + _SPARE_TOKENS))
    with own_run() as run:
        model = ModelSection(path=str(make_null_checkpoint(run.home / "null", 0.0)), name="null")
        run.up(RuntimeConfig(model=model, server=ServerSection(port=0), memory=memory))
        requests_per_s = measure_requests(run.report().endpoint)
        window_s, records = measure_records(run, num_streams, num_tokens)
    return RecorderBench(
        environment=environment,
        requests=requests,
        requests_per_s=requests_per_s,
        journal_share=requests[0].cost_s * requests_per_s,
        record_s=record_s,
        read_s=read_s,
        tokens_per_s=num_streams * num_tokens / window_s,
        records_per_s={name: count / window_s for name, count in records.items()},
        shares={name: record_s * count / window_s for name, count in records.items()},
    )


def measure_request(directory: Path, prompt_tokens: int, num_requests: int) -> RequestCost:
    """Note requests as the controller does, each ended 32 requests later. ``directory`` is on tmpfs. Raises: OSError."""
    spec = RequestSpec(
        generation=Generation("chatcmpl-000000000000000000000000"),
        prompt_ids=[(7919 * index) % 150_000 for index in range(prompt_tokens)],
        items=[],
        max_new_tokens=64,
    )
    records: list[JournalRecord] = []
    for key in range(num_requests):
        records.append(Submitted(key, 1, key, spec))
        if key >= 32:
            records.append(Ended(key - 32))
    without_s = _time(lambda record: None, records)
    with tempfile.TemporaryDirectory(dir=directory, prefix="mmrt-journal-") as name:
        journal, _ = Journal.open(Path(name))
        compactions, last = 0, 0
        with_s = 0.0
        for start in range(0, len(records), 64):  # in pieces, to see the file shrink
            with_s += _time(journal.append, records[start : start + 64])
            compactions += journal.num_bytes < last
            last = journal.num_bytes
        journal.close()
    return RequestCost(
        prompt_tokens=prompt_tokens,
        with_s=with_s / num_requests,
        without_s=without_s / num_requests,
        compactions=compactions,
    )


def _time(append: Callable[[JournalRecord], None], records: Sequence[JournalRecord]) -> float:
    start_s = time.perf_counter()
    for record in records:
        append(record)
    return time.perf_counter() - start_s


def measure_record(directory: Path) -> tuple[float, float]:
    """Seconds of one flight record, and of one reading of a full recorder: medians. ``directory`` is on tmpfs."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="mmrt-bench-") as place, RunDirectory.create(Path(place) / "run", {}) as run:
        recorder = FlightRecorder.create(run, "decode")
        event = recorder.writer(1).event
        records_s, readings_s = [], []
        for _ in range(_TRIALS):
            start_s = time.perf_counter()
            for number in range(_NUM_RECORDS):
                event(20, number, 1, 2, 3)
            records_s.append((time.perf_counter() - start_s) / _NUM_RECORDS)
            start_s = time.perf_counter()
            recorder.read()
            readings_s.append(time.perf_counter() - start_s)
        recorder.close()
    return statistics.median(records_s), statistics.median(readings_s)


def measure_requests(url: str) -> float:
    """Short requests per second. Raises: BenchError."""
    _stream(url, _SHORT_STREAMS, _SHORT_TOKENS)
    start_s = time.perf_counter()
    for _ in range(_SHORT_ROUNDS):
        _stream(url, _SHORT_STREAMS, _SHORT_TOKENS)
    return _SHORT_STREAMS * _SHORT_ROUNDS / (time.perf_counter() - start_s)


def measure_records(run: OwnRun, num_streams: int, num_tokens: int) -> tuple[float, dict[str, int]]:
    """(seconds, flight records by process) of long streams. Raises: BenchError, OwnRunError, ShmError."""
    endpoint = run.report().endpoint
    with RunDirectory.attach(run.run) as directory:
        recorders = {name: FlightRecorder.attach(directory, name, writable=False) for name in (*ACTORS, SUPERVISOR)}
        before = {name: recorder.num_written for name, recorder in recorders.items()}
        start_s = time.perf_counter()
        _stream(endpoint, num_streams, num_tokens)
        window_s = time.perf_counter() - start_s
        written = {name: recorder.num_written - before[name] for name, recorder in recorders.items()}
        for recorder in recorders.values():
            recorder.close()
    return window_s, written


def _stream(url: str, num_streams: int, num_tokens: int) -> None:
    async def stream() -> list[str]:
        streams = await open_streams(url, make_bodies(num_streams, num_tokens))
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await asyncio.gather(*(each.finished for each in streams))
        except TimeoutError:
            raise BenchError(f"the streams did not end within {_TIMEOUT_S:g} s") from None
        records = [each.record(index) for index, each in enumerate(streams)]
        return [record.error or "cut" for record in records if not record.is_success]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        failed = runner.run(stream())
    if failed:
        raise BenchError(f"{len(failed)} of {num_streams} streams failed, the first with: {failed[0]}")


def show(console: Console, bench: RecorderBench) -> None:
    """The tables, and what was to be reached."""
    rows = [
        [
            str(cost.prompt_tokens),
            *(f"{value * 1e6:.1f}" for value in (cost.with_s, cost.without_s, cost.cost_s)),
            str(cost.compactions),
        ]
        for cost in bench.requests
    ]
    show_table(console, "one request in the journal, us", ["prompt tokens", "noted", "not noted", "cost", "compactions"], rows)
    by_rate = sorted(bench.records_per_s.items(), key=lambda item: -item[1])
    rows = [[name, f"{rate:.0f}", f"{bench.shares[name]:.3%}"] for name, rate in by_rate]
    show_table(console, f"flight records at {bench.tokens_per_s:.0f} tokens/s", ["process", "records/s", "of its time"], rows)
    console.print(f"reading a full recorder: {bench.read_s * 1000:.2f} ms", highlight=False)
    most = max(bench.shares.values())
    journal = f"journal, {bench.requests_per_s:.0f} requests/s: {bench.journal_share:.2%} of a processor, target {JOURNAL_TARGET:.0%}"
    record = f"one flight record: {bench.record_s * 1e6:.2f} us, target {RECORD_TARGET_S * 1e6:g} us"
    share = f"largest share of a process: {most:.3%}, target {RECORDER_TARGET:.0%}"
    targets = {journal: bench.journal_share <= JOURNAL_TARGET, record: bench.record_s <= RECORD_TARGET_S, share: most < RECORDER_TARGET}
    show_targets(console, targets)
