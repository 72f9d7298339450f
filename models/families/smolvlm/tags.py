"""Ids of the text around tiles, from a checkpoint's tokenizer.json: tags of row and column are tokens, line ends are pieces of text.
Idefics3-8B and the first SmolVLM have no such tokens: their tags are text, too.
"""

import re
from itertools import chain, product
from pathlib import Path

import msgspec

from ...errors import CheckpointError
from ...item_text import TileTokens
from ..qwen3.times import Tokenizer, piece_ids

_OPENING, _WHOLE = "<fake_token_around_image>", "<global-img>"
_LINE_END = "\u010a"  # as byte-level tokenizers write it
_SPLITS = (  # how pre-tokenizers cut a tag: Llama 3's and its like, GPT-2's
    (re.compile(rb"\\p\{L\}\\\\p\{N\}\]\?\\\\p\{L\}\+"), re.compile(r"[^a-z\d]?[a-z]+|\d|[^a-z\d]+")),
    (re.compile(rb'"use_regex"\s*:\s*true'), re.compile(r"[a-z]+|\d|[^a-z\d]+")),
)


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
        ids: dict[str, tuple[int, ...]] = {token.content: (token.id,) for token in found.added_tokens}
        if _WHOLE not in ids and most < 10:
            ids |= _tags_of_text(found, [_WHOLE, *(_tag(*place) for place in product(range(most), repeat=2))])
        row_end, last_row_end = piece_ids(found.model, (_LINE_END, 2 * _LINE_END))
        return TileTokens(
            opening=ids[_OPENING],
            whole=ids[_WHOLE],
            places=tuple(tuple(ids[_tag(row, column)] for column in range(most)) for row in range(most)),
            row_end=row_end,
            last_row_end=last_row_end,
        )
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; tiles of pictures have tags") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{file}: no byte-level BPE tokenizer: {error}") from None
    except KeyError as error:
        raise CheckpointError(f"{file}: has no {error}, which tags tiles of pictures") from None


def _tag(row: int, column: int) -> str:
    return f"<row_{row + 1}_col_{column + 1}>"


def _tags_of_text(file: _File, tags: list[str]) -> dict[str, tuple[int, ...]]:
    """The ids of tags without tokens of their own; none where the tokenizer cuts text in a way that is not known."""
    split = next((split for sign, split in _SPLITS if sign.search(memoryview(file.pre_tokenizer))), None)
    if split is None:
        return {}
    pieces = {tag: split.findall(tag) for tag in tags}
    known = [*dict.fromkeys(chain(*pieces.values()))]
    ids = dict(zip(known, piece_ids(file.model, known), strict=True))
    return {tag: tuple(id for piece in its for id in ids[piece]) for tag, its in pieces.items()}
