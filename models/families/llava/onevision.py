"""LLaVA-OneVision: text, pictures and videos, seen by SigLIP. As transformers' ``llava_onevision``, with the decoder of Qwen2, without
windows.

A picture that is alone in its request is cut into tiles, each of several is seen as one. A frame of a video has a quarter of a tile's
tokens, and a learned row ends the video.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ....schema.media import ItemShape, SegmentShape
from ...architecture import LanguageConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...errors import UnsupportedMediaError
from ...media_config import VisionRules
from ..qwen2_5 import fields, media, seeing
from ..text.nested import is_tied, nested_fields, nested_positions, parse_nested
from ..vit import VitConfig, parse_steps, parse_vit
from . import LlavaFamily, pictures, seen_layers

_SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26, "num_attention_heads": 16, "patch_size": 14}
_SIGLIP |= {"image_size": 384}
_GRIDS = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))
_ASPECT = "anyres_max_9"
_MAX_FRAMES = 32  # of a video, where the file does not say
_PLACEHOLDERS = {"image": 151646, "video": 151647}


class OneVisionFamily(LlavaFamily):
    """A ``Family``."""

    def parse_config(self, files: CheckpointFiles) -> ModelConfig:
        """Map config.json. Raises CheckpointError."""
        root = files.required("config.json")
        text = nested_fields(root, "qwen2")

        def parse_text(own: JsonObject, is_any_tied: bool) -> LanguageConfig:
            return parse_nested(text, is_tied(files, root, text))

        def parse_tower(own: JsonObject, hidden_size: int) -> VitConfig:
            return _parse_tower(root, hidden_size)

        config = seeing.parse_config(files, "llava_onevision", parse_text, parse_tower, _parse_rules)
        image, video = (root.integer(f"{kind}_token_index", f"{kind}_token_id", default=id) for kind, id in _PLACEHOLDERS.items())
        return replace(config, image_token_id=image, video_token_id=video, max_context=nested_positions(text))

    def image_item(self, config: ModelConfig, height: int, width: int) -> ItemShape:
        """As LLaVA-NeXT's. Readers know one among others by its details, too."""
        item = super().image_item(config, height, width)
        return replace(item, segments=[replace(segment, details=(height, width)) for segment in item.segments])

    @staticmethod
    def video_item(
        config: ModelConfig, num_frames: int, height: int, width: int, sampled_fps: float, times_s: Sequence[float] = ()
    ) -> ItemShape:
        """Frames are alike, whatever their size. The last of the details says how many learned rows end the segment."""
        rules = media.vision_rules(config, "video")
        if num_frames < 1:
            raise UnsupportedMediaError("video has no frames")
        side = rules.tile // rules.patch_size
        num_tokens, details = (-(-side // 2)) ** 2, (rules.tile, rules.tile, 0)
        frame = SegmentShape("video", (1, side, side), side**2, rules.row_bytes, num_tokens, details=details)
        last = replace(frame, num_tokens=num_tokens + 1, details=(*details[:2], 1))
        segments = [*[frame] * (num_frames - 1), last]
        return ItemShape("video", (num_frames, side, side), num_frames * num_tokens + 1, segments)


def _parse_tower(root: JsonObject, hidden_size: int) -> VitConfig:
    vision = root.object("vision_config").with_defaults(_SIGLIP)
    vision.text("model_type", default="siglip_vision_model", choices=("siglip_vision_model",))
    root.text("vision_feature_select_strategy", default="full", choices=("full",))
    return seen_layers(root, parse_vit(vision, hidden_size, 1), -1)


def _parse_rules(files: CheckpointFiles, vision: Any) -> VisionRules:
    root, nested = files.required("config.json"), files.optional("processor_config.json") or JsonObject({}, "defaults")
    image, video, _ = fields.processors(files, video_falls_back=True)
    video = video if video.data else image
    tile = root.object("vision_config").with_defaults(_SIGLIP).integer("image_size")
    base, num_tokens = VisionRules(), vision.position_side**2
    if (found := nested.integer("num_image_tokens", default=num_tokens)) != num_tokens:
        raise nested.error("num_image_tokens", f"is {found}, but a tile has {num_tokens} tokens")
    for processor in (image, video):
        parse_steps(processor, "bicubic")
        if processor.boolean("do_center_crop", default=False):
            raise processor.error("do_center_crop", "is true, which is not supported")
        size = processor.data.get("size")
        side = size if isinstance(size, int) else processor.object("size").integer("shortest_edge", "height", default=tile)
        if side != tile:
            raise processor.error("size", f"is {side}, but the vision tower's image_size is {tile}")
    mean, std = (image.colour(name, default=usual) for name, usual in (("image_mean", base.image_mean), ("image_std", base.image_std)))
    for name, of_image, usual in (("image_mean", mean, base.image_mean), ("image_std", std, base.image_std)):
        if (of_video := video.colour(name, default=usual)) != of_image:
            raise video.error(name, f"is {list(of_video)}, but that of pictures is {list(of_image)}")
    grids = pictures.parse_grids(tile, root, image, _GRIDS)
    areas = [height * width for height, width in grids]
    return VisionRules(
        patch_size=vision.patch_size,
        temporal_patch_size=1,
        merge_size=1,
        min_pixels=min(areas),
        max_pixels=max(areas),
        video_min_pixels=tile**2,
        video_max_pixels=tile**2,
        **_sampling(video),
        image_mean=mean,
        image_std=std,
        tile=tile,
        grids=grids,
        cuts_alone=True,
        most_tiles=_most_tiles(root, nested),
    )


def _sampling(video: JsonObject) -> Mapping[str, Any]:
    """How many frames are taken: as many as the file says, else by time."""
    count = video.integer("num_frames", default=0, least=0)
    return {"fps": video.number("fps", default=VisionRules().fps), "min_frames": count or 1, "max_frames": count or _MAX_FRAMES}


def _most_tiles(root: JsonObject, nested: JsonObject) -> int:
    """Raises CheckpointError where the two files do not agree."""
    of_model, of_processor = (place.text("vision_aspect_ratio", default=_ASPECT) for place in (root, nested))
    if (found := re.fullmatch(r"anyres_max_([1-9]\d?)", of_model)) is None:
        raise root.error("vision_aspect_ratio", f"is {of_model!r}, expected anyres_max_ with a number from 1 to 99")
    if of_processor != of_model:
        raise nested.error("vision_aspect_ratio", f"is {of_processor!r}, but the model's is {of_model!r}")
    return int(found[1])


LLAVA_ONEVISION = OneVisionFamily("llava_onevision", has_tiles=True)
