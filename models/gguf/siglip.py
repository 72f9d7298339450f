"""Towers in GGUF (mmproj) that are SigLIP's, of Gemma 3, SmolVLM2 and Idefics3: their fields of config.json and of the processor's
file. Pure."""

import math
import re

from ..errors import CheckpointError
from .contents import Contents, Fields
from .tower_facts import check_activation, check_width, facts_of, inner_width, shape_of, tokens_of, with_controls

_PICTURE = "<image_soft_token>"
_NAMES = {"boi_token_index": "<start_of_image>", "image_token_index": _PICTURE, "eoi_token_index": "<end_of_image>"}
_UNUSED = re.compile(r"<unused\d+>|\[PAD\d+\]")
_MERGE = 4  # patches of a token at a side
_BILINEAR, _LANCZOS = 2, 1
_PLACEHOLDER = "<image>"  # of a picture's rows in SmolVLM2 and Idefics3
_SMOLVLM_EDGE = 4  # tiles at the longer side, where a file does not say
_UNTOLD, _EPSILON = 1e-5, 1e-6  # what converters write where a checkpoint does not say, and what transformers takes


def with_picture_tokens(contents: Contents) -> Contents:
    """With the tokens that stand at pictures as control tokens. Most files lack the one of a picture's rows, which lies behind their
    vocabulary: the last unused token, which no text has, gets its name. Raises: CheckpointError."""
    tokens = tokens_of(contents)
    if absent := [token for token in _NAMES.values() if token not in tokens and token != _PICTURE]:
        raise CheckpointError(f"{contents.where}: tokenizer.ggml.tokens has no {absent[0]!r}, which stands at pictures")
    named = list(tokens)
    if _PICTURE not in named:
        unused = max((number for number, token in enumerate(named) if _UNUSED.fullmatch(token)), default=-1)
        if unused < 0:
            raise CheckpointError(f"{contents.where}: tokenizer.ggml.tokens has neither {_PICTURE!r} nor an unused token")
        named[unused] = _PICTURE
    return with_controls(contents._replace(metadata={**contents.metadata, "tokenizer.ggml.tokens": named}), _NAMES.values())


def gemma3_fields(contents: Contents, tower: Contents, config: Fields) -> dict[str, Fields]:
    """As ``towers.tower_fields``. Raises: CheckpointError."""
    facts, tokens = facts_of(tower), with_picture_tokens(contents).metadata["tokenizer.ggml.tokens"]
    check_width(contents, tower, shape_of(tower, "mm.input_projection.weight")[1])
    vision = _vision_fields(tower)
    side, patch = vision["image_size"], vision["patch_size"]
    merge = facts.integer("projector.scale_factor", default=_MERGE)
    own = {
        "model_type": "gemma3",
        "text_config": config,
        "vision_config": vision,
        "mm_tokens_per_image": (side // patch // merge) ** 2,
        **{field: tokens.index(token) for field, token in _NAMES.items()},
        **{name: config[name] for name in ("dtype", "tie_word_embeddings", "quantization_config")},
    }
    image = {
        "image_mean": facts.colour("image_mean"),
        "image_std": facts.colour("image_std"),
        "size": {"height": side, "width": side},
        "resample": _BILINEAR,
    }
    return {"config.json": own, "preprocessor_config.json": image}


def smolvlm_fields(contents: Contents, tower: Contents, config: Fields) -> dict[str, Fields]:
    """As ``towers.tower_fields``. Raises: CheckpointError."""
    facts, tokens = facts_of(tower), tokens_of(contents)
    check_width(contents, tower, shape_of(tower, "mm.model.fc.weight")[0])
    if _PLACEHOLDER not in tokens:
        raise CheckpointError(f"{contents.where}: tokenizer.ggml.tokens has no {_PLACEHOLDER!r}, which stands at pictures")
    vision = _vision_fields(tower)
    if math.isclose(vision["layer_norm_eps"], _UNTOLD, rel_tol=1e-3):
        vision["layer_norm_eps"] = _EPSILON
    side = vision["image_size"]
    own = {
        "model_type": "smolvlm",
        "text_config": config,
        "vision_config": vision,
        "scale_factor": facts.integer("projector.scale_factor", default=2),
        "image_token_id": tokens.index(_PLACEHOLDER),
        **{name: config[name] for name in ("dtype", "tie_word_embeddings", "quantization_config")},
    }
    image = {
        "image_mean": facts.colour("image_mean"),
        "image_std": facts.colour("image_std"),
        "size": {"longest_edge": facts.integer("preproc_image_size", default=_SMOLVLM_EDGE * side)},
        "max_image_size": {"longest_edge": side},
        "resample": _LANCZOS,
    }
    return {"config.json": own, "preprocessor_config.json": image}


def _vision_fields(tower: Contents) -> Fields:
    """vision_config. Raises: CheckpointError."""
    facts = facts_of(tower)
    check_activation(tower, "gelu")
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": facts.integer("embedding_length"),
        "intermediate_size": inner_width(tower),
        "num_hidden_layers": facts.integer("block_count", most=1000),
        "num_attention_heads": facts.integer("attention.head_count"),
        "layer_norm_eps": facts.number("attention.layer_norm_epsilon"),
        "patch_size": facts.integer("patch_size"),
        "image_size": facts.integer("image_size"),
    }
