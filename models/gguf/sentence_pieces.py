"""A tokenizer of SentencePiece's kind from a GGUF file: tokens, and scores of which merges are made."""

import math
from collections.abc import Sequence

import tokenizers
from tokenizers.models import BPE

from ..errors import CheckpointError
from ..text import sentence_pieces

NORMAL = 1


def make_pieces(
    tokens: Sequence[str], kinds: Sequence[int], scores: object, where: str, *, unknown: str | None, has_prefix: bool
) -> tokenizers.Tokenizer:
    """The tokenizer without added tokens. Of two neighbours that make up a token those of the highest score are merged first.

    Raises: CheckpointError naming the key and its value.
    """
    if not isinstance(scores, list) or not all(type(score) in (int, float) and math.isfinite(score) for score in scores):
        raise CheckpointError(f"{where}: tokenizer.ggml.scores is missing, or no list of finite numbers")
    if len(scores) != len(tokens):
        raise CheckpointError(f"{where}: tokenizer.ggml.scores has {len(scores)} numbers, for {len(tokens)} tokens")
    merges = _merges(tokens, kinds, scores, {token: number for number, token in enumerate(tokens)})
    return pieces_of(tokens, merges, where, unknown=unknown, has_prefix=has_prefix)


def pieces_of(
    tokens: Sequence[str], merges: Sequence[tuple[str, str]], where: str, *, unknown: str | None, has_prefix: bool
) -> tokenizers.Tokenizer:
    """Build the tokenizer without added tokens. ``merges``: pairs of neighbours, the first to merge first. Raises: CheckpointError."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if absent := [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]:
        raise CheckpointError(f"{where}: tokenizer.ggml.tokens has no '<0x{absent[0]:02X}>': all bytes are expected")
    try:
        model = BPE(vocab=vocabulary, merges=list(merges), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{where}: tokenizer.ggml.merges do not fit the tokens: {error}") from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = sentence_pieces.normalizer(has_prefix)
    tokenizer.decoder = sentence_pieces.decoder()
    return tokenizer


def _merges(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens that make up another, the highest score first; of equal ones the first token."""
    plain = {token for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL}
    found: list[tuple[str, str]] = []
    for number in sorted(range(len(tokens)), key=lambda number: -scores[number]):
        token = tokens[number]
        if token in plain:
            pairs = ((token[:end], token[end:]) for end in range(1, len(token)))
            known = [pair for pair in pairs if plain.issuperset(pair)]
            found += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return found
