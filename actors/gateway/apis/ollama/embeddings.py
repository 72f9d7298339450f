"""Ollama's ``POST /api/embed``, and ``/api/embeddings`` of its older clients: vectors of texts, as those of ``embeddings``."""

import time
from collections.abc import Mapping, Sequence

import msgspec

from ...answers.choices import Usage
from ...reading.field_rules import settle
from ...reading.field_table import ollama as table
from ...reading.fields import Fields
from ...reading.json_body import Body, decode_body
from ...reading.prompt import PromptBuilder
from ...reading.validation import Limits, check_model
from ..openai.embeddings import INPUT_TEXTS, check_texts, rows_of, unit
from ..prefills import Found, PrefillRequest
from .requests import TAG, NothingAsked

ID_PREFIX = "embed-"
_encode = msgspec.json.Encoder().encode


class AskedVectors(msgspec.Struct, frozen=True):
    """A valid request. ``inputs``: texts, by the field that each stands in. ``num_dimensions``: of each vector, None for all."""

    inputs: Mapping[str, str | list[int]]
    num_dimensions: int | None = None


def read_embed(body: Body, limits: Limits) -> AskedVectors:
    """Validate the body of ``POST /api/embed``.

    Raises:
        RequestError: 400, or 404 for an unknown model.
        NothingAsked: there is no text.
    """
    fields = Fields(decode_body(body, limits.body))
    check_model(fields, limits, limits.model_name + TAG)
    num_dimensions = fields.take_int("dimensions", 0, limits.hidden_size)
    given = fields.take("input", INPUT_TEXTS)
    settle(fields, table.EMBED)
    if given in (None, "", []):
        raise NothingAsked
    return AskedVectors(check_texts(given, limits), num_dimensions or None)


def read_embeddings(body: Body, limits: Limits) -> AskedVectors:
    """Validate the body of ``POST /api/embeddings``, which has one text. Raises: as ``read_embed``."""
    fields = Fields(decode_body(body, limits.body))
    check_model(fields, limits, limits.model_name + TAG)
    prompt = fields.take_str("prompt")
    settle(fields, table.EMBEDDINGS)
    if not prompt:
        raise NothingAsked
    return AskedVectors({"prompt": prompt})


class Vectors:
    """One request and its answer. ``is_single``: of the older route."""

    def __init__(self, is_single: bool) -> None:
        self._is_single = is_single
        self._num_dimensions: int | None = None
        self._began_s = time.monotonic()

    def read(self, body: Body, limits: Limits, prompts: PromptBuilder) -> PrefillRequest:
        """Validate the body, and return a row for each text. Raises: as ``read_embed``."""
        asked = (read_embeddings if self._is_single else read_embed)(body, limits)
        self._num_dimensions = asked.num_dimensions
        field = "prompt" if self._is_single else "input"
        return PrefillRequest(rows_of(asked.inputs, "last", prompts, limits, field), messages_field=field)

    def answer(self, model: str, found: Sequence[Found], usage: Usage) -> bytes:
        """Return the body of the answer. It takes long for many vectors: call it in any thread."""
        vectors = [unit(one.vector[: self._num_dimensions]).tolist() for one in found if one.vector is not None]
        if self._is_single:
            return _encode({"embedding": vectors[0] if vectors else []})
        total_ns = max(1, round(1e9 * (time.monotonic() - self._began_s)))
        numbers = {"total_duration": total_ns, "load_duration": 0, "prompt_eval_count": usage.prompt_tokens}
        return _encode({"model": model, "embeddings": vectors, **numbers})
