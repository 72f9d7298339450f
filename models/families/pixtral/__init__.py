"""Models with Pixtral's tower, which sees pictures in their own ratio of sides: LightOnOCR, with Qwen3's decoder, Mistral 3, which are
Mistral Small 3.1 and 3.2 and Ministral 3, and Pixtral 12B. As transformers' ``lighton_ocr``, ``mistral3`` and ``llava``.

Ministral 3's queries grow beyond the context that it was first trained with, which is the longest that is served.
"""

import math
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ....schema.media import ItemShape, MediaKind, View
from ...architecture import LanguageConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...checkpoint.weight_specs import TensorSpec, language_specs
from ...errors import CheckpointError, UnsupportedMediaError
from ...media_config import VisionRules
from .. import no_media, vit
from ..added_tokens import read_tokenizer
from ..family import CheckpointRecipe, made_recipes
from ..qwen2_5 import media, seeing
from ..text.nested import is_tied, nested_fields, nested_positions, parse_nested
from .fields import PixtralConfig, parse_rules, parse_tower, processor_unit, tower_specs

if TYPE_CHECKING:
    import torch

    from ...towers.interface import Tower

_LIGHTON_NAMES = {"vision_encoder.": "vision_tower.", "vision_projection.": "multi_modal_projector."}
_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


