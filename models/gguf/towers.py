"""The towers of a model in GGUF, which have a file of their own (mmproj): Qwen's fields of config.json and of the processors' files,
and which of several files belongs to a model. Pure.

What such a file does not say (limits of pixels, rules for videos) is as the family's published checkpoints have it.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..checkpoint.files import best_tower
from ..checkpoint.gguf_towers import deepstack_blocks
from ..checkpoint.json_fields import JsonObject
from ..errors import CheckpointError
from . import gemma4, glm, internvl, llava, pixtral
from .contents import Contents, Fields
from .fields import OMNI, TOWER, architecture_of
from .siglip import gemma3_fields, smolvlm_fields, with_picture_tokens
from .tower_facts import check_width, facts_of, inner_width, shape_of, tokens_of

_VISION = "clip.vision."
_OWN = {  # of families whose towers are not Qwen's
    "gemma3": gemma3_fields,
    "smolvlm": smolvlm_fields,
    "gemma4": gemma4.tower_fields,
    "mistral3": pixtral.mistral_fields,
    "lighton_ocr": pixtral.lighton_fields,
    "internvl": internvl.tower_fields,
    "glm4v": glm.tower_fields,
    "llava": llava.tower_fields,
}
_TOKENS = {
    "gemma3": with_picture_tokens,
    "gemma4": gemma4.with_media_tokens,
    "mistral3": pixtral.with_line_tokens,
    "internvl": internvl.with_tile_tokens,
    "glm4v": glm.with_media_tokens,
    "llava": llava.with_placeholder,
}
_EPSILON = 1e-6  # of the towers' norms
_MERGED = "mm.2.weight"  # the last matrix: its rows are the decoder's width
_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_OMNI_IDS = {
    "image_token_id": "<|IMAGE|>",
    "video_token_id": "<|VIDEO|>",
    "audio_token_id": "<|AUDIO|>",
    "audio_start_token_id": "<|audio_bos|>",
    "audio_end_token_id": "<|audio_eos|>",
    "vision_start_token_id": "<|vision_bos|>",
    "vision_end_token_id": "<|vision_eos|>",
}
_EXTRACTOR = {
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 300,
}  # of sounds, in Omni's published checkpoints


class _Published(NamedTuple):
    """``sections`` of rope, where an old file does not say."""

    sections: tuple[int, int, int]
    min_pixels: int
    max_pixels: int
    video: Fields


_PUBLISHED = {
    "qwen2": _Published((16, 24, 24), 56 * 56, 16384 * 28 * 28, {}),
    "qwen3": _Published((24, 20, 20), 256 * 256, 4096 * 4096, {"shortest_edge": 4 * 32 * 32, "longest_edge": 24576 * 32 * 32}),
}


def tower_fields(contents: Contents, tower: Contents, config: Fields) -> dict[str, Fields]:
    """The files of a checkpoint that a tower adds or changes, by their names. ``config``: config.json of the decoder alone. Raises:
    CheckpointError naming the file, the key and the value, also for a tower of another model."""
    family, name = _family(contents, tower), contents.metadata["general.architecture"]
    if (own := _OWN.get(family)) is not None:
        return own(contents, tower, config)
    facts, text = facts_of(tower), JsonObject(contents.metadata, contents.where)
    published = _PUBLISHED["qwen2" if name == "qwen2vl" else "qwen3"]
    tokens = tokens_of(contents)
    ids = _OMNI_IDS if family == OMNI else _IDS
    if absent := [token for token in ids.values() if token not in tokens]:
        raise CheckpointError(f"{contents.where}: tokenizer.ggml.tokens has no {absent[0]!r}, which stands at media")
    sections = text.integers(f"{name}.rope.dimension_sections", default=published.sections)[:3]
    colours: Fields = {"image_mean": facts.colour("image_mean"), "image_std": facts.colour("image_std")}
    image = {
        **colours,
        "min_pixels": facts.integer("image_min_pixels", default=published.min_pixels),
        "max_pixels": facts.integer("image_max_pixels", default=published.max_pixels),
    }
    text_config = {**config, "rope_parameters": {**config["rope_parameters"], "mrope_section": list(sections)}}
    said: Fields = {
        "model_type": family,
        "vision_config": _vision_fields(contents, tower, facts, family),
        **{field: tokens.index(token) for field, token in ids.items()},
    }
    if family == OMNI:
        said["audio_config"] = sound = _sound_fields(tower, config["hidden_size"])
        image |= {**_EXTRACTOR, "feature_size": sound["num_mel_bins"]}
    return {
        "config.json": {**text_config, **said, **({"text_config": text_config} if family == OMNI else {})},
        "preprocessor_config.json": image,
        **({"video_preprocessor_config.json": {**colours, "size": published.video}} if published.video else {}),
    }


def choose_tower(contents: Contents, towers: Sequence[Contents], config: Fields) -> tuple[Contents | None, list[str]]:
    """The tower that fits a model, if any does; else why each does not. ``config``: see ``tower_fields``."""
    fitting, said = dict[Path, Contents](), list[str]()
    for tower in towers:
        try:
            tower_fields(contents, tower, config)
        except CheckpointError as error:
            said.append(str(error))
        else:
            fitting[Path(tower.where)] = tower
    chosen = best_tower(Path(contents.where), fitting)
    return (None, said) if chosen is None else (fitting[chosen], [])


def contents_with(contents: Contents, tower: Contents | None) -> Contents:
    """A model's file with the names of tokens that a tower needs. Raises: CheckpointError."""
    named = None if tower is None else _TOKENS.get(_family(contents, tower))
    return contents if named is None else named(contents)


