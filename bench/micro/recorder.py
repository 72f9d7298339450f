"""``mmrt bench recorder``: what the flight recorders cost: one record, one reading, and their share of a busy run's time.

The share is counted, not guessed from two runs of different luck: records that each process writes in a second of a run with the null
model, which does nothing but what the runtime itself does, times what a record costs.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from ...runtime.config import MemorySection, ModelSection, RuntimeConfig, ServerSection
from ...runtime.stage_table import RECORDERS
from ...shm.errors import ShmError
from ...shm.flight_recorder import FlightRecorder
from ...shm.run_directory import RunDirectory
from ..environment import Environment, read_environment
from ..output import JSON_HELP, open_console, write_json
from ..own_run import OwnRun, OwnRunError, own_run
from ..render import show_environment, show_table
from ..serve.client import BenchError
from ..serve.raw_client import RawStream, open_streams
from .runtime import make_bodies, make_null_checkpoint

RECORD_TARGET_S = 2e-6
SHARE_TARGET = 0.01
_NUM_RECORDS = 100_000
_TRIALS = 7
_TIMEOUT_S = 300.0
_SPARE_TOKENS = 512


class RecorderBench(msgspec.Struct, frozen=True, kw_only=True):
    """``records_per_s`` and ``shares`` (of the process's time) by process, while ``num_streams`` streams ran for ``window_s``."""

    environment: Environment
    record_s: float
    read_s: float
    num_streams: int
    window_s: float
    tokens_per_s: float
    records_per_s: dict[str, float]
    shares: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when nothing could be measured."""
    parser = argparse.ArgumentParser(prog="mmrt bench recorder", description="What the flight recorders cost.")
    add = parser.add_argument
    add("--streams", type=int, default=32, help="of the null model (%(default)s)")
    add("--tokens", type=int, default=3000, help="per stream (%(default)s)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.streams < 1 or options.tokens < 1:
        parser.error(f"--streams {options.streams} and --tokens {options.tokens} must be at least 1")
    console = open_console(options.json)
    environment = read_environment()
    try:
        record_s, read_s = measure_record()
        with own_run() as run:
            window_s, records = measure_run(run, options.streams, options.tokens)
    except (BenchError, OwnRunError, ShmError, OSError) as error:
        print(f"mmrt bench recorder: {error}", file=sys.stderr)
        return 1
    bench = RecorderBench(
        environment=environment,
        record_s=record_s,
        read_s=read_s,
        num_streams=options.streams,
        window_s=window_s,
        tokens_per_s=options.streams * options.tokens / window_s,
        records_per_s={name: count / window_s for name, count in records.items()},
        shares={name: record_s * count / window_s for name, count in records.items()},
    )
    show(console, bench)
    write_json(options.json, bench)
    return 0


def measure_record() -> tuple[float, float]:
    """Seconds of one record, and of one reading of a full recorder: medians."""
    with tempfile.TemporaryDirectory(prefix="mmrt-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        with RunDirectory.create(Path(place) / "run", {}) as run:
            recorder = FlightRecorder.create(run, "decode")
            event = recorder.writer(1).event
            times_s = [_timed_records(event) for _ in range(_TRIALS)]
            readings_s = []
            for _ in range(_TRIALS):
                start_s = time.perf_counter()
                recorder.read()
                readings_s.append(time.perf_counter() - start_s)
            recorder.close()
    return statistics.median(times_s), statistics.median(readings_s)


def _timed_records(event: Callable[[int, int, int, int, int], None]) -> float:
    start_s = time.perf_counter()
    for number in range(_NUM_RECORDS):
        event(20, number, 1, 2, 3)
    return (time.perf_counter() - start_s) / _NUM_RECORDS


def measure_run(run: OwnRun, num_streams: int, num_tokens: int) -> tuple[float, dict[str, int]]:
    """(seconds, records by process) of streams of the null model. Raises: BenchError, OwnRunError, ShmError."""
    checkpoint = make_null_checkpoint(run.home / "null", 0.0)
    run.up(
        RuntimeConfig(
            model=ModelSection(path=str(checkpoint), name="null"),
            server=ServerSection(port=0),
            memory=MemorySection(max_sequences=num_streams, kv_tokens=num_streams * (num_tokens + _SPARE_TOKENS)),
        )
    )
    try:
        endpoint = run.report().endpoint
        with RunDirectory.attach(run.run) as directory:
            recorders = {name: FlightRecorder.attach(directory, name, writable=False) for name in RECORDERS}
            before = {name: recorder.num_written for name, recorder in recorders.items()}
            start_s = time.perf_counter()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                streams = runner.run(_stream(endpoint, make_bodies(num_streams, num_tokens)))
            window_s = time.perf_counter() - start_s
            written = {name: recorder.num_written - before[name] for name, recorder in recorders.items()}
            for recorder in recorders.values():
                recorder.close()
    finally:
        run.down()
    failed = [record.error for record in (stream.record(index) for index, stream in enumerate(streams)) if record.error]
    if failed:
        raise BenchError(f"{len(failed)} of {num_streams} streams failed, the first with: {failed[0]}")
    return window_s, written


async def _stream(url: str, bodies: Sequence[bytes]) -> list[RawStream]:
    streams = await open_streams(url, bodies)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await asyncio.gather(*(stream.finished for stream in streams))
    except TimeoutError:
        raise BenchError(f"the streams did not end within {_TIMEOUT_S:g} s") from None
    return streams


def show(console: Console, bench: RecorderBench) -> None:
    """The table, and what was to be reached."""
    show_environment(console, bench.environment)
    by_rate = sorted(bench.records_per_s.items(), key=lambda item: -item[1])
    rows = [[name, f"{rate:.0f}", f"{bench.shares[name]:.3%}"] for name, rate in by_rate]
    title = f"{bench.num_streams} streams, {bench.tokens_per_s:.0f} tokens/s, {bench.window_s:.1f} s"
    show_table(console, title, ["process", "records/s", "of its time"], rows)
    console.print(f"reading a full recorder: {bench.read_s * 1000:.2f} ms", highlight=False)
    most = max(bench.shares.values())
    for text, reached in (
        (f"one record: {bench.record_s * 1e6:.2f} us, target {RECORD_TARGET_S * 1e6:g} us", bench.record_s <= RECORD_TARGET_S),
        (f"largest share of a process: {most:.3%}, target {SHARE_TARGET:.0%}", most < SHARE_TARGET),
    ):
        console.print(f"{'reached' if reached else 'MISSED '}  {text}", style="green" if reached else "red", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
