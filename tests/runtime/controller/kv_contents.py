"""What KV pages hold in the simulated run of ``recovery_world``, and what the index of the cache says about it.

The KV of a token depends on everything before it: salt, tokens, positions, media. Two requests that agree in all of this leave
equal values, so a page may serve both; any other page has another value in some place.
"""

import random
from collections.abc import Sequence

import numpy as np

from mmrt.runtime.bus import messages as m
from mmrt.runtime.controller.state.state import ControllerState
from mmrt.runtime.pools import kind_of_pool
from mmrt.schema.media import MediaSpan
from mmrt.shm.pool import PagePool

PAGE_TOKENS = 4
IMAGE, VIDEO, AUDIO = 901, 902, 903
NUM_CONTENTS = 3


def positions(num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[bytes, int]:
    """A medium stands on one spot and moves what follows by less than its length; a token before a video with sound steps back."""
    found = np.empty((num_tokens, 3), np.int64)
    index = position = 0
    for span in spans:
        count = span.start - index
        found[index : span.start] = np.arange(position, position + count)[:, None]
        position += count
        if count and any(segment.kind != span.shape.kind for segment in span.shape.segments):
            found[span.start - 1] -= 1
        index = span.start + span.shape.num_tokens
        found[span.start : index] = position
        position += 1 + span.shape.num_tokens // 2
    found[index:] = np.arange(position, position + num_tokens - index)[:, None]
    return found.tobytes(), position - index


class KVContents:
    """The values of tokens in the KV cache, by request; and the contents that each key has stood for."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, int], list[int]] = {}
        self._named: dict[tuple[str, bytes], tuple[int, ...]] = {}

    def values(self, request: m.RequestSpec, spec: m.SequenceSpec, member: int, tokens: Sequence[int], era: bytes) -> list[int]:
        """Return the value of each of the row's tokens. ``tokens``: the expanded prompt and the generated ones. ``era``: its own."""
        values = self._values.setdefault((spec.key, member), [])
        if len(values) < len(tokens):
            num_prompt = spec.num_companion_tokens if member else spec.num_prompt_tokens
            spans = [] if member else spec.spans
            prompt, delta = positions(num_prompt, spans)
            at = [row.tobytes() for row in np.frombuffer(prompt, np.int64).reshape(-1, 3)]
            at += [np.full(3, index + delta, np.int64).tobytes() for index in range(num_prompt, len(tokens))]
            media: dict[int, tuple[object, int]] = {}
            for item, (span, medium) in enumerate(zip(spans, request.items, strict=False)):
                content = medium.content or (spec.key, item)
                media |= {span.start + offset: (content, offset) for offset in range(span.shape.num_tokens)}
            for index in range(len(values), len(tokens)):
                before = values[-1] if values else hash((era, request.salt))
                values.append(hash((before, tokens[index], at[index], media.get(index))))
        return values

    def check_index(self, state: ControllerState, pool: PagePool, content: list[dict[int, int]]) -> None:
        """Every key is the controller's, of a page that the cache owns, and stands for one content, which is complete."""
        keys, ledger = pool.read_keys(), state.pools[pool.name]
        assert {page: ledger.cache.key_of(page) for page in ledger.cache.pages()} == keys, "the index is not the controller's"
        kind = kind_of_pool(pool.name)
        places = {0} if kind == "state" else set(range(PAGE_TOKENS))  # a state is that of its last token
        for page, key in keys.items():
            assert set(content[page]) == places, f"{kind} page {page} got its key before its contents"
            held = tuple(content[page][slot] for slot in sorted(places))
            assert self._named.setdefault((kind, key), held) == held, f"{kind} page {page} does not hold what its key says"
            if kind == "state" and (tokens := self._named.get(("kv", key))) is not None:
                assert held == tokens[-1:], f"state {page} is not that at the end of its key's tokens"

    def check_writable(self, pool: PagePool, page: int) -> None:
        assert pool._key_generations[page] != pool.generations[page], f"page {page} is written, and has a key"


def make_text(rng: random.Random, num_tokens: int) -> list[int]:
    """Text that often begins as other text does."""
    known = random.Random(rng.randrange(2))
    common = num_tokens if rng.random() < 0.4 else rng.randint(0, num_tokens)
    return [known.randint(1, 99) for _ in range(common)] + [rng.randint(1, 99) for _ in range(num_tokens - common)]
