"""Ids of times such as ``01:30``, which stand before the frames of a video in Gemma 4's prompts, from a checkpoint's tokenizer.json."""

import re
from pathlib import Path

import msgspec

from ...errors import CheckpointError
from ...item_text import TimeTokens
from ..qwen3.times import GROUPED_DIGITS, Tokenizer, piece_ids

_SPACES = ("\u2581", "\u0120")  # as Gemma's tokenizers write one, and byte-level ones
_PARTS = "(?:[0-9:]|" + "|".join(_SPACES) + ")*"
_JOINED = re.compile(f'"({_PARTS}[0-9]{_PARTS})"[ ]*:'.encode())  # entries of a vocabulary
_decode = msgspec.json.Decoder(Tokenizer).decode


def read_clock_tokens(path: Path) -> TimeTokens:
    """``TimeTokens`` of ``mm.ss``: ``text("01.30")`` is that of ``01:30`` and a space. Each of these characters is a piece of its own.

    Raises: CheckpointError for a file that is missing or damaged, or whose tokenizer joins them."""
    file = path / "tokenizer.json"
    try:
        found = _decode(file.read_bytes())
        vocab = bytes(found.model.vocab)
        space = next((sign for sign in _SPACES if f'"{sign}"'.encode() in vocab), _SPACES[0])
        *digits, colon, gap = piece_ids(found.model, [*"0123456789", ":", space])
        longer = next((one[1].decode() for one in _JOINED.finditer(vocab) if len(one[1].decode()) > 1), None)
        is_grouped = (grouped := GROUPED_DIGITS.search(memoryview(found.pre_tokenizer))) is not None and grouped[1] != b"1"
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; times of videos are text") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{file}: no BPE tokenizer: {error}") from None
    except KeyError as error:
        raise CheckpointError(f"{file}: model.vocab has no {error}, of which times of videos are made") from None
    if is_grouped or longer is not None:
        told = f"as {longer!r}" if longer is not None else "by its pre_tokenizer"
        raise CheckpointError(f"{file}: joins the digits of times, {told}, which is not supported: times of videos are text")
    return TimeTokens(opening=(), digits=(tuple(digits),), point=colon, closing=gap)
