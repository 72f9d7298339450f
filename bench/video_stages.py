"""One stage of a video's way to its first token, alone on this machine, in a process of its own. Called by ``video``.

usage: python -m mmrt.bench.video_stages STAGE CHECKPOINT DTYPE FILE; STAGE is one of ``STAGES``. Prints a ``StageAlone`` as JSON.
Decoding takes all processors, as it does in a run; the models take ``--threads`` threads, as many as an actor has.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch

from ..actors.media_items import OpenItem, open_item
from ..actors.media_rules import for_medium, for_run
from ..media.decoding import DecodingPool
from ..media.limits import MediaLimits, TimeBudget
from ..models.architecture import ModelConfig
from ..models.config import load_model_config
from ..models.decoder import Chunk
from ..models.lm import build_language_model
from ..models.towers import TowerInput, Towers
from ..models.weights import attach_weights, torch_dtype, write_weights
from ..runtime.config import MediaSection
from ..runtime.messages import MediaOptions

STAGES = ("decode", "encode", "prefill")
PAGE_TOKENS = 16
CHUNK_TOKENS = 1024
_TIMEOUT_S = 3600.0


class StageAlone(msgspec.Struct, frozen=True, kw_only=True):
    """``num_units``: frames of temporal patches, or tokens."""

    wall_s: float
    cpu_s: float
    num_units: int


def run_stage(
    stage: str, checkpoint: Path, dtype: Literal["auto", "float32", "bfloat16"], file: Path, options: MediaOptions
) -> StageAlone:
    """Do a stage's work for the whole video, without its preparation."""
    config = for_medium(for_run(load_model_config(checkpoint, dtype), MediaSection()), options)
    with DecodingPool() as pool, file.open("rb", buffering=0) as reader:
        item = open_item("video", reader, config, MediaLimits(), TimeBudget(_TIMEOUT_S), pool)
        work = {"decode": _decode, "encode": _encode, "prefill": _prefill}[stage](checkpoint, config, item)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        num_units = work()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        item.close()
    return StageAlone(wall_s=wall_s, cpu_s=cpu_s, num_units=num_units)


def _decode(_: Path, config: ModelConfig, item: OpenItem) -> Callable[[], int]:
    def work() -> int:
        return sum(len(list(item.rows(segment))) for segment in range(len(item.item.segments)))

    return work


def _encode(checkpoint: Path, config: ModelConfig, item: OpenItem) -> Callable[[], int]:
    """Segment by segment, as plans come; the rows are noise: their values cost nothing."""
    towers = Towers(config, _weights(checkpoint, config))
    random = np.random.default_rng(0)
    parts = [
        TowerInput("video", random.integers(0, 256, (part.num_rows, part.row_bytes), np.uint8), part.grid)
        for part in item.item.segments
    ]
    towers.encode(parts[:1])

    def work() -> int:
        return sum(len(towers.encode([part])[0]) for part in parts)

    return work


def _prefill(checkpoint: Path, config: ModelConfig, item: OpenItem) -> Callable[[], int]:
    num_tokens = item.item.num_tokens
    num_pages = -(-num_tokens // PAGE_TOKENS)
    pool = torch.zeros(num_pages, config.kv_page_bytes(PAGE_TOKENS), dtype=torch.uint8)
    model = build_language_model(config, _weights(checkpoint, config), pool, PAGE_TOKENS)
    embeds = torch.randn(num_tokens, config.language.hidden_size).to(torch_dtype(config.dtype))
    positions = torch.arange(num_tokens).expand(3, -1)
    block_table = torch.randperm(num_pages)
    chunks = [
        Chunk(embeds[at : at + CHUNK_TOKENS], positions[:, at : at + CHUNK_TOKENS], at, block_table)
        for at in range(0, num_tokens, CHUNK_TOKENS)
    ]
    model.prefill([Chunk(embeds[:8], positions[:, :8], 0, block_table)])

    def work() -> int:
        for chunk in chunks:
            model.prefill([chunk])
        return num_tokens

    return work


def _weights(checkpoint: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    buffers: list[bytearray] = []

    def allocate(num_bytes: int) -> memoryview:
        buffers.append(bytearray(num_bytes))
        return memoryview(buffers[0])

    index = write_weights(checkpoint, config, allocate)
    return attach_weights(memoryview(buffers[0]), index)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("dtype")
    parser.add_argument("file", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fps", type=float)
    parser.add_argument("--max-pixels", type=int)
    options = parser.parse_args(argv)
    limits = MediaOptions(fps=options.fps, max_pixels=options.max_pixels)
    torch.set_num_threads(options.threads)
    alone = run_stage(options.stage, options.checkpoint, options.dtype, options.file, limits)
    print(msgspec.json.encode(alone).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
