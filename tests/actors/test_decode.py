"""decode's loop over a real table and ring: who it takes in, whom it lets go, and what it says of that."""

import pytest

from mmrt.actors.decode import Decoding
from mmrt.runtime.messages import Admit, Drop, Dropped, SequenceEnded, ToActor, decode_token_hint
from mmrt.shm.doorbell import Ringer
from mmrt.shm.ring import Ring
from mmrt.shm.sequence_table import EndCode, Phase
from mmrt.tests.actors.bench import Bench, Counting, Row
from mmrt.tests.actors.fake_actor import FakeActor


def serve(bench: Bench, *script: object, ring_bytes: int = 4096) -> FakeActor:
    actor = FakeActor(bench.run, "decode", script)  # type: ignore[arg-type]
    actor.become_active()
    hints = Ring.create(bench.run, "tokens", ring_bytes)
    with Ringer(bench.run, "detokenizer") as bell:
        Decoding(actor, bench.table, bench.running, hints, bell).run()  # type: ignore[arg-type]
    return actor


def turns(count: int) -> list[list[ToActor]]:
    return [[]] * count


def placed(bench: Bench, row: int = 0, max_new_tokens: int = 10, phase: Phase = Phase.DECODE) -> Row:
    made = bench.place([10], row=row, max_new_tokens=max_new_tokens)
    bench.grant_all(made)
    bench.table.set_phase(row, phase)
    return made


def test_rows_are_found_without_being_told(counting: Bench) -> None:
    row, other = placed(counting, 0, 3), placed(counting, 1, 5)
    actor = serve(counting, *turns(6))
    assert counting.committed(row) == [11, 12, 13] and counting.committed(other) == [11, 12, 13, 14, 15]
    assert actor.sent == [SequenceEnded(1, *row.place), SequenceEnded(1, *other.place)]
    records = Ring.attach(counting.run, "tokens").pop_all()
    assert [decode_token_hint(record).rows for record in records] == [[0, 1]] * 3 + [[1]] * 2
    assert actor.num_waits == 1


def test_admit_counts_only_for_a_row_in_decode(counting: Bench) -> None:
    early, late = placed(counting, 0, phase=Phase.PREPARE), placed(counting, 1, phase=Phase.PREPARE)

    def start() -> None:
        counting.table.set_phase(1, Phase.DECODE)

    serve(counting, [], start, [Admit(1, *early.place), Admit(1, *late.place), Admit(1, 1, late.generation + 1)], [])
    assert counting.committed(early) == [] and counting.committed(late) == [11, 12]


def test_a_dropped_row_is_left_alone_until_it_is_in_decode_again(counting: Bench) -> None:
    """The controller takes the phase back before it says Drop: from its answer on nothing of the row is written."""
    row = placed(counting)

    def take_back() -> None:
        counting.table.set_phase(0, Phase.PREPARE)

    def give_again() -> None:
        assert counting.committed(row) == [11, 12, 13]
        counting.table.set_phase(0, Phase.DECODE)

    drop = Drop(1, *row.place, ticket=77)
    late = Admit(1, *row.place)
    actor = serve(counting, *turns(2), take_back, [], [drop], [late], [drop], [], give_again, [late], *turns(10))
    assert actor.sent == [Dropped(1, *row.place, 77)] * 2 + [SequenceEnded(1, *row.place)]
    assert counting.committed(row) == list(range(11, 21))


def test_drop_is_answered_for_rows_that_are_not_there(counting: Bench) -> None:
    row = placed(counting)
    actor = serve(counting, [], [Drop(1, row.row, row.generation + 1, 5), Drop(1, 6, 1, 6)], [])
    assert actor.sent == [Dropped(1, row.row, row.generation + 1, 5), Dropped(1, 6, 1, 6)]
    assert counting.committed(row) == [11, 12, 13]


def test_with_everybody_out_of_pages_it_waits_a_little(counting: Bench) -> None:
    row = counting.place([10] * 16, max_new_tokens=10)
    counting.grant(row, 1)
    counting.table.set_phase(0, Phase.DECODE)
    actor = serve(counting, *turns(4), lambda: counting.grant(row, 1), *turns(2))
    assert counting.committed(row) == [11, 12, 13] and actor.num_waits == 3


def test_one_that_cannot_be_computed_ends_with_an_error(counting: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bad = counting.place([20], row=1)
    counting.grant_all(bad)
    counting.table.set_phase(1, Phase.DECODE)
    row = placed(counting, 0, 6)
    assert isinstance(counting.model, Counting)
    counting.model.broken = frozenset({22})
    actor = serve(counting, *turns(7))
    assert counting.committed(row) == list(range(11, 17)) and counting.end(row) == EndCode.LENGTH
    assert counting.committed(bad) == [21, 22] and counting.end(bad) == EndCode.ERROR
    assert actor.sent == [SequenceEnded(1, *bad.place), SequenceEnded(1, *row.place)]
    assert "this one cannot be computed" in caplog.text


def test_a_full_ring_of_hints_holds_nobody_up(counting: Bench) -> None:
    """Hints are hints: the detokenizer may be away as long as it likes."""
    row = placed(counting, max_new_tokens=200)
    serve(counting, *turns(210), ring_bytes=64)
    assert len(counting.committed(row)) == 200
