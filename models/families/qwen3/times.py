"""Ids of pieces of text, from a checkpoint's tokenizer.json, and of times: ``<12.3 seconds>`` stands before each frame of a video.

The file is read here without the tokenizer's library, which most processes of a run do without. Qwen's tokenizers cut such a text
into ``<``, digits, ``.``, `` seconds`` and ``>`` before they merge bytes, so the ids of the pieces make up those of any time.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...errors import CheckpointError
from ...item_text import TimeTokens

_GROUPED_DIGITS = b"p{N}{"
_PIECES = (*"0123456789<.>", "\u0120seconds")  # the space as byte-level tokenizers write it


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


def read_time_tokens(path: Path) -> TimeTokens:
    """The pieces' ids. Raises CheckpointError for a file that is missing or damaged, or whose tokenizer cuts times otherwise."""
    file = path / "tokenizer.json"
    try:
        found = _decode_tokenizer(file.read_bytes())
        if _GROUPED_DIGITS in bytes(found.pre_tokenizer):
            raise CheckpointError(f"{file}: pre_tokenizer takes several digits at once, expected one: times of videos are text")
        ids = piece_ids(found.model, _PIECES)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; times of videos are text") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{file}: no byte-level BPE tokenizer: {error}") from None
    except KeyError as error:
        raise CheckpointError(f"{file}: model.vocab has no {error}, of which times of videos are made") from None
    *digits, opening, point, closing, seconds = ids
    return TimeTokens(opening=opening, digits=tuple(digits), point=point, closing=seconds + closing)


def piece_ids(model: _Model, pieces: Sequence[str]) -> list[tuple[int, ...]]:
    """Of each of the pieces, as byte-level tokenizers write them. A trained vocabulary that has a whole piece merges it.

    Raises: KeyError for a part that it lacks, msgspec.MsgspecError for another kind of tokenizer."""
    # Decoding it builds none of the vocabulary's other entries: every process of a run reads the file at its start.
    fields = {f"piece_{number}": piece for number, piece in enumerate(pieces)}
    known = msgspec.defstruct("Known", [(field, int, -1) for field in fields], rename=fields)
    whole = msgspec.structs.astuple(msgspec.json.decode(model.vocab, type=known))
    if min(whole) >= 0:
        return [(id,) for id in whole]
    vocab = _decode_vocabulary(model.vocab)
    merges = _decode_merges(model.merges)
    return [tuple(vocab[part] for part in _merged(piece, merges)) for piece in pieces]


def _merged(word: str, merges: list[str | tuple[str, str]]) -> list[str]:
    """The parts that byte-pair encoding leaves of a word: the earliest merge first (Sennrich et al., 2016)."""
    if len(word) == 1:
        return [word]
    pairs = (tuple(merge.split(" ")) if isinstance(merge, str) else merge for merge in merges)
    ranks = {pair: rank for rank, pair in enumerate(pairs) if pair[0] + pair[1] in word}
    parts = list(word)
    while found := [(ranks[pair], at) for at, pair in enumerate(zip(parts, parts[1:], strict=False)) if pair in ranks]:
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
