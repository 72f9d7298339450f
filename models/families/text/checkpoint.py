"""What checkpoints of text alone have in common: their configuration, and the names of their tensors."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from ...architecture import AttentionConfig, LanguageConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...checkpoint.weight_specs import TensorSpec, language_specs
from ..fields import FeedForwards, parse_decoder, parse_dtype, parse_eos, parse_mlps
from .ropes import Ropes, TurningLayers, all_turn, no_turns, parse_rope, served_positions
from .windows import Windows, no_windows


class Reading(NamedTuple):
    """How a family's config.json is read. All layers have the attention of ``attention`` but for their ``windows``. ``max_positions``,
    ``epsilon``: where the file has no ``max_position_embeddings`` and ``rms_norm_eps``. ``has_output_norms``: as in ``LayerConfig``.
    ``is_tied``: its head, where the file has no ``tie_word_embeddings``. ``finish`` changes what is a family's alone."""

    attention: Callable[[JsonObject], AttentionConfig]
    max_positions: int
    feed_forwards: FeedForwards = parse_mlps
    windows: Windows = no_windows
    ropes: Ropes = parse_rope
    epsilon: float = 1e-6
    has_output_norms: bool = False
    turning_layers: TurningLayers = all_turn
    is_tied: bool = False
    finish: Callable[[JsonObject, LanguageConfig], LanguageConfig] = lambda config, language: language


def parse_text_config(files: CheckpointFiles, family: str, reading: Reading) -> ModelConfig:
    """Map config.json. Raises CheckpointError."""
    config = files.required("config.json")
    positions = config.integer("max_position_embeddings", default=reading.max_positions)
    return ModelConfig(
        family=family,
        language=parse_language(config, reading, config.boolean("tie_word_embeddings", default=reading.is_tied)),
        dtype=parse_dtype(config),
        max_context=served_positions(config, positions),
        eos_token_ids=parse_eos(files, config),
    )


def parse_language(config: JsonObject, reading: Reading, tie: bool) -> LanguageConfig:
    """The decoder. Raises CheckpointError."""
    mixer, positions = reading.attention(config), config.integer("max_position_embeddings", default=reading.max_positions)
    rope, max_positions = reading.ropes(config, mixer.head_dim, positions), served_positions(config, positions)
    language = parse_decoder(config, mixer, rope, tie, reading.feed_forwards)
    found = [window if window < max_positions else 0 for window in reading.windows(config, language.num_layers)]
    turns = reading.turning_layers(config, language.num_layers)
    layers = tuple(
        replace(layer, mixer=replace(mixer, window=window, rope=int(not does_turn)), has_output_norms=reading.has_output_norms)
        for layer, window, does_turn in zip(language.layers, found, turns, strict=True)
    )
    ropes = (rope,) if all(turns) else (rope, no_turns(mixer.head_dim))
    language = replace(language, layers=layers, ropes=ropes, rms_norm_eps=config.number("rms_norm_eps", default=reading.epsilon))
    return reading.finish(config, language)


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """See ``Family``."""
    return list(language_specs(config.language))


def canonical_name(name: str) -> str:
    """See ``Family``."""
    return name if name.startswith("lm_head.") else f"language.{name.removeprefix('model.')}"


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    return f"model.{name.removeprefix('language.')}" if name.startswith("language.") else name


def renamed(name: str, names: Mapping[str, str]) -> str:
    """The name with the one part that is in ``names`` changed."""
    return next((name.replace(part, other) for part, other in names.items() if part in name), name)
