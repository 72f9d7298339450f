"""How the config.json of each family of text is read, also inside a model that sees. Pure."""

from functools import partial

from msgspec.structs import replace

from ...architecture import AttentionConfig
from ...checkpoint.json_fields import JsonObject
from ..experts import parse_experts
from ..fields import parse_attention, parse_fused_mlps
from .checkpoint import Reading
from .ropes import parse_ernie_rope, parse_glm_rope, parse_phi3_rope, parse_rope, turn_but_for_some
from .windows import windows_by_layer, windows_everywhere, windows_if_named, windows_if_used


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
    "qwen2": Reading(_qwen2_attention, max_positions=32768, windows=windows_by_layer),
    "qwen3": Reading(_qwen3_attention, max_positions=32768, windows=windows_by_layer),
    "qwen3_moe": Reading(_qwen3_moe_attention, 32768, feed_forwards=parse_experts, windows=windows_if_used),
}
"""By family."""
