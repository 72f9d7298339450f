"""Ids of the text around pictures and their slices, from a checkpoint's tokenizer.json, and the number before each picture."""

from msgspec.structs import replace

from ...architecture import ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...errors import CheckpointError
from ...item_text import NUMBER
from ..added_tokens import read_tokenizer
from ..qwen2_5 import fields
from ..qwen3.times import piece_ids

_LINE_END = "\u010a"  # as byte-level tokenizers write it
_PLACEHOLDERS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}  # texts of tokens where the file has no others
_AROUND = {  # a picture and a slice
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
}
_NUMBERS = {"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"}


def add_texts(files: CheckpointFiles, config: ModelConfig, numbers_videos: bool) -> ModelConfig:
    """The configuration with these ids: those of a picture and a video, those around it, around a slice, and that of a line end, which
    stands behind all rows of slices but the last. ``numbers_videos``: also videos have numbers, of their own. Raises CheckpointError
    for a file that is missing or damaged, or lacks a token."""
    told = files.optional("tokenizer_config.json") or JsonObject({}, "defaults")
    image, _, _ = fields.processors(files, video_falls_back=False)
    has_numbers = image.boolean("use_image_id", default=True)
    file = files.path / "tokenizer.json"
    found = read_tokenizer(files.path, "pictures have text around them")
    ids = found.ids
    placeholders = [f"{kind}_token" for kind in config.media_kinds]
    texts = {**{field: _PLACEHOLDERS[field] for field in placeholders}, **_AROUND, **(_NUMBERS if has_numbers else {})}
    written = {field: told.token(field) if told.has(field) else usual for field, usual in texts.items()}
    for field, text in written.items():
        if text not in ids:
            raise CheckpointError(f"{file}: has no {text!r} ({field}), which stands for pictures or around them")
    try:
        ((line_end,),) = piece_ids(found.model, (_LINE_END,))
    except KeyError:
        raise CheckpointError(f"{file}: model.vocab has no line end of byte-level tokenizers, which stands behind slices") from None
    around = tuple(ids[written[field]] for field in _AROUND)
    number = NUMBER.join(written[field] for field in _NUMBERS) if has_numbers else ""
    numbered = placeholders if numbers_videos else placeholders[:1]
    return replace(
        config,
        image_token_id=ids[written["image_token"]],
        video_token_id=ids[written["video_token"]] if "video_token" in written else -1,
        vision_start_token_id=around[0],
        vision_end_token_id=around[1],
        item_text_ids=(*around, line_end),
        prompt_texts=tuple((written[field], number + written[field]) for field in numbered) if has_numbers else (),
    )
