"""``mmrt bench accuracy``: the distance of reduced precision from float32, compared with transformers in the same precision.

Random text is forced through several computations of one checkpoint: transformers in float32 (the reference), transformers in the
reduced dtype, and ours (prefill, then one token at a time from paged KV) with each kind of KV cache, with pages of the prompt packed
as on their way to another device, and weights in the format that is asked for. A flip is an argmax that differs from the reference's.
With ``--formats`` all formats of weights are compared instead (``formats``).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
import torch
from rich.console import Console
from torch import Tensor

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, progress, run_bench
from mmrt.bench.render import show_table
from mmrt.bench.serve.errors import BenchError
from mmrt.models.architecture import KvDType, ModelConfig, TransferDType, WeightFormat
from mmrt.models.checkpoint.weights import read_weights, torch_dtype
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.lm.decoder import Chunk
from mmrt.models.lm.kv_packing import KvPacking
from mmrt.models.lm.language_model import build_language_model

from .extras import need_extra
from .formats import FormatsBench, measure_formats, show_formats
from .prose import PROSE

PAGE_TOKENS = 16
PROMPT_TOKENS = 40


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One computation against the reference, over ``num_tokens`` predictions."""

    name: str
    num_tokens: int
    flips: int
    mean_error: float
    max_error: float
    kv_bytes: int  # per token; if it is packed, on the way


class AccuracyBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    checkpoint: str
    dtype: str
    weights: str = "auto"
    differences: list[Difference]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0; 1 without the extra."""
    about = "Reduced precision against float32. Needs the extra reference, but for --formats."
    parser = argparse.ArgumentParser(prog="mmrt bench accuracy", description=about)
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint directory; with --formats also a GGUF file")
    add("--formats", action="store_true", help="all formats of weights over a text: memory, loss and time")
    add("--text", type=Path, metavar="FILE", help="with --formats: force the beginning of this text, not of one that comes with mmrt")
    add("--text-tokens", type=int, default=512, help="with --formats: tokens of the text (%(default)s)")
    add("--threads", type=int, default=1, help="with --formats (%(default)s)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--weights", choices=get_args(WeightFormat), default="auto", help="format of the language model's matrices: auto is dtype")
    add("--sequences", type=int, default=8)
    add("--tokens", type=int, default=30, help="predictions per sequence (%(default)s)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.formats:
        return _compare_formats(parser, options)
    if load_model_config(options.checkpoint).quantization is not None:
        parser.error(f"{options.checkpoint} is quantized: transformers, for comparison, reads it only with other packages")
    bench = run_bench("accuracy", options.json, (BenchError,), lambda _: measure(options), show)
    return 1 if bench is None else 0


def _compare_formats(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    for name in ("text_tokens", "threads"):
        if (value := getattr(options, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: expected 1 or more")
    try:
        text = PROSE if options.text is None else options.text.read_text()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--text {options.text}: {error}")

    def compare(console: Console) -> FormatsBench:
        with progress(console) as tell:
            return measure_formats(options.checkpoint, text, options.text_tokens, options.threads, tell)

    bench = run_bench("accuracy", options.json, (BenchError, CheckpointError), compare, show_formats)
    return 1 if bench is None else 0


def measure(options: argparse.Namespace) -> AccuracyBench:
    """All computations. Raises: BenchError."""
    need_extra("reference", "transformers")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    config = load_model_config(options.checkpoint, options.dtype)
    generator = torch.Generator().manual_seed(options.seed)
    length = PROMPT_TOKENS + options.tokens
    ids = torch.randint(0, min(config.language.vocab_size, 1000), (options.sequences, length), generator=generator)
    reference = transformers_logits(options.checkpoint, ids, PROMPT_TOKENS, "float32")
    peer = transformers_logits(options.checkpoint, ids, PROMPT_TOKENS, options.dtype)
    differences = [difference(f"transformers, {options.dtype}", config, peer, reference)]
    for kv_dtype in get_args(KvDType):
        config = load_model_config(options.checkpoint, options.dtype, kv_dtype=kv_dtype, weights=options.weights)
        name = f"mmrt, {options.dtype}" if kv_dtype == "auto" else f"mmrt, {options.dtype}, KV in {kv_dtype}"
        differences.append(difference(name, config, our_logits(options.checkpoint, config, ids, PROMPT_TOKENS), reference))
    config = load_model_config(options.checkpoint, options.dtype, weights=options.weights)
    for packed in get_args(TransferDType)[1:]:
        logits = our_logits(options.checkpoint, config, ids, PROMPT_TOKENS, packed)
        differences.append(difference(f"mmrt, {options.dtype}, packed in {packed}", config, logits, reference, packed))
    return AccuracyBench(
        environment=read_environment(),
        checkpoint=options.checkpoint.name,
        dtype=options.dtype,
        weights=options.weights,
        differences=differences,
    )


def show(console: Console, bench: AccuracyBench) -> None:
    """The table."""
    rows = []
    for d in bench.differences:
        errors = f"{100 * d.flips / d.num_tokens:.1f} %", f"{d.mean_error:.4f}", f"{d.max_error:.4f}"
        rows.append([d.name, str(d.kv_bytes), str(d.flips), *errors])
    weights = "" if bench.weights in ("auto", bench.dtype) else f", weights in {bench.weights}"
    num_tokens = bench.differences[0].num_tokens
    title = f"{bench.checkpoint}{weights}: logits of {num_tokens} tokens against float32; KV in bytes per token"
    show_table(console, title, ["", "KV", "flips", "rate", "mean |d|", "max |d|"], rows)


def difference(name: str, config: ModelConfig, logits: Tensor, reference: Tensor, packed: TransferDType = "auto") -> Difference:
    """Compare logits float32 [S, T, V]."""
    error = (logits - reference).abs()
    flips = logits.argmax(-1) != reference.argmax(-1)
    return Difference(
        name=name,
        num_tokens=flips.numel(),
        flips=int(flips.sum()),
        mean_error=float(error.mean()),
        max_error=float(error.max()),
        kv_bytes=(config.packed_page_bytes(PAGE_TOKENS, packed) or config.kv_page_bytes(PAGE_TOKENS)) // PAGE_TOKENS,
    )


def transformers_logits(checkpoint: Path, ids: Tensor, num_prompt: int, dtype: str) -> Tensor:
    """float32 [S, T, V]: transformers' logits before each token after the prompt."""
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5OmniThinkerForConditionalGeneration

    kind = AutoConfig.from_pretrained(checkpoint).model_type
    family = Qwen2_5_VLForConditionalGeneration if kind == "qwen2_5_vl" else Qwen2_5OmniThinkerForConditionalGeneration
    model = family.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    logits: Tensor = model(input_ids=ids[:, :-1], attention_mask=torch.ones_like(ids[:, :-1])).logits[:, num_prompt - 1 :].float()
    return logits


