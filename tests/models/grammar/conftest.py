"""The vocabulary of the model that comes with mmrt."""

import pytest

from mmrt.models.config import load_model_config
from mmrt.models.grammar.matcher import Matchers
from mmrt.models.grammar.vocabulary import GrammarVocabulary, load_vocabulary
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.runtime.process.run import DEFAULT_MODEL


@pytest.fixture(scope="session")
def vocabulary() -> GrammarVocabulary:
    return load_vocabulary(DEFAULT_MODEL, load_model_config(DEFAULT_MODEL))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEFAULT_MODEL)


@pytest.fixture
def matchers(vocabulary: GrammarVocabulary) -> Matchers:
    return Matchers(vocabulary)
