"""Gemma 4 in GGUF: its decoder's fields of config.json, and those of its towers. Pure.

What files do not say is as the published checkpoints have it: a token of 3 x 3 patches, budgets of tokens, and how far sounds see.
"""

from collections.abc import Sequence

from ..checkpoint.json_fields import JsonObject
from ..errors import CheckpointError
from .contents import ROPE_FACTORS, Contents, Fields
from .tower_facts import check_width, facts_of, shape_of, with_controls

PLACEHOLDERS = {"image_token_id": "<|image|>", "video_token_id": "<|video|>", "audio_token_id": "<|audio|>"}
_ENDS = {"boi_token_id": "<|image>", "eoi_token_id": "<image|>", "boa_token_id": "<|audio>", "eoa_token_index": "<audio|>"}
_POOL = 3  # patches of a token at a side
_BOUNDED = "v.blk.0.attn_q.input_max"


def decoder_fields(facts: JsonObject, fields: Fields, contents: Contents) -> Fields:
    """Layers with a window for one that attends to all, whose heads are larger. Raises CheckpointError."""
    layers = fields["num_hidden_layers"]
    has_window = facts.data.get("attention.sliding_window_pattern")
    if not isinstance(has_window, list) or len(has_window) < layers or not all(type(one) is bool for one in has_window):
        raise facts.error("attention.sliding_window_pattern", f"is no list of true or false for each of {layers} layers")
    shared = facts.integer("attention.shared_kv_layers", default=0, least=0, most=layers - 1)
    size = facts.integer("embedding_length_per_layer_input", default=0, least=0)
    full = [number for number in range(layers) if not has_window[number]]
    kv_heads = _by_layer(contents, "attention.head_count_kv", layers)
    head_dim = facts.integer("attention.key_length_swa")
    if (turning := facts.integer("rope.dimension_count_swa", default=head_dim)) != head_dim:
        raise facts.error("rope.dimension_count_swa", f"is {turning}, expected attention.key_length_swa ({head_dim})")
    own: Fields = {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in has_window[:layers]],
        "sliding_window": facts.integer("attention.sliding_window"),
        "head_dim": head_dim,
        "num_key_value_heads": next((kv_heads[number] for number in range(layers) if has_window[number]), kv_heads[0]),
        "per_layer_config": {str(number): {"head_dim": fields["head_dim"], "num_key_value_heads": kv_heads[number]} for number in full},
        "attention_k_eq_v": any(f"blk.{number}.attn_v.weight" not in contents.types for number in full if number < layers - shared),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": size,
        "pad_token_id": contents.metadata.get("tokenizer.ggml.padding_token_id", 0),
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": _ropes(facts, fields, contents),
        **_feed_forwards(facts, contents, layers, shared),
    }
    if size:
        own["vocab_size_per_layer_input"] = shape_of(contents, "per_layer_token_embd.weight")[0]
    else:  # pictures of larger models see themselves
        own["use_bidirectional_attention"] = "vision"
    if facts.has("final_logit_softcapping"):
        own["final_logit_softcapping"] = facts.number("final_logit_softcapping")
    return {**fields, **own}


def _by_layer(contents: Contents, key: str, layers: int) -> list[int]:
    """Read a field for each layer; one value counts for all. Raises: CheckpointError."""
    found = contents.metadata.get(f"gemma4.{key}")
    found = found if isinstance(found, list) else [found] * layers
    if len(found) < layers or not all(type(one) is int and one > 0 for one in found[:layers]):
        raise CheckpointError(f"{contents.where}: gemma4.{key} is no number, and no list of numbers of {layers} layers")
    return found[:layers]


