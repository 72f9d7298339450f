"""OpenAI's ``POST /v1/embeddings``, and vLLM's form of it for conversations: vectors pooled from the last hidden states of prompts.

The hidden states are those that the language model's head takes, after the last norm. Nothing is generated.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pybase64
from numpy.typing import NDArray

from .....runtime.bus.messages import Pooling
from ...answers.choices import Usage
from ...reading.content import Conversation, read_messages
from ...reading.field_rules import settle
from ...reading.field_table import chat as table
from ...reading.fields import STRING, Fields, Schema, kind_of, refuse, show
from ...reading.json_body import Body, decode_body
from ...reading.media import MediaIntake
from ...reading.media_options import FOR_ALL, OptionReader
from ...reading.prompt import PromptBuilder
from ...reading.template_fields import TemplateUse, read_options
from ...reading.validation import Limits, read_prefill_fields, read_prompt
from ..prefills import Found, PrefillRequest, PromptRow, check_num_tokens
from .answers import final_usage

ID_PREFIX = "embd-"
MAX_INPUTS = 2048
MAX_NUMBERS = 1 << 22  # in the vectors of a request, before they are cut
POOLINGS: tuple[Pooling, ...] = ("last", "mean")
FORMATS = ("float", "base64")
_INPUT: Schema = {"anyOf": [{**STRING, "minLength": 1}, {"type": "array", "items": {"type": "integer"}, "minItems": 1}]}
_INPUTS: Schema = {"anyOf": [*_INPUT["anyOf"], {"type": "array", "items": _INPUT, "minItems": 1, "maxItems": MAX_INPUTS}]}
INPUT_TEXTS: Schema = {"anyOf": [STRING, {"type": "array", "items": {**STRING, "minLength": 1}, "maxItems": MAX_INPUTS}]}
_encode = msgspec.json.Encoder().encode


class AskedEmbeddings(NamedTuple):
    """A valid request. ``inputs``: texts or token ids, by the field that each stands in; none where ``conversation`` is given.
    ``num_dimensions``: of each vector, None for all."""

    inputs: Mapping[str, str | list[int]]
    conversation: Conversation
    template: TemplateUse
    pooling: Pooling
    is_base64: bool
    num_dimensions: int | None
    priority: int
    cache_salt: str | None


def read_embeddings(body: Body, limits: Limits) -> AskedEmbeddings:
    """Validate the body of ``POST /v1/embeddings``.

    Raises:
        RequestError: 400, or 404 for an unknown model, or 413 for a medium that is too large.
    """
    fields = Fields(decode_body(body, limits.body))
    priority, cache_salt = read_prefill_fields(fields, limits)
    is_base64 = _take_word(fields, "encoding_format", FORMATS) == "base64"
    pooling: Pooling = "mean" if _take_word(fields, "pooling", POOLINGS) == "mean" else "last"
    num_dimensions = fields.take_int("dimensions", 1, limits.hidden_size)
    inputs: Mapping[str, str | list[int]] = {}
    conversation, template = Conversation((), ()), TemplateUse()
    if fields.leftover.get("messages") is not None:
        if fields.leftover.get("input") is not None:
            raise refuse("input", "is given, and so is messages; give one of them")
        conversation, template = _read_conversation(fields, limits)
    else:
        given = fields.take("input", _INPUTS)
        settle(fields, table.EMBEDDINGS)
        inputs = _read_inputs(given, limits)
    return AskedEmbeddings(inputs, conversation, template, pooling, is_base64, num_dimensions, priority, cache_salt)


class Embedding:
    """One request and its answer."""

    def __init__(self) -> None:
        self._is_base64 = False
        self._num_dimensions: int | None = None

    def read(self, body: Body, limits: Limits, prompts: PromptBuilder) -> PrefillRequest:
        """Validate the body, and return a row for each input. Raises: RequestError, as ``read_embeddings``."""
        asked = read_embeddings(body, limits)
        self._is_base64, self._num_dimensions = asked.is_base64, asked.num_dimensions
        if not asked.inputs:
            rows = [PromptRow(prompts.ids_of(asked.conversation, asked.template), pooling=asked.pooling)]
            return PrefillRequest(rows, asked.conversation.media, asked.priority, asked.cache_salt)
        rows = rows_of(asked.inputs, asked.pooling, prompts, limits, "input")
        return PrefillRequest(rows, (), asked.priority, asked.cache_salt, "input")

    def answer(self, model: str, found: Sequence[Found], usage: Usage) -> bytes:
        """Return the body of the answer. It takes long for many vectors: call it in any thread."""
        data = [msgspec.Raw(_encode(self._entry(at, one.vector))) for at, one in enumerate(found) if one.vector is not None]
        return _encode({"object": "list", "data": data, "model": model, "usage": final_usage(usage)})

    def _entry(self, index: int, vector: NDArray[np.float64]) -> dict[str, Any]:
        numbers = unit(vector[: self._num_dimensions]).astype("<f4")
        embedding = pybase64.b64encode_as_string(numbers.tobytes()) if self._is_base64 else numbers.tolist()
        return {"object": "embedding", "index": index, "embedding": embedding}


def rows_of(
    inputs: Mapping[str, str | list[int]], pooling: Pooling, prompts: PromptBuilder, limits: Limits, field: str
) -> list[PromptRow]:
    """Return a row for each text or token ids. ``inputs``: by the field that each stands in; ``field`` holds all. Raises:
    RequestError."""
    rows, num_tokens = list[PromptRow](), 0
    for path, given in inputs.items():
        rows.append(PromptRow(prompts.text_ids(given, path), pooling=pooling))
        num_tokens += len(rows[-1].ids)
        check_num_tokens(num_tokens, limits.max_context, field)
    return rows


def check_texts(value: Any, limits: Limits) -> dict[str, str | list[int]]:
    """Return a text, or each of a list of texts, by the field that it stands in. Raises: RequestError."""
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        raise refuse("input", f"expected a string or an array of strings, got {show(value)}")
    return _read_inputs(value, limits)


def unit(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the vector with length 1; one of zeros as it is."""
    return vector / (np.linalg.norm(vector) or 1.0)


