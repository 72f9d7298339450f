"""Text to token ids and back: a checkpoint's ``tokenizer.json`` in the ``tokenizers`` library, without torch or transformers.

The gateway encodes prompts with it, the detokenizer decodes with it. Ordinary text gets the ids that transformers' AutoTokenizer
gives. A user's text never becomes a control token: ``PromptGuard`` replaces such text by unguessable sentinels
before the chat template is rendered, and encodes it as the plain characters that it is.
"""

import codecs
import json
import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from ..checkpoint.files import VOCABULARY, tokenizer_file
from ..errors import CheckpointError
from . import sentence_pieces
from .tokenizer_trial import check_number, check_tokenizer
from .vocabulary_files import read_vocabulary

_SENTINEL = re.compile("x|([0-9]+)y")  # behind a request's nonce


class Tokenizer:
    """A loaded tokenizer. Immutable, so threads may share it.

    ``token_bytes[id]`` is what a token adds to the decoded bytes, empty for special tokens; ``eos_ids`` end a generation;
    ``control_ids`` maps the text of every control token to its id; ``special_tokens`` are the named ones that chat templates use.
    ``opening_ids``: the ``bos_token``, if the file puts it in front of any text; else none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Collection[int] = (),
        control_ids: Collection[int] = (),
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.eos_ids = frozenset(eos_ids)
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        special = {id for id, token in added.items() if token.special}
        control = special | set(control_ids)
        self.control_ids = {token.content: id for id, token in added.items() if id in control}
        self._going_on = sentence_pieces.going_on(backend) if sentence_pieces.has_pieces(backend) else None
        self._begins_anew = self._going_on is not None and sentence_pieces.begins_anew(backend)
        self.token_bytes = _token_bytes(backend, special) if self._going_on is None else sentence_pieces.piece_bytes(backend, special)
        self.vocab_size = len(self.token_bytes)
        self._special_text = {id: token.content for id, token in added.items() if id in special}
        self._longest_token_chars = max((len(token) for token in backend.get_vocab()), default=1)
        self.control_words = ControlWords.of(self.control_ids)
        self._literal_ids = self._encode_literally()
        put_around, bos = backend.encode("").ids, self.special_tokens.get("bos_token")
        self.opening_ids = put_around[:1] if bos is not None and put_around[:1] == [backend.token_to_id(bos)] else []

    @classmethod
    def load(cls, path: Path, control_ids: Collection[int] = (), eos_ids: Collection[int] = ()) -> "Tokenizer":
        """Read a checkpoint directory. ``control_ids``: those of added tokens that are control tokens whatever the file says.

        Raises:
            CheckpointError: a file is missing, malformed, or takes too long to load; or is of another kind than byte-level BPE and
                SentencePiece.
        """
        file, config = tokenizer_file(path), _read_json(path / "tokenizer_config.json")
        if file.name == VOCABULARY:
            backend = read_vocabulary(path, config)
        else:
            check_tokenizer(file)
            try:
                backend = tokenizers.Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises nothing narrower
                raise CheckpointError(f"{file} cannot be read: {error}") from error
        _add_missing_tokens(backend, config, path)
        named = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
        special_tokens = {name: text for name, text in named.items() if text is not None}
        try:
            return cls(backend, eos_ids=eos_ids, control_ids=control_ids, special_tokens=special_tokens)
        except ValueError as error:
            raise CheckpointError(f"{file}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered template: control tokens are recognised. Nothing is added before or after."""
        return self.encode_pieces([text])[0]

    def encode_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of each text, without holding the GIL."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_going_on(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts that go on another; ``encode_pieces`` of a tokenizer that puts no space in front."""
        if self._going_on is None:
            return self.encode_pieces(texts)
        return [encoding.ids for encoding in self._going_on.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_parts(self, parts: Sequence[tuple[str, Sequence[int]]], begins: bool) -> list[int]:
        """Ids of one text that is cut into parts, ids behind each. ``begins``: nothing stands in front of it."""
        texts = [text for text, _ in parts]
        opening = self.encode_pieces(texts)
        within = opening if self._going_on is None else self.encode_going_on(texts)
        found: list[int] = []
        for number, (_, behind) in enumerate(parts):
            found += (opening if begins else within)[number]
            if behind or found:  # what follows an added token may begin anew
                begins = self._begins_anew and not behind and found[-1] in self._added
            found += behind
        return found

    def encode_prompt(self, text: str) -> list[int]:
        """``encode`` of a text without a template, with the tokens that the file puts around any: Llama 3 begins with one."""
        return self._backend.encode_batch_fast([text])[0].ids

    def encode_control_token_as_text(self, content: str) -> list[int]:
        """Ids of a control token's characters when it is mere text; none of them is a control token."""
        return self._literal_ids[content]

    def decode(self, ids: Sequence[int], with_control_tokens: bool = False) -> str:
        """The whole text at once. Without control tokens it is what the joined deltas equal."""
        if self._going_on is None:
            return self._backend.decode(list(ids), skip_special_tokens=not with_control_tokens)
        bytes_of = self.bytes_of if with_control_tokens else lambda id: self.token_bytes[id] if 0 <= id < self.vocab_size else b""
        return b"".join(map(bytes_of, ids)).decode("utf-8", "replace")

    def bytes_of(self, id: int) -> bytes:
        """Return the bytes of one token, a control token's name included; none for an id without a token."""
        if (name := self._special_text.get(id)) is not None:
            return name.encode()
        return self.token_bytes[id] if 0 <= id < self.vocab_size else b""

    def min_tokens(self, num_chars: int) -> int:
        """A lower bound on the tokens of so many characters, however they are cut; used to refuse far too long prompts."""
        return num_chars // self._longest_token_chars

    def _encode_literally(self) -> dict[str, list[int]]:
        """Return the ids of each control token's characters."""
        control, literal = frozenset(self.control_ids.values()), dict[str, list[int]]()
        backend = self._going_on or self._backend
        backend.encode_special_tokens = True
        try:
            for content in self.control_ids:
                ids = backend.encode(content, add_special_tokens=False).ids
                if not control.isdisjoint(ids):  # a control token that the file does not call special: no piece of it is one
                    ids = [id for char in content for id in backend.encode(char, add_special_tokens=False).ids]
                if not control.isdisjoint(ids):
                    raise ValueError(f"control token {content!r} cannot be written as text")
                literal[content] = ids
        finally:
            backend.encode_special_tokens = False
        return literal


class ControlWords(NamedTuple):
    """The contents of control tokens, the longest first, and what finds them. ``beginnings``: texts that one may follow."""

    contents: tuple[str, ...]
    numbers: dict[str, int]
    pattern: re.Pattern[str]
    beginnings: tuple[str, ...]

    @classmethod
    def of(cls, contents: Iterable[str]) -> "ControlWords":
        words = tuple(sorted(contents, key=len, reverse=True))
        beginnings = {word[:end] for word in words for end in range(1, len(word))}
        pattern = re.compile("|".join(map(re.escape, words)) or r"(?!)")
        return cls(words, {word: at for at, word in enumerate(words)}, pattern, tuple(beginnings))


class PromptGuard:
    """Keeps control tokens that a user wrote from becoming control tokens, for one request.

    ``hide`` the user's strings, render the template with the results, ``encode`` what comes out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = tokenizer.control_words
        self._nonce = secrets.token_hex(16)  # letters and digits: templates neither trim nor escape them
        self._border = f"{self._nonce}x"

    def hide(self, texts: Sequence[str]) -> list[str]:
        """The user's strings, in the order of the prompt, with sentinels for control tokens.

        A control token cut in two over neighbouring strings, which a template may join, is kept apart by an empty sentinel.
        """
        hidden = [self._words.pattern.sub(self._replace, text) for text in texts]
        if len(hidden) < 2:
            return hidden
        borders: list[int] = []
        length = 0
        for text in hidden[:-1]:
            length += len(text)
            borders.append(length)
        joined = "".join(hidden)
        position, next_border, cut = 0, 0, set()
        while found := self._words.pattern.search(joined, position):
            while borders[next_border] <= found.start():
                next_border += 1
            cut.add(next_border + 1)
            position = borders[next_border]
        return [self._border + text if i in cut else text for i, text in enumerate(hidden)]

    def hide_apart(self, text: str) -> str:
        """One more of the user's strings, which a template may put anywhere or leave out: nothing grows together with it."""
        return f"{self._border}{self.hide([text])[0]}{self._border}"

    def hide_within(self, value: Any) -> Any:
        """The user's JSON value with all its strings hidden, keys included. A template may put them anywhere: one that ends as a
        control token begins is kept apart from what follows it. Others stay as they are, for a template that compares them."""
        if isinstance(value, dict):
            return {self.hide_within(name): self.hide_within(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [self.hide_within(entry) for entry in value]
        if not isinstance(value, str):
            return value
        hidden = self._words.pattern.sub(self._replace, value)
        return hidden + self._border if value.rstrip().endswith(self._words.beginnings) else hidden

    @property
    def mark(self) -> str:
        """Text that marks a place in the rendered template, for ``up_to_mark``."""
        return f"{self._nonce}z"

    def up_to_mark(self, rendered: str) -> str | None:
        """Return what stands before the last mark; None without any."""
        before, mark, _ = rendered.rpartition(self.mark)
        return before.replace(self.mark, "") if mark else None

    def encode(self, rendered: str, begins: bool = True) -> list[int]:
        """Token ids of a rendered template that contains hidden strings. ``begins``: it does not go on another text."""
        first, *rest = rendered.split(self._nonce)
        pieces = [first]
        after: list[list[int]] = []  # ids that follow each piece
        for text in rest:
            if (found := _SENTINEL.match(text)) is None:
                pieces[-1] += self._nonce + text
                continue
            index = found.group(1)
            after.append([] if index is None else self._tokenizer.encode_control_token_as_text(self._words.contents[int(index)]))
            pieces.append(text[found.end() :])
        after.append([])
        return self._tokenizer.encode_parts(list(zip(pieces, after, strict=True)), begins)

    def _replace(self, found: re.Match[str]) -> str:
        return f"{self._nonce}{self._words.numbers[found.group()]}y"


class IncrementalDecoder:
    """Ids to text, piece by piece: the joined pieces equal ``Tokenizer.decode`` of all ids, wherever the ids were cut.

    Bytes that do not yet make a character are held back until the rest has come or ``flush`` says that nothing more will.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that is certain after these ids; ids outside the vocabulary add nothing, as in transformers."""
        table = self._token_bytes
        size = len(table)
        return self._decoder.decode(b"".join([table[id] for id in ids if 0 <= id < size]))

    def flush(self) -> str:
        """The held-back rest, an incomplete character as U+FFFD."""
        return self._decoder.decode(b"", final=True)


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in table.values()]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


def _token_bytes(backend: tokenizers.Tokenizer, special: Collection[int]) -> list[bytes]:
    """Bytes by id, the way the library's byte-level decoder makes them.

    Raises:
        ValueError: another kind of decoder.
    """
    if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
        raise ValueError(f"the decoder is {backend.decoder}, only ByteLevel is supported, and SentencePiece's with bytes")
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    byte_of = _byte_of_char()
    for token, id in vocabulary.items():
        if id not in special:
            known = [byte_of.get(char) for char in token]
            table[id] = token.encode() if None in known else bytes(byte for byte in known if byte is not None)
    return table


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds {type(value).__name__}, expected an object")
    return value


def _token_text(value: object) -> str | None:
    """A token in tokenizer_config.json is a string or an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], path: Path) -> None:
    """Add tokens that only tokenizer_config.json has, as transformers does; their ids must come out as stated."""
    stated = config.get("added_tokens_decoder")
    if not isinstance(stated, dict):
        return
    file = path / "tokenizer_config.json"
    check_number(file, len(stated))
    known = backend.get_added_tokens_decoder()
    added: dict[int, tokenizers.AddedToken] = {}
    for id, token in sorted(((int(id), token) for id, token in stated.items() if id.isdigit()), key=lambda pair: pair[0]):
        content = _token_text(token)
        if content is None or id in known:
            continue
        flags = {name: bool(token.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        added[id] = tokenizers.AddedToken(content, **flags)
    backend.add_tokens([*added.values()])  # all at once: each call goes through all tokens
    for id, one in added.items():
        if backend.token_to_id(one.content) != id:
            raise CheckpointError(
                f"{file}: token {one.content!r} should have id {id}, with tokenizer.json it gets {backend.token_to_id(one.content)}"
            )
