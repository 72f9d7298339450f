"""All routes of the endpoint as the description shows them, each with the reader that validates its requests. A route that the
application has and this table has not, or the other way round, fails a test; only those of the page are left out.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ....shm.kept_records import KeptRecords
from ..apis.anthropic import messages as anthropic
from ..apis.decisions import read_decisions
from ..apis.ollama import embeddings as ollama_embeddings
from ..apis.ollama import requests as ollama
from ..apis.openai import input_items
from ..apis.openai.embeddings import read_embeddings
from ..apis.openai.responses import Exchange
from ..apis.openai.stored import StoredResponses
from ..apis.openai.transcriptions import read_transcription, read_translation
from ..keeping.kept_answers import KeptAnswers
from ..reading.content import Conversation
from ..reading.fields import OBJECT, Schema
from ..reading.json_body import Body
from ..reading.validation import Limits, read_chat, read_detokenize, read_text, read_tokenize
from . import answers, examples

STREAM_QUERY: Mapping[str, Schema] = {"stream": {"enum": ["true", "false"]}, "starting_after": {"type": "integer", "minimum": 0}}
FROM_QUERY: Mapping[str, Schema] = {"from": {"type": "integer", "minimum": 0}}
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
TEXT = "text/plain"


class JsonBody(NamedTuple):
    """The body of a request. ``examples``: of the media that a model takes, valid ones."""

    read: Callable[[Body, Limits], object]
    examples: Callable[[examples.Kinds], list[dict[str, Any]]]


class FormBody(NamedTuple):
    """The body of a request that is a form. ``examples``: valid ones of models that take such a request, with the types of JSON."""

    read: Callable[[Any, Limits], object]
    examples: Callable[[examples.Kinds], list[dict[str, Any]]]


class Operation(NamedTuple):
    """A route. ``answer``: the schema of its JSON; ``text``: of what type it is where it is none. ``stream``: of what type it is when
    it is streamed. ``statuses``: of its errors besides those that all routes share. ``query``: the parameters of its URL."""

    method: str
    path: str
    tag: str
    summary: str
    answer: Schema | None
    body: JsonBody | FormBody | None = None
    stream: str = ""
    statuses: tuple[int, ...] = ()
    text: str = ""
    is_open: bool = False
    query: Mapping[str, Schema] = MappingProxyType({})


_READ = (400, 404, 408, 413, 415, 429)  # errors of requests with a body
_WORK = (*_READ, 422, 500, 503, 504)


def _read_response(body: Body, limits: Limits) -> object:
    stored = StoredResponses(KeptAnswers(KeptRecords.own()))
    stored.put(b"", "resp_1", Conversation((), ()), examples.RESPONSE)
    return Exchange(stored).read(body, limits)


OPERATIONS = (
    Operation(
        "POST", "/v1/chat/completions", "OpenAI", "Answer a conversation",
        answers.CHAT, JsonBody(read_chat, examples.chat), EVENTS, _WORK,
    ),
    Operation(
        "GET", "/v1/stream/{id}", "mmrt", "The stream of chat completions whose request named it as X-Conversation-Id",
        None, stream=EVENTS, statuses=(404,), query=FROM_QUERY,
    ),
    Operation("DELETE", "/v1/stream/{id}", "mmrt", "End such a stream, and forget it", answers.DELETED, statuses=(404,)),
    Operation(
        "POST", "/v1/completions", "OpenAI", "Continue a text",
        answers.TEXT, JsonBody(read_text, examples.text), EVENTS, _WORK,
    ),
    Operation(
        "POST", "/v1/responses", "OpenAI", "Answer in the form of OpenAI's Responses",
        answers.RESPONSE, JsonBody(_read_response, examples.responses), EVENTS, _WORK,
    ),
    Operation(
        "POST", "/v1/responses/input_tokens", "OpenAI", "Count the tokens of an input",
        answers.COUNTED, JsonBody(_read_response, examples.responses), "", _WORK,
    ),
    Operation(
        "GET", "/v1/responses/{id}/input_items", "OpenAI", "The items that a kept response was made of",
        answers.ITEMS, statuses=(404,), query=input_items.QUERY,
    ),
    Operation(
        "GET", "/v1/responses/{id}", "OpenAI", "A kept response, or the events of one in the background",
        answers.RESPONSE, stream=EVENTS, statuses=(404,), query=STREAM_QUERY,
    ),
    Operation(
        "POST", "/v1/responses/{id}/cancel", "OpenAI", "Cancel a response in the background", answers.RESPONSE, statuses=(404,),
    ),
    Operation("DELETE", "/v1/responses/{id}", "OpenAI", "Forget a kept response", answers.DELETED, statuses=(404,)),
    Operation(
        "POST", "/v1/embeddings", "OpenAI", "Vectors of texts, or of a conversation",
        answers.EMBEDDINGS, JsonBody(read_embeddings, examples.embeddings), "", _WORK,
    ),
    Operation(
        "POST", "/v1/audio/transcriptions", "OpenAI", "The text of a sound, of a model that hears",
        answers.TRANSCRIPTION, FormBody(read_transcription, examples.transcriptions), EVENTS, _WORK, TEXT,
    ),
    Operation(
        "POST", "/v1/audio/translations", "OpenAI", "The text of a sound in English, of a model that hears",
        answers.TRANSCRIPTION, FormBody(read_translation, examples.transcriptions), EVENTS, _WORK, TEXT,
    ),
    Operation(
        "POST", "/v1/decisions", "mmrt", "The probabilities of possible answers to questions about a conversation",
        answers.DECISIONS, JsonBody(read_decisions, examples.decisions), "", _WORK,
    ),
    Operation("GET", "/v1/models", "OpenAI", "List the served model", answers.MODELS),
    Operation("GET", "/v1/models/{model}", "OpenAI", "Describe the served model", answers.MODEL, statuses=(404,)),
    Operation(
        "POST", "/v1/messages", "Anthropic", "Answer in the form of Anthropic's Messages",
        answers.MESSAGE, JsonBody(anthropic.read_message, examples.messages), EVENTS, _WORK,
    ),
    Operation(
        "POST", "/v1/messages/count_tokens", "Anthropic", "Count the tokens of a prompt",
        answers.INPUT_TOKENS, JsonBody(anthropic.read_count, examples.count_tokens), "", _WORK,
    ),
    Operation(
        "POST", "/api/chat", "Ollama", "Answer a conversation",
        answers.OLLAMA_CHAT, JsonBody(ollama.read_chat, examples.ollama_chat), LINES, _WORK,
    ),
    Operation(
        "POST", "/api/generate", "Ollama", "Answer a prompt",
        answers.OLLAMA_GENERATE, JsonBody(ollama.read_generate, examples.ollama_generate), LINES, _WORK,
    ),
    Operation(
        "POST", "/api/embed", "Ollama", "Vectors of texts",
        answers.OLLAMA_EMBED, JsonBody(ollama_embeddings.read_embed, examples.ollama_embed), "", _WORK,
    ),
    Operation(
        "POST", "/api/embeddings", "Ollama", "The vector of a text",
        answers.OLLAMA_EMBEDDING, JsonBody(ollama_embeddings.read_embeddings, examples.ollama_embeddings), "", _WORK,
    ),
    Operation(
        "POST", "/api/show", "Ollama", "Describe the served model",
        answers.OLLAMA_MODEL, JsonBody(ollama.read_show, examples.ollama_show), "", _READ,
    ),
    Operation("GET", "/api/tags", "Ollama", "List the served model", answers.OLLAMA_TAGS),
    Operation("GET", "/api/ps", "Ollama", "List the loaded model", answers.OLLAMA_RUNNING),
    Operation("GET", "/api/version", "Ollama", "The version of Ollama whose API this is, and that of mmrt", answers.OLLAMA_VERSION),
    Operation(
        "POST", "/tokenize", "Tokens", "The tokens of a prompt",
        answers.TOKENS, JsonBody(read_tokenize, examples.tokenize), "", (*_READ, 503),
    ),
    Operation(
        "POST", "/detokenize", "Tokens", "The text of tokens",
        answers.PROMPT, JsonBody(read_detokenize, examples.detokenize), "", (*_READ, 503),
    ),
    Operation("GET", "/health", "Server", "Whether the gateway answers", answers.STATUS, is_open=True),
    Operation("GET", "/ready", "Server", "Whether a request would be served", answers.READY, statuses=(503,), is_open=True),
    Operation("GET", "/v1", "Server", "The main routes", OBJECT, is_open=True),
    Operation("GET", "/version", "Server", "The version of mmrt", answers.VERSION),
    Operation("GET", "/metrics", "Server", "Metrics for Prometheus", None, text=TEXT),
    Operation("GET", "/openapi.json", "Server", "This description", OBJECT),
)  # fmt: skip