def _take_word(fields: Fields, name: str, allowed: Sequence[str]) -> str | None:
    value = fields.take(name, {"enum": list(allowed)})
    if value is not None and (not isinstance(value, str) or value not in allowed):
        raise refuse(fields.path(name), f"is {show(value)}, allowed are {', '.join(allowed)}")
    return value


def _read_conversation(fields: Fields, limits: Limits) -> tuple[Conversation, TemplateUse]:
    messages, for_all = fields.take("messages"), fields.take(FOR_ALL)
    template = TemplateUse(opens_answer=fields.take_bool("add_generation_prompt"), options=read_options(fields))
    settle(fields, table.EMBEDDINGS)
    intake = MediaIntake(limits.kinds, limits.media, OptionReader(for_all, limits.kinds, limits.vision_rules), limits.family)
    return read_messages(messages, intake, limits.max_context), template


def _read_inputs(value: Any, limits: Limits) -> dict[str, str | list[int]]:
    """Read a text, a list of texts, token ids, or a list of these."""
    if value is None:
        raise refuse("input", "is required, or messages")
    if isinstance(value, list) and not value:
        raise refuse("input", "is empty, at least one text is needed")
    several = value if isinstance(value, list) and isinstance(value[0], str | list) else None
    if several is None:
        if not isinstance(value, str | list):
            raise refuse("input", f"expected a string, an array of strings, token ids or an array of these, got {kind_of(value)}")
        return {"input": read_prompt(value, "input")}
    limit = min(MAX_INPUTS, MAX_NUMBERS // max(1, limits.hidden_size))
    if len(several) > limit:
        raise refuse("input", f"has {len(several)} entries, the limit is {limit}")
    return {path: read_prompt(one, path) for at, one in enumerate(several) for path in [f"input[{at}]"]}