def our_logits(checkpoint: Path, config: ModelConfig, ids: Tensor, num_prompt: int, packed: TransferDType = "auto") -> Tensor:
    """As ``transformers_logits``, from our decoder: all but the last prompt token prefilled, the rest decoded as one batch. ``packed``:
    type of the pages on their way between the two."""
    num_sequences, length = ids.shape
    num_pages = -(-length // PAGE_TOKENS)
    kv = torch.zeros((num_sequences * num_pages, config.kv_page_bytes(PAGE_TOKENS)), dtype=torch.uint8)
    tables = torch.arange(num_sequences * num_pages).view(num_sequences, num_pages)
    model = build_language_model(config, read_weights(checkpoint, config), kv, PAGE_TOKENS)
    assert model.embed(ids[0, :1]).dtype == torch_dtype(config.dtype)
    prompt = torch.arange(num_prompt - 1).expand(3, -1)
    model.prefill([Chunk(model.embed(row[: num_prompt - 1]), prompt, 0, table) for row, table in zip(ids, tables, strict=True)])
    if packed != "auto":
        packing = KvPacking(config.language, PAGE_TOKENS, torch_dtype(config.dtype), packed)
        kv.copy_(packing.unpack(packing.pack(kv)))
    steps = []
    for position in range(num_prompt - 1, length - 1):
        lengths = torch.full((num_sequences,), position + 1)
        steps.append(model.decode(ids[:, position], torch.full((3, num_sequences), position), lengths, tables))
    return torch.stack(steps, dim=1)
