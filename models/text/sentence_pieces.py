"""Tokenizers of SentencePiece's kind in the ``tokenizers`` library, as Llama 2's: spaces are U+2581, and a character that the
vocabulary lacks is written in tokens of bytes.

A text gets a space in front, and in most of them one behind an added token as well; what goes on a text has none, so such a tokenizer
has a second form. The space comes from a normalizer, or, in newer files, from a pre-tokenizer ("Metaspace"). An answer's text keeps its
first space, as in llama.cpp and vLLM: it goes on the prompt.
"""

import json
import re
from collections.abc import Collection
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TO_SPACES = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
_FROM_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_BEHIND_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}  # Gemma's: finds none
_PREFIX = {"type": "Prepend", "prepend": SPACE}
_DECODING = [_TO_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def decoder() -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])


def normalizer(has_prefix: bool) -> normalizers.Normalizer:
    """``has_prefix``: a text gets a space in front."""
    spaces = normalizers.Replace(" ", SPACE)
    return normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces


def has_pieces(backend: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer is of this kind."""
    found = _state(backend.decoder)
    return found is not None and found.get("type") == "Sequence" and found.get("decoders") in (_DECODING, [*_DECODING, _STRIP])


def going_on(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer for what goes on a text. Raises: ValueError for a normalizer or pre-tokenizer that is not known."""
    found, metaspace = _state(backend.normalizer), _metaspace(backend)
    is_known = found in (_FROM_SPACES, {"type": "Sequence", "normalizers": [_PREFIX, _FROM_SPACES]})
    is_plain = backend.pre_tokenizer is None or _state(backend.pre_tokenizer) == _BEHIND_SPACES
    if not (is_known and is_plain or found is None and metaspace is not None):
        told = f"{backend.normalizer}, the pre-tokenizer {backend.pre_tokenizer}"
        raise ValueError(f"the normalizer is {told}, expected Prepend and Replace, or Replace, and none; or none and Metaspace")
    other = tokenizers.Tokenizer.from_str(backend.to_str())
    if metaspace is None:
        other.normalizer = normalizer(has_prefix=False)
    else:
        other.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=metaspace["split"])
    other.no_truncation()
    other.no_padding()
    return other


def begins_anew(backend: tokenizers.Tokenizer) -> bool:
    """Whether a text behind an added token gets a space in front, too."""
    metaspace = _metaspace(backend)
    return metaspace is None or metaspace["prepend_scheme"] == "always"


def piece_bytes(backend: tokenizers.Tokenizer, special: Collection[int]) -> list[bytes]:
    """What each token adds to a text, by its id; nothing for special ones."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, id in vocabulary.items():
        if id not in special:
            byte = _BYTE.fullmatch(token)
            table[id] = bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()
    return table


def _metaspace(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    """The state of a pre-tokenizer that puts U+2581 in the place of spaces."""
    found = _state(backend.pre_tokenizer)
    return found if found is not None and (found.get("type"), found.get("replacement")) == ("Metaspace", SPACE) else None


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())
