"""The families of text alone: Llama and its like (SmolLM2), SmolLM3, Mistral, Phi-3 and Phi-4, GLM-4, ERNIE 4.5, Seed-OSS, Granite,
OLMo 2 and 3, Qwen2 and Qwen3, the last also with experts. As transformers' models of these names."""

from collections.abc import Mapping
from types import MappingProxyType

from ...architecture import ModelConfig
from ...checkpoint.json_fields import CheckpointFiles
from .. import no_media
from ..family import CheckpointRecipe, made_recipes
from . import checkpoint
from .readings import READINGS


class TextFamily:
    """A ``Family`` without towers. ``names``: parts of tensors' names, and what they are in families that have them at other places."""

    def __init__(self, name: str, names: Mapping[str, str] = MappingProxyType({})) -> None:
        self._name, self._names = name, names

    def parse_config(self, files: CheckpointFiles) -> ModelConfig:
        """Map config.json. Raises CheckpointError."""
        return checkpoint.parse_text_config(files, self._name, READINGS[self._name])

    def recipes(self) -> Mapping[str, CheckpointRecipe]:
        return made_recipes(__package__, self._name)

    def canonical_name(self, name: str) -> str:
        return checkpoint.renamed(checkpoint.canonical_name(name), self._names)

    def checkpoint_name(self, name: str) -> str:
        return checkpoint.renamed(checkpoint.checkpoint_name(name), {ours: theirs for theirs, ours in self._names.items()})

    tensor_specs = staticmethod(checkpoint.tensor_specs)
    build_towers = staticmethod(no_media.build_towers)
    positions = staticmethod(no_media.positions)
    image_item = staticmethod(no_media.image_item)
    sample_frames = staticmethod(no_media.sample_frames)
    video_item = staticmethod(no_media.video_item)
    audio_item = staticmethod(no_media.audio_item)
    video_with_sound = staticmethod(no_media.video_with_sound)


_NORMS_BEHIND = {
    ".post_attention_layernorm.": ".post_self_attn_layernorm.",
    ".post_feedforward_layernorm.": ".post_mlp_layernorm.",
}
LLAMA, MISTRAL, PHI3, GLM, GLM4, SMOLLM3, QWEN2, QWEN3, QWEN3_MOE, ERNIE4_5, SEED_OSS, GRANITE = map(
    TextFamily,
    ("llama", "mistral", "phi3", "glm", "glm4", "smollm3", "qwen2", "qwen3", "qwen3_moe", "ernie4_5", "seed_oss", "granite"),
)
OLMO2, OLMO3 = (TextFamily(name, _NORMS_BEHIND) for name in ("olmo2", "olmo3"))
