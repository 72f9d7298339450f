"""Gemma 3 that sees pictures (4B, 12B, 27B), as transformers' ``gemma3``: each is resized to one square and becomes as many tokens,
which see each other in all layers of the decoder. No crops are made of wide pictures (pan and scan), as by default in transformers.
"""

import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ....schema.media import ItemShape, MediaKind
from ...architecture import ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...checkpoint.weight_specs import TensorSpec, language_specs, same
from ...errors import CheckpointError, UnsupportedMediaError
from ...media_config import VisionRules
from .. import no_media, vit
from ..added_tokens import read_added_tokens
from ..family import CheckpointRecipe, made_recipes
from ..fields import parse_dtype, parse_eos
from ..qwen2_5 import fields, media, seeing
from ..text import gemma
from ..vit import VitConfig, parse_steps, parse_vit, vit_specs
from . import MAX_POSITIONS, parse_text

if TYPE_CHECKING:
    import torch

    from ...towers.interface import Tower

positions, sample_frames = no_media.positions, media.sample_frames
video_item, audio_item, video_with_sound = seeing.video_item, media.audio_item, seeing.video_with_sound

_TEXT = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
_PROJECTION = "vision.merger.mm_input_projection_weight"
_NORM = "vision.merger.mm_soft_emb_norm.weight"
_HALF = (0.5, 0.5, 0.5)


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json, whose ``text_config`` leaves out what is as in Gemma3TextConfig. Raises CheckpointError."""
    root = files.required("config.json")
    text = root.object("text_config").with_defaults(_TEXT)
    if not text.has("tie_word_embeddings") and root.has("tie_word_embeddings"):
        text = text.over({"tie_word_embeddings": root.boolean("tie_word_embeddings")})
    max_context = text.integer("max_position_embeddings", default=MAX_POSITIONS)
    language = parse_text(text, max_context, sees_pictures=True)
    num_tokens = root.integer("mm_tokens_per_image", default=256)
    vision = _parse_tower(root, language.hidden_size, num_tokens)
    ids = {
        field: root.integer(*names, default=default, least=0)
        for field, (*names, default) in {
            "image": ("image_token_index", "image_token_id", 262144),
            "begin": ("boi_token_index", "boi_token_id", 255999),
            "end": ("eoi_token_index", "eoi_token_id", 256000),
        }.items()
    }
    begin, image, end = _texts_of(files.path, (ids["begin"], ids["image"], ids["end"]))
    return ModelConfig(
        family="gemma3_seeing",
        language=language,
        dtype=parse_dtype(root, text),
        max_context=max_context,
        eos_token_ids=parse_eos(files, root, text),
        vision=vision,
        vision_rules=_parse_rules(files, vision, num_tokens),
        image_token_id=ids["image"],
        vision_start_token_id=ids["begin"],
        vision_end_token_id=ids["end"],
        prompt_texts=((begin, f"\n\n{begin}{image}{end}\n\n"),),
    )


def _parse_tower(root: JsonObject, hidden_size: int, num_tokens: int) -> VitConfig:
    vision, side = root.object("vision_config"), math.isqrt(num_tokens)
    num_patches = vision.integer("image_size", default=224) // vision.integer("patch_size", default=16)
    is_square = side**2 == num_tokens and num_patches >= side and num_patches % side == 0
    if not is_square or vision.integer("image_size", default=224) % num_patches:
        raise root.error(
            "mm_tokens_per_image", f"is {num_tokens}, expected a square that divides {num_patches} x {num_patches} patches"
        )
    defaults = {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}
    return replace(parse_vit(vision.with_defaults(defaults), hidden_size, num_patches // side), merger_depth=0)


def _texts_of(path: Path, ids: tuple[int, ...]) -> list[str]:
    """Of tokens that stand at pictures. Raises CheckpointError."""
    known = {id: text for text, id in read_added_tokens(path, "it names the tokens of pictures").items()}
    if unknown := [id for id in ids if id not in known]:
        raise CheckpointError(f"{path / 'tokenizer.json'}: added_tokens has no id {unknown[0]}, which stands at pictures")
    return [known[id] for id in ids]


def _parse_rules(files: CheckpointFiles, vision: VitConfig, num_tokens: int) -> VisionRules:
    nested = files.optional("processor_config.json") or JsonObject({}, "defaults")
    image, _, _ = fields.processors(files, video_falls_back=False)
    parse_steps(image, "bilinear")
    side = vision.position_side * vision.patch_size
    if image.has("do_pan_and_scan") and image.boolean("do_pan_and_scan"):
        raise image.error("do_pan_and_scan", "is true, which is not supported")
    size = image.object("size")
    for name in ("height", "width"):
        if (found := size.integer(name, default=side)) != side:
            raise size.error(name, f"is {found}, but the vision tower sees {side} pixels at a side")
    if (length := nested.integer("image_seq_length", default=num_tokens)) != num_tokens:
        raise nested.error("image_seq_length", f"is {length}, but a picture has {num_tokens} tokens")
    return VisionRules(
        patch_size=vision.patch_size,
        temporal_patch_size=1,
        merge_size=vision.merge_size,
        min_pixels=side**2,
        max_pixels=side**2,
        max_frames=0,
        resample="bilinear",
        image_mean=image.colour("image_mean", default=_HALF),
        image_std=image.colour("image_std", default=_HALF),
        tile=side,
    )


def image_item(config: ModelConfig, height: int, width: int) -> ItemShape:
    """All of it, as a square."""
    rules = media.vision_rules(config, "image")
    if min(height, width) < 1:
        raise UnsupportedMediaError(f"picture of {width}x{height} pixels is empty")
    return media.image_item_of(rules, (rules.tile, rules.tile))


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """Decoder and tower."""
    assert isinstance(config.vision, VitConfig)
    width, out = config.vision.hidden_size, config.vision.out_hidden_size
    norm = same(_NORM, width)._replace(dtype="float32", offset=1.0)
    return [*language_specs(config.language), *vit_specs(config.vision), norm, same(_PROJECTION, width, out)]


def canonical_name(name: str) -> str:
    """See ``Family``."""
    found = vit.canonical_name(name)
    return gemma.canonical_name(f"model.{found.removeprefix('language.')}") if found.startswith("language.") else found


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    if name.startswith("language."):
        return f"language_model.{gemma.checkpoint_name(name)}"
    return vit.checkpoint_name(name)


def build_towers(config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
    # By its name: only the process that builds towers depends on them.
    towers: dict[MediaKind, Tower] = import_module(f"{__package__}.towers").build_towers(config, weights, device)
    return towers


def recipes() -> Mapping[str, CheckpointRecipe]:
    return made_recipes(__package__, "gemma3_seeing")
