"""What checkpoints of text alone have in common: their configuration, and the names of their tensors."""

from ...architecture import AttentionConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...checkpoint.weight_specs import TensorSpec, language_specs
from ..fields import FeedForwards, parse_decoder, parse_dtype, parse_eos, parse_mlps
from .ropes import parse_rope


def parse_text_config(
    files: CheckpointFiles, family: str, mixer: AttentionConfig, max_positions: int, feed_forwards: FeedForwards = parse_mlps
) -> ModelConfig:
    """Map config.json; ``max_positions`` where it has no ``max_position_embeddings``. Raises CheckpointError, also for windows."""
    config = files.required("config.json")
    max_positions = config.integer("max_position_embeddings", default=max_positions)
    rope = parse_rope(config, mixer.head_dim, max_positions)
    tie = config.boolean("tie_word_embeddings", default=False)
    language = parse_decoder(config, mixer, rope, tie, feed_forwards)
    _refuse_windows(config, language.num_layers)
    return ModelConfig(
        family=family,
        language=language,
        dtype=parse_dtype(config),
        max_context=max_positions,
        eos_token_ids=parse_eos(files, config),
    )


def _refuse_windows(config: JsonObject, num_layers: int) -> None:
    """Raise CheckpointError if a layer attends to a part of the context alone."""
    kinds = config.data.get("layer_types") or ()
    if not isinstance(kinds, list | tuple):
        raise config.error("layer_types", f"is {kinds!r}, expected a list of names")
    if others := {str(kind) for kind in kinds} - {"full_attention"}:
        raise config.error("layer_types", f"has {', '.join(sorted(others))}; only full_attention is supported")
    if kinds or not config.boolean("use_sliding_window", default=False):
        return
    if "sliding_window" in config.data and config.data["sliding_window"] is None:
        return
    if (first := config.integer("max_window_layers", default=28, least=0)) < num_layers:
        window = config.integer("sliding_window", default=4096)
        raise config.error("sliding_window", f"is {window}, in use from layer {first} on; sliding-window attention is not supported")


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """See ``Family``."""
    return list(language_specs(config.language))


def canonical_name(name: str) -> str:
    """See ``Family``."""
    return name if name.startswith("lm_head.") else f"language.{name.removeprefix('model.')}"


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    return f"model.{name.removeprefix('language.')}" if name.startswith("language.") else name
