"""OpenAI's Responses API: a body of ``POST /v1/responses`` becomes a ``ChatRequest``. ``responses_answer`` has the answers."""

from collections.abc import Sequence
from typing import Any

import msgspec

from .....models.grammar.source import JSON_OBJECT
from .....runtime.bus.messages import RequestSpec
from .....runtime.errors import CONTEXT_EXCEEDED, RequestError
from .....shm.spool import whole
from ...reading.content import Conversation, Message, check_messages, take_role
from ...reading.field_rules import passes_over, settle, settle_first
from ...reading.field_table import responses as table
from ...reading.fields import AT_LEAST_ONE, Fields, kind_of, refuse, show
from ...reading.grammar_fields import AskedGrammar, read_named_schema
from ...reading.harmless import OBJECT
from ...reading.json_body import Body, decode_body
from ...reading.media import MediaIntake
from ...reading.media_options import FOR_ALL, OptionReader
from ...reading.output_fields import Output
from ...reading.template_fields import TemplateUse
from ...reading.thinking import read_thinking
from ...reading.tool_messages import read_id
from ...reading.validation import ChatRequest, Limits, check_grammar, read_generation
from .background import Form, Job
from .input_items import Item, item_of, item_of_text, with_ids
from .responses_answer import ID_PREFIX, Response, ResponseEvents, output_of, response_of
from .responses_parts import read_content
from .responses_tools import AnswerItems, namespaces_of, offered, read_tools
from .stored import StoredResponses
from .stored_conversation import StoredConversation

_MAX_ID_CHARS = 64
_SHOWN = (
    "instructions",
    "max_output_tokens",
    "parallel_tool_calls",
    "previous_response_id",
    "text",
    "tool_choice",
    "tools",
)  # in the response
_FORMATS = ("text", "json_object", "json_schema")


