"""How the config.json of each family of text is read, also inside a model that sees. Pure."""

from functools import partial

from msgspec.structs import replace

from ...architecture import AttentionConfig, LanguageConfig, RopeConfig
from ...checkpoint.json_fields import JsonObject
from ..experts import parse_experts
from ..fields import parse_attention, parse_fused_mlps
from .checkpoint import Reading
from .ropes import parse_ernie_rope, parse_glm_rope, parse_phi3_rope, parse_rope, turn_but_for_some
from .windows import windows_by_layer, windows_by_pattern, windows_everywhere, windows_if_named, windows_if_used


def _llama_attention(config: JsonObject) -> AttentionConfig:
    if config.boolean("mlp_bias", default=False):
        raise config.error("mlp_bias", "is true; a feed-forward with biases is not supported")
    return parse_attention(config)


def _mistral_attention(config: JsonObject) -> AttentionConfig:
    return replace(parse_attention(config, default_kv_heads=8), bias=False, output_bias=False)


def _ministral3_attention(config: JsonObject) -> AttentionConfig:
    return replace(parse_attention(config, default_head_dim=128, default_kv_heads=8), bias=False, output_bias=False)


def _qwen2_attention(config: JsonObject) -> AttentionConfig:
    return replace(parse_attention(config), bias=True, output_bias=False)


def _qwen3_attention(config: JsonObject) -> AttentionConfig:
    return replace(parse_attention(config, default_head_dim=128), qk_norm=True)


def _qwen3_moe_attention(config: JsonObject) -> AttentionConfig:
    return replace(parse_attention(config), qk_norm=True)


def _phi3_attention(config: JsonObject) -> AttentionConfig:
    return replace(parse_attention(config), bias=False, output_bias=False, is_fused=True)


def _glm_attention(config: JsonObject) -> AttentionConfig:
    has_biases = config.boolean("attention_bias", default=True)
    return replace(parse_attention(config, default_head_dim=128, default_kv_heads=2), bias=has_biases, output_bias=False)


def _ernie_attention(config: JsonObject) -> AttentionConfig:
    if config.boolean("use_bias", default=False):
        raise config.error("use_bias", "is true; a feed-forward with biases is not supported")
    return replace(parse_attention(config, default_head_dim=128, default_kv_heads=2), bias=False, output_bias=False)


def _seed_attention(config: JsonObject) -> AttentionConfig:
    has_biases, has_output_bias = (config.boolean(f"attention_{name}", default=name == "bias") for name in ("bias", "out_bias"))
    mixer = _llama_attention(config.over({"head_dim": 128, "num_key_value_heads": 8}))
    return replace(mixer, bias=has_biases, output_bias=has_output_bias)


def _smollm3_attention(config: JsonObject) -> AttentionConfig:
    if config.boolean("use_sliding_window", default=False):
        raise config.error("use_sliding_window", "is true, which is not supported")
    return _llama_attention(config)


def _granite_attention(config: JsonObject) -> AttentionConfig:
    return replace(_llama_attention(config), scale=config.number("attention_multiplier", default=1.0))


def _with_multipliers(config: JsonObject, language: LanguageConfig) -> LanguageConfig:
    """Granite's, of what is embedded, what layers add, and logits."""
    scale = config.number("residual_multiplier", default=1.0)
    return replace(
        language,
        layers=tuple(replace(layer, output_scale=scale) for layer in language.layers),
        embedding_scale=config.number("embedding_multiplier", default=1.0),
        logits_divisor=config.number("logits_scaling", default=1.0),
    )


def _olmo_attention(config: JsonObject) -> AttentionConfig:
    return replace(parse_attention(config), has_joint_norms=True)


def _with_norms_behind(config: JsonObject, language: LanguageConfig) -> LanguageConfig:
    """OLMo's: layers have norms of what they add alone."""
    return replace(language, layers=tuple(replace(layer, has_input_norms=False) for layer in language.layers))


def _windows_of_olmo3(config: JsonObject, num_layers: int) -> list[int]:
    """All layers but each fourth have one, or those that ``layer_types`` names. Gemma's pattern says nothing here."""
    return windows_by_pattern(config.with_values({"sliding_window_pattern": None}), num_layers, default_interval=4)


def _with_local_rope(config: JsonObject, language: LanguageConfig) -> LanguageConfig:
    """OLMo 3's: layers with a window, also one as large as the context, have a rotary embedding that is not stretched."""
    ropes = config.object("rope_parameters")
    if ropes.has("rope_type", "rope_theta"):
        raise config.error("rope_parameters", "has those of all layers alike, expected full_attention and sliding_attention")
    local = ropes.object("sliding_attention")
    local.text("rope_type", default="default", choices=("default",))
    windows = _windows_of_olmo3(config, language.num_layers)
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, rope=int(window > 0))) for layer, window in zip(language.layers, windows, strict=True)
    )
    both = (*language.ropes, RopeConfig(theta=local.number("rope_theta", default=5e5)))
    return _with_norms_behind(config, replace(language, layers=layers, ropes=both))


_SMOLLM3 = Reading(
    _smollm3_attention, 32768, ropes=partial(parse_rope, default_theta=2e6), turning_layers=turn_but_for_some, is_tied=True
)
_GLM = Reading(_glm_attention, 131072, parse_fused_mlps, ropes=parse_glm_rope, epsilon=1.5625e-7)

READINGS = {
    "llama": Reading(_llama_attention, max_positions=2048),
    "mistral": Reading(_mistral_attention, max_positions=131072, windows=windows_everywhere),
    "ministral3": Reading(_ministral3_attention, max_positions=16384, windows=windows_if_named),  # inside Mistral 3 alone
    "phi3": Reading(_phi3_attention, 4096, parse_fused_mlps, windows_if_named, parse_phi3_rope, epsilon=1e-5),
    "glm": _GLM,
    "glm4": _GLM._replace(has_output_norms=True),
    "smollm3": _SMOLLM3,
    "ernie4_5": Reading(_ernie_attention, 131072, ropes=parse_ernie_rope, epsilon=1e-5, is_tied=True),
    "seed_oss": Reading(_seed_attention, 524288),
    "granite": Reading(_granite_attention, 2048, finish=_with_multipliers),
    "olmo2": Reading(_olmo_attention, 2048, epsilon=1e-5, has_output_norms=True, finish=_with_norms_behind),
    "olmo3": Reading(
        _olmo_attention,
        2048,
        windows=_windows_of_olmo3,
        ropes=partial(parse_rope, default_theta=5e5),
        epsilon=1e-5,
        has_output_norms=True,
        finish=_with_local_rope,
    ),
    "qwen2": Reading(_qwen2_attention, max_positions=32768, windows=windows_by_layer),
    "qwen3": Reading(_qwen3_attention, max_positions=32768, windows=windows_by_layer),
    "qwen3_moe": Reading(_qwen3_moe_attention, 32768, feed_forwards=parse_experts, windows=windows_if_used),
}
"""By family."""
