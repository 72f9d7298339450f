"""The expansion of a prompt: each placeholder of a medium becomes the tokens of its segments, and the text around them (pure;
controller process)."""

from collections.abc import Sequence

from ....schema.media import ItemShape, MediaSpan
from ...bus.messages import RequestSpec
from ...errors import RequestError, prompt_too_long
from ..scheduling.types import Limits


def check_placeholders(spec: RequestSpec, limits: Limits) -> None:
    """Check for one placeholder per medium, of its kind, in order, and text after the last one. Raises RequestError."""
    kinds = {token: kind for kind, token in limits.placeholder_ids.items()}
    found = [kinds[token] for token in spec.prompt_ids if token in kinds]
    wanted = [item.kind for item in spec.items]
    if found != wanted:
        message = f"the prompt has placeholders for {found or 'no media'}, the request has {wanted or 'none'}"
        raise RequestError(message, param="messages")
    if wanted and spec.prompt_ids[-1] in kinds:
        raise RequestError("the prompt ends in media, text must follow it", param="messages")


def expanded_place(spec: RequestSpec, place: int, spans: Sequence[MediaSpan], limits: Limits) -> int:
    """Return where a place of ``prompt_ids`` lies in the expanded prompt. ``spans``: of its media, there."""
    if not spans:
        return place
    before = sum(map(spec.prompt_ids[:place].count, limits.placeholder_ids.values()))
    return place + sum(sum(segment.num_prompt_tokens for segment in span.shape.segments) - 1 for span in spans[:before])


def expand(spec: RequestSpec, shapes: Sequence[ItemShape], limits: Limits) -> tuple[list[int], list[int]]:
    """Return the prompt ids with each placeholder expanded, by its segments, and the start of each item.

    Raises: RequestError for an item without tokens, and for a prompt that exceeds the context, before it is built.
    """
    if not shapes:
        return list(spec.prompt_ids), []
    num_tokens = len(spec.prompt_ids) - len(shapes)
    for number, shape in enumerate(shapes, 1):
        if shape.num_tokens < 1 or shape.num_tokens != sum(segment.num_prompt_tokens for segment in shape.segments):
            raise RequestError(f"{shape.kind} {number} has no tokens", param="messages")
        num_tokens += shape.num_tokens
    if num_tokens + 1 > limits.max_context:
        raise prompt_too_long("messages", num_tokens, limits.max_context)
    placeholders = set(limits.placeholder_ids.values())
    prompt: list[int] = []
    starts: list[int] = []
    end = 0  # of what has been copied
    for place in [place for place, token in enumerate(spec.prompt_ids) if token in placeholders]:
        prompt += spec.prompt_ids[end:place]
        end = place + 1
        starts.append(len(prompt))
        for segment in shapes[len(starts) - 1].segments:
            prompt += segment.lead
            for id, count in segment.ids or ((limits.placeholder_ids[segment.kind], segment.num_tokens),):
                prompt += [id] * count
            prompt += segment.trail
    prompt += spec.prompt_ids[end:]
    return prompt, starts


def spans_of(prompt: Sequence[int], starts: Sequence[int], shapes: Sequence[ItemShape], limits: Limits) -> list[MediaSpan]:
    """Return the places of items in what ``expand`` gives, each with the text that is placed with it."""
    spans = list[MediaSpan]()
    for start, shape in zip(starts, shapes, strict=True):
        end = behind = start + shape.num_tokens
        while end < len(prompt) and prompt[end] in limits.behind_ids:
            end += 1
        spans.append(MediaSpan(start, shape, end - behind))
    return spans
