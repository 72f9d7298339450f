"""The tokens that a checkpoint's tokenizer.json adds to its vocabulary, for families that write some of them around media. Read without
the tokenizer's library, which most processes of a run do without."""

from pathlib import Path

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
        return {token.content: token.id for token in self.added_tokens}


_decode = msgspec.json.Decoder(TokenizerFile).decode


def read_tokenizer(path: Path, use: str) -> TokenizerFile:
    """That of a checkpoint directory; ``use``: for what its ids are wanted. Raises CheckpointError for a file that is missing, damaged
    or of another kind."""
    file = path / "tokenizer.json"
    try:
        return _decode(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; {use}") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{file}: no byte-level BPE tokenizer: {error}") from None
