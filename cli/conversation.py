"""The state of ``mmrt chat``: turns, media to come, fields of requests, and the commands that change them. It uses files."""

import difflib
import io
import json
import os
import re
import shlex
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

import msgspec

from ..runtime.errors import UserError
from .endpoint import media_part

COMMANDS = {
    "image": ("FILE [QUESTION]", "attach an image to the next question, or to this one"),
    "video": ("FILE [QUESTION]", "attach a video"),
    "audio": ("FILE [QUESTION]", "attach a sound"),
    "again": ("", "ask the last question once more"),
    "system": ("[TEXT]", "set the system prompt, or remove it"),
    "set": ("[FIELD [VALUE]]", "set a field of the requests, such as temperature; without a value, remove it"),
    "save": ("FILE", "write the conversation to a file"),
    "load": ("FILE", "go on with a conversation from a file"),
    "stats": ("", "show the speed of the last answer, and how much of the context is used"),
    "clear": ("", "forget the conversation, and what is attached"),
    "help": ("", "show this"),
    "quit": ("", "end the chat, as Ctrl-D does"),
}
MEDIA = {"image": "image_url", "video": "video_url", "audio": "input_audio"}
_ALIASES = {"?": "help", "bye": "quit", "exit": "quit"}
_COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?", re.DOTALL)
_OWN_FIELDS = ("messages", "model", "stream", "n")  # that the chat itself needs as they are


class _Turn(msgspec.Struct):
    role: Literal["system", "user", "assistant"]
    content: str | list[dict[str, Any]]


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[_Turn]
    fields: dict[str, Any] = {}


MAX_SAVED_BYTES = 1 << 28  # media are in it
_decode_saved = msgspec.json.Decoder(_Saved).decode


class Taken(NamedTuple):
    """The consequences of a line: ``told`` is for the user; ``asks``: the last turn is a question to be answered;
    ``stats``: the server's figures are asked for."""

    told: str = ""
    asks: bool = False
    ends: bool = False
    stats: bool = False