def _kind(tower: Contents) -> str | None:
    found = tower.metadata.get("clip.projector_type", tower.metadata.get(f"{_VISION}projector_type"))
    return found if isinstance(found, str) else None


def _family(contents: Contents, tower: Contents) -> str:
    """The family of a model with this tower. Raises: CheckpointError if it has none, or the file is none of a tower."""
    towers, name = architecture_of(contents).towers, contents.metadata["general.architecture"]
    if not towers:
        raise CheckpointError(f"{contents.where}: general.architecture is {name!r}, which takes no pictures: leave the mmproj file out")
    if (found := tower.metadata.get("general.architecture")) != TOWER:
        raise CheckpointError(f"{tower.where}: is no mmproj file: general.architecture is {found!r}, expected {TOWER!r}")
    kind = _kind(tower)
    if kind is None or kind not in towers:
        expected = " or ".join(map(repr, towers))
        raise CheckpointError(f"{tower.where}: clip.projector_type is {kind!r}, expected {expected} for a model of architecture {name}")
    return towers[kind]


def _vision_fields(contents: Contents, tower: Contents, facts: JsonObject, family: str) -> Fields:
    """vision_config. The width of rows is that of the tensors: older files tell another."""
    depth, width, rows = facts.integer("block_count", most=1000), facts.integer("embedding_length"), shape_of(tower, _MERGED)[0]
    check_width(contents, tower, rows)
    if not math.isclose(epsilon := facts.number("attention.layer_norm_epsilon", default=_EPSILON), _EPSILON, rel_tol=1e-3):
        raise facts.error("attention.layer_norm_epsilon", f"is {epsilon:g}, expected {_EPSILON:g}")
    inner = inner_width(tower)
    fields: Fields = {
        "depth": depth,
        "num_heads": facts.integer("attention.head_count"),
        "patch_size": facts.integer("patch_size"),
        "temporal_patch_size": 2,
        "spatial_merge_size": facts.integer("spatial_merge_size", default=2),
    }
    if family == "qwen2_vl":
        if inner % width:
            raise CheckpointError(f"{tower.where}: feed-forwards have {inner} values, expected a multiple of {width}")
        return {**fields, "embed_dim": width, "hidden_size": rows, "mlp_ratio": inner // width}
    fields |= {"hidden_size": width, "intermediate_size": inner, "out_hidden_size": rows}
    if family in ("qwen2_5_vl", OMNI):
        every = facts.integer("n_wa_pattern")
        whole = list(range(every - 1, depth, every))
        window = facts.integer("window_size", default=112)
        return {**fields, "fullatt_block_indexes": whole, "window_size": window, "tokens_per_second": 2}
    positions = shape_of(tower, "v.position_embd.weight")[0]
    return {**fields, "num_position_embeddings": positions, "deepstack_visual_indexes": list(_deepstack(contents, tower))}


def _sound_fields(tower: Contents, rows: int) -> Fields:
    """audio_config."""
    facts = facts_of(tower, "clip.audio.")
    return {
        "encoder_layers": facts.integer("block_count", most=1000),
        "d_model": facts.integer("embedding_length"),
        "encoder_ffn_dim": facts.integer("feed_forward_length"),
        "encoder_attention_heads": facts.integer("attention.head_count"),
        "num_mel_bins": facts.integer("num_mel_bins", default=128),
        "output_dim": rows,
    }


def _deepstack(contents: Contents, tower: Contents) -> tuple[int, ...]:
    """The blocks that a merger stands behind. Raises: CheckpointError if the tower's flags, or the model, tell otherwise."""
    blocks, key = deepstack_blocks(tower.types), f"{contents.metadata['general.architecture']}.n_deepstack_layers"
    flags = tower.metadata.get(f"{_VISION}is_deepstack_layers", [])
    told = [block for block, flag in enumerate(flags) if flag] if isinstance(flags, list) else flags
    if told != list(blocks):
        raise CheckpointError(f"{tower.where}: clip.vision.is_deepstack_layers tells of blocks {told}, tensors are of {list(blocks)}")
    count = JsonObject(contents.metadata, contents.where).integer(key, default=len(blocks), least=0)
    if count != len(blocks):
        model = Path(contents.where).name
        raise CheckpointError(f"{tower.where}: has {len(blocks)} mergers of deepstack, {model} {count}: it is of another model")
    return blocks