class Exchange:
    """One request and its response: reads the body, and is the ``AnswerFormat`` of what it reads."""

    id_prefix = ID_PREFIX

    def __init__(self, stored: StoredResponses, tenant: bytes = b"") -> None:
        """``tenant``: goes on with its own conversations alone."""
        self._stored = stored
        self._tenant = tenant
        self._asks_for_stream = False
        self.is_background = False
        self._shown: dict[str, Any] = {}  # fields of the request that its response repeats
        self._outputs: dict[str, dict[str, Any]] = {}  # of responses whose items the request names
        self._conversation = Conversation((), ())  # without the instructions, which are of one response alone
        self._items: list[Item] = []  # that the conversation was made of

    def read(self, body: Body, limits: Limits) -> ChatRequest:
        """Validate the body, which may come twice (``BodyReader``). It also takes mmrt's own fields of chat completions.

        Raises:
            RequestError: 400, or 404 for an unknown model, or 413 for a medium that is too large.
        """
        self._items = []
        fields = Fields(decode_body(body, limits.body))
        settle_first(fields, table.REQUEST, "return_token_ids")
        self._shown = {name: fields.leftover.get(name) for name in _SHOWN}
        self._asks_for_stream = fields.leftover.get("stream") is True
        _take_stream_options(fields)
        grammar = _read_text_format(fields)
        generation = read_generation(
            fields, limits, lambda *_: Output(), grammar, max_tokens_fields=("max_output_tokens",), clamp_max_tokens=True
        )
        tools, grammar = read_tools(fields, generation.grammar, limits.max_tool_bytes)
        generation = msgspec.structs.replace(generation, grammar=grammar)
        check_grammar(generation)
        instructions, store, metadata = (
            fields.take_str("instructions"),
            fields.take_flag("store"),
            fields.take("metadata", OBJECT.schema),
        )
        self.is_background = fields.take_flag("background") is True
        if self.is_background and store is False:
            raise refuse("background", "is true, which needs store: the answer is fetched later")
        if metadata is not None and not isinstance(metadata, dict):
            raise refuse("metadata", f"expected an object, got {kind_of(metadata)}")
        earlier = self._earlier(fields.take_str("previous_response_id", _MAX_ID_CHARS))
        given, for_all = fields.take_required("input", AT_LEAST_ONE), fields.take(FOR_ALL)
        use = TemplateUse(thinking=read_thinking(fields))
        settle(fields, table.REQUEST)
        intake = MediaIntake(limits.kinds, limits.media, OptionReader(for_all, limits.kinds, limits.vision_rules), limits.family)
        intake.media.extend(earlier.media)  # which count against the limits of one request
        messages = self._read_input(given, earlier.messages, intake, limits.max_context)
        self._conversation = Conversation(messages, tuple(intake.media))
        sampling = generation.sampling
        self._shown |= {
            "store": store is not False,
            "background": self.is_background,
            "metadata": metadata or {},
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "tools": offered(self._shown["tools"]),
            "tool_choice": self._shown["tool_choice"] or "auto",
            "parallel_tool_calls": self._shown["parallel_tool_calls"] is not False,
        }
        system = (Message("system", instructions),) if instructions else ()
        conversation = Conversation((*system, *messages), self._conversation.media)
        return ChatRequest(generation, conversation, use, messages_field="input", tools=tools)

    def _earlier(self, id: str | None) -> Conversation:
        if id is None:
            return Conversation((), ())
        if (found := self._stored.get(self._tenant, id)) is None:
            raise refuse("previous_response_id", self._stored.why_unknown(id, self._tenant))
        if found.played is not None and found.played.status in ("failed", "cancelled"):
            why = f"{show(id)} has no answer, its status is {found.played.status}: name the one before it"
            raise refuse("previous_response_id", why)
        self._items += [*found.items, *map(item_of, output_of(found.body).values())]
        return found.conversation

    def begin(self, id: str, created: int, model: str, fingerprint: str) -> "Response":
        """See ``AnswerFormat``."""
        if not self._shown["store"]:
            self._conversation = Conversation((), ())  # nobody will ask for it, and it has media
        return Response(id, self._shown_of(created, model), self._keep, namespaces_of(self._shown["tools"]))

    def _shown_of(self, created: int, model: str) -> dict[str, Any]:
        return {"created_at": created, "model": model, **self._shown}

    def job(
        self, id: str, created: int, model: str, asked: ChatRequest, spec: RequestSpec, is_thinking: bool | None, client: str
    ) -> Job:
        """Return what is kept of a response in the background. ``asked``: what was read, with all its media."""
        place = asked.generation.output.thoughts
        form = Form(
            id,
            msgspec.json.encode(self._shown_of(created, model)),
            None if asked.tools is None else sorted(asked.tools.names),
            None if place == "inside" else is_thinking,
            place == "left out",
        )
        pairs = zip(asked.conversation.media, self._conversation.media, strict=True)
        media = tuple(None if medium.data is own.data else whole(medium.data) for medium, own in pairs)
        conversation = StoredConversation.of(self._told())
        items = with_ids(self._items, id.removeprefix(ID_PREFIX))
        return Job(form, spec, conversation, items, media, asked.field_names, client)

    def failed(self, error: RequestError, id: str, created: int, model: str) -> bytes | None:
        """Return the stream of a response that fails before it begins, None where the error is a status. OpenAI's server answers with
        a stream where a prompt is too long, and Codex knows that by nothing else."""
        if not self._asks_for_stream or error.code != CONTEXT_EXCEEDED:
            return None
        return ResponseEvents(self.begin(id, created, model, "")).error(error)

    def _keep(self, id: str, answer: Message, body: bytes) -> None:
        """Store the response with its conversation, unless the request says no."""
        if self._shown["store"]:
            told, items = self._told(), with_ids(self._items, id.removeprefix(ID_PREFIX))
            self._stored.put(self._tenant, id, told._replace(messages=(*told.messages, answer)), body, items)

    def _told(self) -> Conversation:
        messages = tuple(message._replace(thoughts_field="") for message in self._conversation.messages)
        return self._conversation._replace(messages=messages)

    def _read_input(self, value: Any, earlier: Sequence[Message], intake: MediaIntake, max_context: int) -> tuple[Message, ...]:
        """Return the conversation that goes on with the input."""
        if isinstance(value, str):
            if not value:
                raise refuse("input", "is empty")
            self._items.append(item_of_text(value))
            return (*earlier, Message("user", value))
        items = AnswerItems(earlier, intake)
        for at, item in enumerate(check_messages(value, max_context, "input")):
            path = f"input[{at}]"
            fields = Fields(item, path)
            if (kind := fields.take("type", {"enum": list(table.ITEMS.used)})) == "item_reference" or (
                kind is None and fields.leftover.keys() == {"id"}
            ):
                item = self._referred(fields)
                fields = Fields(item, path)
                kind = fields.take("type")
            if passes_over(table.ITEMS, kind or "message", path):
                continue
            if not items.read(kind, fields):
                items.add(_read_message(fields, path, intake))
            self._items.append(item_of(item))
        if len(items.messages) == len(earlier):
            raise refuse("input", "has no message: all its items are passed over")
        return tuple(items.messages)

    def _referred(self, reference: Fields) -> dict[str, Any]:
        """Return the item that a reference names: one of a response that is kept."""
        id = read_id(reference, "id")
        settle(reference, table.REFERENCE)
        response_id = response_of(id)
        if response_id not in self._outputs:
            found = self._stored.get(self._tenant, response_id)
            self._outputs[response_id] = {} if found is None else output_of(found.body)
        item: dict[str, Any] | None = self._outputs[response_id].get(id)
        if item is None:
            raise refuse(reference.path("id"), self._stored.why_unknown(id))
        return item


def _take_stream_options(fields: Fields) -> None:
    value = fields.take("stream_options")
    options = Fields({} if value is None else value, "stream_options")
    settle(options, table.STREAM_OPTIONS)


def _read_text_format(fields: Fields) -> AskedGrammar | None:
    value = fields.take("text")
    config = Fields({} if value is None else value, "text")
    form = config.take("format")
    settle(config, table.TEXT_CONFIG)
    if form is None:
        return None
    form = Fields(form, "text.format")
    kind = form.take_choice("type", _FORMATS)
    if kind == "json_schema":
        return read_named_schema(form)
    settle(form, table.FORMAT)
    return AskedGrammar(JSON_OBJECT, "text.format") if kind == "json_object" else None


def _read_message(fields: Fields, path: str, intake: MediaIntake) -> Message:
    role, content = take_role(fields, table.ROLES), fields.take("content")
    settle(fields, table.MESSAGE)
    return Message(role, read_content(content, f"{path}.content", role, intake))
