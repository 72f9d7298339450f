"""``mmrt bench accuracy --formats``: what a model loses in each format of weights, the memory that it takes, and its processor time.

A text is forced through the model in each format, with activations in float32. The reference is the model in float32, so quantized
checkpoints and GGUF files are measured as well: against the values that they have.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, get_args

import msgspec
import torch
from rich.console import Console
from torch import Tensor

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import Tell
from mmrt.bench.render import show_table
from mmrt.bench.serve.errors import BenchError
from mmrt.models.architecture import WeightFormat
from mmrt.models.checkpoint.files import GGUF_SUFFIX
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config, weight_bytes
from mmrt.models.gguf.directory import gguf_directory
from mmrt.models.lm.decoder import Chunk, Decoder
from mmrt.models.lm.language_model import build_language_model
from mmrt.models.text.tokenizer import Tokenizer

FORMATS: tuple[WeightFormat, ...] = tuple(name for name in get_args(WeightFormat) if name != "auto")
T = TypeVar("T")
_PAGE_TOKENS = 16
_ROWS_AT_ONCE = 128  # of logits
_STEPS = 10


class FormatFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One format. ``divergence``: Kullback-Leibler's of the next token's chances from those in float32, in nats, the mean of all
    tokens. ``same_share``: of tokens behind which the most probable one is that of float32. Times are the processor's: ``step_s`` is
    that of a decode step of one sequence, the least of some."""

    weights: str
    num_bytes: int
    loss: float
    divergence: float
    same_share: float
    prefill_s: float
    step_s: float


class FormatsBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    checkpoint: str
    num_tokens: int
    num_threads: int
    figures: list[FormatFigures]


def measure_formats(checkpoint: Path, text: str, num_tokens: int, num_threads: int, tell: Tell) -> FormatsBench:
    """All formats, of a directory or a GGUF file. Raises: BenchError, CheckpointError."""
    torch.set_num_threads(num_threads)
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as home:
        path = gguf_directory(checkpoint.absolute(), Path(home)) if checkpoint.suffix == GGUF_SUFFIX else checkpoint
        if load_model_config(path).language.delta is not None:
            raise BenchError(f"{checkpoint} has recurrent states: its formats cannot be measured")
        ids = torch.tensor(Tokenizer.load(path).encode(text)[:num_tokens])
        if len(ids) < 2:
            raise BenchError(f"the text has {len(ids)} tokens, at least 2 are needed")
        reference: Tensor | None = None
        figures = []
        for weights in FORMATS:
            tell(weights)
            chances, found = _measure(path, weights, ids)
            reference = chances if reference is None else reference
            figures.append(_compared(found, chances, reference, ids))
    return FormatsBench(
        environment=read_environment(), checkpoint=checkpoint.name, num_tokens=len(ids), num_threads=num_threads, figures=figures
    )


def _measure(path: Path, weights: WeightFormat, ids: Tensor) -> tuple[Tensor, FormatFigures]:
    """Logarithms of the next token's chances [T, V], and figures without a comparison."""
    config = load_model_config(path, "float32", weights=weights)
    num_pages = len(ids) // _PAGE_TOKENS + 1
    kv = torch.zeros((num_pages, config.kv_page_bytes(_PAGE_TOKENS)), dtype=torch.uint8)
    model: Decoder = build_language_model(config, read_weights(path, config), kv, _PAGE_TOKENS)
    chunk = Chunk(model.embed(ids), torch.arange(len(ids)).expand(3, -1), 0, torch.arange(num_pages))
    prefill_s, (hidden,) = _timed(lambda: model.prefill([chunk], [0]))
    chances = torch.cat([torch.log_softmax(model.logits(part), -1) for part in torch.split(hidden, _ROWS_AT_ONCE)])

    def step() -> Tensor:
        length = len(ids) + 1
        return model.decode(ids[-1:], torch.full((3, 1), length - 1), torch.tensor([length]), torch.arange(num_pages)[None])

    step()  # warms up
    step_s = min(_timed(step)[0] for _ in range(_STEPS))
    return chances, FormatFigures(
        weights=weights, num_bytes=weight_bytes(config), loss=0, divergence=0, same_share=1, prefill_s=prefill_s, step_s=step_s
    )


def _timed(compute: Callable[[], T]) -> tuple[float, T]:
    began_s = time.process_time()
    found = compute()
    return time.process_time() - began_s, found


def _compared(figures: FormatFigures, chances: Tensor, reference: Tensor, ids: Tensor) -> FormatFigures:
    divergences = (reference.exp() * (reference - chances)).sum(-1)
    return msgspec.structs.replace(
        figures,
        loss=-float(chances[:-1].gather(1, ids[1:, None]).mean()),
        divergence=float(divergences.mean()),
        same_share=float((chances.argmax(-1) == reference.argmax(-1)).double().mean()),
    )


def show_formats(console: Console, bench: FormatsBench) -> None:
    """The table."""
    rows = [
        [
            one.weights,
            f"{one.num_bytes / 1e6:.0f} MB",
            f"{one.loss:.4f}",
            f"{one.divergence:.4f}",
            f"{100 * one.same_share:.1f} %",
            f"{one.prefill_s:.2f} s",
            f"{1000 * one.step_s:.1f} ms",
        ]
        for one in bench.figures
    ]
    threads = f"{bench.num_threads} thread{'s' * (bench.num_threads > 1)}"
    title = f"{bench.checkpoint}: formats of weights over {bench.num_tokens} tokens; processor times, {threads}"
    show_table(console, title, ["", "memory", "loss", "KL", "same token", "prefill", "step"], rows)
