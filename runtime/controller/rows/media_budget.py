"""The budget of a request's new pictures (pure; rules over ``ControllerState``).

It bounds the work that one request makes: a picture that a cache has is not decoded again, so it costs nothing, and a conversation
whose pictures were sent with each turn goes on. Caches are looked into only where all pictures together are more than the limit.
"""

from itertools import takewhile

import msgspec

from ....schema.media import ItemShape
from ...bus.messages import RequestSpec
from ...errors import CONTEXT_EXCEEDED, RequestError
from ..caches import embedding_cache, prefix_cache
from ..state.known_media import media_key
from ..state.state import ControllerState
from .expansion import expand, spans_of


def check_pixels(state: ControllerState, spec: RequestSpec) -> None:
    """Refuse a request whose new pictures have too many pixels. Raises: RequestError, which names the first that is too much."""
    limit = state.limits.max_request_pixels
    if sum(max(0, item.num_pixels) for item in spec.items) <= limit:
        return
    shapes = _known_shapes(state, spec)
    num_in_prefix, total = _num_in_prefix(state, spec, shapes), 0
    for number, (item, shape) in enumerate(zip(spec.items, shapes, strict=True)):
        if number < num_in_prefix or (shape is not None and _is_encoded(state, spec, number, shape)):
            continue
        total += max(0, item.num_pixels)
        if total > limit:
            message = (
                f"{item.path}: makes {total} pixels in all new pictures of the request, the limit is {limit} (media.max_request_pixels)"
            )
            raise RequestError(message, param=item.path)


def _known_shapes(state: ControllerState, spec: RequestSpec) -> list[ItemShape | None]:
    keys = [media_key(spec, state.era, item) for item in range(len(spec.items))]
    return [None if key is None else state.known_media.find(key).shape for key in keys]


def _is_encoded(state: ControllerState, spec: RequestSpec, item: int, shape: ItemShape) -> bool:
    """Return whether the embedding pages of an item are in the cache or in a file, segment by segment."""
    key = media_key(spec, state.era, item)
    assert key is not None
    places = state.pools["embedding"].cache, state.saved["embedding"]
    of_segments = embedding_cache.keys_of(state, key, shape)
    return all(any(len(place.find_leading(keys)) == len(keys) for place in places) for keys in of_segments)


def _num_in_prefix(state: ControllerState, spec: RequestSpec, shapes: list[ItemShape | None]) -> int:
    """Return how many leading items have their KV pages in a cache or in a file, all of them. Raises: RequestError if those whose
    tokens are known exceed the context."""
    known = [shape for shape in takewhile(lambda shape: shape is not None, shapes) if shape is not None]
    if not known or not state.limits.prefix_cache:
        return 0
    placeholders = set(state.limits.placeholder_ids.values())
    places = [place for place, token in enumerate(spec.prompt_ids) if token in placeholders]
    end = places[len(known)] if len(known) < len(places) else len(spec.prompt_ids)
    beginning = msgspec.structs.replace(spec, prompt_ids=spec.prompt_ids[:end], items=spec.items[: len(known)])
    try:
        prompt, starts = expand(beginning, known, state.limits)
    except RequestError as error:
        if error.code == CONTEXT_EXCEEDED:
            raise
        return 0  # an item without tokens is refused later
    spans = spans_of(prompt, starts, known, state.limits)
    keys = prefix_cache.keys_of(state, state.era, beginning, prompt, spans)
    caches, saved = [state.pools[pool].cache for pool in state.kv_pools], state.saved["kv"]

    def is_cached(page_key: bytes) -> bool:
        return any(cache.find(page_key) is not None for cache in caches) or bool(saved.find_leading([page_key]))

    num_tokens = sum(1 for _ in takewhile(is_cached, keys.leading(len(prompt)))) * state.limits.kv_page_tokens
    return sum(span.start + span.shape.num_tokens <= num_tokens for span in spans)
