"""``mmrt bench journal``: what it costs that every request is noted before it is accepted, and noted again at its end.

Two measurements, multiplied. A journal on tmpfs by itself: seconds per request, for several lengths of the prompt, beside one whose
every call does nothing. A run of the null model with short requests: how many requests a second it does at most. The product
is the share of one processor that the journal takes there; if the controller were the bottleneck, it would be the share of
throughput. A real model does far fewer requests a second.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import uvloop

from ...actors.controller.journal import Journal
from ...runtime.bus.messages import RequestSpec, Sampling
from ...runtime.config import MemorySection, ModelSection, RuntimeConfig, ServerSection
from ...runtime.controller.records import Ended, JournalRecord, Submitted
from ...shm.run_directory import RunDirectory
from ..environment import Environment, read_environment
from ..output import JSON_HELP, open_console, write_json
from ..own_run import OwnRun, OwnRunError, own_run
from ..render import show_environment, show_table
from ..serve.client import BenchError
from ..serve.raw_client import open_streams
from .runtime import make_bodies, make_null_checkpoint

TARGET_SHARE = 0.02
_PROMPTS = (32, 512, 4096)
_STREAM_TOKENS = 32
_TIMEOUT_S = 300.0


class NoteCost(msgspec.Struct, frozen=True, kw_only=True):
    """Of one request, in seconds: both its records. ``without_s`` is the same loop over a journal that does nothing."""

    prompt_tokens: int
    with_s: float
    without_s: float
    compactions: int

    @property
    def cost_s(self) -> float:
        return self.with_s - self.without_s


class JournalBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    costs: list[NoteCost]
    requests_per_s: float  # of the null model, short requests
    tokens_per_s: float
    share: float  # of the journal at that rate, with the shortest prompts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when nothing could be measured or the target was missed."""
    parser = argparse.ArgumentParser(prog="mmrt bench journal", description="What the journal costs.")
    add = parser.add_argument
    add("--requests", type=int, default=5000, help="per length of prompt (%(default)s)")
    add("--streams", type=int, default=64, help="at a time, in the run (%(default)s)")
    add("--rounds", type=int, default=5, help="of so many streams (%(default)s)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if min(options.requests, options.streams, options.rounds) < 1:
        parser.error("--requests, --streams and --rounds must be at least 1")
    console = open_console(options.json)
    try:
        parent = RunDirectory.default_path().parent
        costs = [measure_cost(parent.parent, prompt, options.requests) for prompt in _PROMPTS]
        with own_run() as run:
            requests_per_s = measure_rate(run, options.streams, options.rounds)
    except (BenchError, OwnRunError, OSError) as error:
        print(f"mmrt bench journal: {error}", file=sys.stderr)
        return 1
    bench = JournalBench(
        environment=read_environment(),
        costs=costs,
        requests_per_s=requests_per_s,
        tokens_per_s=requests_per_s * _STREAM_TOKENS,
        share=costs[0].cost_s * requests_per_s,
    )
    show_environment(console, bench.environment)
    rows = [
        [
            str(cost.prompt_tokens),
            f"{cost.with_s * 1e6:.1f}",
            f"{cost.without_s * 1e6:.1f}",
            f"{cost.cost_s * 1e6:.1f}",
            str(cost.compactions),
        ]
        for cost in costs
    ]
    show_table(console, "one request, us", ["prompt tokens", "noted", "not noted", "cost", "compactions"], rows)
    console.print(
        f"null model: {requests_per_s:.0f} requests/s of {_STREAM_TOKENS} tokens; the journal takes {bench.share:.2%} of a processor"
        f" (target {TARGET_SHARE:.0%})",
        highlight=False,
        soft_wrap=True,
    )
    write_json(options.json, bench)
    return 0 if bench.share <= TARGET_SHARE else 1


def measure_cost(directory: Path, prompt_tokens: int, num_requests: int) -> NoteCost:
    """Note requests as the controller does, each ended 32 requests later. ``directory`` is on tmpfs. Raises: OSError."""
    spec = RequestSpec(
        request_id="chatcmpl-000000000000000000000000",
        prompt_ids=[(7919 * index) % 150_000 for index in range(prompt_tokens)],
        items=[],
        sampling=Sampling(),
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
    return NoteCost(
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


def measure_rate(run: OwnRun, num_streams: int, rounds: int) -> float:
    """Requests per second of a null model without step time, ``num_streams`` at a time. Raises: BenchError, OwnRunError."""
    checkpoint = make_null_checkpoint(run.home / "null", 0.0)
    run.up(
        RuntimeConfig(
            model=ModelSection(path=str(checkpoint), name="null"),
            server=ServerSection(port=0),
            memory=MemorySection(max_sequences=num_streams),
        )
    )
    try:
        url = run.report().endpoint
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_round(url, num_streams))
            start_s = time.perf_counter()
            for _ in range(rounds):
                runner.run(_round(url, num_streams))
            elapsed_s = time.perf_counter() - start_s
    finally:
        run.down()
    return num_streams * rounds / elapsed_s


async def _round(url: str, num_streams: int) -> None:
    streams = await open_streams(url, make_bodies(num_streams, _STREAM_TOKENS))
    async with asyncio.timeout(_TIMEOUT_S):
        await asyncio.gather(*(stream.finished for stream in streams))
    for index, stream in enumerate(streams):
        if not stream.record(index).is_success:
            raise BenchError(f"a stream failed: {stream.record(index).error}")


if __name__ == "__main__":
    sys.exit(main())
