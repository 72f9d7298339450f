"""Ids of the text around tiles, from a checkpoint's tokenizer.json: ``<img>`` and ``</img>``, and ``Frame1: `` before a frame."""

from pathlib import Path

import msgspec
from msgspec.structs import replace

from ...architecture import ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...errors import CheckpointError
from ..qwen3.times import Tokenizer, piece_ids, read_time_tokens

_LINE_END = "\u010a"  # as byte-level tokenizers write it
_OPENING, _CLOSING = ("Frame",), (":", "\u0120")
_TOKENS = {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"}  # where the file has no others


class _Added(msgspec.Struct):
    id: int
    content: str


class _File(Tokenizer):
    added_tokens: list[_Added] = []


_decode = msgspec.json.Decoder(_File).decode


def add_texts(files: CheckpointFiles, config: ModelConfig) -> ModelConfig:
    """The configuration with these ids. A model whose tokenizer has no token for videos takes none. Raises CheckpointError for a file
    that is missing or damaged, or lacks a token."""
    told = files.optional("tokenizer_config.json") or JsonObject({}, "defaults")
    file = files.path / "tokenizer.json"
    found = _read(file)
    ids = {token.content: token.id for token in found.added_tokens}
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
    (line_end,) = piece_ids(found.model, (_LINE_END,))
    return replace(
        config,
        video_token_id=ids[names["video_token"]],
        video_is_pictures=True,
        times=read_time_tokens(files.path, _OPENING, _CLOSING),
        item_text_ids=line_end,
    )


def _read(file: Path) -> _File:
    try:
        return _decode(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; tiles of pictures have text around them") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{file}: no byte-level BPE tokenizer: {error}") from None
