"""The keys of KV pages: names of everything that determines their contents (pure; controller process).

A page's key is a hash of the key of the page before it, its token ids, its M-RoPE positions where these are not the tokens' indices,
and the digests of media that reach into it. The first page of a sequence follows a root made of the run's secret and the
request's salt: keys cannot be guessed, and no page is found under another salt. A run has one model, one dtype and one page size,
so the secret stands for them.

A medium without a digest names nothing: no page has a key from its first token on.
"""

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from ....schema.media import ItemShape, MediaSpan
from ....schema.page_key import KEY_BYTES
from ...bus.wire import encode

Positions = Callable[[int, Sequence[MediaSpan]], tuple[bytes, int]]
"""M-RoPE positions of an expanded prompt of so many tokens: int64 [num_tokens, 3] as bytes, and the delta. Token i behind the prompt
stands at i + delta on all three axes."""

_TOKEN_BYTES = 24
_PLACE = struct.Struct("<iI")


class Medium(NamedTuple):
    """A medium at prompt tokens [start, end). ``content``: its digest, or empty."""

    start: int
    end: int
    content: bytes


def indices(num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[bytes, int]:
    """Positions of text: every token stands at its index."""
    del spans
    return _indices(0, num_tokens), 0


def root_key(secret: bytes, era: bytes, salt: bytes) -> bytes:
    """Return the key before the first page of every sequence of this run and salt."""
    return blake2b(salt, digest_size=KEY_BYTES, key=secret, person=era).digest()


def content_digest(content: bytes, shape: ItemShape) -> bytes:
    """Return the digest of a medium as it is cut into frames and segments: an equal one that is cut otherwise gives other tokens. Empty
    where the content is not known."""
    return content and blake2b(content + encode(shape), digest_size=KEY_BYTES).digest()


class PageKeys:
    """The keys of one member's pages, computed as far as they are asked for."""

    def __init__(
        self,
        root: bytes,
        prompt: Sequence[int],
        page_tokens: int,
        media: Sequence[Medium] = (),
        positions: Callable[[], tuple[bytes, int]] | None = None,
    ) -> None:
        """``media``: in prompt order. ``positions``: called once, if at all; needed with media."""
        assert positions is not None or not media
        self._ids = array("i", prompt)
        self._num_prompt = len(prompt)
        self._page_tokens = page_tokens
        self._media = media
        self._next_medium = 0  # the first that may reach into the next page
        self._find_positions = positions
        self._positions: tuple[bytes, int] | None = None
        self._end = min([medium.start for medium in media if not medium.content], default=None)
        self._root = root
        self._keys: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Number of tokens known: the prompt and generated ones."""
        return len(self._ids)

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt

    def extend(self, ids: Sequence[int]) -> None:
        """Append generated ids."""
        self._ids.extend(ids)

    def leading(self, num_tokens: int) -> Iterator[bytes]:
        """Yield the keys of the pages that the first ``num_tokens`` tokens fill, as far as ids and media are known. Each is computed
        when its turn comes."""
        keys = self._keys
        for page in range(self._num_pages(num_tokens)):
            if page == len(keys):
                self._compute(page + 1)
            yield keys[page]

    def up_to(self, num_tokens: int, first: int = 0) -> list[bytes]:
        """Return all these keys, from page ``first`` on."""
        count = self._num_pages(num_tokens)
        self._compute(count)
        return self._keys[first:count]

    def at(self, page: int) -> bytes | None:
        """Return the key of a page; None if not all of its ids and media are known."""
        if page >= self._num_pages(self.num_tokens):
            return None
        self._compute(page + 1)
        return self._keys[page]

    def _num_pages(self, num_tokens: int) -> int:
        known = len(self._ids) if self._end is None else min(self._end, len(self._ids))
        return max(0, min(num_tokens, known)) // self._page_tokens

    def _compute(self, count: int) -> None:
        """Compute the first ``count`` keys, as far as they are not known yet."""
        keys, ids, page_tokens = self._keys, self._ids, self._page_tokens
        key = keys[-1] if keys else self._root
        for start in range(len(keys) * page_tokens, count * page_tokens, page_tokens):
            contents = key + ids[start : start + page_tokens].tobytes()
            if self._find_positions is not None:
                contents += self._media_in(start, start + page_tokens) + self._positions_of(start, start + page_tokens)
            key = blake2b(contents, digest_size=KEY_BYTES).digest()
            keys.append(key)

    def _media_in(self, start: int, end: int) -> bytes:
        """Return the places and digests of the media that reach into the next page. Pages are asked for in order."""
        media, index, found = self._media, self._next_medium, b""
        while index < len(media) and media[index].end <= start:
            index += 1
        self._next_medium = index
        while index < len(media) and media[index].start < end:
            found += _PLACE.pack(start - media[index].start, len(media[index].content)) + media[index].content
            index += 1
        return found

    def _positions_of(self, start: int, end: int) -> bytes:
        """Return the positions of a page's tokens; empty if each is the token's index."""
        if self._positions is None:
            assert self._find_positions is not None
            self._positions = self._find_positions()
        prompt, delta = self._positions
        num_prompt = self._num_prompt
        if start >= num_prompt:
            return _indices_of_page(start + delta, end + delta) if delta else b""
        positions = prompt[start * _TOKEN_BYTES : end * _TOKEN_BYTES]
        if end > num_prompt:
            positions += _indices_of_page(max(start, num_prompt) + delta, end + delta)
        return b"" if positions == _indices_of_page(start, end) else positions


def _indices(start: int, end: int) -> bytes:
    """Return positions that are indices, on all three axes."""
    positions = array("q", bytes(_TOKEN_BYTES * (end - start)))
    positions[0::3] = positions[1::3] = positions[2::3] = array("q", range(start, end))
    return positions.tobytes()


_indices_of_page = lru_cache(1024)(_indices)
