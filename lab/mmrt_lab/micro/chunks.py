"""``mmrt bench chunks``: what the size of prefill's chunks costs a prompt, and streams beside it (CW4, US10).

Runs of one model that differ in ``scheduling.prefill_budget_tokens`` alone, of one engine that does one thing at a time and guesses no
tokens, get the same work in turns: text streams, and a long prompt beside them. All times are those of the runs' flight recorders, so
that the client and the gateway, which wait for cores as well, are not in them. Figures are medians, over rounds of medians over chunks
and steps: a pause of the machine is in few of these. Ratios compare the runs within a round.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, progress, run_bench
from mmrt.bench.own_run import OwnRun, OwnRunError, own_run
from mmrt.bench.render import show_table
from mmrt.bench.serve.errors import BenchError
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ActorsSection, ModelSection, SchedulingSection, ServerSection

_ALONE_S = 0.5  # of the streams before the prompt comes
_STREAM_TOKENS = 4000  # a stream is cut before; prompt and answer have to fit the model's context
_FIRST_ID, _NUM_IDS = 50, 900  # of tokens that every vocabulary has

Slice = dict[str, Any]


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one prompt beside streams. ``chunk_s``: of a chunk. ``prompt_s``: from the first one's begin to the last one's end.
    ``alone_s``: between the ends of two steps before; ``waiting_s``: with a chunk between them; ``beside_s``: of all while the prompt
    is computed, their mean."""

    chunk_s: float
    prompt_s: float
    alone_s: float
    waiting_s: float
    beside_s: float


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of one size beside so many streams."""

    num_streams: int
    chunk_tokens: int
    blocks: list[Block]

    def median(self, figure: str) -> float:
        return statistics.median(float(getattr(block, figure)) for block in self.blocks)

    def ratio(self, figure: str, other: "Cell") -> float:
        """The median of the ratios to the same rounds of another cell."""
        pairs = zip(self.blocks, other.blocks, strict=True)
        return statistics.median(float(getattr(mine, figure)) / float(getattr(its, figure)) for mine, its in pairs)

    @property
    def factor(self) -> float:
        """By which the prompt lengthens the mean time of a token of the streams (US10)."""
        return statistics.median(block.beside_s / block.alone_s for block in self.blocks)


class ChunksBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    model: str
    num_tokens: int
    cells: list[Cell]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0; 1 if the runs cannot be had."""
    parser = argparse.ArgumentParser(prog="mmrt bench chunks", description="What the size of chunks costs prompts, and streams beside.")
    add = parser.add_argument
    add("model", nargs="?", default="", help="a checkpoint's directory or a GGUF file; the demo model")
    add("--chunks", type=_numbers, default=[64, 256, 1024], help="tokens (64,256,1024); ratios are to the first")
    add("--streams", type=_numbers, default=[1, 4], help="beside the prompt (1,4)")
    add("--tokens", type=int, default=3000, help="of the prompt (%(default)s)")
    add("--rounds", type=int, default=8, help="of each size, after one that warms up (%(default)s)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.tokens < 2 * max(options.chunks):
        parser.error("--rounds must be at least 1, and --tokens twice the largest of --chunks")

    def run(console: Console) -> ChunksBench:
        return measure(console, options.model, options.chunks, options.streams, options.tokens, options.rounds)

    bench = run_bench("chunks", options.json, (BenchError, OwnRunError, OSError, aiohttp.ClientError), run, show)
    return 0 if bench is not None else 1


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{min(numbers)} is below 1")
    return numbers


def measure(
    console: Console, model: str, chunks: Sequence[int], streams: Sequence[int], num_tokens: int, num_rounds: int
) -> ChunksBench:
    """Everything. Raises: BenchError, OwnRunError, OSError, aiohttp.ClientError."""
    path = str(Path(model).resolve()) if model else ""
    with progress(console) as tell, ExitStack() as stack:
        runs = {size: stack.enter_context(own_run(f"{size}")) for size in chunks}
        for size, run in runs.items():
            tell(f"starting a run with chunks of {size} tokens")
            run.up(_config(path, size))
        blocks: dict[tuple[int, int], list[Block]] = {(count, size): [] for count in streams for size in chunks}
        for number in range(-1, num_rounds):
            for (count, size), found in blocks.items():
                tell(f"round {number + 1} of {num_rounds}: {count} streams, chunks of {size}")
                asyncio.run(_load(runs[size], count, num_tokens, seed=1 + (number + 1) * len(blocks) + streams.index(count)))  # all new
                block = find_block(_slices(runs[size]), num_tokens)
                if number >= 0:
                    found.append(block)
        cells = [Cell(num_streams=count, chunk_tokens=size, blocks=found) for (count, size), found in blocks.items()]
        return ChunksBench(environment=read_environment(), model=model or "the demo model", num_tokens=num_tokens, cells=cells)


def _config(path: str, chunk_tokens: int) -> RuntimeConfig:
    scheduling = SchedulingSection(policy="weighted", prefill_budget_tokens=chunk_tokens, prompt_lookup=False)
    actors = ActorsSection(layout="EPD", turns="plans")
    return RuntimeConfig(model=ModelSection(path=path), server=ServerSection(port=0), actors=actors, scheduling=scheduling)


async def _load(run: OwnRun, num_streams: int, num_tokens: int, seed: int) -> None:
    """Streams, and after a while a prompt; they are cut once it has its first token."""
    url = f"{run.report().endpoint}/v1/completions"
    async with aiohttp.ClientSession() as session:
        flowing = [asyncio.Event() for _ in range(num_streams)]
        streams = [asyncio.create_task(_stream(session, url, place, seed, event)) for place, event in enumerate(flowing)]
        try:
            await asyncio.wait_for(asyncio.gather(*(event.wait() for event in flowing)), timeout=120)
            await asyncio.sleep(_ALONE_S)
            async with session.post(url, json=_body(num_tokens, seed, max_tokens=1)) as response:
                if response.status != 200:
                    raise BenchError(f"status {response.status}: {await response.text()}")
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)


