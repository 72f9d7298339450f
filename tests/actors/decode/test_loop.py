"""decode's loop over a real table and doorbell: who it takes in, whom it lets go, and what it says of that."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mmrt.actors.decode.grammar_compiler import GrammarCompiler
from mmrt.actors.decode.loop import Decoding
from mmrt.actors.decode.page_copier import PageCopier
from mmrt.actors.host.solo_trials import solo_place, solo_step
from mmrt.models.grammar.matcher import Matchers
from mmrt.models.grammar.vocabulary import load_vocabulary
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.runtime.bus.copy_plans import Transfer, TransferChunk
from mmrt.runtime.bus.messages import Admit, Drop, Dropped, PlanDone, Run, SequenceEnded, ToActor, Transferred
from mmrt.runtime.bus.sampling import Sampling
from mmrt.runtime.bus.wire import encode
from mmrt.runtime.process.crash_cause import Death
from mmrt.schema.rows import EndCode, Phase
from mmrt.shm.doorbell import Listener, Ringer
from mmrt.shm.plan_table import PlanTable
from mmrt.shm.pool import PagePool
from mmrt.shm.status import ActorStatus
from mmrt.tests.actors.bench import PAGE_TOKENS, Bench, Counting, Row
from mmrt.tests.actors.host.fake_actor import FakeActor

both_ways = pytest.mark.parametrize("launches_ahead", [False, True], ids=["as told", "ahead"])


def no_vocabulary() -> Matchers:
    raise NotImplementedError


def serve(
    bench: Bench,
    *script: object,
    death: Death | None = None,
    compiler: GrammarCompiler | None = None,
    name: str = "decode",
) -> FakeActor:
    for segment in ("actors", f"flight-{name}"):
        bench.run.segment_path(segment).unlink(missing_ok=True)
    actor = FakeActor(bench.run, name, script)  # type: ignore[arg-type]
    actor.become_active()
    actor.death = death
    compiler = compiler or GrammarCompiler(no_vocabulary, actor.wake)
    if not bench.run.segment_path("plans").exists():
        PlanTable.create(bench.run, 4, 1024)
    copier = PageCopier(actor, bench.kv, bench.table, PAGE_TOKENS)  # type: ignore[arg-type]
    with Ringer(bench.run, "detokenizer") as bell:
        Decoding(actor, bench.table, bench.running, compiler, bench.gaps, bell, copier).run()  # type: ignore[arg-type]
    compiler.close()
    return actor


def turns(count: int) -> list[list[ToActor]]:
    return [[]] * count


def placed(bench: Bench, row: int = 0, max_new_tokens: int = 10, phase: Phase = Phase.DECODE) -> Row:
    made = bench.place([10], row=row, max_new_tokens=max_new_tokens)
    bench.grant_all(made)
    bench.table.set_phase(row, phase)
    return made


@both_ways
def test_rows_are_found_without_being_told(counting: Bench) -> None:
    row, other = placed(counting, 0, 3), placed(counting, 1, 5)
    with Listener(counting.run, "detokenizer") as listener:
        rings: list[bool] = []
        actor = serve(counting, *[[], lambda: rings.append(listener.drain())] * 5, [])
    assert counting.committed(row) == [11, 12, 13] and counting.committed(other) == [11, 12, 13, 14, 15]
    assert actor.sent == [SequenceEnded(1, *row.place), SequenceEnded(1, *other.place)]
    assert rings == [True] * 5, "one at least for each step that committed something"
    assert actor.num_waits == 1


def test_pages_of_another_device_are_copied_between_steps(counting: Bench) -> None:
    row, other = placed(counting, 0, 3), placed(counting, 1, phase=Phase.PREPARE)
    source = PagePool.create(counting.run, "kv.1", 8, counting.kv.page_bytes)
    source.data[5] = 7
    counting.table.append_source_pages(1, 0, [5])
    plans = PlanTable.create(counting.run, 4, 1024)
    plans.write(2, 9, 0, encode(Transfer("kv.1", [TransferChunk(*other.place, 0, 0, PAGE_TOKENS)])))
    actor = serve(counting, [], [Run(1, 2, 9)], *turns(3))
    assert counting.committed(row) == [11, 12, 13]
    (done,) = [message for message in actor.sent if isinstance(message, PlanDone)]
    assert (done.plan_id, done.result) == (9, Transferred(counting.kv.page_bytes))
    assert (counting.kv.data[counting.table.pages(1, 0)[0]] == 7).all()


def test_admit_counts_only_for_a_row_in_decode(counting: Bench) -> None:
    early, late = placed(counting, 0, phase=Phase.PREPARE), placed(counting, 1, phase=Phase.PREPARE)

    def start() -> None:
        counting.table.set_phase(1, Phase.DECODE)

    serve(counting, [], start, [Admit(1, *early.place), Admit(1, *late.place), Admit(1, 1, late.generation + 1)], [])
    assert counting.committed(early) == [] and counting.committed(late) == [11, 12]


def test_the_gap_behind_a_first_token_of_prefill_is_counted_once_by_whoever_ends_it(counting: Bench) -> None:
    """Not that of a row whose first token decode drew, though the row before it had one of prefill; nor again after a restart."""
    earlier = placed(counting, 1, phase=Phase.PREPARE)
    counting.table.note_first(np.array([1]), np.array([earlier.generation]), 5)
    counting.table.set_phase(1, Phase.FREE)
    row, other = placed(counting), placed(counting, 1)
    began_ns = time.monotonic_ns()
    for one in (row, other):
        counting.table.commit(np.array([one.row]), np.array([one.generation]), np.array([11]))
    counting.table.note_first(np.array([0]), np.array([row.generation]), began_ns)
    for num_steps in (3, 2):
        counting.new_running_set()
        serve(counting, *turns(num_steps))
    longest_ns = time.monotonic_ns() - began_ns
    assert counting.committed(row) == counting.committed(other) == [11, 12, 13, 14, 15, 16]
    each, of_steps = counting.gaps.read(), counting.gaps.read_of_steps()
    assert sum(of_steps) == 6 and sum(each) == 7 and 1e9 * counting.gaps.sum_s <= 7 * longest_ns


@both_ways
def test_a_dropped_row_is_left_alone_until_it_is_in_decode_again(counting: Bench, launches_ahead: bool) -> None:
    """The controller takes the phase back before it says Drop: from its answer on nothing of the row is written."""
    row = placed(counting)

    def take_back() -> None:
        counting.table.set_phase(0, Phase.PREPARE)

    def give_again() -> None:
        assert counting.committed(row) == [11, 12, 13, *([14] if launches_ahead else [])]  # that was launched before Drop came
        counting.table.set_phase(0, Phase.DECODE)

    drop = Drop(1, *row.place, ticket=77)
    late = Admit(1, *row.place)
    actor = serve(counting, *turns(2), take_back, [], [drop], [late], [drop], [], give_again, [late], *turns(10))
    assert actor.sent == [Dropped(1, *row.place, 77)] * 2 + [SequenceEnded(1, *row.place)]
    assert counting.committed(row) == list(range(11, 21))
    assert sum(counting.gaps.read()) == 8, "the first token of each membership ends no gap"


def test_each_decode_runs_the_rows_that_it_owns(counting: Bench) -> None:
    row, other, nobodys = (placed(counting, number, 40) for number in range(3))
    counting.table.set_owner(1, 1)
    counting.table.set_owner(2, None)
    serve(counting, [Admit(1, *row.place), Admit(1, *other.place), Admit(1, *nobodys.place)], *turns(2))
    assert [len(counting.committed(row)) for row in (row, other, nobodys)] == [3, 0, 0]
    counting.new_running_set()
    serve(counting, *turns(2), name="decode.1")
    assert [len(counting.committed(row)) for row in (row, other, nobodys)] == [3, 2, 0]


@both_ways
def test_a_row_goes_on_at_another_decode_after_its_last_token(counting: Bench) -> None:
    row = placed(counting)
    drop = Drop(1, *row.place, ticket=7)
    actor = serve(counting, *turns(3), lambda: counting.table.set_owner(0, None), [drop], [Admit(1, *row.place)], [])
    assert actor.sent == [Dropped(1, *row.place, 7)]
    before = counting.committed(row)
    counting.table.set_owner(0, 1)
    counting.new_running_set()
    actor = serve(counting, [Admit(1, *row.place)], *turns(10), name="decode.1")
    assert 3 <= len(before) < 10 and actor.sent == [SequenceEnded(1, *row.place)]
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


@both_ways
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


@both_ways
def test_a_detokenizer_that_does_not_answer_its_bell_holds_nobody_up(counting: Bench) -> None:
    row = placed(counting, max_new_tokens=200)
    with Listener(counting.run, "detokenizer"):
        serve(counting, *turns(210))
    assert len(counting.committed(row)) == 200


@both_ways
def test_who_becomes_late_while_a_step_is_launched_leaves(counting: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmrt.actors.decode.loop.SCAN_S", 0.0)
    late = counting.place([10], max_new_tokens=40, deadline_s=time.monotonic() + 0.7)
    counting.grant_all(late)
    counting.table.set_phase(0, Phase.DECODE)
    other = placed(counting, 1, 30)
    serve(counting, *turns(5), lambda: time.sleep(0.8), *turns(5))
    assert counting.running.rows == [1] and not counting.running.is_ahead
    assert 5 <= len(counting.committed(late)) <= 12 and len(counting.committed(other)) >= 10


@both_ways
def test_late_rows_are_let_go(counting: Bench) -> None:
    """The controller ends them, or the next one does; decode computes nothing more for them."""
    row = counting.place([10], row=0, max_new_tokens=200, deadline_s=1.0)
    counting.grant_all(row)
    counting.table.set_phase(0, Phase.DECODE)
    other = placed(counting, 1, 5)
    serve(counting, [Admit(1, *row.place)], *turns(6))
    assert counting.committed(row) == [] and counting.end(row) == EndCode.NONE
    assert len(counting.committed(other)) == 5


def test_a_member_that_becomes_late_leaves(counting: Bench) -> None:
    row = counting.place([10], row=0, max_new_tokens=200, deadline_s=50.0)
    counting.grant_all(row)
    counting.table.set_phase(0, Phase.DECODE)
    counting.running.add(*row.place, 49.0)
    counting.running.expire(49.9)
    assert counting.running.rows == [0]
    counting.running.expire(50.0)
    assert counting.running.rows == []


def test_a_row_whose_grammar_cannot_be_taken_in_ends_by_it(counting: Bench, checkpoint: Path) -> None:
    """It was compiled before, by another version of the library maybe."""
    counting.grammars = Matchers(load_vocabulary(checkpoint, counting.config))
    counting.new_running_set()
    row = counting.place([5], sampling=Sampling(grammar="start: ("))
    counting.grant_all(row)
    counting.table.set_phase(0, Phase.DECODE)
    serve(counting, *turns(3))
    assert counting.end(row) == EndCode.GRAMMAR


@both_ways
def test_steps_go_on_while_a_grammar_is_compiled(counting: Bench, checkpoint: Path) -> None:
    """The thread waits for the vocabulary as long as this test wants."""
    may_load, woken = threading.Event(), threading.Event()

    def load() -> Matchers:
        assert may_load.wait(30)
        return Matchers(load_vocabulary(checkpoint, counting.config))

    def let_load() -> None:
        assert len(counting.committed(plain)) > 5 and counting.committed(row) == []
        may_load.set()
        assert woken.wait(30)

    counting.grammars = compiler = GrammarCompiler(load, woken.set)
    counting.new_running_set()
    plain = placed(counting, 0, 40)
    row = counting.place([5], row=1, sampling=Sampling(temperature=0, grammar='start: "yes"'), ignore_eos=False)
    counting.grant_all(row)
    counting.table.set_phase(1, Phase.DECODE)
    serve(counting, *turns(8), let_load, *turns(40), compiler=compiler)
    assert counting.end(row) == EndCode.STOP and counting.end(plain) == EndCode.LENGTH
    assert Tokenizer.load(checkpoint).decode(counting.committed(row)) == "yes"


def test_the_vocabulary_is_copied_while_nothing_runs(counting: Bench) -> None:
    threads, loaded = list[str](), threading.Event()

    def load() -> Matchers:
        threads.append(threading.current_thread().name)
        loaded.set()
        raise NotImplementedError

    serve(counting, *turns(5), lambda: loaded.wait(30), *turns(5), compiler=GrammarCompiler(load, loaded.set))
    assert len(threads) == 1 and threads[0].startswith("grammars")


@both_ways
def test_a_row_that_cannot_be_taken_in_ends(counting: Bench, caplog: pytest.LogCaptureFixture) -> None:
    generation = counting.table.begin(0)
    counting.table.set_owner(0, 0)
    counting.table.write_spec(0, b"no spec")
    counting.table.set_phase(0, Phase.DECODE)
    other = placed(counting, 1, 5)
    actor = serve(counting, *turns(6))
    assert counting.table.end(0, generation) == EndCode.ERROR and len(counting.committed(other)) == 5
    assert actor.sent[0] == SequenceEnded(1, 0, generation)
    assert "row 0 cannot be decoded" in caplog.text


# the generation before died in the middle of a step

GROUP = Death(5, True, "died of SIGSEGV", 1)


def names_of_steps(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int] | None]:
    """Whose each step is, as the status words say it; None for one over many."""
    names: list[tuple[int, int] | None] = []
    begin = ActorStatus.begin_step

    def noted(self: ActorStatus, step: int, deadline_s: float) -> None:
        names.append(solo_place(step))
        begin(self, step, deadline_s)

    monkeypatch.setattr(ActorStatus, "begin_step", noted)
    return names


def test_after_a_crash_everybody_is_tried_alone_and_work_goes_on(counting: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [placed(counting, row, 20) for row in range(3)]
    names = names_of_steps(counting, monkeypatch)
    serve(counting, *turns(5), death=GROUP)
    assert names == [rows[0].place, None, rows[1].place, None, rows[2].place, None, None, None]
    # row 0 is tried first and steps with each turn from then on, row 2 is tried in the third turn
    assert [len(counting.committed(row)) for row in rows] == [6, 5, 4]


def test_after_a_kill_from_outside_nobody_is_suspected(counting: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    placed(counting, 0, 20)
    names = names_of_steps(counting, monkeypatch)
    serve(counting, *turns(3), death=Death(5, False, "was killed"))
    assert names == [None] * 3


def test_who_dies_alone_too_is_given_up_and_the_others_are_tried(counting: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    guilty, other = placed(counting, 0, 20), placed(counting, 1, 20)
    names = names_of_steps(counting, monkeypatch)
    actor = serve(counting, *turns(3), death=Death(solo_step(guilty.place), True, "died of SIGSEGV", 2))
    assert counting.end(guilty) == EndCode.ERROR and counting.committed(guilty) == []
    assert actor.sent == [SequenceEnded(1, *guilty.place)]
    assert names == [other.place, None, None, None] and len(counting.committed(other)) == 4


def test_who_is_given_up_here_but_runs_elsewhere_goes_on(counting: Bench) -> None:
    gone = placed(counting, 0, 20)
    counting.table.set_owner(0, 1)
    serve(counting, *turns(3), death=Death(solo_step(gone.place), True, "died of SIGSEGV", 2))
    assert counting.end(gone) == EndCode.NONE


def test_a_suspect_that_went_elsewhere_is_none_here(counting: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, other = placed(counting, 0, 40), placed(counting, 1, 40)
    names = names_of_steps(counting, monkeypatch)
    held: list[set[int]] = []
    monkeypatch.setattr(counting.running, "hold", held.append)
    take = [lambda: counting.table.set_owner(0, None), [Drop(1, *gone.place, 3)], lambda: counting.table.set_owner(0, 1)]
    serve(counting, *take, *turns(4), death=GROUP)
    assert other.place in names and held[-1] == set()


def test_a_trial_that_was_killed_from_outside_begins_again(counting: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [placed(counting, row, 20) for row in range(2)]
    names = names_of_steps(counting, monkeypatch)
    serve(counting, *turns(2), death=Death(solo_step(rows[0].place), False, "was killed", 1))
    assert counting.end(rows[0]) == EndCode.NONE
    assert names[:4] == [rows[0].place, None, rows[1].place, None]


@both_ways
def test_a_suspect_whose_row_is_free_is_none_any_more(counting: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    other, gone = placed(counting, 0, 40), placed(counting, 1, 20)
    names = names_of_steps(counting, monkeypatch)
    held: list[set[int]] = []
    monkeypatch.setattr(counting.running, "hold", held.append)

    def cancel() -> None:
        counting.table.set_phase(1, Phase.ENDING)

    def free() -> None:
        counting.table.set_phase(1, Phase.FREE)

    serve(counting, cancel, [Drop(1, *gone.place, 3)], free, *turns(6), death=GROUP)
    assert other.place in names and held[-1] == set(), "cancelled before its trial"
    assert len(counting.committed(other)) >= 6


@both_ways
def test_suspects_that_have_gone_or_wait_for_pages_hold_nobody_up(counting: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    poor = counting.place([10] * 16, row=0, max_new_tokens=10)
    gone, other = placed(counting, 1, 20), placed(counting, 2, 20)
    counting.table.set_phase(0, Phase.DECODE)
    names = names_of_steps(counting, monkeypatch)

    def end_and_grant() -> None:
        counting.table.set_phase(1, Phase.ENDING)
        counting.table.set_phase(1, Phase.FREE)
        counting.table.begin(1)
        counting.grant(poor, 2)

    drop = Drop(1, *gone.place, 3)
    serve(counting, [drop], [drop], end_and_grant, [], *turns(3), death=GROUP)
    assert other.place in names and poor.place in names
    assert len(counting.committed(other)) >= 5 and len(counting.committed(poor)) >= 2


@both_ways
def test_one_that_raises_alone_ends_without_a_death(counting: Bench) -> None:
    bad, row = counting.place([20], row=0), placed(counting, 1, 6)
    counting.grant_all(bad)
    counting.table.set_phase(0, Phase.DECODE)
    assert isinstance(counting.model, Counting)
    counting.model.broken = frozenset({20})
    serve(counting, *turns(7), death=GROUP)
    assert counting.end(bad) == EndCode.ERROR and counting.end(row) == EndCode.LENGTH