def _feed_forwards(facts: JsonObject, contents: Contents, layers: int, shared: int) -> Fields:
    """Their width, which may be twice as much in layers that share keys and values; and experts. Raises CheckpointError."""
    widths = _by_layer(contents, "feed_forward_length", layers)
    is_wide = widths[-1] != widths[0]
    if widths != [widths[0]] * (layers - shared) + [widths[0] * (1 + is_wide)] * shared:
        raise facts.error("feed_forward_length", f"is {widths}, expected one width, or twice as much in the last {shared} layers")
    fields: Fields = {"intermediate_size": widths[0], "use_double_wide_mlp": is_wide}
    if facts.integer("expert_count", default=0, least=0):
        fields |= {
            "enable_moe_block": True,
            "num_experts": facts.integer("expert_count"),
            "top_k_experts": facts.integer("expert_used_count"),
            "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        }
    return fields


def _ropes(facts: JsonObject, fields: Fields, contents: Contents) -> Fields:
    """Raises CheckpointError."""
    factors = contents.factors.get(ROPE_FACTORS)
    if not factors:
        raise CheckpointError(f"{contents.where}: tensor {ROPE_FACTORS!r} is missing, which says what part of a head turns")
    full = {"rope_type": "proportional", "partial_rotary_factor": factors.count(1.0) / len(factors)}
    local = facts.number("rope.freq_base_swa", default=1e4)
    return {
        "full_attention": {**full, "rope_theta": fields["rope_parameters"]["rope_theta"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def with_media_tokens(contents: Contents) -> Contents:
    """With the tokens that stand at media as control tokens. Raises: CheckpointError for a file without them."""
    return with_controls(contents, (*PLACEHOLDERS.values(), *_ENDS.values()))


def tower_fields(contents: Contents, tower: Contents, config: Fields) -> dict[str, Fields]:
    """As ``towers.tower_fields``. Raises: CheckpointError."""
    facts, tokens = facts_of(tower), with_media_tokens(contents).metadata["tokenizer.ggml.tokens"]
    check_width(contents, tower, shape_of(tower, "mm.input_projection.weight")[0])
    vision = _vision_fields(tower, facts)
    colours = {name: list(facts.colour(name)) for name in ("image_mean", "image_std")}
    pictures = {**{name: vision[name] for name in ("patch_size", "pooling_kernel_size")}, "do_normalize": True, **colours}
    processors: Fields = {"image_processor": pictures, "video_processor": pictures}
    own: Fields = {
        "model_type": "gemma4",
        "text_config": config,
        "vision_config": vision,
        **{field: tokens.index(token) for field, token in {**PLACEHOLDERS, **_ENDS}.items()},
        **{name: config[name] for name in ("dtype", "tie_word_embeddings", "quantization_config")},
    }
    if tower.metadata.get("clip.audio.projector_type") == "gemma4a":
        own["audio_config"] = sound = _sound_fields(tower)
        processors["feature_extractor"] = {"feature_size": sound["subsampling_conv_channels"][0], "sampling_rate": 16000}
    return {"config.json": own, "processor_config.json": processors}


def _vision_fields(tower: Contents, facts: JsonObject) -> Fields:
    heads = facts.integer("attention.head_count")
    return {
        "num_hidden_layers": facts.integer("block_count", most=1000),
        "hidden_size": facts.integer("embedding_length"),
        "intermediate_size": shape_of(tower, "v.blk.0.ffn_up.weight")[0],
        "num_attention_heads": heads,
        "head_dim": shape_of(tower, "v.blk.0.attn_q.weight")[0] // heads,
        "patch_size": facts.integer("patch_size"),
        "pooling_kernel_size": facts.integer("projector.scale_factor", default=_POOL),
        "position_embedding_size": shape_of(tower, "v.position_embd.weight", 3)[1],
        "rms_norm_eps": facts.number("attention.layer_norm_epsilon"),
        "standardize": "v.std_bias" in tower.types,
        "use_clipped_linears": _BOUNDED in tower.types,
    }


def _sound_fields(tower: Contents) -> Fields:
    facts = facts_of(tower, "clip.audio.")
    channels: Sequence[int] = [shape_of(tower, f"a.conv1d.{number}.weight", 4)[0] for number in (0, 1)]
    return {
        "num_hidden_layers": facts.integer("block_count", most=1000),
        "hidden_size": facts.integer("embedding_length"),
        "num_attention_heads": facts.integer("attention.head_count"),
        "subsampling_conv_channels": list(channels),
        "conv_kernel_size": shape_of(tower, "a.blk.0.conv_dw.weight")[1],
        "output_proj_dims": shape_of(tower, "a.pre_encode.out.weight")[0],
        "rms_norm_eps": facts.number("attention.layer_norm_epsilon"),
        "use_clipped_linears": _BOUNDED.replace("v.", "a.", 1) in tower.types,
    }
