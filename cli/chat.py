"""``mmrt chat``: a conversation with a running endpoint in the terminal, or over a pipe, one question a line."""

import sys
from contextlib import closing
from typing import Annotated

import typer

from ..runtime.environment import read_environment
from ..runtime.errors import RunError, UserError
from .conversation import COMMANDS, Conversation
from .endpoint import ApiKey, Endpoint, ModelName, Url, find_endpoint
from .line_editor import Reader, piped_lines, terminal_lines
from .options import RunName
from .terminal import printable

PROMPT, MORE = ">>> ", "... "
_BLOCK = '"""'
HISTORY_NAME = "chat_history"


def register(app: typer.Typer) -> None:
    @app.command()
    def chat(
        url: Url = None,
        api_key: ApiKey = None,
        model: ModelName = None,
        system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system prompt.")] = None,
        max_tokens: Annotated[int | None, typer.Option(metavar="N", help="Length of an answer at most.")] = None,
        temperature: Annotated[float | None, typer.Option(metavar="T", help="0 is greedy.")] = None,
        seed: Annotated[int | None, typer.Option(metavar="N", help="Of the random draws.")] = None,
        run: RunName = None,
    ) -> None:
        """Talk with the model about text, images, videos and sounds.

        Ctrl-C stops an answer, Ctrl-D ends the chat, /help lists its commands: /image FILE and others. In a pipe each line is a
        question; the exit status is 1 if one got no answer.
        """
        fields = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        conversation = Conversation({key: value for key, value in fields.items() if value is not None}, system)
        raise typer.Exit(talk(find_endpoint(url, api_key, run), model, conversation))


def talk(server: Endpoint, model: str | None = None, conversation: Conversation | None = None, read: Reader | None = None) -> int:
    """Talk with a server. ``model``: its name; default: the first that the server lists. ``read``: where questions come from; default:
    the terminal, or the pipe that is standard input.

    Returns the exit status: 1 if a question that was not typed got no answer. Raises: RunError.
    """
    name = model or server.first_model()
    conversation = conversation or Conversation({})
    if read is not None or not sys.stdin.isatty():
        return 0 if Chat(server, name, conversation, is_terminal=False).run(read or piped_lines) else 1
    lines = terminal_lines(read_environment().state_home / HISTORY_NAME, [f"/{command}" for command in COMMANDS])
    print(f"{name} at {server.url}. Ctrl-C stops an answer, Ctrl-D ends the chat, /help lists commands.", file=sys.stderr)
    Chat(server, name, conversation, is_terminal=True).run(lines)
    return 0


class Chat:
    """Reads lines, asks the server, prints its answers. At a terminal Ctrl-C ends an answer or a line, never the chat."""

    def __init__(self, server: Endpoint, model: str, conversation: Conversation, *, is_terminal: bool) -> None:
        self._server = server
        self._model = model
        self._conversation = conversation
        self._is_terminal = is_terminal
        self._shown = printable if sys.stdout.isatty() else str
        self._has_failed = False

    def run(self, read: Reader) -> bool:
        """Talk until the lines end. Return whether all went well."""
        is_over = False
        while not is_over:
            try:
                is_over = self._step(read)
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                self._conversation.settle()
                self._tell("\n(Ctrl-D ends the chat)")
            except UserError as error:
                self._fail(str(error))
        return not self._has_failed

    def _step(self, read: Reader) -> bool:
        """Take one line. Return whether the chat is over. Raises: UserError, KeyboardInterrupt."""
        line = _read_question(read)
        if line is None:
            if self._is_terminal:
                self._tell("")
            return True
        taken = self._conversation.take(line)
        if taken.told:
            self._tell(taken.told)
        if taken.asks:
            self._ask()
        return taken.ends

    def _ask(self) -> None:
        """Print the answer to the last question as it comes, and keep what was printed."""
        parts: list[str] = []
        stopped = False
        try:
            with closing(self._server.stream(self._conversation.body(self._model))) as answer:
                for text in answer:
                    parts.append(text)
                    print(self._shown(text), end="", flush=True)
        except KeyboardInterrupt:
            stopped = True
            if not self._is_terminal:
                raise
        except RunError as error:
            self._end_line(parts)
            self._conversation.withdraw()
            self._fail(f"{error}")
            return
        self._end_line(parts)
        if stopped and not parts:
            self._conversation.withdraw()
        else:
            self._conversation.answer("".join(parts))
        if stopped:
            self._tell("(stopped)")
        elif self._server.finish_reason == "length":
            self._tell("(cut off at the limit of its length: max_tokens, or the model's context)")

    @staticmethod
    def _end_line(parts: list[str]) -> None:
        if parts:
            print(flush=True)

    def _fail(self, message: str) -> None:
        self._has_failed = True
        print(f"error: {message}", file=sys.stderr, flush=True)

    @staticmethod
    def _tell(text: str) -> None:
        """Say something that is no answer: a reader of our output does not get it."""
        print(text, file=sys.stderr, flush=True)


def _read_question(read: Reader) -> str | None:
    """Return a line, or the lines of a block between triple quotation marks; None at the end."""
    line = read(PROMPT)
    if line is None or not line.startswith(_BLOCK):
        return line
    lines = [line.removeprefix(_BLOCK)]
    while not lines[-1].rstrip().endswith(_BLOCK) and (more := read(MORE)) is not None:
        lines.append(more)
    return "\n".join(lines).rstrip().removesuffix(_BLOCK).strip("\n")
