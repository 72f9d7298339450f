"""A tokenizer out of vocab.json and merges.txt, as repositories of Qwen have it that no tokenizers library has written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from ..checkpoint.files import MERGES, VOCABULARY
from ..errors import CheckpointError
from .tokenizer_trial import MAX_FILE_BYTES, QWEN_SPLIT

_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_decode = msgspec.json.Decoder(dict[str, int]).decode


def read_vocabulary(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer without added tokens; ``config``: tokenizer_config.json. Raises: CheckpointError, also for other classes than
    Qwen's, whose rules are not in these files."""
    if (kind := config.get("tokenizer_class")) not in _CLASSES:
        told = f"it can be made of {VOCABULARY} and {MERGES} for a {_CLASSES[0]} alone, and tokenizer_class is {kind!r}"
        raise CheckpointError(f"{path / 'tokenizer.json'} is missing; {told}")
    vocabulary, merges = vocabulary_of(path / VOCABULARY), list[tuple[str, str]]()
    for line in _read(path / MERGES).decode("utf-8", "replace").split("\n"):
        first, space, second = line.strip("\r").partition(" ")
        if space and not line.startswith("#version"):
            merges.append((first, second))
    try:
        tokenizer = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path / MERGES}: does not fit {VOCABULARY}: {error}") from None
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated", invert=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def vocabulary_of(file: Path) -> dict[str, int]:
    """The number of each token of vocab.json. Raises: CheckpointError."""
    try:
        return _decode(_read(file))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is no vocabulary: {error}") from None


def _read(file: Path) -> bytes:
    with file.open("rb") as opened:
        data = opened.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise CheckpointError(f"{file} has more than {MAX_FILE_BYTES} bytes")
    return data
