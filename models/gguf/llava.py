"""Towers in GGUF (mmproj) that are CLIP's, of LLaVA-1.5 and LLaVA-NeXT (1.6): their fields of config.json and of the processor's file.
Pure.

A file has the layers up to the one that is seen. NeXT's has a row that ends each line of tiles.
"""

from typing import Any

from .contents import Contents, Fields
from .tower_facts import check_activation, check_width, facts_of, inner_width, shape_of, with_controls

_PLACEHOLDER = "<image>"
_NEWLINE = "model.image_newline"


def with_placeholder(contents: Contents) -> Contents:
    """With the token of a picture as a control token. Raises: CheckpointError for a file without it."""
    return with_controls(contents, (_PLACEHOLDER,))


def tower_fields(contents: Contents, tower: Contents, config: Fields) -> dict[str, Fields]:
    """As ``towers.tower_fields``. Raises: CheckpointError."""
    facts, tokens = facts_of(tower), with_placeholder(contents).metadata["tokenizer.ggml.tokens"]
    check_width(contents, tower, shape_of(tower, "mm.2.weight")[0])
    layers, side = facts.integer("block_count", most=1000), facts.integer("image_size")
    if facts.has("feature_layer") and (seen := facts.integers("feature_layer")) != (layers,):
        raise facts.error("feature_layer", f"is {list(seen)}, expected that of the last layer alone ({layers})")
    vision: Fields = {
        "model_type": "clip_vision_model",
        "hidden_size": facts.integer("embedding_length"),
        "intermediate_size": inner_width(tower),
        "num_hidden_layers": layers,
        "num_attention_heads": facts.integer("attention.head_count"),
        "patch_size": facts.integer("patch_size"),
        "image_size": side,
        "layer_norm_eps": facts.number("attention.layer_norm_epsilon"),
        "hidden_act": check_activation(tower, "quick_gelu"),
    }
    has_tiles, own = _NEWLINE in tower.types, dict[str, Any]()
    if has_tiles and facts.has("image_grid_pinpoints"):
        sides = facts.integers("image_grid_pinpoints", least=1)
        if len(sides) % 2:
            raise facts.error("image_grid_pinpoints", f"is {list(sides)}, expected pairs of sides")
        own["image_grid_pinpoints"] = [list(pair) for pair in zip(sides[::2], sides[1::2], strict=True)]
    fields: Fields = {
        **own,
        "model_type": "llava_next" if has_tiles else "llava",
        "text_config": config,
        "vision_config": vision,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "multimodal_projector_bias": "mm.0.bias" in tower.types,
        "image_token_index": tokens.index(_PLACEHOLDER),
        **{name: config[name] for name in ("dtype", "tie_word_embeddings", "quantization_config")},
    }
    image = {
        **own,
        "image_mean": facts.colour("image_mean"),
        "image_std": facts.colour("image_std"),
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
    }
    return {"config.json": fields, "preprocessor_config.json": image}
