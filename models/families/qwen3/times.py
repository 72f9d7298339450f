"""Ids of pieces of text, from a checkpoint's tokenizer.json, and of times: ``<12.3 seconds>`` stands before each frame of a video, for
example.

The file is read here without the tokenizer's library, which most processes of a run do without. Tokenizers cut such a text into ``<``,
digits, ``.``, `` seconds`` and ``>`` before they merge bytes, so the ids of the pieces make up those of any time. Some take up to three
digits at once, from the left.
"""

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec

from ...errors import CheckpointError
from ...item_text import TimeTokens

SECONDS = "\u0120seconds"  # the space as byte-level tokenizers write it
_MOST_DIGITS = 3
GROUPED_DIGITS = re.compile(rb"p\{N\}(?:\{1,(\d+)\}|([+*{]))")
_NUMBER = re.compile(rb'"(\d{1,3})"\s*:\s*(\d+)')


class _Model(msgspec.Struct):
    vocab: msgspec.Raw
    merges: msgspec.Raw


class Tokenizer(msgspec.Struct):
    """What is read of tokenizer.json."""

    model: _Model
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")


_decode_tokenizer = msgspec.json.Decoder(Tokenizer).decode
_decode_vocabulary = msgspec.json.Decoder(dict[str, int]).decode
_decode_merges = msgspec.json.Decoder(list[str | tuple[str, str]]).decode


def read_time_tokens(path: Path, opening: Sequence[str] = ("<",), closing: Sequence[str] = (SECONDS, ">")) -> TimeTokens:
    """The pieces' ids; ``opening`` and ``closing`` stand before and behind a number. Raises CheckpointError for a file that is missing
    or damaged, or whose tokenizer cuts times otherwise."""
    file = path / "tokenizer.json"
    try:
        found = _decode_tokenizer(file.read_bytes())
        lengths = range(1, _digits_at_once(file, found) + 1)
        *around, point = piece_ids(found.model, [*opening, *closing, "."])
        ids = iter(_number_ids(found.model, [f"{number:0{length}}" for length in lengths for number in range(10**length)]))
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; times of videos are text") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{file}: no byte-level BPE tokenizer: {error}") from None
    except KeyError as error:
        raise CheckpointError(f"{file}: model.vocab has no {error}, of which times of videos are made") from None
    before, behind = (tuple(id for ids in found for id in ids) for found in (around[: len(opening)], around[len(opening) :]))
    digits = tuple(tuple(islice(ids, 10**length)) for length in lengths)
    return TimeTokens(opening=before, digits=digits, point=point, closing=behind)


def piece_ids(model: _Model, pieces: Sequence[str]) -> list[tuple[int, ...]]:
    """Of each of the pieces, as byte-level tokenizers write them. A trained vocabulary that has a whole piece merges it.

    Raises: KeyError for a part that it lacks, msgspec.MsgspecError for another kind of tokenizer."""
    # Decoding it builds none of the vocabulary's other entries: every process of a run reads the file at its start.
    fields = {f"piece_{number}": piece for number, piece in enumerate(pieces)}
    known = msgspec.defstruct("Known", [(field, int, -1) for field in fields], rename=fields)
    whole = msgspec.structs.astuple(msgspec.json.decode(model.vocab, type=known))
    lacking = [piece for piece, id in zip(pieces, whole, strict=True) if id < 0]
    merged = iter(_merged_ids(model, lacking) if lacking else ())
    return [(id,) if id >= 0 else next(merged) for id in whole]


def _digits_at_once(file: Path, tokenizer: Tokenizer) -> int:
    """How many digits make a piece at most. Raises CheckpointError."""
    if (grouped := GROUPED_DIGITS.search(memoryview(tokenizer.pre_tokenizer))) is None:
        return 1
    if grouped[1] is None or not 1 <= int(grouped[1]) <= _MOST_DIGITS:
        told = f"pre_tokenizer takes more than {_MOST_DIGITS} digits at once, which is not supported: times of videos are text"
        raise CheckpointError(f"{file}: {told}")
    return int(grouped[1])


def _number_ids(model: _Model, numbers: Sequence[str]) -> list[tuple[int, ...]]:
    """As ``piece_ids``, of hundreds of numbers, by the text of the vocabulary."""
    text = bytes(model.vocab)
    entries = (entry for entry in _NUMBER.finditer(text) if text[entry.start() - 1 : entry.start()] != b"\\")
    whole = {entry[1].decode(): int(entry[2]) for entry in entries}
    return [(whole[number],) for number in numbers] if whole.keys() >= {*numbers} else _merged_ids(model, numbers)


def _merged_ids(model: _Model, pieces: Sequence[str]) -> list[tuple[int, ...]]:
    vocab, ranks = _decode_vocabulary(model.vocab), _ranks(model, pieces)
    return [tuple(vocab[part] for part in _merged(piece, ranks)) for piece in pieces]


def _ranks(model: _Model, pieces: Sequence[str]) -> dict[tuple[str, ...], int]:
    """The places of the merges that may take part in a piece."""
    parts = {piece[first:end] for piece in pieces for first in range(len(piece)) for end in range(first + 2, len(piece) + 1)}
    pairs = (tuple(merge.split(" ")) if isinstance(merge, str) else merge for merge in _decode_merges(model.merges))
    return {pair: rank for rank, pair in enumerate(pairs) if pair[0] + pair[1] in parts}


def _merged(word: str, ranks: dict[tuple[str, ...], int]) -> list[str]:
    """The parts that byte-pair encoding leaves of a word: the earliest merge first (Sennrich et al., 2016)."""
    parts = list(word)
    while found := [(ranks[pair], at) for at, pair in enumerate(zip(parts, parts[1:], strict=False)) if pair in ranks]:
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
