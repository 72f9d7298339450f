"""SmolVLM2 and Idefics3: text and pictures, which are cut into square tiles. As transformers' ``smolvlm`` and ``idefics3``, which see a
picture alike.

A picture is resized twice, cut into tiles, each between tags of its row and column, and shown once more as a whole.
"""

import math
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from ....schema.media import ItemShape, MediaKind, SegmentShape, View
from ...architecture import LanguageConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...checkpoint.weight_specs import TensorSpec, language_specs
from ...errors import UnsupportedMediaError
from ...media_config import VisionConfig, VisionRules
from .. import no_media
from ..family import CheckpointRecipe, made_recipes
from ..fields import max_positions, parse_attention, parse_decoder
from ..qwen2_5 import fields, media, seeing
from ..text.ropes import parse_rope
from ..vit import VitConfig, parse_steps, parse_vit, vit_specs
from .tags import read_tile_tokens

if TYPE_CHECKING:
    import torch

    from ...towers.interface import Tower

positions = no_media.positions
audio_item, sample_frames = media.audio_item, media.sample_frames
video_item, video_with_sound = seeing.video_item, seeing.video_with_sound

_MOST_EDGE = 4096  # of a picture once it is resized; transformers would resize a larger one again
_PLACEHOLDER = 128257  # of a picture, where the file does not say
_PARTS = {
    "model.text_model.": "language.",
    "model.vision_model.": "vision.",
    "model.connector.modality_projection.proj.": "vision.merger.linear_1.",
    "model.": "language.",  # as files in GGUF have the decoder
}


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json. Raises CheckpointError."""
    is_tied = files.required("config.json").boolean("tie_word_embeddings", default=False)  # text_config's says nothing

    def parse_text(text: JsonObject, _: bool) -> LanguageConfig:
        heads = parse_attention(text)
        return parse_decoder(text, heads, parse_rope(text, heads.head_dim, max_positions(text)), is_tied)

    def parse_tower(vision: JsonObject, hidden_size: int) -> VisionConfig:
        merge = files.required("config.json").integer("scale_factor", default=2)
        return parse_vit(vision, hidden_size, merge)

    config = seeing.parse_config(files, "smolvlm", parse_text, parse_tower, _parse_rules, _PLACEHOLDER)
    assert config.vision_rules is not None
    tiles = read_tile_tokens(files.path, math.ceil(config.vision_rules.longest_edge / config.vision_rules.tile))
    return msgspec.structs.replace(config, tiles=tiles, item_text_ids=tuple(sorted(set(tiles.ids))))


def _parse_rules(files: CheckpointFiles, vision: VisionConfig) -> VisionRules:
    nested = files.optional("processor_config.json") or JsonObject({}, "defaults")
    image, _, _ = fields.processors(files, video_falls_back=False)
    parse_steps(image, "lanczos")
    for name in ("do_image_splitting", "do_convert_rgb"):
        if not image.boolean(name, default=True):
            raise image.error(name, "is false, which is not supported")
    size, largest = image.object("size"), image.object("max_image_size")
    tile = largest.integer("longest_edge", default=364)
    side = tile // vision.patch_size
    if side < vision.merge_size or side % vision.merge_size:
        raise largest.error("longest_edge", f"is {tile}, {side} patches: no multiple of scale_factor ({vision.merge_size})")
    num_tokens = (side // vision.merge_size) ** 2
    if nested.integer("image_seq_len", default=num_tokens) != num_tokens:
        raise nested.error("image_seq_len", f"is {nested.integer('image_seq_len')}, but a tile has {num_tokens} tokens")
    longest = size.integer("longest_edge", default=4 * 364, most=_MOST_EDGE)
    return VisionRules(
        patch_size=vision.patch_size,
        temporal_patch_size=1,
        merge_size=vision.merge_size,
        min_pixels=tile**2,
        max_pixels=(-(-longest // tile) * tile) ** 2,
        max_frames=0,
        resample="lanczos",
        image_mean=image.colour("image_mean", default=(0.5, 0.5, 0.5)),
        image_std=image.colour("image_std", default=(0.5, 0.5, 0.5)),
        tile=tile,
        longest_edge=longest,
    )


def image_item(config: ModelConfig, height: int, width: int) -> ItemShape:
    """Its tiles, row by row, then all of it at a tile's size. One tile is shown as a whole alone."""
    rules, tiles = media.vision_rules(config, "image"), config.tiles
    assert tiles is not None
    if min(height, width) < 1:
        raise UnsupportedMediaError(f"picture of {width}x{height} pixels is empty")
    sizes = _sizes(rules, height, width)
    tile, side = rules.tile, rules.tile // rules.patch_size
    seen = side * rules.patch_size  # pixels at a side that make whole patches
    num_rows, num_columns = (length // tile for length in sizes[-1])
    segments = list[SegmentShape]()

    def add(view: View, lead: tuple[int, ...], trail: tuple[int, ...]) -> None:
        num_tokens = (side // rules.merge_size) ** 2
        segments.append(SegmentShape("image", (1, side, side), side**2, rules.row_bytes, num_tokens, lead, trail, views=(view,)))

    if num_rows * num_columns > 1:
        for row in range(num_rows):
            for column in range(num_columns):
                is_last = column == num_columns - 1
                trail = () if not is_last else tiles.row_end if row < num_rows - 1 else tiles.last_row_end
                add(View(sizes, (column * tile, row * tile, seen, seen)), tiles.opening + tiles.places[row][column], trail)
        sizes = (*sizes, (tile, tile))
    add(View(sizes, (0, 0, seen, seen)), tiles.opening + tiles.whole, tiles.opening)
    num_tokens = sum(segment.num_prompt_tokens for segment in segments)
    return ItemShape("image", (len(segments), side, side), num_tokens, segments)


def _sizes(rules: VisionRules, height: int, width: int) -> tuple[tuple[int, int], ...]:
    """To which a picture is resized: the longer side to the longest edge, then both to multiples of a tile. The edge is shorter by
    whole tiles where these would have more than ``max_pixels``."""
    edge = rules.longest_edge
    while True:
        first = _with_longer_side(height, width, edge)
        first = (first[0] + first[0] % 2, first[1]) if width >= height else (first[0], first[1] + first[1] % 2)
        first = max(first[0], 1), max(first[1], 1)
        second = _with_longer_side(*first, _up_to_tiles(rules, max(first)))
        second = _up_to_tiles(rules, second[0]), _up_to_tiles(rules, second[1])
        if second[0] * second[1] <= rules.max_pixels or edge <= rules.tile:
            return first, second
        edge -= rules.tile


def _with_longer_side(height: int, width: int, longer: int) -> tuple[int, int]:
    ratio = width / height
    return (int(longer / ratio), longer) if width >= height else (longer, int(longer * ratio))


def _up_to_tiles(rules: VisionRules, length: int) -> int:
    return math.ceil(length / rules.tile) * rules.tile


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """Decoder and tower."""
    assert isinstance(config.vision, VitConfig)
    return [*language_specs(config.language), *vit_specs(config.vision)]


def canonical_name(name: str) -> str:
    """See ``Family``: with and without ``model.`` in front."""
    whole = name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
    return next((ours + whole.removeprefix(theirs) for theirs, ours in _PARTS.items() if whole.startswith(theirs)), name)


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    parts = sorted(_PARTS.items(), key=lambda part: -len(part[1]))  # the merger is a part of the tower
    return next((theirs + name.removeprefix(ours) for theirs, ours in parts if name.startswith(ours)), name)


def recipes() -> Mapping[str, CheckpointRecipe]:
    return made_recipes(__package__)


def build_towers(config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
    # By its name: only the process that builds towers depends on them.
    towers: dict[MediaKind, Tower] = import_module(f"{__package__}.towers").build_towers(config, weights, device)
    return towers
