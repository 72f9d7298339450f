"""Ids of the text around tiles, from a checkpoint's tokenizer.json: tags of row and column are tokens, line ends are pieces of text."""

from pathlib import Path

import msgspec

from ...errors import CheckpointError
from ...item_text import TileTokens
from ..qwen3.times import Tokenizer, piece_ids

_OPENING, _WHOLE = "<fake_token_around_image>", "<global-img>"
_LINE_END = "\u010a"  # as byte-level tokenizers write it


class _Added(msgspec.Struct):
    id: int
    content: str


class _File(Tokenizer):
    added_tokens: list[_Added] = []


_decode = msgspec.json.Decoder(_File).decode


def read_tile_tokens(path: Path, most: int) -> TileTokens:
    """``most``: rows and columns of tiles at most. Raises CheckpointError for a file that is missing or damaged, or lacks a tag."""
    file = path / "tokenizer.json"
    try:
        found = _decode(file.read_bytes())
        ids = {token.content: (token.id,) for token in found.added_tokens}
        row_end, last_row_end = piece_ids(found.model, (_LINE_END, 2 * _LINE_END))
        return TileTokens(
            opening=ids[_OPENING],
            whole=ids[_WHOLE],
            places=tuple(tuple(ids[f"<row_{row + 1}_col_{column + 1}>"] for column in range(most)) for row in range(most)),
            row_end=row_end,
            last_row_end=last_row_end,
        )
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; tiles of pictures have tags") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{file}: no byte-level BPE tokenizer: {error}") from None
    except KeyError as error:
        raise CheckpointError(f"{file}: has no {error}, which tags tiles of pictures") from None
