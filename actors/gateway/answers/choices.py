"""The choices of an answer: the requests that compute them, and what a client gets of each. Runs in the gateway's event loop.

The choices of one answer are requests of their own with equal prompts, of which the controller prefills one (``prefix_cache``).
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple

import msgspec

from ....models.text.thoughts import ThoughtReader, Thoughts
from ....models.text.tool_calls import CallPiece, CallReader
from ....runtime.bus.messages import FinishReason, RequestSpec
from ....runtime.bus.sampling import Sampling
from ....runtime.errors import RequestError
from ..keeping.state import Place
from ..reading.output_fields import Output
from .client_request import ClientRequest
from .logprobs import LogprobFormat, joined
from .token_table import Tokens


class Usage(NamedTuple):
    """Tokens of the prompts, of all choices together, and, of the prompts, those whose KV pages were in the prefix cache; of the
    choices, those of thoughts, with what came along with their ends; frames of the prompts' sounds. ``media_share``: the least share
    of its tokens that a picture or video has; less than 1 where the request asked for it, or the load did (VL9)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    thought_tokens: int = 0
    sound_frames: int = 0
    media_share: float = 1.0

    @property
    def of_media(self) -> dict[str, float]:
        """``media_share`` as answers say it, where media have fewer tokens than they would."""
        return {"media_share": self.media_share} if self.media_share < 1 else {}


class Ending(NamedTuple):
    """The end of a choice. ``stop``: the stop string that ended it, "" if none did. ``queue_s``: until pages were granted;
    ``prefill_s``: from there to its first text; ``decode_s``: from there to its end. ``is_full``: context or KV cache were full before
    ``max_new_tokens``."""

    reason: FinishReason | Literal["tool_calls"]
    stop: str = ""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    is_full: bool = False


class Piece(NamedTuple):
    """A piece of a choice: text, ids if they were asked for, the ``logprobs`` field, None without, pieces of calls of functions, and
    thoughts, which come before the text."""

    text: str
    ids: list[int]
    logprobs: dict[str, Any] | None
    calls: Sequence[CallPiece] = ()
    thoughts: str = ""

    @property
    def calls_around(self) -> tuple[Sequence[CallPiece], Sequence[CallPiece]]:
        """The pieces of a call that began earlier, which come before the text, and those of calls behind it."""
        num_rest = next((at for at, call in enumerate(self.calls) if call.name is not None), len(self.calls))
        return self.calls[:num_rest], self.calls[num_rest:]


NOTHING = Piece("", [], None)


class News(NamedTuple):
    """News of a choice, as they came. ``tokens``: with log-probabilities, if asked for. ``has_echo``: the prompt comes first."""

    text: str
    ids: list[int]
    tokens: Tokens | None
    has_echo: bool = False
    calls: Sequence[CallPiece] = ()
    thoughts: str = ""

    @property
    def is_shown(self) -> bool:
        """Return whether there is more than ids and log-probabilities, which go along with other news."""
        return bool(self.text or self.calls or self.thoughts or self.has_echo)


