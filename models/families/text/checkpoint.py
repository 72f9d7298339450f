"""What checkpoints of text alone have in common: their configuration, and the names of their tensors."""

from msgspec.structs import replace

from ...architecture import AttentionConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles
from ...checkpoint.weight_specs import TensorSpec, language_specs
from ..fields import FeedForwards, parse_decoder, parse_dtype, parse_eos, parse_mlps
from .ropes import parse_rope
from .windows import Windows, no_windows


def parse_text_config(
    files: CheckpointFiles,
    family: str,
    mixer: AttentionConfig,
    max_positions: int,
    feed_forwards: FeedForwards = parse_mlps,
    windows: Windows = no_windows,
) -> ModelConfig:
    """Map config.json; ``max_positions`` where it has no ``max_position_embeddings``. Raises CheckpointError."""
    config = files.required("config.json")
    max_positions = config.integer("max_position_embeddings", default=max_positions)
    rope = parse_rope(config, mixer.head_dim, max_positions)
    tie = config.boolean("tie_word_embeddings", default=False)
    language = parse_decoder(config, mixer, rope, tie, feed_forwards)
    found = [window if window < max_positions else 0 for window in windows(config, language.num_layers)]
    layers = tuple(replace(layer, mixer=replace(mixer, window=window)) for layer, window in zip(language.layers, found, strict=True))
    language = replace(language, layers=layers)
    return ModelConfig(
        family=family,
        language=language,
        dtype=parse_dtype(config),
        max_context=max_positions,
        eos_token_ids=parse_eos(files, config),
    )


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """See ``Family``."""
    return list(language_specs(config.language))


def canonical_name(name: str) -> str:
    """See ``Family``."""
    return name if name.startswith("lm_head.") else f"language.{name.removeprefix('model.')}"


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    return f"model.{name.removeprefix('language.')}" if name.startswith("language.") else name
