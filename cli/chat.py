"""``mmrt chat``: a conversation with a running endpoint in the terminal, or over a pipe, one question a line."""

import sys
from contextlib import ExitStack, closing
from typing import Annotated

import typer

from ..runtime.environment import read_environment
from ..runtime.errors import RunError, UserError
from .answer_view import view_answer
from .conversation import COMMANDS, Conversation
from .endpoint import ApiKey, Endpoint, ModelName, Url, find_endpoint
from .line_editor import Reader, piped_lines, terminal_lines
from .options import RunName
from .terminal import ThoughtView

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
        server = find_endpoint(url, api_key, run)
        given = {key: value for key, value in fields.items() if value is not None}
        raise typer.Exit(talk(server, model, Conversation(given, system, server.chat_fields)))


def talk(server: Endpoint, model: str | None = None, conversation: Conversation | None = None, question: str | None = None) -> int:
    """Talk with a server. ``model``: its name; default: the first that the server lists. ``question``: to ask alone, as it is;
    default: what comes from the terminal, or the pipe that is standard input.

    Returns the exit status: 1 if a question that was not typed got no answer. Raises: RunError.
    """
    name = model or server.first_model()
    conversation = conversation or Conversation({}, known_fields=server.chat_fields)
    if question is not None or not sys.stdin.isatty():
        chat = Chat(server, name, conversation, is_terminal=False)
        return 0 if (chat.run(piped_lines) if question is None else chat.ask(question)) else 1
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
        self._is_plain = read_environment().plain_output
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

    def ask(self, question: str) -> bool:
        """Ask this as it is: no command, no block. Return whether there is an answer."""
        self._conversation.ask(question)
        self._ask()
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
        if taken.stats:
            self._tell(self._stats())
        if taken.asks:
            self._ask()
        return taken.ends

    def _ask(self) -> None:
        """Print the answer to the last question as it comes, and keep what was printed."""
        parts: list[str] = []
        stopped, view = False, view_answer(is_plain=self._is_plain)
        thoughts = ThoughtView(sys.stderr, is_plain=self._is_plain)
        try:
            with ExitStack() as ends:
                ends.callback(view.end)
                ends.callback(thoughts.end)
                answer = ends.enter_context(closing(self._server.stream(self._conversation.body(self._model), thoughts.add)))
                for text in answer:
                    thoughts.end()
                    parts.append(text)
                    view.add(text)
        except KeyboardInterrupt:
            stopped = True
            if not self._is_terminal:
                raise
        except RunError as error:
            self._conversation.withdraw()
            self._fail(f"{error}")
            return
        if stopped and not parts:
            self._conversation.withdraw()
        else:
            self._conversation.answer("".join(parts))
        if stopped:
            self._tell("(stopped)")
        elif self._server.finish_reason == "length":
            self._tell("(cut off at the limit of its length: max_tokens, or the model's context)")

    def _stats(self) -> str:
        """Return the figures of the last answer. Raises: UserError if there is none."""
        spent = self._server.spent
        if spent is None:
            raise UserError("/stats: no question has been answered yet, or the last one not to its end")
        if spent.prompt_tokens is None or spent.answer_tokens is None:
            return f"first text after {spent.first_s:.2f} s; the server does not count tokens"
        speed = f", then {(spent.answer_tokens - 1) / spent.rest_s:.1f} tokens/s" if spent.answer_tokens > 1 and spent.rest_s else ""
        most = self._server.context_of(self._model)
        return (
            f"answer: {spent.answer_tokens} tokens; the first text after {spent.first_s:.2f} s{speed}\n"
            f"context: {spent.prompt_tokens + spent.answer_tokens} tokens used" + (f" of {most}" if most else "")
        )

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
