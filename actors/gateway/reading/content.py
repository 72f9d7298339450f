"""Messages of a chat request: turn roles, text and content parts into the template's input and media in order.

Pure. Called by validation.
"""

from typing import Any, NamedTuple

from ....runtime.errors import prompt_too_long
from ....schema.media import MediaKind
from .field_rules import Kinds, passes_over, settle
from .field_table import chat as table
from .fields import Fields, kind_of, refuse, show
from .media import MEDIA_PARTS, MediaIntake, Medium
from .tool_messages import Call, check_results, read_calls, read_id

# OpenAI's "developer" is what its newer models call "system"; chat templates know only the latter.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_NAME_CHARS = 64
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class MediaPart(NamedTuple):
    """The place of a medium in a message."""

    kind: MediaKind


class Message(NamedTuple):
    """One message. ``content`` keeps the form in which it came, since templates may tell a string from a list of parts. ``name``
    tells speakers of the same role apart, where the template has a place for it. ``calls``: those of an assistant; ``call_id``: of the
    call whose result it is. ``thoughts``: those of an assistant before it said this; ``thoughts_field``: their place in the request,
    "" if they are of an earlier one."""

    role: str
    content: str | tuple[str | MediaPart, ...]
    name: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    thoughts: str = ""
    thoughts_field: str = ""

    @property
    def says_nothing(self) -> bool:
        """True for an answer that is thoughts alone, or empty."""
        return self._replace(thoughts="", thoughts_field="") == Message("assistant", "")


class Conversation(NamedTuple):
    """All messages; ``media`` in the order of their parts."""

    messages: tuple[Message, ...]
    media: tuple[Medium, ...]


def read_messages(value: Any, intake: MediaIntake, max_context: int) -> Conversation:
    """Validate ``messages``. ``intake`` reads their media. More texts and media than the context has tokens are refused unread:
    empty ones cost time too.

    Raises:
        RequestError: names the fault and its field.
    """
    messages = tuple(_read_message(entry, f"messages[{i}]", intake) for i, entry in enumerate(check_messages(value, max_context)))
    check_results(messages)
    return Conversation(messages, tuple(intake.media))


def check_messages(value: Any, max_context: int, path: str = "messages") -> list[Any]:
    """Return messages if they are a list of so many texts and media that they may fit. Raises: RequestError."""
    if not isinstance(value, list):
        raise refuse(path, f"expected an array, got {kind_of(value)}")
    if not value:
        raise refuse(path, "is empty, at least one message is needed")
    num_parts = sum(map(_num_parts, value))
    if num_parts > max_context:
        raise prompt_too_long(path, num_parts, max_context, "and there are more texts and media than that")
    return value


def check_continues(conversation: Conversation) -> None:
    """Check that the last message is an answer, with text that can be continued. Raises: RequestError."""
    path, last = f"messages[{len(conversation.messages) - 1}]", conversation.messages[-1]
    if last.role != "assistant":
        raise refuse(f"{path}.role", f"is {show(last.role)}, with continue_final_message the last message is of role assistant")
    if last.calls:
        raise refuse(f"{path}.tool_calls", "cannot be combined with continue_final_message, which continues a text")
    if not (last.content and last.content[-1]):
        raise refuse(f"{path}.content", "is empty, with continue_final_message it is continued")


def is_continued(last: Message, path: str) -> bool:
    """Return whether the last message is the model's: in other APIs than OpenAI's the answer then continues it. Raises: RequestError if
    it is empty or calls functions."""
    if last.role != "assistant":
        return False
    if last.calls:
        raise refuse(f"{path}.content", f"calls {last.calls[-1].name}, whose result is to follow in a message of the user")
    if not (last.content and last.content[-1]):
        raise refuse(f"{path}.content", "is empty; a last message of the assistant is continued")
    return True


def _num_parts(message: Any, levels: int = 2) -> int:
    """The number of texts and media it may hold, those in the results of calls too; 1 if it is no message."""
    content = message.get("content", message.get("output")) if isinstance(message, dict) and levels else None
    return sum(_num_parts(part, levels - 1) for part in content) if isinstance(content, list) and content else 1


def _read_message(value: Any, path: str, intake: MediaIntake) -> Message:
    fields = Fields(value, path)
    role = take_role(fields, table.ROLES)
    content = fields.take("content")
    name = fields.take_str("name", MAX_NAME_CHARS)
    call_id = read_id(fields, "tool_call_id") if role == "tool" else ""
    calls = read_calls(fields.take("tool_calls"), f"{path}.tool_calls") if role == "assistant" else ()
    refusal = fields.take_str("refusal") if role == "assistant" else None
    thoughts, thoughts_field = _read_thoughts(fields) if role == "assistant" else ("", "")
    settle(fields, table.MESSAGE)
    if isinstance(content, list):
        parts = [_read_part(part, f"{path}.content[{i}]", role, intake) for i, part in enumerate(content)]
        content = tuple(part for part in parts if part is not None)
    elif content is not None and not isinstance(content, str):
        raise refuse(f"{path}.content", f"expected a string or an array of parts, got {kind_of(content)}")
    return Message(role, content or refusal or "", name or "", calls, call_id, thoughts, thoughts_field)


def _read_thoughts(fields: Fields) -> tuple[str, str]:
    """Take the thoughts of an answer, by the name that this server or another one gave them, with their place; "" where they are no
    text."""
    given = [name for name in ("reasoning_content", "reasoning") if isinstance(fields.leftover.get(name), str)]
    found = [(fields.take_str(name), fields.path(name)) for name in given]
    return next(((text, path) for text, path in found if text), ("", ""))


def take_role(fields: Fields, kinds: Kinds) -> str:
    """Take the role of a message. Raises: RequestError."""
    role = fields.take_required("role", {"enum": list(kinds.used)})
    passes_over(kinds, role, fields.path("role").removesuffix(".role"), field="role")
    return ROLES[role]


def _read_part(value: Any, path: str, role: str, intake: MediaIntake) -> str | MediaPart | None:
    """Read a part; None if it is passed over."""
    fields = Fields(value, path)
    stated = fields.take_required("type")
    if passes_over(table.PARTS, stated, path, ", ".join(["text", *MEDIA_PARTS])):
        return None
    return read_text_part(stated, fields) if stated in TEXT_PARTS else MediaPart(intake.read(stated, fields, path, role))


def read_text_part(kind: str, part: Fields) -> str:
    """Take the text of a part. A refusal is what the assistant has said. Raises: RequestError."""
    text = part.take_required_str("refusal" if kind == "refusal" else "text")
    settle(part, table.TEXT_PART)
    return text
