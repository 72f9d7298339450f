"""Requests that ``mmrt bench serve`` sends: planned from a seed, and their HTTP bodies. Pure; the same seed gives the same bytes.

A plan says when, of which group, with which media and how long; ``make_body`` makes the bytes. Lengths are planned in tokens and
made of words; ``Calibration`` is how many words that takes with the server's tokenizer. Called by ``serve``.
"""

import base64
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

import msgspec

from .samples import ImageFormat, make_audio, make_image, make_video
from .traces import BLOCK_TOKENS, TraceMedium, TraceRow

Modality = Literal["text", "image", "video", "audio"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)

Message = dict[str, object]
"""One of a chat, as the API has it."""

WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you were"
    " her all she there would their we him been has when who will more no if out so said what up its about into than them can only"
    " other new some could time these two may then do first any my now such like our over man me even most made after also did many"
    " before must through back years where much your way well down should because each just those people how too little state good"
    " very make world still own see men work long get here between both life being under never day same another know while last"
    " might us great old year off come since against go came right used take three water house river stone light winter road letter"
).split()


class MediaShapes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of generated media: pixels as (width, height), lengths in seconds."""

    image_size: tuple[int, int] = (336, 336)
    image_format: ImageFormat = "png"
    video_size: tuple[int, int] = (320, 240)
    video_s: float = 2.0
    video_fps: int = 8
    audio_s: float = 2.0
    token_share: float = 1.0  # that requests ask for, of the tokens of pictures and videos


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of text in, each request drawing evenly from [low, high]; tokens out, always the same."""

    input_low: int = 64
    input_high: int = 64
    max_tokens: int = 64


class Calibration(msgspec.Struct, frozen=True):
    """tokens = overhead + per_word * words, for prompts without media."""

    overhead_tokens: float = 0.0
    tokens_per_word: float = 1.0

    def num_words(self, num_tokens: int) -> int:
        """The number of words for a prompt of about ``num_tokens``; at least 1."""
        return max(1, round((num_tokens - self.overhead_tokens) / self.tokens_per_word))


class RequestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``seed`` makes its words and media its own; ``group`` is what its figures are reported under.

    ``messages``: those of a data set, sent as they are. ``traced``: the first of its media as a trace has them. ``blocks``: of each
    ``BLOCK_TOKENS`` of the prompt, media included; equal ones have equal words.
    """

    index: int
    seed: str
    group: str
    media: tuple[Modality, ...]
    num_input_tokens: int
    max_tokens: int
    arrival_s: float = 0.0
    traced: tuple[TraceMedium, ...] = ()
    blocks: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()

    @property
    def num_traced_tokens(self) -> int:
        """Tokens of the prompt that media of a trace take."""
        return sum(medium.tokens for medium in self.traced)

    def text_blocks(self) -> Iterator[tuple[str, int]]:
        """Yield the seed of each part of the text, and its tokens; media stand before all text. Without blocks it is one part."""
        left, begun = self.num_input_tokens, self.num_traced_tokens
        for at, block in enumerate(self.blocks):
            if (num_tokens := min(left, (at + 1) * BLOCK_TOKENS - begun)) > 0:
                yield f"block/{block}", num_tokens
                left, begun = left - num_tokens, begun + num_tokens
        if left or not self.blocks:
            yield self.seed, left


def calibrate(short: tuple[int, int], long: tuple[int, int]) -> Calibration:
    """From two measured (words, prompt tokens). Raises: ValueError when they do not make a rising line."""
    (words_a, tokens_a), (words_b, tokens_b) = short, long
    if words_b <= words_a or tokens_b <= tokens_a:
        raise ValueError(f"{words_a} words gave {tokens_a} prompt tokens and {words_b} words {tokens_b}: no rising line")
    per_word = (tokens_b - tokens_a) / (words_b - words_a)
    return Calibration(tokens_a - per_word * words_a, per_word)


def parse_modalities(text: str) -> dict[Modality, float]:
    """``text,image`` or ``text:3,image:1`` as weights that sum to 1. Raises: ValueError naming the part at fault."""
    weights: dict[Modality, float] = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition(":")
        known = next((modality for modality in MODALITIES if modality == name), None)
        if known is None:
            raise ValueError(f"unknown modality {name!r}: choose from {', '.join(MODALITIES)}")
        weights[known] = weights.get(known, 0.0) + float(weight or 1)
        if not 0 < weights[known] < float("inf"):
            raise ValueError(f"the weight of {name!r} is {weight}, it must be above 0")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def poisson_arrivals(rate: float, num_requests: int, seed: int) -> list[float]:
    """Arrival times from 0 on with exponential gaps of mean 1/rate; all at 0 for an infinite rate. Raises: ValueError."""
    if not rate > 0:
        raise ValueError(f"rate {rate} must be above 0")
    rng = random.Random(f"{seed}/arrivals")
    arrivals, now_s = [], 0.0
    for _ in range(num_requests):
        arrivals.append(now_s)
        now_s += 0.0 if rate == float("inf") else rng.expovariate(rate)
    return arrivals


def plan_steady(modalities: Mapping[Modality, float], num_requests: int, lengths: Lengths, seed: int) -> list[RequestPlan]:
    """Requests that are all alike: text and one item of each other modality named. The group is their names joined by ``+``."""
    media = tuple(name for name in modalities if name != "text")
    return [_plan(index, "+".join(media) or "text", media, lengths, seed) for index in range(num_requests)]


def plan_mixed(modalities: Mapping[Modality, float], num_requests: int, lengths: Lengths, seed: int) -> list[RequestPlan]:
    """Requests of one modality each, drawn by weight; a medium comes with text. The group is the modality."""
    rng = random.Random(f"{seed}/modalities")
    drawn = rng.choices(list(modalities), list(modalities.values()), k=num_requests)
    return [_plan(index, name, () if name == "text" else (name,), lengths, seed) for index, name in enumerate(drawn)]


def with_trace(plans: Sequence[RequestPlan], rows: Sequence[TraceRow], *, own_input: bool, own_output: bool) -> list[RequestPlan]:
    """The same plans with the rows' arrivals, media and lengths (TI17); lengths that are ``own`` stay as planned."""
    planned = []
    for plan, row in zip(plans, rows, strict=True):
        kinds = [medium.type for medium in row.media]
        num_text = row.num_input_tokens - sum(medium.tokens for medium in row.media)
        planned.append(
            msgspec.structs.replace(
                plan,
                arrival_s=row.arrival_s,
                media=(*kinds, *plan.media),
                group="+".join(dict.fromkeys(kinds)) if kinds and plan.group == "text" else plan.group,
                num_input_tokens=plan.num_input_tokens if own_input else max(1, num_text),
                max_tokens=plan.max_tokens if own_output else max(1, row.num_output_tokens),
                traced=row.media,
                blocks=() if own_input else row.blocks,
            )
        )
    return planned


def with_arrivals(plans: Sequence[RequestPlan], arrivals: Sequence[float]) -> list[RequestPlan]:
    """The same plans at these times."""
    return [msgspec.structs.replace(plan, arrival_s=at_s) for plan, at_s in zip(plans, arrivals, strict=True)]


def _plan(index: int, group: str, media: tuple[Modality, ...], lengths: Lengths, seed: int) -> RequestPlan:
    own = f"{seed}/{group}/{index}"
    num_input_tokens = random.Random(f"{own}/length").randint(lengths.input_low, lengths.input_high)
    return RequestPlan(
        index=index, seed=own, group=group, media=media, num_input_tokens=num_input_tokens, max_tokens=lengths.max_tokens
    )


def make_prompt(seed: str, num_words: int) -> str:
    """Words drawn from a fixed list."""
    return " ".join(random.Random(f"{seed}/words").choices(WORDS, k=num_words))


