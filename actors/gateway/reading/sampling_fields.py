"""Fields of a request for how its tokens are drawn. Pure; used by ``validation``."""

import math
import re
import secrets

from ....models.architecture import MAX_REPETITION_PENALTY, MAX_TEMPERATURE, MIN_REPETITION_PENALTY, SamplingDefaults
from ....runtime.bus.sampling import Sampling
from .fields import Fields, Schema, kind_of, refuse, show

GREEDY_BELOW = 1e-5  # a temperature that leaves nothing to chance, as in vLLM
MAX_GUIDANCE_SCALE = 20.0
MAX_PENALTY = 2.0
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
_INT64 = 1 << 63
_BAD_WORD: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARS, "pattern": r"\S"}
_BAD_WORDS: Schema = {"type": "array", "items": _BAD_WORD, "maxItems": MAX_BAD_WORDS}
_TOKEN_ID = "[0-9]{1,10}"
_LOGIT_BIAS: Schema = {
    "type": "object",
    "patternProperties": {f"^{_TOKEN_ID}$": {"type": ["number", "null"], "minimum": -MAX_BIAS, "maximum": MAX_BIAS}},
    "additionalProperties": False,
    "maxProperties": MAX_BIASES,
}


def read_sampling(fields: Fields, defaults: SamplingDefaults, max_context: int) -> Sampling:
    """Take the fields, without ``bad_words``, which needs a tokenizer. Raises: RequestError."""
    seed = fields.take_int("seed", -_INT64, _INT64 - 1)
    top_k = fields.take_int("top_k", -1, (1 << 31) - 1)
    temperature = _or(fields.take_float("temperature", 0, MAX_TEMPERATURE), defaults.temperature)
    top_p = _or(fields.take_float("top_p", 0, 1), defaults.top_p)
    if top_p == 0:  # the likeliest token alone
        temperature, top_p = 0.0, 1.0
    return Sampling(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=top_p,
        top_k=defaults.top_k if top_k is None else max(top_k, 0),  # -1 is off, as in vLLM
        min_p=_or(fields.take_float("min_p", 0, 1), defaults.min_p),
        seed=secrets.randbits(63) if seed in (None, -1) else seed % _INT64,  # -1 is random, as in vLLM
        guidance_scale=_or(fields.take_float("guidance_scale", 0, MAX_GUIDANCE_SCALE), 1.0),
        repetition_penalty=_or(
            fields.take_float("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY), defaults.repetition_penalty
        ),
        presence_penalty=_or(fields.take_float("presence_penalty", -MAX_PENALTY, MAX_PENALTY), 0.0),
        frequency_penalty=_or(fields.take_float("frequency_penalty", -MAX_PENALTY, MAX_PENALTY), 0.0),
        logit_bias=_read_logit_bias(fields),
        min_tokens=fields.take_int("min_tokens", 0, max_context) or 0,
    )


def check_min_tokens(min_tokens: int, max_tokens: int | None, max_tokens_field: str) -> None:
    """Check that an answer may be as long as it must be. Raises: RequestError."""
    if max_tokens is not None and min_tokens > max_tokens:
        raise refuse("min_tokens", f"is {min_tokens}, but {max_tokens_field} is {max_tokens}")


def read_bad_words(fields: Fields) -> list[str]:
    """Take the texts that must not appear. Raises: RequestError."""
    value = fields.take("bad_words", _BAD_WORDS)
    if value is None:
        return []
    if not isinstance(value, list):
        raise refuse("bad_words", f"expected an array of strings, got {kind_of(value)}")
    if len(value) > MAX_BAD_WORDS:
        raise refuse("bad_words", f"has {len(value)} entries, the limit is {MAX_BAD_WORDS}")
    for i, word in enumerate(value):
        if not isinstance(word, str):
            raise refuse(f"bad_words[{i}]", f"expected a string, got {kind_of(word)}")
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise refuse(f"bad_words[{i}]", f"is {show(word)}, allowed are 1 to {MAX_BAD_WORD_CHARS} characters, not only spaces")
    return value


def _read_logit_bias(fields: Fields) -> list[tuple[int, float]]:
    value = fields.take("logit_bias", _LOGIT_BIAS)
    if value is None:
        return []
    if not isinstance(value, dict):
        raise refuse("logit_bias", f"expected an object from token ids to numbers, got {kind_of(value)}")
    if len(value) > MAX_BIASES:
        raise refuse("logit_bias", f"has {len(value)} entries, the limit is {MAX_BIASES}")
    found: dict[int, float] = {}
    biases = Fields(value, "logit_bias")
    for name in value:
        if re.fullmatch(_TOKEN_ID, name, re.ASCII) is None:
            raise refuse("logit_bias", f"has the key {show(name)}, expected a token id")
        if int(name) in found:
            raise refuse("logit_bias", f"has the token id {int(name)} twice")
        found[int(name)] = _or(biases.take_float(name, -MAX_BIAS, MAX_BIAS), 0.0)
    return list(found.items())


def _or(value: float | None, default: float) -> float:
    assert value is None or math.isfinite(value)
    return default if value is None else value
