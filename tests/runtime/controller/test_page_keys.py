"""Keys of KV pages: equal for equal contents, and for nothing else."""

from collections.abc import Sequence
from unittest.mock import Mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from mmrt.runtime.controller.scheduling import page_keys
from mmrt.runtime.controller.scheduling.page_keys import Medium, PageKeys, indices, root_key
from mmrt.runtime.controller.state.page_cache import PageCache

PAGE = 4
ROOT = root_key(b"secret", b"", b"")
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=24)


def keys_of(prompt: Sequence[int], media: Sequence[Medium] = (), at: Sequence[int] | None = None, root: bytes = ROOT) -> list[bytes]:
    """``at``: the position of every token, the same on all axes; else its index."""

    def positions() -> tuple[bytes, int]:
        if at is None:
            return indices(len(prompt), ())
        return np.repeat(np.array(at, np.int64), 3).tobytes(), at[-1] + 1 - len(at)

    return PageKeys(root, prompt, PAGE, media, positions if media else None).up_to(len(prompt))


@settings(deadline=None)
@given(prompts, prompts)
def test_keys_are_equal_as_far_as_the_tokens_are(one: list[int], other: list[int]) -> None:
    for page, (a, b) in enumerate(zip(keys_of(one), keys_of(other), strict=False), start=1):
        assert (a == b) == (one[: page * PAGE] == other[: page * PAGE])


@settings(deadline=None)
@given(prompts, prompts, st.integers(0, 40), st.booleans())
def test_generated_ids_are_named_as_a_prompt_that_holds_them(prompt: list[int], ids: list[int], asked: int, has_media: bool) -> None:
    media = [Medium(0, 1, b"m")] if has_media else []
    grown = PageKeys(ROOT, prompt, PAGE, media, lambda: indices(len(prompt), ()))
    grown.up_to(asked)
    for index in ids:
        grown.extend([index])
        grown.up_to(asked)
    assert grown.num_tokens == len(prompt) + len(ids)
    whole = keys_of([*prompt, *ids], media)
    assert grown.up_to(1000) == whole and grown.up_to(1000, 1) == whole[1:]


def test_roots_differ_by_secret_era_and_salt() -> None:
    roots = [root_key(secret, era, salt) for secret in (b"a", b"b") for era in (b"", b"era") for salt in (b"", b"tenant")]
    assert len({keys_of([1, 2, 3, 4], root=root)[0] for root in roots}) == 8


def test_a_medium_is_in_the_keys_from_its_first_page_on() -> None:
    prompt = [1, 2, 3, 4, 5, *[9] * 6, 6]
    one, other = (keys_of(prompt, [Medium(5, 11, content)]) for content in (b"one", b"other"))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False]
    assert one[0] == keys_of(prompt)[0], "text before it is shared with requests that have no media"


def test_two_media_cannot_be_taken_for_one_another() -> None:
    """The same tokens, the same digests, but the border between them elsewhere."""
    prompt = [9] * 8
    assert keys_of(prompt, [Medium(0, 3, b"a"), Medium(3, 8, b"b")])[0] != keys_of(prompt, [Medium(0, 2, b"a"), Medium(2, 8, b"b")])[0]


def test_an_unknown_medium_ends_the_keys() -> None:
    prompt = [1] * 6 + [9] * 4 + [1] * 6
    assert len(keys_of(prompt, [Medium(6, 10, b"")])) == 1
    assert len(keys_of(prompt, [Medium(8, 10, b"")])) == 2
    assert len(keys_of(prompt, [Medium(2, 4, b"known"), Medium(8, 10, b"")])) == 2


def test_positions_are_in_the_keys_where_they_are_not_indices() -> None:
    """The token before a video with sound stands elsewhere than before a picture, though nothing before it differs."""
    prompt, media = [1, 2, 3, 4, 9, 9, 5, 6, 7, 8, 9, 9], [Medium(4, 6, b"m")]
    plain = keys_of(prompt, media)
    stepped_back = keys_of(prompt, media, at=[0, 1, 2, 2, *range(4, 12)])
    moved = keys_of(prompt, media, at=[0, 1, 2, 3, 4, 4, *range(5, 11)])
    assert [a == b for a, b in zip(plain, stepped_back, strict=True)] == [False, False, False]
    assert [a == b for a, b in zip(plain, moved, strict=True)] == [True, False, False]


def test_no_key_is_computed_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt whose first page is in no cache costs one key when it is looked up."""
    computed = Mock(wraps=page_keys.blake2b)
    monkeypatch.setattr(page_keys, "blake2b", computed)
    keys = PageKeys(ROOT, [1] * 4000, PAGE)
    assert PageCache(1).find_leading(keys.leading(3999)) == [] and computed.call_count == 1
    assert list(keys.leading(3999)) == keys.up_to(3999) and computed.call_count == 999


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=5), st.integers(0, 9))
def test_a_page_names_the_media_that_reach_into_it(gaps: list[tuple[int, int]], tail: int) -> None:
    media: list[Medium] = []
    for gap, length in gaps:
        start = media[-1].end + gap if media else gap
        media.append(Medium(start, start + length, b"%d" % len(media)))
    prompt = [7] * ((media[-1].end if media else 0) + tail)
    keys = keys_of(prompt, media)
    for number, medium in enumerate(media):
        changed = keys_of(prompt, [*media[:number], medium._replace(content=b"other"), *media[number + 1 :]])
        first = medium.start // PAGE
        assert [a == b for a, b in zip(keys, changed, strict=True)] == [page < first for page in range(len(keys))]
