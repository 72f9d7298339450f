"""A run directory on tmpfs with a sequence table and rings, and a small byte-level tokenizer."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from mmrt.models.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|other|>"],
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox 😀😀 größer, ещё раз"] * 4, trainer)
    return Tokenizer(backend, eos_ids=[0])
