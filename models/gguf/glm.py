"""Towers in GGUF (mmproj) of GLM-OCR, GLM-4.1V and GLM-4.6V: their fields of config.json and of the processors' files. Pure.

Files do not say which of the three a model is. GLM-OCR's queries have no biases; GLM-4.6V's context is longer than GLM-4.1V's, whose
videos have other frames. Limits of pixels are those of the published checkpoints.
"""

from ..errors import CheckpointError
from .contents import Contents, Fields
from .decoders import SECTIONS
from .tower_facts import check_activation, check_width, facts_of, shape_of, with_controls

_IDS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
_CONTEXT_OF_4_1V = 65536
_LEAST_PIXELS = 112 * 112  # as the processors count them: of all frames, or of two of a picture
_MOST_PIXELS, _MOST_OF_VIDEOS = 28 * 28 * 12288, 28 * 28 * 60000


def with_media_tokens(contents: Contents) -> Contents:
    """With the tokens that stand at media as control tokens. Raises: CheckpointError for a file without them."""
    return with_controls(contents, _IDS.values())


def tower_fields(contents: Contents, tower: Contents, config: Fields) -> dict[str, Fields]:
    """As ``towers.tower_fields``. Raises: CheckpointError."""
    facts, tokens = facts_of(tower), with_media_tokens(contents).metadata["tokenizer.ggml.tokens"]
    rows = shape_of(tower, "mm.down.weight")[0]
    check_width(contents, tower, rows)
    check_activation(tower, "silu")
    if SECTIONS not in config["rope_parameters"]:
        raise CheckpointError(f"{contents.where}: glm4.rope.dimension_sections is missing: it is the decoder of a model of text alone")
    is_ocr, patch = not config["attention_bias"], facts.integer("patch_size")
    sizes = {"patch_size": patch, "temporal_patch_size": 2}
    vision: Fields = {
        **sizes,
        "spatial_merge_size": shape_of(tower, "mm.patch_merger.weight", 4)[3],
        "depth": facts.integer("block_count", most=1000),
        "hidden_size": facts.integer("embedding_length"),
        "intermediate_size": shape_of(tower, "v.blk.0.ffn_up.weight" if is_ocr else "mm.gate.weight")[0],
        "num_heads": facts.integer("attention.head_count"),
        "out_hidden_size": rows,
        "image_size": facts.integer("image_size"),
        "rms_norm_eps": facts.number("attention.layer_norm_epsilon"),
        "attention_bias": is_ocr,
    }
    is_older = config["max_position_embeddings"] <= _CONTEXT_OF_4_1V
    own: Fields = {
        "model_type": "glm_ocr" if is_ocr else "glm4v" if is_older else "glm46v",
        "text_config": {**config, "model_type": "glm_ocr_text" if is_ocr else "glm4v_text"},
        "vision_config": vision,
        **{field: tokens.index(token) for field, token in _IDS.items()},
        **{name: config[name] for name in ("dtype", "tie_word_embeddings", "quantization_config")},
    }
    both: Fields = {**sizes, "merge_size": 2, "image_mean": facts.colour("image_mean"), "image_std": facts.colour("image_std")}
    size = {"shortest_edge": _LEAST_PIXELS, "longest_edge": _MOST_PIXELS}
    video = {**both, "size": {**size, "longest_edge": _MOST_OF_VIDEOS}}
    return {"config.json": own, "preprocessor_config.json": {**both, "size": size}, "video_preprocessor_config.json": video}
