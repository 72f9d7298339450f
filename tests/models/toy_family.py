"""A model family in one module: the left and the right half of a picture in tiles of 16 x 16, nine of which make a token; between
the halves is a word. Every second layer of its decoder has a window, and the upper half attends to keys and values of the lower.
``test_families`` registers it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmrt.models.architecture import AttentionConfig, LanguageConfig, LayerConfig, MlpConfig, ModelConfig, RopeConfig
from mmrt.models.checkpoint.json_fields import CheckpointFiles
from mmrt.models.checkpoint.weight_specs import TensorSpec, language_specs, same
from mmrt.models.errors import UnsupportedMediaError
from mmrt.models.families.family import CheckpointRecipe
from mmrt.models.lm.decoder import AfterLayer
from mmrt.models.media_config import VisionRules
from mmrt.models.towers.interface import Tower, TowerInput
from mmrt.schema.media import ItemShape, MediaKind, MediaSpan, SegmentShape, View

TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tile>", "<cut>")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


def parse_config(files: CheckpointFiles) -> ModelConfig:
    config = files.required("config.json")
    width = config.integer("width")
    language = LanguageConfig(
        vocab_size=config.integer("words"),
        hidden_size=width,
        rms_norm_eps=1e-6,
        tie_embeddings=True,
        layers=tuple(
            LayerConfig(
                mixer=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=width // 2, window=window, owner=owner),
                feed_forward=MlpConfig(intermediate_size=2 * width),
            )
            for window, owner in ((config.integer("window"), -1), (0, -1), (config.integer("window"), 0), (0, 1))
        ),
        ropes=(RopeConfig(theta=10000.0),),
    )
    return ModelConfig(
        family="toy",
        language=language,
        dtype="float32",
        max_context=512,
        eos_token_ids=config.integers("end"),
        vision_rules=VisionRules(patch_size=16, temporal_patch_size=1, merge_size=3, max_frames=0),
        image_token_id=config.integer("tile"),
        item_text_ids=(config.integer("cut"),),
    )


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    assert config.vision_rules is not None
    return [*language_specs(config.language), same("vision.project", config.language.hidden_size, config.vision_rules.row_bytes)]


def canonical_name(name: str) -> str:
    return name.removeprefix("toy/")


def checkpoint_name(name: str) -> str:
    return f"toy/{name}"


def recipes() -> Mapping[str, CheckpointRecipe]:
    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        config = {"model_type": "toy", "width": 32, "window": 24, "words": 320, "end": [ids["<|im_end|>"]], "tile": ids["<tile>"]}
        config["cut"] = ids["<cut>"]
        return {"config.json": config}

    return {"toy": CheckpointRecipe(320, 20, TOKENS, (), {}, TEMPLATE, files)}


class _Tower:
    """The mean of nine tiles, projected."""

    def __init__(self, project: Tensor) -> None:
        self._project = project

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        tiles = [torch.from_numpy(part.rows).float() for part in parts]
        return [tile.view(-1, 9, tile.shape[1]).mean(1) @ self._project.T for tile in tiles]


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    return {"image": _Tower(weights["vision.project"])}


def positions(config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[np.ndarray, int]:
    """A picture stands at one place."""
    ahead = np.zeros(num_tokens, np.int64)
    for span in spans:
        ahead[span.start + 1 : span.start + span.shape.num_tokens] = 1
    places = np.arange(num_tokens) - np.cumsum(ahead)
    return np.broadcast_to(places, (3, num_tokens)), int(places[-1]) + 1 - num_tokens


def image_item(config: ModelConfig, height: int, width: int) -> ItemShape:
    assert config.vision_rules is not None
    half = -(-height // 48)
    grid = (2, 3 * half, 3)
    views = tuple(View(((48 * half, 96),), (x, 0, 48, 48 * half)) for x in (0, 48))
    ids = (config.image_token_id, half), (config.item_text_ids[0], 1), (config.image_token_id, half)
    segment = SegmentShape("image", grid, 18 * half, config.vision_rules.row_bytes, 2 * half + 1, ids=ids, views=views)
    return ItemShape("image", grid, segment.num_tokens, [segment])


def sample_frames(config: ModelConfig, total_frames: int, fps: float) -> np.ndarray:
    raise UnsupportedMediaError("this model takes no video")


def video_item(
    config: ModelConfig, num_frames: int, height: int, width: int, sampled_fps: float, times_s: Sequence[float] = ()
) -> ItemShape:
    raise UnsupportedMediaError("this model takes no video")


def audio_item(config: ModelConfig, num_frames: int) -> ItemShape:
    raise UnsupportedMediaError("this model takes no audio")


def video_with_sound(config: ModelConfig, video: ItemShape, sound: ItemShape) -> ItemShape:
    raise UnsupportedMediaError("this model takes no sound with its videos")
