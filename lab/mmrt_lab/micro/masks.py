"""``mmrt bench masks``: what masks of grammars add to a decode step on the CPU.

Streams write JSON texts of one schema over a vocabulary of Qwen's size, of a made tokenizer. The model's part is played by noise, with
one allowed token raised above it, as logits of a model that has learned to write JSON. A step's sampling with masks, with the taking of
its tokens, takes turns with the sampling of the same logits without any.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from rich.console import Console

from mmrt.actors.decode.grammar_rows import GrammarRows
from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, run_bench
from mmrt.bench.render import show_table, show_targets
from mmrt.models.families.registry import family_named
from mmrt.models.grammar.matcher import Matchers
from mmrt.models.grammar.source import source_of_schema
from mmrt.models.grammar.text import grammar_text
from mmrt.models.grammar.vocabulary import GrammarVocabulary
from mmrt.models.make.tokenizer import write_tokenizer
from mmrt.models.sampling.interface import SamplingRows
from mmrt.models.sampling.sampler import CpuSampler
from mmrt.models.text.tokenizer import Tokenizer

TARGET_S = 0.3e-3
VOCABULARY = 151_643
_RAISED = 25.0  # far above the noise
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["circle", "square", "star"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 9999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 2, "maxItems": 6},
    },
    "required": ["name", "kind", "size", "tags"],
    "additionalProperties": False,
}
_KINDS = {"greedy": (0.0, 0), "temperature 0.8, top-k 40": (0.8, 40)}  # temperature, top_k


class MaskCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step, medians: sampling with masks and taking the tokens, and sampling alone. ``added_s``: of their differences."""

    rows: str
    with_s: float
    without_s: float
    added_s: float


class MaskBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    num_streams: int
    num_steps: int
    costs: list[MaskCost]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when nothing could be measured."""
    parser = argparse.ArgumentParser(prog="mmrt bench masks", description="What masks of grammars add to a decode step.")
    add = parser.add_argument
    add("--streams", type=int, default=16, help="with a grammar each (%(default)s)")
    add("--steps", type=int, default=200, help="of each kind of sampling (%(default)s)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.streams < 1 or options.steps < 1:
        parser.error(f"--streams {options.streams} and --steps {options.steps} must be at least 1")
    bench = run_bench("masks", options.json, (OSError,), lambda _: measure(options.streams, options.steps), show)
    return 1 if bench is None else 0


def measure(num_streams: int, num_steps: int, vocab_size: int = VOCABULARY) -> MaskBench:
    """Everything, on one thread. Raises: OSError."""
    environment, num_threads = read_environment(), torch.get_num_threads()
    matchers = Matchers(make_vocabulary(vocab_size))
    torch.set_num_threads(1)
    try:
        costs = [_measure(matchers, name, *kind, num_streams, num_steps, vocab_size) for name, kind in _KINDS.items()]
    finally:
        torch.set_num_threads(num_threads)
    return MaskBench(environment=environment, num_streams=num_streams, num_steps=num_steps, costs=costs)


def make_vocabulary(vocab_size: int) -> GrammarVocabulary:
    """Return the vocabulary of a made tokenizer with so many tokens. Raises: OSError."""
    recipe = family_named("qwen2_5_vl").recipes()["tiny"]._replace(vocab_size=vocab_size)
    with tempfile.TemporaryDirectory(prefix="mmrt-bench-") as folder:
        ids = write_tokenizer(Path(folder), recipe)
        return GrammarVocabulary(Tokenizer.load(Path(folder)), vocab_size, [ids["<|im_end|>"]])


def _measure(
    matchers: Matchers, name: str, temperature: float, top_k: int, num_streams: int, num_steps: int, vocab_size: int
) -> MaskCost:
    grammar, generator, choose = grammar_text(source_of_schema(_SCHEMA)), torch.Generator().manual_seed(1), random.Random(1)
    answers = [matchers.begin(grammar) for _ in range(num_streams)]
    masked, plain = CpuSampler(vocab_size), CpuSampler(vocab_size)
    with_s, without_s = list[float](), list[float]()
    for step in range(num_steps):
        answers = [matchers.begin(grammar) if answer.is_complete or answer.failed else answer for answer in answers]
        grammars = GrammarRows(range(num_streams), answers)
        logits = torch.randn(num_streams, vocab_size, generator=generator)
        for row, bits in enumerate(grammars.masks().bits):
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            logits[row, int(allowed[choose.randrange(len(allowed))])] += _RAISED
        rows, same = _rows(num_streams, temperature, top_k, step), logits.clone()
        grammars = GrammarRows(range(num_streams), answers)  # which does not know the masks above
        for number in (0, 1) if step % 2 else (1, 0):
            began_s = time.thread_time()
            if number:
                tokens = masked.sample(logits, rows, masks=grammars).numpy()
                grammars.take(tokens, np.zeros(num_streams, np.int64))
            else:
                plain.sample(same, rows)
            (with_s if number else without_s).append(time.thread_time() - began_s)
    added_s = statistics.median(one - other for one, other in zip(with_s, without_s, strict=True))
    return MaskCost(rows=name, with_s=statistics.median(with_s), without_s=statistics.median(without_s), added_s=added_s)


def _rows(num: int, temperature: float, top_k: int, step: int) -> SamplingRows:
    return SamplingRows(
        np.full(num, temperature, np.float32),
        np.full(num, top_k, np.int64),
        np.ones(num, np.float32),
        np.zeros(num, np.float32),
        np.arange(num, dtype=np.uint64),
        np.full(num, step, np.int64),
    )


def show(console: Console, bench: MaskBench) -> None:
    """The table, and what was to be reached."""
    rows = [[cost.rows, *(f"{1000 * value:.2f}" for value in (cost.with_s, cost.without_s, cost.added_s))] for cost in bench.costs]
    title = f"{bench.num_streams} streams, {bench.num_steps} steps, processor time, medians"
    show_table(console, title, ["ms", "with masks", "without", "added"], rows)
    show_targets(
        console,
        {f"{cost.rows}: {1000 * cost.added_s:.2f} ms, target {1000 * TARGET_S:g} ms": cost.added_s <= TARGET_S for cost in bench.costs},
    )
