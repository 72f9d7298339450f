"""Whether a checkpoint's tokenizer belongs to its model, by the numbers of the tokens. Without the tokenizers library."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ..architecture import ModelConfig
from ..checkpoint.files import VOCABULARY, tokenizer_file
from ..checkpoint.json_fields import CheckpointFiles
from ..errors import CheckpointError


class _Token(msgspec.Struct, frozen=True):
    id: int


class _Model(msgspec.Struct, frozen=True):
    vocab: Mapping[str, int] | Sequence[msgspec.Raw] = {}


class _File(msgspec.Struct, frozen=True):
    model: _Model = _Model()
    added_tokens: tuple[_Token, ...] = ()


_decode = msgspec.json.Decoder(_File).decode
_decode_vocabulary = msgspec.json.Decoder(dict[str, int]).decode


def check_vocabulary(path: Path, config: ModelConfig) -> int:
    """Return the number of the tokenizer's tokens.

    Raises: CheckpointError if the vocabulary has tokens that the model lacks, or lacks one that ends the model's answers. Tokens that
    were added to the vocabulary may lie behind the model's last: prompts with them are refused.
    """
    file = tokenizer_file(path)
    try:
        found = _in_two_files(path) if file.name == VOCABULARY else _decode(file.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is no tokenizer: {error}") from None
    vocabulary = found.model.vocab
    num_plain = max(vocabulary.values(), default=-1) + 1 if isinstance(vocabulary, Mapping) else len(vocabulary)
    num_tokens = max((token.id + 1 for token in found.added_tokens), default=0)
    num_tokens = max(num_tokens, num_plain)
    known = config.language.vocab_size
    if num_plain > known:
        raise CheckpointError(f"{file} is another model's: it has {num_plain} tokens, the model's vocabulary is {known}")
    if lacking := [id for id in config.eos_token_ids if id >= num_tokens]:
        raise CheckpointError(f"{file} is another model's: it has {num_tokens} tokens, and answers end with token {lacking[0]}")
    return num_tokens


def _in_two_files(path: Path) -> _File:
    """vocab.json, and the added tokens of tokenizer_config.json."""
    vocabulary = _decode_vocabulary((path / VOCABULARY).read_bytes())
    config = CheckpointFiles(path).optional("tokenizer_config.json")
    added = () if config is None else config.object("added_tokens_decoder").data
    return _File(_Model(vocabulary), tuple(_Token(int(id)) for id in added if id.isdigit()))
