"""Ids of the text around tiles, from a checkpoint's tokenizer.json: ``<img>`` and ``</img>``, and ``Frame1: `` before a frame."""

from msgspec.structs import replace

from ...architecture import ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...errors import CheckpointError
from ..added_tokens import read_tokenizer
from ..qwen3.times import piece_ids, read_time_tokens

_LINE_END = "\u010a"  # as byte-level tokenizers write it
_OPENING, _CLOSING = ("Frame",), (":", "\u0120")
_TOKENS = {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"}  # where the file has no others


def add_texts(files: CheckpointFiles, config: ModelConfig) -> ModelConfig:
    """The configuration with these ids. A model whose tokenizer has no token for videos takes none. Raises CheckpointError for a file
    that is missing or damaged, or lacks a token."""
    told = files.optional("tokenizer_config.json") or JsonObject({}, "defaults")
    file = files.path / "tokenizer.json"
    found = read_tokenizer(files.path, "tiles of pictures have text around them")
    ids = found.ids
    names = {field: told.token(field) if told.has(field) else usual for field, usual in _TOKENS.items()}
    for field in ("start_image_token", "end_image_token"):
        if names[field] not in ids:
            raise CheckpointError(f"{file}: has no {names[field]!r} ({field}), which stands around tiles of pictures")
    config = replace(
        config,
        vision_start_token_id=ids[names["start_image_token"]],
        vision_end_token_id=ids[names["end_image_token"]],
        item_text_ids=(ids[names["start_image_token"]], ids[names["end_image_token"]]),
    )
    assert config.vision_rules is not None
    if names["video_token"] not in ids:
        return replace(config, video_token_id=-1, vision_rules=replace(config.vision_rules, max_frames=0))
    try:
        (line_end,) = piece_ids(found.model, (_LINE_END,))
    except KeyError:
        raise CheckpointError(f"{file}: model.vocab has no line end of byte-level tokenizers, which stands behind frames") from None
    return replace(
        config,
        video_token_id=ids[names["video_token"]],
        video_is_pictures=True,
        times=read_time_tokens(files.path, _OPENING, _CLOSING),
        item_text_ids=line_end,
    )
