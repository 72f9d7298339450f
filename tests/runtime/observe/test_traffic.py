"""Traces of traffic: what records say of requests, in order of arrival, without contents."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.runtime.observe.flight import FlightRecord, Kind, pack_item, pack_pair, unpack_item
from mmrt.runtime.observe.prompt_blocks import BLOCK_TOKENS, block_hashes
from mmrt.runtime.observe.traffic import Traffic, TrafficMedium, TrafficRow

S = 1_000_000_000


class Tape:
    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def __call__(self, at_s: float, kind: Kind, key: int, *numbers: int, generation: int = 1) -> None:
        self.traffic.add(FlightRecord("controller", generation, kind, int(at_s * S), 0, key, *[*numbers, 0, 0, 0][:3]))


@pytest.fixture
def tape() -> Iterator[Tape]:
    yield Tape(Traffic(10 * S, patch_size=14, mel_rate=100.0))


def a_request(tape: Tape, key: int, at_s: float, blocks: tuple[int, ...] = (), num_tokens: int = 30) -> None:
    tape(at_s, Kind.RECEIVED, key)
    tape(at_s + 0.1, Kind.SUBMITTED, key, 9, 0)
    tape(at_s + 0.2, Kind.PREPARED, key, num_tokens, 0, 50)
    for first in range(0, len(blocks), 3):
        tape(at_s + 0.2, Kind.BLOCKS, key, *blocks[first : first + 3])


def test_a_request_with_all_that_can_be_said(tape: Tape) -> None:
    a_request(tape, 7, 11.0, (111, 222, 333, 444))
    tape(11.2, Kind.ITEM, 7, pack_item("image", 1, 24), pack_pair(8, 12), 99)
    tape(11.2, Kind.ITEM, 7, pack_item("video", 1500, 48), pack_pair(2, 4), 98)
    tape(11.2, Kind.ITEM, 7, pack_item("audio", 250, 12), pack_pair(0, 0), 99)
    tape(11.3, Kind.CACHED, 7, 16)
    tape(11.5, Kind.FIRST_TEXT, 7)
    tape(12.0, Kind.OVER, 7, 5)
    (row,) = tape.traffic.rows(13 * S)
    assert row == TrafficRow(
        timestamp=1000.0,
        input_length=30,
        output_length=5,
        hash_ids=[0, 1, 2, 3],
        media=[
            TrafficMedium(type="image", id=0, tokens=24, width=168, height=112),
            TrafficMedium(type="video", id=1, tokens=48, width=56, height=28, seconds=1.5),
            TrafficMedium(type="audio", id=0, tokens=12, seconds=2.5),
        ],
        cached_length=16,
        ttft_ms=500.0,
    )
    assert not tape.traffic.num_open


def test_rows_come_in_order_of_arrival_and_the_rest_at_the_end(tape: Tape) -> None:
    for key, at_s in ((1, 11.0), (2, 12.0), (3, 13.0)):
        a_request(tape, key, at_s, (5, key))
    tape(14.0, Kind.OVER, 2, 4)
    assert not [*tape.traffic.rows(15 * S)] and tape.traffic.num_open == 3
    tape(16.0, Kind.OVER, 1, 3)
    rows = [*tape.traffic.rows(17 * S)]
    assert [(row.timestamp, row.hash_ids) for row in rows] == [(1000.0, [0, 1]), (2000.0, [0, 2])]
    a_request(tape, 4, 18.0)
    tape(19.0, Kind.OVER, 4, 2)
    assert [row.output_length for row in tape.traffic.rest()] == [2] and tape.traffic.num_open == 1


def test_a_request_whose_gateway_says_nothing_more_is_over_with_its_row(tape: Tape) -> None:
    a_request(tape, 1, 11.0)
    tape(12.0, Kind.SENT, 1, 6)
    tape(12.5, Kind.ENDED, 1)
    assert not [*tape.traffic.rows(13 * S)]
    assert [row.output_length for row in tape.traffic.rows(18 * S)] == [6]


def test_a_request_that_its_gateway_took_with_it_holds_up_no_others(tape: Tape) -> None:
    tape(11.0, Kind.RECEIVED, 1)
    a_request(tape, 2, 12.0)
    tape(12.5, Kind.ENDED, 2)
    assert not [*tape.traffic.rows(30 * S)], "it may be slow"
    tape(31.0, Kind.RECEIVED, 3, generation=2)
    assert [row.timestamp for row in tape.traffic.rows(31 * S)] == [2000.0]
    assert (tape.traffic.num_unread, tape.traffic.num_open) == (1, 1)


def test_requests_whose_ends_may_be_missing_are_forgotten(tape: Tape) -> None:
    a_request(tape, 1, 11.0, (5, 6))
    tape.traffic.forget()
    tape(12.0, Kind.OVER, 1, 5)
    a_request(tape, 2, 13.0, (5,))
    tape(14.0, Kind.OVER, 2, 5)
    assert [(row.timestamp, row.hash_ids) for row in tape.traffic.rows(15 * S)] == [(3000.0, [0])]
    assert not tape.traffic.num_open


def test_requests_from_before_and_refused_ones_are_left_out(tape: Tape) -> None:
    a_request(tape, 1, 9.0)
    tape(9.95, Kind.RECEIVED, 2)
    tape(11.0, Kind.FIRST_TEXT, 1)
    tape(11.0, Kind.OVER, 1, 5)
    tape(11.0, Kind.CACHED, 2, 5)
    tape(12.0, Kind.RECEIVED, 3)
    tape(12.1, Kind.SUBMITTED, 3, 9, 1)
    tape(12.2, Kind.FAILED, 3, 422)
    tape(12.3, Kind.OVER, 3, 0, 422)
    assert not [*tape.traffic.rows(20 * S)] and (tape.traffic.num_unread, tape.traffic.num_open) == (1, 0)


def test_a_prompt_that_is_prepared_again_is_said_once(tape: Tape) -> None:
    for _ in range(2):
        a_request(tape, 1, 11.0, (5, 6))
    tape(12.0, Kind.OVER, 1, 5)
    assert [row.hash_ids for row in tape.traffic.rows(20 * S)] == [[0, 1]]


@given(st.sampled_from(["image", "video", "audio"]), st.integers(0, 1 << 40), st.integers(0, 1 << 31))
def test_items_are_unpacked_as_they_were(kind: str, length: int, num_tokens: int) -> None:
    packed = pack_item(kind, length, num_tokens)  # type: ignore[arg-type]
    assert packed < 1 << 64 and unpack_item(packed) == (kind, min(length, (1 << 28) - 1), num_tokens)


@given(st.integers(0, 1500), st.integers(1, 700), st.integers(0, 1499), st.binary(max_size=4))
def test_blocks_are_alike_up_to_the_first_difference(num_shared: int, num_more: int, place: int, salt: bytes) -> None:
    """In tokens, in media, and in the salt."""
    first, second = [[*range(num_shared), *[1 << 20 | other] * num_more] for other in range(2)]
    media = [(min(place, len(first) - 1), b"one")]
    hashes = block_hashes(salt, first, media)
    assert len(hashes) == -(-len(first) // BLOCK_TOKENS) and all(0 < found < 1 << 64 for found in hashes)
    same = sum(a == b for a, b in zip(hashes, block_hashes(salt, second, media), strict=True))
    assert same == num_shared // BLOCK_TOKENS
    elsewhere = block_hashes(salt, first, [(media[0][0], b"other")])
    assert sum(a == b for a, b in zip(hashes, elsewhere, strict=True)) == media[0][0] // BLOCK_TOKENS
    assert not {*hashes} & {*block_hashes(salt + b"x", first, media)}
