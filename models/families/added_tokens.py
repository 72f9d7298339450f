"""The tokens that a checkpoint's tokenizer.json adds to its vocabulary, for families that write some of them around media. Read without
the tokenizer's library, which most processes of a run do without."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from ..errors import CheckpointError
from .qwen3.times import Tokenizer


class _Added(msgspec.Struct):
    id: int
    content: str


class TokenizerFile(Tokenizer):
    """What is read of tokenizer.json."""

    added_tokens: list[_Added] = []

    @property
    def ids(self) -> dict[str, int]:
        """By the tokens' texts."""
        return _ids(self.added_tokens)


class _AnyTokenizer(msgspec.Struct):
    added_tokens: list[_Added] = []


_decode, _decode_any = msgspec.json.Decoder(TokenizerFile).decode, msgspec.json.Decoder(_AnyTokenizer).decode
Decoded = TypeVar("Decoded")


def read_tokenizer(path: Path, use: str) -> TokenizerFile:
    """That of a checkpoint directory; ``use``: for what its ids are wanted. Raises CheckpointError for a file that is missing, damaged
    or of another kind."""
    return _read(path, use, _decode, "byte-level BPE tokenizer")


def read_added_tokens(path: Path, use: str) -> dict[str, int]:
    """Ids by the tokens' texts, as ``read_tokenizer``, of a tokenizer of any kind."""
    return _ids(_read(path, use, _decode_any, "tokenizer").added_tokens)


def _read(path: Path, use: str, decode: Callable[[bytes], Decoded], kind: str) -> Decoded:
    file = path / "tokenizer.json"
    try:
        return decode(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; {use}") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{file}: no {kind}: {error}") from None


def _ids(tokens: list[_Added]) -> dict[str, int]:
    return {token.content: token.id for token in tokens}
