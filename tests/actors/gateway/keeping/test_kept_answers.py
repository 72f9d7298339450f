"""Kept answers: bounds in bytes and time, tenants beside each other, and what another process finds of them."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.actors.gateway.keeping import kept_answers
from mmrt.actors.gateway.keeping.kept_answers import KeptAnswers
from mmrt.shm.kept_records import KeptRecords

PAGE = 4096
SMALL = 3 * PAGE  # of an answer of up to a page


@pytest.fixture
def records() -> Iterator[KeptRecords]:
    descriptor = KeptRecords.create()
    yield KeptRecords(descriptor)
    os.close(descriptor)


def kept(answers: KeptAnswers, tenant: bytes = b"") -> list[str]:
    return [id for owner, id in answers._answers if owner == tenant]


def test_the_latest_are_kept(records: KeptRecords) -> None:
    answers = KeptAnswers(records, max_bytes=3 * SMALL)
    assert all(answers.put(b"", f"{number}", b"x" * 500) for number in range(20))
    assert kept(answers) == ["17", "18", "19"]
    assert not answers.put(b"", "large", bytes(3 * SMALL)) and kept(answers) == ["17", "18", "19"]
    assert answers.remove(b"", "18") and not answers.remove(b"", "18") and not answers.remove(b"a", "19")
    assert answers.put(b"", "another", b"") and kept(answers) == ["17", "19", "another"], "what was removed leaves room"
    assert answers.num_bytes == 2 * SMALL + 2 * PAGE


def test_nobody_pushes_out_a_tenant_that_has_less(records: KeptRecords) -> None:
    answers = KeptAnswers(records, max_bytes=4 * SMALL)
    answers.put(b"small", "first", b"x")
    for number in range(20):
        answers.put(b"large", f"{number}", b"x")
    assert kept(answers, b"small") == ["first"] and kept(answers, b"large") == ["17", "18", "19"]
    assert answers.get(b"large", "first") is None, "of another"


def test_they_are_kept_for_a_time(records: KeptRecords) -> None:
    now_s = 0.0
    answers = KeptAnswers(records, kept_s=10, clock=lambda: now_s)
    answers.put(b"", "old", b"x")
    open_one = answers.open(b"", "open", b"x", b"")
    now_s = 6.0
    answers.put(b"", "new", b"x")
    now_s = 10.0
    assert answers.get(b"", "old") is None and answers.get(b"", "open") is open_one and not answers.remove(b"", "old")
    answers.put(b"", "old", b"again")
    answers.expire()
    assert kept(answers) == ["open", "new", "old"]
    now_s = 30.0
    answers.expire()
    assert kept(answers) == ["open"]


def test_what_is_under_way_is_kept_and_grows(records: KeptRecords) -> None:
    answers = KeptAnswers(records, max_bytes=4 * SMALL)
    one = answers.open(b"", "one", b"asked", b"0")
    assert one is not None and one.is_open
    assert answers.append(one, b"ab", b"1") and answers.append(one, b"cd", b"2")
    for number in range(5):
        answers.put(b"", f"{number}", b"x")
    again = KeptAnswers(records, max_bytes=4 * SMALL).get(b"", "one")
    assert again is not None and (again.state, again.num_log_bytes, again.is_open) == (b"2", 4, True)
    assert answers.body(one) == b"asked" and answers.log(one, 1, 3) == b"bc"
    assert not answers.append(one, bytes(5 * SMALL), b"3") and one.state == b"2", "no room for that"
    others = [answers.open(b"", f"open {number}", b"x", b"") for number in range(4)]
    assert [other is None for other in others] == [False, False, True, True], "none of these may be forgotten"
    assert answers.put(b"", "one", b"whole", b"3") and (found := answers.get(b"", "one")) is not None
    assert not found.is_open and answers.body(found) == b"whole" and answers.body(one) is None
    assert not answers.append(one, b"x", b""), "it has ended"


def test_a_short_memory_keeps_no_part(records: KeptRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = KeptAnswers(records)
    one = answers.open(b"", "open", b"x", b"")
    assert one is not None

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(records, "write_body", fail)
        patch.setattr(records, "write_log", fail)
        assert not answers.put(b"", "a", b"x") and not answers.append(one, b"x", b"y")
    assert kept(answers) == ["open"] and list(records.used()) == [one.number] and one.num_log_bytes == 0


def test_what_another_version_wrote_is_dropped(records: KeptRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(kept_answers, "_FORMAT", 2)
        KeptAnswers(records).put(b"", "later", b"x")
    KeptAnswers(records).put(b"", "good", b"x")
    records.commit(7, b"\xff")
    assert kept(KeptAnswers(records)) == ["good"] and len(list(records.used())) == 1


ids = st.sampled_from(["a", "b", "c", "d"])
tenants = st.sampled_from([b"", b"t"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), tenants, ids, st.integers(0, 3 * PAGE)),
        st.tuples(st.just("open"), tenants, ids, st.integers(0, 3 * PAGE)),
        st.tuples(st.just("append"), tenants, ids, st.integers(0, 2 * PAGE)),
        st.tuples(st.just("remove"), tenants, ids, st.just(0)),
        st.tuples(st.just("wait"), tenants, ids, st.integers(0, 20)),
        st.tuples(st.just("die"), tenants, ids, st.just(0)),
    ),
    max_size=40,
)


@given(steps)
def test_whatever_happens(steps: list[tuple[str, bytes, str, int]]) -> None:
    """The sums are right, the bound holds, no record is lost or doubled, and another process finds the same."""
    descriptor, now_s = KeptRecords.create(), 0.0

    def made() -> KeptAnswers:
        return KeptAnswers(KeptRecords(descriptor), 8 * SMALL, 30, lambda: now_s)

    def shown(answers: KeptAnswers) -> list[tuple[Any, ...]]:
        found = sorted(answers._answers.items(), key=lambda pair: pair[1].order)
        return [(*key, one.state, one.is_open, answers.body(one), answers.log(one, 0, one.num_log_bytes)) for key, one in found]

    answers = made()
    for number, (what, tenant, id, amount) in enumerate(steps):
        data, state = bytes([number]) * amount, b"%d" % number
        one = answers.get(tenant, id)
        if what == "put":
            answers.put(tenant, id, data, state)
        elif what == "open":
            answers.open(tenant, id, data, state)
        elif what == "append" and one is not None and one.is_open:
            answers.append(one, data, state)
        elif what == "remove":
            assert answers.remove(tenant, id) == (one is not None)
        elif what == "wait":
            now_s += amount
            answers.expire()
        elif what == "die":
            before = shown(answers)
            answers = made()
            assert shown(answers) == before
        assert answers.num_bytes == sum(one.num_bytes for one in answers._answers.values()) <= 8 * SMALL
        assert sorted(one.number for one in answers._answers.values()) == list(answers._records.used())
    os.close(descriptor)