def make_body(
    plan: RequestPlan,
    shapes: MediaShapes,
    calibration: Calibration,
    model: str,
    *,
    extensions: bool = True,
    temperature: float = 0.0,
) -> bytes:
    """The JSON body of a streaming chat completion of one message, or of a data set's. Raises: ValueError for media sizes that cannot
    be made."""
    messages = plan.messages or [make_message(plan, shapes, calibration)]
    return encode_body(messages, plan.max_tokens, model, extensions=extensions, temperature=temperature)


def make_message(plan: RequestPlan, shapes: MediaShapes, calibration: Calibration) -> Message:
    """The user's message: media, then text. Raises: ValueError for media sizes that cannot be made."""
    prompt = _text_of(plan, calibration)
    content: object = prompt
    if plan.media:
        parts = [_part(name, media_seed(plan, number), shapes_of(plan, number, shapes)) for number, name in enumerate(plan.media)]
        content = [*parts, {"type": "text", "text": prompt}]
    return {"role": "user", "content": content}


def encode_body(
    messages: Sequence[Message], max_tokens: int, model: str, *, extensions: bool = True, temperature: float = 0.0
) -> bytes:
    """The JSON body of a streaming chat completion. ``extensions`` adds ignore_eos and continuous_usage_stats."""
    stream_options: dict[str, bool] = {"include_usage": True}
    body: dict[str, object] = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": stream_options,
    }
    if extensions:
        stream_options["continuous_usage_stats"] = True
        body["ignore_eos"] = True
    return json.dumps(body).encode()


def _text_of(plan: RequestPlan, calibration: Calibration) -> str:
    num_words = calibration.num_words(plan.num_input_tokens)
    if not plan.blocks:
        return make_prompt(plan.seed, num_words)
    words: list[str] = []
    for seed, num_tokens in plan.text_blocks():
        words += make_prompt(seed, min(num_words - len(words), round(num_tokens / calibration.tokens_per_word))).split()
    return " ".join(words) or WORDS[0]


def shapes_of(plan: RequestPlan, number: int, shapes: MediaShapes) -> MediaShapes:
    """The sizes of a request's medium: a trace's where it has them. Sides of videos are even."""
    if number >= len(plan.traced):
        return shapes
    medium = plan.traced[number]
    sides = (medium.width, medium.height) if medium.width and medium.height else None
    changes: dict[str, object] = {}
    if sides and medium.type == "image":
        changes["image_size"] = sides
    elif sides and medium.type == "video":
        changes["video_size"] = tuple(max(2, side // 2 * 2) for side in sides)
    if medium.seconds and medium.type != "image":
        changes[f"{medium.type}_s"] = medium.seconds
    return msgspec.structs.replace(shapes, **changes)


def media_seed(plan: RequestPlan, number: int) -> int:
    """The seed of a request's medium; media are numbered in the order of the prompt."""
    if number < len(plan.traced) and (same := plan.traced[number].id) >= 0:
        return random.Random(f"medium/{same}").getrandbits(63)
    return random.Random(f"{plan.seed}/{number}").getrandbits(63)


def _part(name: Modality, seed: int, shapes: MediaShapes) -> dict[str, object]:
    """A content part with its medium in a data: URL (input_audio: in base64)."""
    match name:
        case "image":
            data = make_image(seed, *shapes.image_size, shapes.image_format)
            url = _data_url(f"image/{shapes.image_format}", data)
            return {"type": "image_url", "image_url": {"url": url}, **_fewer_tokens(shapes)}
        case "video":
            num_frames = max(1, round(shapes.video_s * shapes.video_fps))
            data = make_video(seed, *shapes.video_size, num_frames, shapes.video_fps)
            return {"type": "video_url", "video_url": {"url": _data_url("video/mp4", data)}, **_fewer_tokens(shapes)}
        case "audio":
            data = make_audio(seed, shapes.audio_s)
            return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
        case "text":
            raise ValueError("text is no medium")


def _fewer_tokens(shapes: MediaShapes) -> dict[str, float]:
    """The option of a part; none where a server that does not know it is asked for all tokens."""
    return {} if shapes.token_share == 1 else {"token_share": shapes.token_share}


def _data_url(mime: str, data: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"
