"""Ids of the text of times, from a checkpoint's tokenizer.json: ``<12.3 seconds>`` stands before each frame of a video.

The file is read here without the tokenizer's library, which most processes of a run do without. Qwen's tokenizers cut such a text
into ``<``, digits, ``.``, `` seconds`` and ``>`` before they merge bytes, so the ids of the pieces make up those of any time.
"""

from pathlib import Path

import msgspec

from ...architecture import TimeTokens
from ...errors import CheckpointError

_SPACE = "\u0120"  # as byte-level tokenizers write it
_GROUPED_DIGITS = b"p{N}{"


class _Model(msgspec.Struct):
    vocab: dict[str, int]
    merges: list[str | tuple[str, str]]


class _Tokenizer(msgspec.Struct):
    model: _Model
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")


def read_time_tokens(path: Path) -> TimeTokens:
    """The pieces' ids. Raises CheckpointError for a file that is missing or damaged, or whose tokenizer cuts times otherwise."""
    file = path / "tokenizer.json"
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_Tokenizer)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; times of videos are text") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{file}: no byte-level BPE tokenizer: {error}") from None
    if _GROUPED_DIGITS in bytes(found.pre_tokenizer):
        raise CheckpointError(f"{file}: pre_tokenizer takes several digits at once, expected one: times of videos are text")

    def ids(piece: str) -> tuple[int, ...]:
        parts = _merged(piece.replace(" ", _SPACE), found.model.merges)
        if missing := [part for part in parts if part not in found.model.vocab]:
            raise CheckpointError(f"{file}: model.vocab has no {missing[0]!r}, a part of {piece!r}: times of videos are text")
        return tuple(found.model.vocab[part] for part in parts)

    digits = tuple(ids(digit) for digit in "0123456789")
    return TimeTokens(opening=ids("<"), digits=digits, point=ids("."), closing=ids(" seconds") + ids(">"))


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