class Conversation:
    """The turns so far. ``fields``: of each request, by name. ``known_fields``: returns those that a request may have, none if that is
    not known."""

    def __init__(
        self, fields: dict[str, Any], system: str | None = None, known_fields: Callable[[], Collection[str]] = frozenset
    ) -> None:
        self.fields = fields
        self._known_fields = known_fields
        self._file = ""  # of this conversation
        self.system = system
        self.turns: list[dict[str, Any]] = []
        self._attached: list[tuple[str, dict[str, Any]]] = []  # name and part
        self._unanswered: dict[str, Any] | None = None

    def body(self, model: str) -> dict[str, Any]:
        """Return the request for the next answer."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        usage = {"stream_options": {"include_usage": True}}
        return {"model": model, "messages": [*system, *self.turns], "stream": True, **usage, **self.fields}

    def answer(self, text: str) -> None:
        """Take the answer to the last question, or the part of it that was wanted."""
        self.turns.append({"role": "assistant", "content": text})

    def withdraw(self) -> None:
        """Take the last question out: it got no answer. ``/again`` brings it back."""
        self._unanswered = self.turns.pop()

    def settle(self) -> None:
        """Take the last turn out if it is a question: nobody answers it any more."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.withdraw()

    def take(self, line: str) -> Taken:
        """Take a line that was typed: a command, or a question. Raises: UserError for a command that cannot be done."""
        if not line.strip() and not self._attached:
            return Taken()
        found = _COMMAND.fullmatch(line.strip())
        if found is None:
            return self.ask(line.removeprefix("/") if line.startswith("//") else line)
        name, rest = _ALIASES.get(found[1], found[1]), (found[2] or "").strip()
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            meant = f"did you mean /{near[0]}? " if near else ""
            raise UserError(f"no command /{name[:40]}; {meant}/help lists them, and //{name[:40]} asks the model")
        if name in MEDIA:
            return self._attach(name, rest)
        if rest and not COMMANDS[name][0]:
            raise UserError(f"/{name} takes nothing, and {rest[:40]!r} is given")
        if name == "system":
            self.system = rest or None
            return Taken("the system prompt is set" if rest else "there is no system prompt")
        if name == "set":
            return self._set(*rest.split(maxsplit=1))
        if name in ("save", "load"):
            if not rest:
                raise UserError(f"/{name} needs a file: /{name} FILE")
            file, more = _split_file(rest)
            if more:
                raise UserError(f"/{name} takes a file, and {more[:40]!r} follows it")
            return self._save(file) if name == "save" else self._load(file)
        return {"stats": _stats, "again": self._again, "clear": self._clear, "help": _help, "quit": _quit}[name]()

    def ask(self, text: str) -> Taken:
        """Take a question as it is, with the media that are attached."""
        media = [part for _, part in self._attached]
        self._attached, self._unanswered = [], None
        parts = [*media, *([{"type": "text", "text": text}] if text.strip() else [])]
        self.turns.append({"role": "user", "content": parts if media else text})
        return Taken(asks=True)

    def _attach(self, kind: str, rest: str) -> Taken:
        if not rest:
            raise UserError(f"/{kind} needs a file: /{kind} FILE [QUESTION]")
        file, question = _split_file(rest)
        self._attached.append((file, media_part(MEDIA[kind], f"./{file}" if file == "-" else file)))
        if question:
            return self.ask(question)
        return Taken(f"attached: {', '.join(name for name, _ in self._attached)}")

    def _set(self, field: str = "", text: str = "") -> Taken:
        if field in _OWN_FIELDS:
            raise UserError(f"/set {field}: the chat sets it itself")
        if field and field not in self.fields and (known := self._known_fields()) and field not in known:
            near = difflib.get_close_matches(field, known, n=1)
            raise UserError(f"/set {field[:40]}: the server has no such field" + (f"; did you mean {near[0]}?" if near else ""))
        if field and not text:
            self.fields.pop(field, None)
        elif field:
            try:
                self.fields[field] = json.loads(text)
            except ValueError:
                self.fields[field] = text
        shown = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in self.fields.items()]
        return Taken("\n".join(shown) or "no field is set: the server's defaults count")

    def _save(self, file: str) -> Taken:
        """Write the conversation, for this user alone. Another file than its own is not replaced."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        data = json.dumps({"messages": [*system, *self.turns], "fields": self.fields}, ensure_ascii=False, indent=1)
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if file == self._file else os.O_EXCL)
        try:
            with open(os.open(file, flags, 0o600), "w", encoding="utf-8", errors="replace") as stream:
                stream.write(data + "\n")
        except (OSError, ValueError) as error:
            raise UserError(f"cannot write {file}: {getattr(error, 'strerror', None) or error}") from None
        self._file = file
        return Taken(f"{len(self.turns)} turns are in {file}")

    def _load(self, file: str) -> Taken:
        try:
            with open(file, "rb") as stream:
                data = stream.read(MAX_SAVED_BYTES + 1)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
        try:
            saved = _decode_saved(data[:MAX_SAVED_BYTES])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{file} is no saved conversation: {error}") from None
        if own := sorted(saved.fields.keys() & {*_OWN_FIELDS}):
            raise UserError(f"{file} sets {', '.join(own)} in its fields, which the chat sets itself: take that out")
        turns = [msgspec.to_builtins(turn) for turn in saved.messages]
        system = _text_of(turns.pop(0)["content"], file) if turns and turns[0]["role"] == "system" else None
        self.system, self.turns, self.fields, self._file = system, turns, saved.fields, file
        self._attached, self._unanswered = [], None
        return Taken(f"{len(turns)} turns of {file}; the next question goes on")

    def _again(self) -> Taken:
        if self._unanswered is not None:
            self.turns.append(self._unanswered)
            self._unanswered = None
        elif self.turns:
            self.turns.pop()
        else:
            raise UserError("/again: nothing has been asked yet")
        return Taken(asks=True)

    def _clear(self) -> Taken:
        self.turns, self._attached, self._unanswered = [], [], None
        return Taken("the conversation is forgotten")


def _text_of(content: str | list[dict[str, Any]], file: str) -> str:
    """Return the text of a system prompt. Raises: UserError if there is anything else in it."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [part.get("text") if part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{file} is no saved conversation: its system prompt has parts that are no text")
    return "\n".join(map(str, texts))


def _help() -> Taken:
    usages = [(f"/{name} {usage}".rstrip(), purpose) for name, (usage, purpose) in COMMANDS.items()]
    width = max(len(usage) for usage, _ in usages)
    lines = [f"{usage:<{width}}  {purpose}" for usage, purpose in usages]
    return Taken("\n".join([*lines, '"""' + " " * (width - 3) + "  begin and end a question of several lines"]))


def _stats() -> Taken:
    return Taken(stats=True)


def _quit() -> Taken:
    return Taken(ends=True)


def _split_file(text: str) -> tuple[str, str]:
    """Return a file's name, quoted or with escapes as terminals paste it, and what follows it. A name that exists needs neither."""
    whole = os.path.expanduser(text)
    if os.path.exists(whole):
        return whole, ""
    stream = io.StringIO(text)
    lexer = shlex.shlex(stream, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        word = lexer.get_token() or ""
    except ValueError as error:
        raise UserError(f"{text[:60]!r}: {str(error)[0].lower()}{str(error)[1:]}") from None
    return os.path.expanduser(word), stream.read().strip()
