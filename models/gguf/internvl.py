"""Towers in GGUF (mmproj) that are InternVL's: their fields of config.json and of the processor's file. Pure.

Which of two norms and what biases a tower has is told by its tensors.
"""

from .contents import Contents, Fields
from .tower_facts import check_activation, check_width, facts_of, shape_of, with_controls

_PLACEHOLDER = "<IMG_CONTEXT>"
_TOKENS = (_PLACEHOLDER, "<img>", "</img>")
_MOST_TILES = 12  # where a file does not say


def with_tile_tokens(contents: Contents) -> Contents:
    """With the tokens of a tile and around it as control tokens. Raises: CheckpointError for a file without them."""
    return with_controls(contents, _TOKENS)


def tower_fields(contents: Contents, tower: Contents, config: Fields) -> dict[str, Fields]:
    """As ``towers.tower_fields``. Raises: CheckpointError."""
    facts, tokens = facts_of(tower), with_tile_tokens(contents).metadata["tokenizer.ggml.tokens"]
    check_width(contents, tower, shape_of(tower, "mm.model.mlp.3.weight")[0])
    side = facts.integer("image_size")
    vision: Fields = {
        "hidden_size": facts.integer("embedding_length"),
        "intermediate_size": shape_of(tower, "v.blk.0.ffn_up.weight")[0],
        "num_hidden_layers": facts.integer("block_count", most=1000),
        "num_attention_heads": facts.integer("attention.head_count"),
        "patch_size": [facts.integer("patch_size")] * 2,
        "image_size": [side] * 2,
        "layer_norm_eps": facts.number("attention.layer_norm_epsilon"),
        "hidden_act": check_activation(tower, "gelu"),
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in tower.types else "rms_norm",
        "attention_bias": "v.blk.0.attn_q.bias" in tower.types,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in tower.types,
    }
    own: Fields = {
        "model_type": "internvl",
        "text_config": config,
        "vision_config": vision,
        "downsample_ratio": 1 / facts.integer("projector.scale_factor", default=2),
        "image_token_id": tokens.index(_PLACEHOLDER),
        **{name: config[name] for name in ("dtype", "tie_word_embeddings", "quantization_config")},
    }
    colours: Fields = {"image_mean": facts.colour("image_mean"), "image_std": facts.colour("image_std")}
    frame = {**colours, "size": {"height": side, "width": side}}
    tiles = {
        "crop_to_patches": True,
        "min_patches": facts.integer("preproc_min_tiles", default=1),
        "max_patches": facts.integer("preproc_max_tiles", default=_MOST_TILES),
    }
    return {"config.json": own, "preprocessor_config.json": {**frame, **tiles}, "video_preprocessor_config.json": frame}
