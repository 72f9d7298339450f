"""The decoder of Qwen3.5 and MiniCPM-V: three layers with a DeltaNet for one that attends. Pure."""

from msgspec.structs import replace

from ...architecture import AttentionConfig, DeltaConfig, LanguageConfig, RopeConfig
from ...checkpoint.json_fields import JsonObject
from ..fields import FeedForwards, parse_attention, parse_decoder
from ..text.ropes import parse_turning
from . import seeing


def parse_text(text: JsonObject, tie: bool, feed_forwards: FeedForwards) -> LanguageConfig:
    """The decoder. Raises CheckpointError."""
    heads = replace(_parse_attention(text), gated=True, qk_norm=True)
    mixers: dict[str, AttentionConfig | DeltaConfig] = {"full_attention": heads, "linear_attention": _parse_delta(text)}
    decoder = parse_decoder(text, heads, _parse_rope(text, heads.head_dim), tie, feed_forwards)
    layers = zip(decoder.layers, _parse_kinds(text, decoder.num_layers), strict=True)
    return replace(decoder, layers=tuple(replace(layer, mixer=mixers[kind]) for layer, kind in layers), norm_offset=1.0)


def _parse_attention(text: JsonObject) -> AttentionConfig:
    for field, expected in (("attention_bias", False), ("attn_output_gate", True)):
        if text.boolean(field, default=expected) != expected:
            raise text.error(field, f"is {str(not expected).lower()}, which is not supported")
    return parse_attention(text, default_head_dim=256)


def _parse_delta(text: JsonObject) -> DeltaConfig:
    delta = DeltaConfig(
        num_key_heads=text.integer("linear_num_key_heads", default=16),
        num_value_heads=text.integer("linear_num_value_heads", default=32),
        key_dim=text.integer("linear_key_head_dim", default=128),
        value_dim=text.integer("linear_value_head_dim", default=128),
        conv_size=text.integer("linear_conv_kernel_dim", default=4, least=2, most=16),
    )
    if delta.num_value_heads % delta.num_key_heads:
        told = f"is {delta.num_value_heads}, expected a multiple of linear_num_key_heads ({delta.num_key_heads})"
        raise text.error("linear_num_value_heads", told)
    return delta


def _parse_kinds(text: JsonObject, count: int) -> list[str]:
    """The mixer of each layer."""
    interval = text.integer("full_attention_interval", default=4)
    kinds = text.data.get("layer_types")
    if kinds is None:
        kinds = ["linear_attention" if number % interval else "full_attention" for number in range(1, count + 1)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise text.error("layer_types", f"is {kinds!r}, expected a list of num_hidden_layers ({count}) names")
    if (named := {*map(str, kinds)}) != {"linear_attention", "full_attention"}:
        raise text.error("layer_types", f"has {', '.join(sorted(named))}, expected linear_attention and full_attention")
    return kinds


def _parse_rope(text: JsonObject, head_dim: int) -> RopeConfig:
    turning = parse_turning(text, head_dim, default=0.25)
    return seeing.parse_rope(text, turning // 2, default_theta=1e4, default_section=(11, 11, 10))
