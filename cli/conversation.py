"""The state of ``mmrt chat``: turns, media to come, fields of requests, and the commands that change them. It reads files, no more."""

import difflib
import io
import json
import os
import re
import shlex
from typing import Any, NamedTuple

from ..runtime.errors import UserError
from .endpoint import media_part

COMMANDS = {
    "image": ("FILE [QUESTION]", "attach an image to the next question, or to this one"),
    "video": ("FILE [QUESTION]", "attach a video"),
    "audio": ("FILE [QUESTION]", "attach a sound"),
    "again": ("", "ask the last question once more"),
    "system": ("[TEXT]", "set the system prompt, or remove it"),
    "set": ("[FIELD [VALUE]]", "set a field of the requests, such as temperature; without a value, remove it"),
    "clear": ("", "forget the conversation, and what is attached"),
    "help": ("", "show this"),
    "quit": ("", "end the chat, as Ctrl-D does"),
}
MEDIA = {"image": "image_url", "video": "video_url", "audio": "input_audio"}
_ALIASES = {"?": "help", "bye": "quit", "exit": "quit"}
_COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?", re.DOTALL)
_OWN_FIELDS = ("messages", "model", "stream", "n")  # that the chat itself needs as they are


class Taken(NamedTuple):
    """The consequences of a line: ``told`` is for the user; ``asks``: the last turn is a question to be answered."""

    told: str = ""
    asks: bool = False
    ends: bool = False


class Conversation:
    """The turns so far. ``fields``: of each request, by name."""

    def __init__(self, fields: dict[str, Any], system: str | None = None) -> None:
        self.fields = fields
        self.system = system
        self.turns: list[dict[str, Any]] = []
        self._attached: list[tuple[str, dict[str, Any]]] = []  # name and part
        self._unanswered: dict[str, Any] | None = None

    def body(self, model: str) -> dict[str, Any]:
        """Return the request for the next answer."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {"model": model, "messages": [*system, *self.turns], "stream": True, **self.fields}

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
            return self._ask(line.removeprefix("/") if line.startswith("//") else line)
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
        return {"again": self._again, "clear": self._clear, "help": _help, "quit": _quit}[name]()

    def _ask(self, text: str) -> Taken:
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
            return self._ask(question)
        return Taken(f"attached: {', '.join(name for name, _ in self._attached)}")

    def _set(self, field: str = "", text: str = "") -> Taken:
        if field in _OWN_FIELDS:
            raise UserError(f"/set {field}: the chat sets it itself")
        if field and not text:
            self.fields.pop(field, None)
        elif field:
            try:
                self.fields[field] = json.loads(text)
            except ValueError:
                self.fields[field] = text
        shown = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in self.fields.items()]
        return Taken("\n".join(shown) or "no field is set: the server's defaults count")

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


def _help() -> Taken:
    usages = [(f"/{name} {usage}".rstrip(), purpose) for name, (usage, purpose) in COMMANDS.items()]
    width = max(len(usage) for usage, _ in usages)
    lines = [f"{usage:<{width}}  {purpose}" for usage, purpose in usages]
    return Taken("\n".join([*lines, '"""' + " " * (width - 3) + "  begin and end a question of several lines"]))


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
