"""Gemma 3, text alone. As transformers' ``gemma3_text``: five layers with a window for one that attends to all, each with a rotary
embedding of its own; what layers add is normed; the weights of norms are 1 + w.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from ...architecture import AttentionConfig, LanguageConfig, LayerConfig, MlpConfig, ModelConfig, RopeConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from .. import no_media
from ..family import CheckpointRecipe, made_recipes
from ..fields import parse_attention, parse_dtype, parse_eos
from ..text import checkpoint, gemma
from ..text.ropes import parse_rope
from ..text.windows import windows_by_pattern

tensor_specs, build_towers, positions = checkpoint.tensor_specs, no_media.build_towers, no_media.positions
image_item, video_item, audio_item = no_media.image_item, no_media.video_item, no_media.audio_item
sample_frames, video_with_sound = no_media.sample_frames, no_media.video_with_sound
canonical_name, checkpoint_name = gemma.canonical_name, gemma.checkpoint_name

MAX_POSITIONS = 131072


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json. Raises CheckpointError."""
    config = files.required("config.json")
    max_context = config.integer("max_position_embeddings", default=MAX_POSITIONS)
    return ModelConfig(
        family="gemma3",
        language=parse_text(config, max_context),
        dtype=parse_dtype(config),
        max_context=max_context,
        eos_token_ids=parse_eos(files, config),
    )


def parse_text(config: JsonObject, max_context: int, sees_pictures: bool = False) -> LanguageConfig:
    """The decoder; ``sees_pictures`` as in ``AttentionConfig``. Raises CheckpointError."""
    config.text("hidden_activation", "hidden_act", default=gemma.ACTIVATION, choices=(gemma.ACTIVATION,))
    if config.boolean("use_bidirectional_attention", default=False):
        raise config.error("use_bidirectional_attention", "is true; a decoder is expected, whose tokens see none behind them")
    if config.data.get("attn_logit_softcapping") is not None:
        bound = config.data["attn_logit_softcapping"]
        raise config.error("attn_logit_softcapping", f"is {bound!r}; bounds of scores are not supported")
    heads = _parse_heads(config)
    hidden_size, num_layers = config.integer("hidden_size"), config.integer("num_hidden_layers", most=1000)
    mlp = MlpConfig(intermediate_size=config.integer("intermediate_size"), activation="gelu_tanh")
    layers = []
    for window in windows_by_pattern(config, num_layers, default_interval=6):
        # A window as large as the context is none, but has the rotary embedding of one.
        mixer = replace(heads, rope=0 if window else 1, window=window if window < max_context else 0, sees_pictures=sees_pictures)
        layers.append(LayerConfig(mixer=mixer, feed_forward=mlp, has_output_norms=True))
    return LanguageConfig(
        vocab_size=config.integer("vocab_size", default=262208),
        hidden_size=hidden_size,
        rms_norm_eps=config.number("rms_norm_eps", default=1e-6),
        layers=tuple(layers),
        ropes=_parse_ropes(config, heads.head_dim, max_context),
        tie_embeddings=config.boolean("tie_word_embeddings", default=True),
        embedding_scale=hidden_size**0.5,
        final_softcap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else 0.0,
        norm_offset=1.0,
    )


def _parse_heads(config: JsonObject) -> AttentionConfig:
    heads = parse_attention(config, default_head_dim=256, default_kv_heads=4)
    return replace(heads, qk_norm=True, scale=config.number("query_pre_attn_scalar", default=256.0) ** -0.5)


def _parse_ropes(config: JsonObject, head_dim: int, max_context: int) -> tuple[RopeConfig, RopeConfig]:
    """Of layers with a window, then of the others."""
    local = config.object("rope_parameters").object("sliding_attention")
    local.text("rope_type", default="default", choices=("default",))
    old = config.number("rope_local_base_freq", default=1e4)  # as transformers 4 wrote it
    return RopeConfig(theta=local.number("rope_theta", default=old)), parse_rope(config, head_dim, max_context, 1e6)


def recipes() -> Mapping[str, CheckpointRecipe]:
    return made_recipes(__package__, "gemma3")
