"""Log-probabilities in the shapes of OpenAI's routes, and vLLM's of a prompt. Pure.

The objects of single tokens are made JSON one by one: a long answer takes less memory, and no call keeps other threads from running
for long.
"""

import codecs
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import msgspec

from ....models.text.tokenizer import Tokenizer
from .token_table import Tokens

LEAST = -9999.0  # JSON has no infinity; as in vLLM
_encode = msgspec.json.Encoder().encode


class _Record(NamedTuple):
    """One token: its id, log-probability and rank, and the likeliest ids with theirs, the likeliest first."""

    id: int
    logprob: float
    rank: int
    alternatives: list[tuple[int, float]]


def _records(tokens: Tokens) -> Iterator[_Record]:
    """Yield the records of all tokens that have one: of a prompt not the first."""
    logprobs = tokens.logprobs
    ids = tokens.ids[len(tokens.ids) - len(logprobs.own) :].tolist()
    columns = logprobs.own.clip(LEAST).tolist(), logprobs.rank.tolist(), logprobs.ids.tolist(), logprobs.values.clip(LEAST).tolist()
    for id, own, rank, others, values in zip(ids, *columns, strict=True):
        yield _Record(id, own, rank, list(zip(others, values, strict=True)))


class TokenNames:
    """The texts by which answers call tokens. A token that is not whole characters is called by its bytes, as OpenAI's."""

    def __init__(self, tokenizer: Tokenizer, of_pieces: str = "") -> None:
        """``of_pieces``: stands before the bytes."""
        self._bytes_of = tokenizer.bytes_of
        self._of_pieces = of_pieces

    def bytes_of(self, id: int) -> bytes:
        return self._bytes_of(id)

    def name(self, id: int) -> str:
        data = self._bytes_of(id)
        if not data:
            return f"token_id:{id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return self._of_pieces + "".join(f"\\x{byte:02x}" for byte in data)


class LogprobFormat(Protocol):
    """Makes the ``logprobs`` of one choice, piece by piece."""

    def prompt(self, tokens: Tokens) -> dict[str, Any]:
        """Of an echoed prompt, before anything else."""
        ...

    def answer(self, tokens: Tokens | None) -> dict[str, Any]:
        """Of tokens of the answer, in order."""
        ...


class ChatLogprobs:
    """The shape of ``/v1/chat/completions``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._names = TokenNames(tokenizer)

    def prompt(self, tokens: Tokens) -> dict[str, Any]:
        raise AssertionError("a conversation is not echoed")

    def answer(self, tokens: Tokens | None) -> dict[str, Any]:
        content = [] if tokens is None else [self._entry(record) for record in _records(tokens)]
        return {"content": content, "refusal": None}

    def _entry(self, record: _Record) -> msgspec.Raw:
        alternatives = [self._token(*one) for one in record.alternatives]
        return msgspec.Raw(_encode({**self._token(record.id, record.logprob), "top_logprobs": alternatives}))

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._names.name(id), "logprob": logprob, "bytes": list(self._names.bytes_of(id))}


class TextLogprobs:
    """The shape of ``/v1/completions``. ``text_offset`` is where in the choice's text, in characters, a token begins."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, "bytes:")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(self, tokens: Tokens) -> dict[str, Any]:
        ids = tokens.ids.tolist()
        offsets = [self._advance(self._tokenizer.bytes_of(id)) for id in ids]
        self._offset += len(self._decoder.decode(b"", final=True))  # a character that it ends within is not finished by the answer
        rest = self._columns(_records(tokens))
        return {
            **{name: [None, *values] for name, values in rest.items()},
            "tokens": [*map(self._names.name, ids)],
            "text_offset": offsets,
        }

    def answer(self, tokens: Tokens | None) -> dict[str, Any]:
        records = [] if tokens is None else list(_records(tokens))
        shown = self._tokenizer.token_bytes  # control tokens are not
        offsets = [self._advance(shown[id] if id < len(shown) else b"") for id, *_ in records]
        columns = self._columns(iter(records))
        return {"tokens": [self._names.name(record.id) for record in records], **columns, "text_offset": offsets}

    def _advance(self, data: bytes) -> int:
        """Return the offset of a token, and go behind it."""
        offset = self._offset
        self._offset += len(self._decoder.decode(data))
        return offset

    def _columns(self, records: Iterator[_Record]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {"token_logprobs": [], "top_logprobs": []}
        for record in records:
            columns["token_logprobs"].append(record.logprob)
            named = {self._names.name(id): logprob for id, logprob in record.alternatives}
            columns["top_logprobs"].append(msgspec.Raw(_encode(named | {self._names.name(record.id): record.logprob})))
        return columns


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Put the lists of one piece behind those of another."""
    return {name: values + second[name] for name, values in first.items()}


def prompt_logprobs(tokens: Tokens, tokenizer: Tokenizer) -> list[msgspec.Raw | None]:
    """Return vLLM's field of this name: null for the first token; for each other one an object from ids to their log-probabilities."""
    names = TokenNames(tokenizer)
    found: list[msgspec.Raw | None] = [None]
    for record in _records(tokens):
        ranked = [(id, value, rank) for rank, (id, value) in enumerate(record.alternatives, 1)]
        entries = {id: (value, rank) for id, value, rank in [*ranked, (record.id, record.logprob, record.rank)]}
        named = {str(id): {"logprob": value, "rank": rank, "decoded_token": names.name(id)} for id, (value, rank) in entries.items()}
        found.append(msgspec.Raw(_encode(named)))
    return found