async def _stream(session: aiohttp.ClientSession, url: str, place: int, seed: int, flowing: asyncio.Event) -> None:
    body = _body(32, 1000 * (place + 1) + seed, max_tokens=_STREAM_TOKENS)
    async with session.post(url, json={**body, "stream": True}) as response:
        async for _ in response.content:
            flowing.set()


def _body(num_tokens: int, seed: int, max_tokens: int) -> dict[str, Any]:
    ids = [_FIRST_ID + (7 * place + 13 * seed) % _NUM_IDS for place in range(num_tokens)]
    return {"prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "cache_salt": f"{seed}"}


def _slices(run: OwnRun) -> list[Slice]:
    events: list[Slice] = json.loads(run.command("trace", "-o", "-")[1])["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def find_block(slices: Sequence[Slice], num_tokens: int) -> Block:
    """Find the figures of the last prompt, of so many tokens (pure). Raises: BenchError if its beginning is overwritten."""
    chunks: list[Slice] = []
    for chunk in sorted((one for one in slices if one["name"] == "prefill"), key=lambda one: -one["ts"]):
        if sum(one["args"]["tokens"] for one in chunks) < num_tokens - 1:
            chunks.insert(0, chunk)
    begins, ends = [one["ts"] / 1e6 for one in chunks], [(one["ts"] + one["dur"]) / 1e6 for one in chunks]
    steps = sorted((one["ts"] + one["dur"]) / 1e6 for one in slices if one["name"] == "step")
    gaps = [(last, next_s) for last, next_s in pairwise(steps) if begins and last > begins[0] - _ALONE_S]
    alone = [after - before for before, after in gaps if after <= begins[0]]
    waiting = [after - before for before, after in gaps if any(before <= begin < after for begin in begins)]
    beside = [after - before for before, after in gaps if after > begins[0] and before < ends[-1]]
    if not alone or not waiting:
        raise BenchError("the flight recorders no longer have all of a prompt: take a smaller one (--tokens)")
    return Block(
        chunk_s=statistics.median(end - begin for begin, end in zip(begins, ends, strict=True)),
        prompt_s=ends[-1] - begins[0],
        alone_s=statistics.median(alone),
        waiting_s=statistics.median(waiting),
        beside_s=statistics.fmean(beside),
    )


def show(console: Console, bench: ChunksBench) -> None:
    firsts = {cell.num_streams: cell for cell in reversed(bench.cells)}
    rows = []
    for cell in bench.cells:
        first = firsts[cell.num_streams]
        figures = [f"{1000 * cell.median(name):.1f} ({cell.ratio(name, first):.2f})" for name in ("prompt_s", "chunk_s", "waiting_s")]
        rows.append(
            [str(cell.num_streams), str(cell.chunk_tokens), *figures, f"{1000 * cell.median('alone_s'):.1f}", f"{cell.factor:.2f}"]
        )
    columns = ["streams", "chunk", "prompt", "a chunk", "a step that waits", "a step alone", "mean of all, over alone"]
    show_table(console, f"ms (ratio to the first), a prompt of {bench.num_tokens} tokens, {bench.model}", columns, rows)