class PixtralFamily:
    """A ``Family``. ``decoders``: kinds of the decoder, the one where the file has none first; ``placeholder``: of a picture, where the
    file does not say; ``activation``: of the tower, likewise. ``has_breaks``: a token stands behind each line of a picture.
    ``has_merge``: as in ``PixtralConfig``."""

    home = __name__

    def __init__(
        self, name: str, decoders: tuple[str, ...], placeholder: int, activation: str, has_breaks: bool, has_merge: bool = True
    ) -> None:
        self._name, self._decoders, self._placeholder, self._has_breaks = name, decoders, placeholder, has_breaks
        self._has_merge = has_merge
        self._activation = activation

    def parse_config(self, files: CheckpointFiles) -> ModelConfig:
        """Map config.json. Raises CheckpointError."""
        root = files.required("config.json")
        text = nested_fields(root, *self._decoders)

        def parse_text(own: JsonObject, is_any_tied: bool) -> LanguageConfig:
            return parse_nested(text, is_tied(files, root, text))

        def parse_vision(own: JsonObject, hidden_size: int) -> PixtralConfig:
            tower = parse_tower(root, text, hidden_size, self._activation, self._has_merge)
            return tower if self._has_breaks else processor_unit(files, tower)

        def parse_its_rules(files: CheckpointFiles, vision: object) -> VisionRules:
            assert isinstance(vision, PixtralConfig)
            return parse_rules(files, vision)

        config = seeing.parse_config(files, self._name, parse_text, parse_vision, parse_its_rules, self._placeholder)
        placeholder = root.integer("image_token_index", "image_token_id", default=self._placeholder, least=0)
        config = replace(config, image_token_id=placeholder, max_context=nested_positions(text))
        return _with_breaks(files, config) if self._has_breaks else config

    def recipes(self) -> Mapping[str, CheckpointRecipe]:
        return made_recipes(self.home, self._name)

    @staticmethod
    def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
        """Decoder and tower."""
        assert isinstance(config.vision, PixtralConfig)
        return [*language_specs(config.language), *tower_specs(config.vision)]

    @staticmethod
    def image_item(config: ModelConfig, height: int, width: int) -> ItemShape:
        """One segment. Its details, where its sides are no whole tokens: the size that it gets, and rows and columns of patches."""
        rules, vision = media.vision_rules(config, "image"), config.vision
        assert isinstance(vision, PixtralConfig)
        size = _size(rules, vision.unit, height, width)
        patch, merge = rules.patch_size, rules.merge_size
        seen = size[0] // patch, size[1] // patch
        grid = (1, math.ceil(seen[0] / merge) * merge, math.ceil(seen[1] / merge) * merge)
        rows, columns = seen[0] // merge, seen[1] // merge
        if not rows * columns:
            raise UnsupportedMediaError(f"picture of {width}x{height} pixels is too small or thin: it has no tokens")
        segment = media.vision_segment(rules, "image", grid)
        if grid[1:] != seen:
            view = View((size,), (0, 0, grid[2] * patch, grid[1] * patch))
            segment = replace(segment, num_tokens=rows * columns, views=(view,), details=(*size, *seen))
        segment = replace(segment, **_lines(config, rows, columns))
        return ItemShape("image", grid, segment.num_tokens, [segment])

    def canonical_name(self, name: str) -> str:
        """See ``Family``."""
        inner = name.removeprefix("model.")
        theirs = next((part for part in _LIGHTON_NAMES if inner.startswith(part)), "")
        return vit.canonical_name(_LIGHTON_NAMES[theirs] + inner.removeprefix(theirs) if theirs else name)

    def checkpoint_name(self, name: str) -> str:
        """See ``Family``: LightOnOCR's files have all but the head within ``model.``."""
        found = vit.checkpoint_name(name)
        if self._has_breaks:
            return found
        for theirs, ours in _LIGHTON_NAMES.items():
            if found.startswith(ours):
                return f"model.{theirs}{found.removeprefix(ours)}"
        return found.removeprefix("language_model.") if "lm_head." in found else f"model.{found.replace('_model.model.', '_model.')}"

    def build_towers(self, config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
        # By its name: only the process that builds towers depends on them.
        towers: dict[MediaKind, Tower] = import_module(f"{self.home}.towers").build_towers(config, weights, device)
        return towers

    positions = staticmethod(no_media.positions)
    sample_frames = staticmethod(media.sample_frames)
    video_item = staticmethod(seeing.video_item)
    audio_item = staticmethod(media.audio_item)
    video_with_sound = staticmethod(seeing.video_with_sound)


def _with_breaks(files: CheckpointFiles, config: ModelConfig) -> ModelConfig:
    """The configuration with the ids of the tokens behind lines. Raises CheckpointError."""
    ids = read_tokenizer(files.path, "pictures have tokens behind their lines").ids
    if lacking := [token for token in (_BREAK, _END) if token not in ids]:
        raise CheckpointError(f"{files.path / 'tokenizer.json'}: has no {lacking[0]!r}, which stands behind lines of pictures")
    return replace(config, item_text_ids=(ids[_BREAK], ids[_END]))


def _lines(config: ModelConfig, rows: int, columns: int) -> dict[str, object]:
    """The ids of a picture's tokens, and their number; nothing where all are placeholders."""
    if not config.item_text_ids:
        return {}
    between, end = config.item_text_ids
    line = ((config.image_token_id, columns), (between, 1))
    return {"ids": line * (rows - 1) + (line[0], (end, 1)), "num_tokens": rows * (columns + 1)}


def _size(rules: VisionRules, unit: int, height: int, width: int) -> tuple[int, int]:
    """No longer than the longest edge, then up to multiples of ``unit``. The edge is shorter by units where there would be more than
    ``max_pixels``, unless nothing would be left. Raises UnsupportedMediaError."""
    if min(height, width) < 1:
        raise UnsupportedMediaError(f"picture of {width}x{height} pixels is empty")
    edges = range(rules.longest_edge, 0, -unit)
    sizes = [_within(edge, unit, height, width) for edge in edges]
    least = rules.patch_size * rules.merge_size
    whole = [size for size in sizes if min(size) >= least] or sizes[:1]
    return next((size for size in whole if size[0] * size[1] <= rules.max_pixels), whole[-1])


def _within(edge: int, unit: int, height: int, width: int) -> tuple[int, int]:
    ratio = max(height / edge, width / edge)
    sides = (height, width) if ratio <= 1 else (math.floor(height / ratio), math.floor(width / ratio))
    return math.ceil(sides[0] / unit) * unit, math.ceil(sides[1] / unit) * unit


LIGHTON_OCR = PixtralFamily("lighton_ocr", ("qwen3", "qwen2", "llama", "mistral"), 151655, "silu", has_breaks=False)
MISTRAL3 = PixtralFamily("mistral3", ("mistral", "ministral3"), 10, "gelu", has_breaks=True)
PIXTRAL = PixtralFamily("pixtral", ("mistral",), 32000, "gelu", has_breaks=True, has_merge=False)
