"""Towers in GGUF (mmproj) that are Pixtral's, of Pixtral 12B, Mistral Small 3.1 and 3.2, Ministral 3 and LightOnOCR: their fields of
config.json and of the processor's file. Pure."""

import math

from ..checkpoint.json_fields import JsonObject
from .contents import Contents, Fields
from .decoders import LONGER_QUERIES
from .tower_facts import check_activation, check_width, facts_of, shape_of, with_controls

_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_LIGHTON_TOKEN = "<|image_pad|>"
_EPSILON = 1e-5  # of the tower's norms
_MERGER = "mm.patch_merger.weight"


def with_line_tokens(contents: Contents) -> Contents:
    """With the tokens of a picture's lines as control tokens. Raises: CheckpointError for a file without them."""
    return with_controls(contents, _TOKENS)


def mistral_fields(contents: Contents, tower: Contents, config: Fields) -> dict[str, Fields]:
    """As ``towers.tower_fields``. Pixtral 12B's file has no merger. Raises: CheckpointError."""
    tokens = with_line_tokens(contents).metadata["tokenizer.ggml.tokens"]
    kind = "ministral3" if LONGER_QUERIES in config["rope_parameters"] else "mistral"
    text = {**config, "model_type": kind, "sliding_window": None}
    files = _files(contents, tower, text)
    has_merger = _MERGER in tower.types
    own = {} if has_merger else {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    files["config.json"] |= {"model_type": "mistral3" if has_merger else "llava", "image_token_index": tokens.index(_TOKENS[0]), **own}
    return files


def lighton_fields(contents: Contents, tower: Contents, config: Fields) -> dict[str, Fields]:
    """As ``towers.tower_fields``. Raises: CheckpointError."""
    tokens = with_controls(contents, (_LIGHTON_TOKEN,)).metadata["tokenizer.ggml.tokens"]
    files = _files(contents, tower, config)
    files["config.json"] |= {"model_type": "lighton_ocr", "image_token_id": tokens.index(_LIGHTON_TOKEN)}
    return files


def _files(contents: Contents, tower: Contents, text: Fields) -> dict[str, Fields]:
    facts, whole = facts_of(tower), JsonObject(tower.metadata, tower.where)
    check_width(contents, tower, shape_of(tower, "mm.2.weight")[0])
    if not math.isclose(epsilon := facts.number("attention.layer_norm_epsilon", default=_EPSILON), _EPSILON, rel_tol=1e-3):
        raise facts.error("attention.layer_norm_epsilon", f"is {epsilon:g}, expected {_EPSILON:g}")
    heads, patch = facts.integer("attention.head_count"), facts.integer("patch_size")
    vision: Fields = {
        "model_type": "pixtral",
        "num_hidden_layers": facts.integer("block_count", most=1000),
        "hidden_size": facts.integer("embedding_length"),
        "intermediate_size": shape_of(tower, "v.blk.0.ffn_up.weight")[0],
        "num_attention_heads": heads,
        "patch_size": patch,
        "image_size": facts.integer("image_size"),
        "hidden_act": check_activation(tower, "silu", "gelu"),
        "rope_theta": whole.number("clip.rope.freq_base", default=1e4),
    }
    config = {
        "text_config": text,
        "vision_config": vision,
        "spatial_merge_size": facts.integer("spatial_merge_size", default=1),
        "multimodal_projector_bias": "mm.1.bias" in tower.types,
        **{name: text[name] for name in ("dtype", "tie_word_embeddings")},
        "quantization_config": {**text["quantization_config"], "tower_heads": heads},
    }
    image: Fields = {
        "image_mean": facts.colour("image_mean"),
        "image_std": facts.colour("image_std"),
        "size": {"longest_edge": facts.integer("preproc_image_size", "image_size")},
        "patch_size": {"height": patch, "width": patch},
    }
    return {"config.json": config, "preprocessor_config.json": image}