class Choice:
    """One choice. ``first``: the request of its prompt's first choice, which has the log-probabilities of the prompt. ``text_of``
    makes the text of the prompt, which comes before the answer; None: it does not. ``format`` makes the ``logprobs``; None: without.
    ``reader`` finds calls of functions in the answer, ``thoughts`` its thoughts; None: it has none."""

    def __init__(
        self,
        index: int,
        request: ClientRequest,
        first: ClientRequest,
        output: Output,
        text_of: Callable[[Sequence[int]], str] | None,
        format: LogprobFormat | None,
        *,
        reader: CallReader | None = None,
        thoughts: ThoughtReader | None = None,
    ) -> None:
        self.index = index
        self.request = request
        self.first = first
        self.cumulative_logprob = 0.0
        self._alternatives = output.logprobs or 0
        self._drops_thoughts = output.thoughts == "left out"
        self._text_of = text_of
        self._owes_echo = text_of is not None
        self._format = format
        self._reader, self._thoughts = reader, thoughts
        self.num_thought_tokens = 0
        self._told: list[Thoughts] = []  # and not taken
        self._held: list[News] = []  # ids and tokens of text that may become a part of a call

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the answer that have come."""
        return self.request.num_tokens

    @property
    def finish(self) -> FinishReason | None:
        finish = self.request.finish
        return "length" if finish is not None and self.request.spec.is_prefill_only else finish

    @property
    def ending(self) -> Ending | None:
        """The reason of its end; None while it goes on. An end by calls is known once all has been taken."""
        reason: FinishReason | Literal["tool_calls"] | None = self.finish
        if reason is None:
            return None
        if reason == "stop" and self._reader is not None and self._reader.has_calls:
            reason = "tool_calls"
        request = self.request
        known = [request.submitted_s]
        for at in (request.granted_s, request.first_text_s, request.finished_s):
            known.append(known[-1] if at is None else max(known[-1], at))  # a step unseen takes no time
        queue_s, prefill_s, decode_s = (after - before for before, after in pairwise(known))
        is_full = reason == "length" and request.num_tokens < (request.spec.max_new_tokens or 0)
        return Ending(reason, request.stop, queue_s, prefill_s, decode_s, is_full)

    @property
    def has_news(self) -> bool:
        """Return whether ``take`` gives text or the end. A prompt to be echoed has to be there first."""
        request = self.request
        has_begun = request.first_text_s is not None or request.finish is not None
        if self._owes_echo and not (has_begun and (self._format is None or self.first.findings.prompt is not None)):
            return False
        return request.has_text or request.is_over

    def follow(self) -> None:
        """Tell thoughts from content in what has come, where all is taken at the end: else all of an answer would count as thoughts."""
        if self._thoughts is not None and self.request.has_text:
            self._tell(self._thoughts, self.request.take(), self.request.is_over)

    def take(self) -> News:
        """Take what has come since the last call, when there is news."""
        request = self.request
        return self._take(request.take(), request.findings.take(), request.take_ids(), request.is_over)

    def taken(self, has_begun: bool, *, has_ended: bool) -> Place:
        """Return the place up to which the client has it. Ids and tokens that are held back come later."""
        taken = self.request.taken
        num_tokens, num_ids = taken.num_tokens, taken.num_ids
        for one in self._held:
            num_ids -= len(one.ids)
            num_tokens -= 0 if one.tokens is None else len(one.tokens.ids)
        return Place(taken.num_bytes, num_tokens, num_ids, has_begun, has_ended)

    def can_take_again(self, place: Place) -> bool:
        """Return whether what a gateway before has shown has come again."""
        needs_prompt = place.has_begun and self._owes_echo and self._format is not None
        return self.request.has(place) and not (needs_prompt and self.first.findings.prompt is None)

    def take_again(self, place: Place) -> News:
        """Take, in one piece, what a gateway before has taken up to a place that is not the end."""
        request = self.request
        tokens = request.findings.take(place.num_tokens)
        return self._take(request.take(place.num_bytes), tokens, request.take_ids(place.num_ids), is_over=False)

    def _take(self, text: str, tokens: Tokens | None, ids: list[int], is_over: bool) -> News:
        if self._thoughts is not None:
            self._tell(self._thoughts, text, is_over)
            text = "".join(one.content for one in self._told)
        told, self._told = self._told, []
        thoughts = "".join(one.thoughts for one in told)
        if tokens is not None:
            self.cumulative_logprob += float(tokens.logprobs.own.sum())
        has_echo, self._owes_echo = self._owes_echo, False
        news = News(text, ids, tokens, has_echo, thoughts="" if self._drops_thoughts else thoughts)
        return news if self._reader is None and self._thoughts is None else self._read(news, is_over)

    def _read(self, news: News, is_over: bool) -> News:
        """Tell calls from content. Where nothing is certain, ids and tokens wait for more, or for the end."""
        calls, text, thoughts = list[CallPiece](), news.text, news.thoughts
        if self._reader is not None:
            readings = [self._reader.push(text), *([self._reader.flush()] if is_over else [])]
            text, calls = "".join(reading.content for reading in readings), [call for reading in readings for call in reading.calls]
        self._held.append(news)
        if not (thoughts or text or calls or is_over):
            return News("", [], None)
        held, self._held = self._held, []
        tokens = [one.tokens for one in held if one.tokens is not None]
        ids = [id for one in held for id in one.ids]
        return News(text, ids, Tokens.joined(tokens) if tokens else None, calls=calls, thoughts=thoughts)

    def _tell(self, reader: ThoughtReader, text: str, is_over: bool) -> None:
        was_inside = reader.is_inside
        told = [reader.push(text), *([reader.flush()] if is_over else [])]
        if was_inside or reader.is_inside or any(one.thoughts for one in told):
            self.num_thought_tokens = self.num_tokens
        self._told += told

    def cost(self, news: News) -> int:
        """Return the number of tokens with which ``piece`` has work."""
        num_tokens = 0 if news.tokens is None or self._format is None else len(news.tokens.ids)
        return num_tokens + (len(self.request.spec.prompt_ids) if news.has_echo else 0)

    def piece(self, news: News) -> Piece:
        """Return the piece that shows the news. Call it in any thread, in the order of ``take``."""
        text, logprobs = news.text, None
        if news.has_echo and self._text_of is not None:
            text = self._text_of(self.request.spec.prompt_ids) + text
            if self._format is not None and self.first.findings.prompt is not None:
                logprobs = self._format.prompt(self.first.findings.prompt.likeliest(self._alternatives))
        if self._format is not None:
            answer = self._format.answer(news.tokens)
            logprobs = answer if logprobs is None else joined(logprobs, answer)
        return Piece(text, news.ids, logprobs, news.calls, news.thoughts)


def specs_of(spec: RequestSpec, output: Output, first_index: int = 0) -> list[RequestSpec]:
    """Return the requests that compute the choices of a prompt. Each has a seed of its own that follows from the request's. Where no
    answer follows the prompt, nothing is sampled or guided, and prefill alone computes."""
    wanted = output.logprobs
    if wanted is None and output.best_of > output.n:
        wanted = 0  # to find the best
    of_prompt = output.prompt_logprobs
    if output.echo and output.logprobs is not None:
        of_prompt = max(output.logprobs, of_prompt or 0)
    replace = msgspec.structs.replace
    if spec.is_prefill_only:
        spec, wanted = replace(spec, companion_ids=None).asking(sampling=Sampling()), None
    id, sampling = spec.generation.request_id, replace(spec.generation.sampling, logprobs=wanted)
    return [
        spec.asking(
            request_id=f"{id}.{first_index + index}" if first_index + index else id,
            sampling=replace(sampling, seed=_seed_of(sampling, index)) if index else replace(sampling, prompt_logprobs=of_prompt),
        )
        for index in range(output.best_of)
    ]


def _seed_of(sampling: Sampling, index: int) -> int:
    return int.from_bytes(blake2b(f"{sampling.seed} {index}".encode(), digest_size=8).digest()) >> 1


def best_of(choices: Sequence[Choice], num: int) -> list[Choice]:
    """Return of each prompt the ``num`` choices of the largest cumulative log-probability, the best first."""
    groups = groupby(choices, key=lambda choice: choice.first.key)
    return [choice for _, group in groups for choice in sorted(group, key=lambda choice: choice.cumulative_logprob, reverse=True)[:num]]


def usage_of(choices: Sequence[Choice]) -> Usage:
    """Return an answer's usage, with each prompt counted once."""
    if len(choices) == 1:
        (choice,) = choices
        request, num_cached = choice.request, max(0, choice.request.num_cached_tokens)
        numbers = request.prompt_tokens(), choice.num_tokens, num_cached, choice.num_thought_tokens
        return Usage(*numbers, request.num_sound_frames, request.media_share)
    prompts = [choice.request for choice in choices if choice.request is choice.first]
    num_prompt_tokens = sum([request.prompt_tokens() for request in prompts])
    num_cached_tokens = sum([max(0, request.num_cached_tokens) for request in prompts])
    num_tokens, num_thought_tokens = (
        sum(counts) for counts in zip(*[(c.num_tokens, c.num_thought_tokens) for c in choices], strict=True)
    )
    num_sound_frames = sum([request.num_sound_frames for request in prompts])
    share = min([request.media_share for request in prompts])
    return Usage(num_prompt_tokens, num_tokens, num_cached_tokens, num_thought_tokens, num_sound_frames, share)


def error_of(choices: Sequence[Choice]) -> RequestError | None:
    """Return the first choice's error, if one has failed: then all fail."""
    return next((choice.request.error for choice in choices if choice.request.error is not None), None)
