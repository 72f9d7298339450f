"""One stage of a video's way to its first token, alone on this machine, in a process of its own. Called by ``video``.

usage: python -m mmrt_lab.media.video_stages STAGE CHECKPOINT DTYPE FILE; STAGE is one of ``STAGES``. Prints a ``StageAlone`` as JSON.
Decoding takes all processors, as it does in a run; the models take ``--threads`` threads, as many as an actor has.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from mmrt.media.decoding import DecodingPool, analyse_bitstream
from mmrt.media.dispatch import Request
from mmrt.media.engines import upright_rgb
from mmrt.media.limits import MediaLimits
from mmrt.media.packets import Bitstream
from mmrt.media.preprocess import resize, temporal_rows
from mmrt.media.timing import sampled, sampled_fps
from mmrt.models.architecture import ModelConfig
from mmrt.models.checkpoint.weights import read_weights, torch_dtype
from mmrt.models.config import load_model_config
from mmrt.models.families.registry import family_of
from mmrt.models.lm.decoder import Chunk
from mmrt.models.lm.language_model import build_language_model
from mmrt.models.towers.dispatch import Towers
from mmrt.models.towers.interface import TowerInput
from mmrt.schema.media import ItemShape

STAGES = ("decode", "encode", "prefill")
PAGE_TOKENS = 16
CHUNK_TOKENS = 1024


class StageAlone(msgspec.Struct, frozen=True, kw_only=True):
    """``num_units``: temporal patches that were decoded, or embedding rows."""

    wall_s: float
    cpu_s: float
    num_units: int


class _Video:
    """A video, and what the model makes of it."""

    def __init__(self, file: Path, config: ModelConfig) -> None:
        self.config = config
        self.limits = MediaLimits()
        self.bitstream: Bitstream = analyse_bitstream(file.open("rb", buffering=0), self.limits)
        info, family = self.bitstream.info, family_of(config)
        self.wanted = sampled(info, partial(family.sample_frames, config))
        fps = sampled_fps(info, len(self.wanted))
        self.item: ItemShape = family.video_item(config, len(self.wanted), info.height, info.width, fps)


def run_stage(stage: str, checkpoint: Path, config: ModelConfig, file: Path) -> StageAlone:
    """Do a stage's work for the whole video, without its preparation."""
    work = {"decode": _decode, "encode": _encode, "prefill": _prefill}[stage](checkpoint, _Video(file, config))
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    num_units = work()
    return StageAlone(wall_s=time.perf_counter() - wall_s, cpu_s=time.process_time() - cpu_s, num_units=num_units)


def _decode(_: Path, video: _Video) -> Callable[[], int]:
    """All engines together, frames resized where they are decoded, as in the video process."""
    rules = video.config.vision_rules
    assert rules is not None
    upright = upright_rgb(video.limits)
    height, width = (side * rules.patch_size for side in video.item.grid[1:])

    def resized(frame: Any, reformatter: Any) -> Any:
        return np.ascontiguousarray(resize(upright(frame, reformatter), height, width))

    def work() -> int:
        with DecodingPool() as pool:
            request = pool.add_decoding_request(video.bitstream, video.wanted, resized, rules.temporal_patch_size)
            return sum(1 for _ in temporal_rows((_next_frame(pool, request) for _ in video.wanted), rules))

    return work


def _next_frame(pool: DecodingPool, request: Request) -> Any:
    frame = pool.get_decoding_output(request)
    assert frame is not None
    return frame


def _encode(checkpoint: Path, video: _Video) -> Callable[[], int]:
    """Segment by segment, as plans come; the rows are noise: their values cost nothing."""
    towers = Towers(video.config, read_weights(checkpoint, video.config))
    random = np.random.default_rng(0)
    parts = [
        TowerInput("video", random.integers(0, 256, (part.num_rows, part.row_bytes), np.uint8), part.grid)
        for part in video.item.segments
    ]
    towers.encode(parts[:1])

    def work() -> int:
        return sum(len(towers.encode([part])[0]) for part in parts)

    return work


def _prefill(checkpoint: Path, video: _Video) -> Callable[[], int]:
    config, num_tokens = video.config, video.item.num_tokens
    num_pages = -(-num_tokens // PAGE_TOKENS)
    pool = torch.zeros(num_pages, config.kv_page_bytes(PAGE_TOKENS), dtype=torch.uint8)
    model = build_language_model(config, read_weights(checkpoint, config), pool, PAGE_TOKENS)
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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("dtype")
    parser.add_argument("file", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fps", type=float, required=True)
    parser.add_argument("--max-pixels", type=int, required=True)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    config = _narrowed(load_model_config(options.checkpoint, options.dtype), options.fps, options.max_pixels)
    alone = run_stage(options.stage, options.checkpoint, config, options.file)
    print(msgspec.json.encode(alone).decode())
    return 0


def _narrowed(config: ModelConfig, fps: float, max_pixels: int) -> ModelConfig:
    """As a request with these options is served."""
    rules = config.vision_rules
    assert rules is not None
    least = min(rules.video_min_pixels, max_pixels)
    return msgspec.structs.replace(
        config, vision_rules=msgspec.structs.replace(rules, fps=fps, video_min_pixels=least, video_max_pixels=max_pixels)
    )


if __name__ == "__main__":
    sys.exit(main())
