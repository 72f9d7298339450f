"""LLaVA-1.5 and LLaVA-NeXT: text and pictures, seen by CLIP. As transformers' ``llava`` and ``llava_next``, with the decoder of Llama,
Mistral or Qwen2, without windows. ``onevision`` has LLaVA-OneVision."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from ....schema.media import ItemShape, MediaKind, SegmentShape
from ...architecture import LanguageConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...checkpoint.weight_specs import TensorSpec, language_specs, same
from ...media_config import VisionRules
from .. import no_media
from ..family import CheckpointRecipe, made_recipes
from ..qwen2_5 import fields, media, seeing
from ..text.nested import is_tied, nested_fields, nested_positions, parse_nested
from ..vit import VitConfig, canonical_name, checkpoint_name, parse_steps, parse_vit, vit_specs
from . import pictures

if TYPE_CHECKING:
    import torch

    from ...towers.interface import Tower

_PLACEHOLDER = 32000  # of a picture, where the file does not say
_CLIP = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14}
_CLIP |= {"image_size": 336}
_GRIDS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


class LlavaFamily:
    """A ``Family``. ``has_tiles``: pictures are cut into tiles, which are joined behind the tower; a learned row ends each line."""

    home = __name__

    def __init__(self, name: str, has_tiles: bool) -> None:
        self._name, self._has_tiles = name, has_tiles

    def parse_config(self, files: CheckpointFiles) -> ModelConfig:
        """Map config.json. Raises CheckpointError."""
        root = files.required("config.json")
        text = nested_fields(root, "llama", "mistral", "qwen2")

        def parse_text(own: JsonObject, is_any_tied: bool) -> LanguageConfig:
            return parse_nested(text, is_tied(files, root, text))

        def parse_tower(own: JsonObject, hidden_size: int) -> VitConfig:
            return _parse_tower(root, hidden_size)

        def parse_rules(files: CheckpointFiles, vision: Any) -> VisionRules:
            return self._parse_rules(files, vision)

        config = seeing.parse_config(files, self._name, parse_text, parse_tower, parse_rules, _PLACEHOLDER)
        placeholder = root.integer("image_token_index", "image_token_id", default=_PLACEHOLDER, least=0)
        return msgspec.structs.replace(config, image_token_id=placeholder, max_context=nested_positions(text))

    def _parse_rules(self, files: CheckpointFiles, vision: VitConfig) -> VisionRules:
        root = files.required("config.json")
        image, _, _ = fields.processors(files, video_falls_back=False)
        parse_steps(image, "bicubic")
        tile = _tile(root)
        if not image.boolean("do_center_crop", default=True) or (not self._has_tiles and image.boolean("do_pad", default=False)):
            raise image.error("do_center_crop", "is false, or do_pad is true; only the middle of a picture is supported")
        for name, names in (("size", ("shortest_edge", "height")), ("crop_size", ("height", "width"))):
            value = image.data.get(name)
            found = value if isinstance(value, int) else image.object(name).integer(*names, default=tile)
            if found != tile:
                raise image.error(name, f"is {found}, but the vision tower's image_size is {tile}")
        base = VisionRules()
        grids = pictures.parse_grids(tile, root, image, _GRIDS) if self._has_tiles else ()
        areas = [height * width for height, width in grids] or [tile**2]
        return VisionRules(
            patch_size=vision.patch_size,
            temporal_patch_size=1,
            merge_size=1,
            min_pixels=min(areas),
            max_pixels=max(areas),
            max_frames=0,
            image_mean=image.colour("image_mean", default=base.image_mean),
            image_std=image.colour("image_std", default=base.image_std),
            tile=tile,
            grids=grids,
        )

    def recipes(self) -> Mapping[str, CheckpointRecipe]:
        return made_recipes(self.home, self._name)

    def tensor_specs(self, config: ModelConfig) -> list[TensorSpec]:
        """Decoder, tower and, with tiles, the learned row."""
        assert isinstance(config.vision, VitConfig)
        newline = [same("vision.image_newline", config.language.hidden_size)] if self._has_tiles else []
        return [*language_specs(config.language), *vit_specs(config.vision), *newline]

    def image_item(self, config: ModelConfig, height: int, width: int) -> ItemShape:
        """One segment: tiles are joined behind the tower. All pictures of LLaVA-1.5 have one size, whatever the bounds of pixels."""
        rules = media.vision_rules(config, "image")
        views, num_tokens = pictures.views_of(rules, height, width), pictures.num_tokens(rules, height, width)
        side = rules.tile // rules.patch_size
        grid = (len(views), side, side)
        details = (height, width) if rules.grids else ()
        segment = SegmentShape("image", grid, len(views) * side**2, rules.row_bytes, num_tokens, views=tuple(views), details=details)
        return ItemShape("image", grid, num_tokens, [segment])

    def build_towers(self, config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
        # By its name: only the process that builds towers depends on them.
        towers: dict[MediaKind, Tower] = import_module(f"{self.home}.towers").build_towers(config, weights, device)
        return towers

    @staticmethod
    def canonical_name(name: str) -> str:
        """See ``Family``."""
        return canonical_name(name).replace("image_newline", "vision.image_newline")

    @staticmethod
    def checkpoint_name(name: str) -> str:
        """See ``Family``."""
        return checkpoint_name(name.replace("vision.image_newline", "image_newline"))

    positions = staticmethod(no_media.positions)
    sample_frames = staticmethod(media.sample_frames)
    video_item = staticmethod(seeing.video_item)
    audio_item = staticmethod(media.audio_item)
    video_with_sound = staticmethod(seeing.video_with_sound)


def _tile(root: JsonObject) -> int:
    return root.object("vision_config").with_defaults(_CLIP).integer("image_size")


def _parse_tower(root: JsonObject, hidden_size: int) -> VitConfig:
    vision = root.object("vision_config").with_defaults(_CLIP)
    vision.text("model_type", default="clip_vision_model", choices=("clip_vision_model",))
    root.text("vision_feature_select_strategy", default="default", choices=("default",))
    config = parse_vit(vision, hidden_size, 1, "quick_gelu", 1e-5)
    return msgspec.structs.replace(seen_layers(root, config, -2), has_class=True, has_first_norm=True, patch_bias=False)


def seen_layers(root: JsonObject, config: VitConfig, default: int) -> VitConfig:
    """The tower as far as ``vision_feature_layer``, ``default`` where the file does not say, and a merger of two matrices. Raises
    CheckpointError."""
    root.text("projector_hidden_act", default="gelu", choices=("gelu",))
    layer = root.data.get("vision_feature_layer", default)
    if isinstance(layer, bool) or not isinstance(layer, int) or not -config.depth <= layer < 0:
        raise root.error("vision_feature_layer", f"is {layer!r}, expected a number from {-config.depth} to -1")
    return msgspec.structs.replace(
        config,
        depth=config.depth + 1 + layer,  # the layers behind are not computed
        has_last_norm=False,
        merger_depth=2,
        merger_bias=root.boolean("multimodal_projector_bias", default=True),
    )


LLAVA, LLAVA_NEXT = LlavaFamily("llava", has_tiles=False), LlavaFamily("llava_next", has_tiles=True)
