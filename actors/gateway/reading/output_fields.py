"""Fields of a request for what an answer holds: how many choices, and which log-probabilities. Pure; used by ``validation``."""

import msgspec

from ....shm.logprob_file import MAX_ALTERNATIVES
from .fields import Fields, refuse, show
from .thinking import ThoughtPlace, read_thought_place

MAX_CHOICES = 128
MAX_LOGPROBS = 1 << 20  # of prompts, or of choices, in an answer that is not streamed, unless one that fills the context has more


class Output(msgspec.Struct, frozen=True):
    """``n`` choices, the best of ``best_of``. ``logprobs`` and ``prompt_logprobs``: with so many alternatives per token; None: without.
    ``echo``: the prompt is the beginning of each choice's text. ``thoughts``: where those of the model are."""

    n: int = 1
    best_of: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    thoughts: ThoughtPlace = "apart"

    def check_prompts(self, num_tokens: int, max_context: int) -> None:
        """Check that an answer about prompts of so many tokens together is not too large for the gateway's memory. Raises:
        RequestError."""
        shown = (self.logprobs if self.echo else None, self.prompt_logprobs)
        num_logprobs = self.n * num_tokens * sum(1 + asked for asked in shown if asked is not None)
        if num_logprobs > (limit := _limit(max_context)):
            raise refuse("prompt", f"the answer would have {num_logprobs} log-probabilities of prompts, the limit is {limit}")

    def most_tokens(self, num_prompts: int, max_context: int) -> int | None:
        """Return how many tokens each choice may have, so that the gateway's memory has room for the log-probabilities of all until the
        answer goes out whole; None: as many as they like."""
        if self.logprobs is None and self.best_of == self.n:
            return None
        return _limit(max_context) // (num_prompts * self.best_of * (1 + (self.logprobs or 0)))


def _limit(max_context: int) -> int:
    return max(MAX_LOGPROBS, (1 + MAX_ALTERNATIVES) * max_context)


def read_chat_output(fields: Fields, max_choices: int, stream: bool) -> Output:
    """Take the fields of a chat request. Raises: RequestError."""
    num_choices = fields.take_int("n", 1, max_choices) or 1
    thoughts = read_thought_place(fields)
    return Output(num_choices, num_choices, read_logprobs(fields), _read_prompt_logprobs(fields, stream), thoughts=thoughts)


def read_logprobs(fields: Fields) -> int | None:
    """Take ``logprobs`` and ``top_logprobs``: the number of alternatives per token, None without. Raises: RequestError."""
    wants_logprobs = fields.take_bool("logprobs")
    num_alternatives = fields.take_int("top_logprobs", 0, MAX_ALTERNATIVES)
    if num_alternatives and not wants_logprobs:
        raise refuse("top_logprobs", f"is {num_alternatives}, but logprobs is not true")
    return (num_alternatives or 0) if wants_logprobs else None


def read_text_output(fields: Fields, max_choices: int, stream: bool) -> Output:
    """Take the fields of a request to continue a text. Raises: RequestError."""
    num_choices = fields.take_int("n", 1, max_choices) or 1
    best_of = fields.take_int("best_of", 1, max_choices) or num_choices
    if best_of < num_choices:
        raise refuse("best_of", f"is {best_of}, but n is {num_choices}")
    if stream and best_of > num_choices:
        raise refuse("best_of", f"is {best_of}, but n is {num_choices}: the best are known at the end, and stream is true")
    logprobs = fields.take("logprobs", {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_ALTERNATIVES}, {"const": False}]})
    if logprobs is not None and (type(logprobs) is not int or not 0 <= logprobs <= MAX_ALTERNATIVES) and logprobs is not False:
        raise refuse("logprobs", f"is {show(logprobs)}, allowed are 0 to {MAX_ALTERNATIVES}")
    echo = fields.take_bool("echo")
    return Output(num_choices, best_of, None if logprobs is False else logprobs, _read_prompt_logprobs(fields, stream), echo)


def _read_prompt_logprobs(fields: Fields, stream: bool) -> int | None:
    found = fields.take_int("prompt_logprobs", 0, MAX_ALTERNATIVES)
    if found is not None and stream:
        raise refuse("prompt_logprobs", "is not allowed when stream is true")
    return found
