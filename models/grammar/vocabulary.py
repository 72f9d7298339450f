"""A tokenizer's vocabulary as llguidance needs it: the bytes of each token, and how a text is cut into tokens."""

from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from ..architecture import ModelConfig
from ..text.tokenizer import PromptGuard, Tokenizer

WORD_BITS = 32
_NUM_TEXTS = 4096
_IN_NUMBERS = b"0123456789.eE+-,]} \n\t\r"


def num_words(vocab_size: int) -> int:
    """int32 words of a mask with one bit per token."""
    return -(-vocab_size // WORD_BITS)


class GrammarVocabulary:
    """``tokenizer`` for matchers. Ids from the tokenizer's last up to ``vocab_size`` are no tokens. Makes a copy of all bytes: with
    150,000 tokens this takes half a second, in which no other thread runs, and 50 MB.

    ``permitted`` int32 [words]: bits of the tokens that have a text, ``permitted_at_end``: and of those that end an answer. ``ends``:
    the numbers of the words with bits of the latter, and these words. ``digits``: of tokens of digits alone. ``beside_numbers``: of
    those that cannot stand behind a digit of a JSON number.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._ids_of = lru_cache(_NUM_TEXTS)(self._encode)  # keys of schemas come again with every answer
        control = set(tokenizer.control_ids.values())
        texts = [b"" if id in control else text for id, text in enumerate(tokenizer.token_bytes[:vocab_size])]
        texts += [b""] * (vocab_size - len(texts))
        eos = sorted(id for id in eos_ids if id < vocab_size)
        if not eos:
            raise ValueError(f"none of the end-of-sequence ids {sorted(eos_ids)} is in the vocabulary of {vocab_size}")
        self.eos_token_id, self.bos_token_id = eos[0], None
        self.tokens, self.special_token_ids = texts, list[int]()
        self.tokenizer = LLTokenizer(TokenizerWrapper(self), n_vocab=vocab_size, eos_token=eos, slices=LLTokenizer.json_slices())
        self.permitted = bits_of([id for id, text in enumerate(texts) if text], vocab_size)
        ends = bits_of(eos, vocab_size)
        self.permitted_at_end = self.permitted | ends
        self.ends = np.flatnonzero(ends), ends[ends != 0]
        self.digits = bits_of([id for id, text in enumerate(texts) if text.isdigit()], vocab_size)
        self.beside_numbers = bits_of([id for id, text in enumerate(texts) if text and text[0] not in _IN_NUMBERS], vocab_size)
        self.tokens = []  # llguidance has its own

    def __call__(self, text: bytes) -> list[int]:
        """The ids of a text in which nothing is a control token. llguidance asks for them where only one text can follow."""
        return self._ids_of(text)

    def _encode(self, text: bytes) -> list[int]:
        guard = PromptGuard(self._tokenizer)
        return guard.encode(guard.hide([text.decode("utf-8", "replace")])[0], begins=False)


def load_vocabulary(path: Path, model: ModelConfig) -> GrammarVocabulary:
    """Read a checkpoint directory's. Raises: CheckpointError."""
    tokenizer = Tokenizer.load(path, control_ids=model.control_ids)
    return GrammarVocabulary(tokenizer, model.language.vocab_size, model.eos_token_ids)


def bits_of(ids: Collection[int], vocab_size: int) -> NDArray[np.int32]:
    """Return a mask, int32 [words], with the bits of these ids."""
    flags = np.zeros(num_words(vocab_size) * WORD_BITS, np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
