"""MiniCPM-V 4.6 and 4.7: text, pictures and videos. As transformers' ``minicpmv4_6`` and ``minicpmv4_7``, with the decoder of Qwen3.5.

A picture is shown as a whole, a large one once more in slices, behind its number in the request. The two differ by positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ....schema.media import MediaKind
from ...architecture import LanguageConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...checkpoint.weight_specs import TensorSpec, language_specs, linear, same
from .. import no_media, vit
from ..family import CheckpointRecipe, made_recipes
from ..fields import parse_mlps
from ..qwen2_5 import media, seeing
from ..qwen2_5.tensors import placed
from ..qwen3.hybrid import parse_text as parse_qwen3_5
from ..text.nested import is_tied
from ..vit import VitConfig, parse_vit, vit_specs
from . import canvas, slices
from .texts import add_texts

if TYPE_CHECKING:
    import torch

    from ...towers.interface import Tower

_TOWER = {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}  # where the file does not say
_MERGE = 4  # twice two patches at a side of a token
_IDS = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")  # of ``item_text_ids``, in config.json
_SAVED = {"vision.merger.": "model.merger.mlp.0.", "vision.": "model.vision_tower.", "language.": "model.language_model."}


class MiniCpmVision(VitConfig, frozen=True, kw_only=True):
    """A plain vision transformer that merges patches twice."""

    merge_layer: int  # behind which four patches become one; behind the last layer four of these become a token


class MiniCpmFamily:
    """A ``Family``. ``has_canvas``: tokens of a picture have positions by where they are seen."""

    def __init__(self, name: str, has_canvas: bool) -> None:
        self._name, self._has_canvas = name, has_canvas
        self.positions = canvas.positions if has_canvas else no_media.positions

    def parse_config(self, files: CheckpointFiles) -> ModelConfig:
        """Map config.json. Raises CheckpointError."""
        root = files.required("config.json")

        def parse_text(text: JsonObject, _: bool) -> LanguageConfig:
            text.text("model_type", default="qwen3_5_text", choices=("qwen3_5_text",))
            return parse_qwen3_5(text, is_tied(files, root, text), parse_mlps)

        def parse_tower(vision: JsonObject, hidden_size: int) -> VitConfig:
            return _parse_tower(root, vision, hidden_size)

        config = seeing.parse_config(files, self._name, parse_text, parse_tower, slices.parse_rules)
        config = add_texts(files, config, numbers_videos=not self._has_canvas)
        if not self._has_canvas:
            return config
        _expect_ids(root, config.item_text_ids)
        return replace(config, behind_ids=config.item_text_ids[-1:])

    def recipes(self) -> Mapping[str, CheckpointRecipe]:
        return made_recipes(__package__, self._name)

    def tensor_specs(self, config: ModelConfig) -> list[TensorSpec]:
        """Decoder and tower."""
        assert isinstance(config.vision, MiniCpmVision)
        return [*language_specs(config.language), *vit_specs(config.vision), *_merger_specs(config.vision)]

    def canonical_name(self, name: str) -> str:
        """See ``Family``: with and without ``model.`` in front."""
        return placed(vit.canonical_name(name), {"merger.mlp.0.": "vision.merger."})

    def checkpoint_name(self, name: str) -> str:
        """See ``Family``."""
        return placed(name, _SAVED)

    def build_towers(self, config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
        # By its name: only the process that builds towers depends on them.
        towers: dict[MediaKind, Tower] = import_module(f"{__package__}.towers").build_towers(config, weights, device)
        return towers

    image_item = staticmethod(slices.image_item)
    audio_item = staticmethod(media.audio_item)
    sample_frames = staticmethod(slices.sample_frames)
    video_item = staticmethod(slices.video_item)
    video_with_sound = staticmethod(seeing.video_with_sound)


def _expect_ids(root: JsonObject, ids: Sequence[int]) -> None:
    """Raise CheckpointError where config.json, by whose ids transformers finds canvases, has others than tokenizer.json."""
    for name, own in zip(_IDS, ids, strict=True):
        if (told := root.integer(name, default=own, least=0)) != own:
            raise root.error(name, f"is {told}, but tokenizer.json has {own}")


def _parse_tower(root: JsonObject, vision: JsonObject, hidden_size: int) -> MiniCpmVision:
    """Raises CheckpointError."""
    for place, name, only in (
        (root, "downsample_mode", "16x"),
        (root, "merge_kernel_size", [2, 2]),
        (root, "merger_times", 1),
        (vision, "window_kernel_size", [2, 2]),
    ):
        if (found := place.data.get(name, only)) != only:
            raise place.error(name, f"is {found!r}, expected {only!r}")
    config = parse_vit(vision.with_defaults(_TOWER), hidden_size, _MERGE)
    layer = root.integer("insert_layer_id", default=6, least=0, most=config.depth - 1)
    fields = {name: getattr(config, name) for name in config.__struct_fields__}
    return MiniCpmVision(**{**fields, "merger_depth": 0, "merge_layer": layer})


def _merger_specs(vision: MiniCpmVision) -> Iterator[TensorSpec]:
    hidden, merged, window = vision.hidden_size, 4 * vision.hidden_size, "vision.vit_merger"
    for part in ("q", "k", "v", "out"):
        yield from linear(f"{window}.self_attn.{part}_proj", hidden, hidden)
    for norm, width in ((f"{window}.layer_norm1", hidden), (f"{window}.pre_norm", merged), ("vision.merger.pre_norm", merged)):
        yield same(f"{norm}.weight", width)
        yield same(f"{norm}.bias", width)
    inner = 4 * vision.intermediate_size
    yield from linear(f"{window}.linear_1", inner, merged)
    yield from linear(f"{window}.linear_2", hidden, inner)
    yield from linear("vision.merger.linear_1", merged, merged)
    yield from linear("vision.merger.linear_2", vision.out_hidden_size, merged)


MINICPM_V_4_6, MINICPM_V_4_7 = MiniCpmFamily("minicpmv4_6", has_canvas=False), MiniCpmFamily("minicpmv4_7", has_canvas=True)
