"""Status words, the controller's numbers, and the blob beneath them: readable when nobody lives, and never half of two."""

import itertools
import os
import signal
import sys
import threading
import time
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mmrt.shm.controller_stats import ControllerStats, PoolUse, StatsSnapshot
from mmrt.shm.errors import MissingError
from mmrt.shm.segment import HEADER_BYTES, Segment
from mmrt.shm.status import ActorState, ActorStatus, ActorTable, Membership
from mmrt.shm.versioned import VersionedBlob
from mmrt.tests.settings import examples

MAX_BYTES = 100
BLOB_OFFSET = HEADER_BYTES + 64


def _blob(segment):
    return VersionedBlob(segment, HEADER_BYTES // 8, BLOB_OFFSET, MAX_BYTES)


@pytest.fixture
def blob_segment(place):
    with Segment.create(place / "blob", BLOB_OFFSET + 2 * VersionedBlob.slot_bytes(MAX_BYTES)) as segment:
        yield segment


class BlobMachine(RuleBasedStateMachine):
    """The last whole write under a tag, whatever died since."""

    segment: ClassVar
    crashes: ClassVar

    @initialize()
    def start(self):
        self.writer = _blob(self.segment)
        self.tag, self.value = 1, b""
        self.writer.write(1, b"")

    @rule(tag=st.integers(1, 3), value=st.binary(max_size=MAX_BYTES + 5))
    def write(self, tag, value):
        if len(value) > MAX_BYTES:
            with pytest.raises(ValueError, match=f"{len(value)} bytes .* exceeds {MAX_BYTES}"):
                self.writer.write(tag, value)
        else:
            self.writer.write(tag, value)
            self.tag, self.value = tag, value

    @rule(tag=st.integers(1, 3), value=st.binary(max_size=MAX_BYTES), steps=st.integers(0, 130))
    def write_and_die(self, tag, value, steps):
        with self.crashes.before_step(self.crashes.codes(VersionedBlob.write), steps):
            self.writer.write(tag, value)
        self.writer = _blob(self.segment)
        found = self.writer.read(tag)
        if (self.tag, self.value) != (tag, found):
            assert found in (None, value)
        if found is not None:
            self.tag, self.value = tag, found

    @invariant()
    def read(self):
        for tag in range(4):
            assert _blob(self.segment).read(tag) == (self.value if tag == self.tag else None)


def test_blob_is_its_last_write(blob_segment, crashes):
    BlobMachine.segment, BlobMachine.crashes = blob_segment, crashes
    run_state_machine_as_test(BlobMachine, settings=settings(max_examples=examples(60), stateful_step_count=20, deadline=None))
    del BlobMachine.segment


def test_every_instruction_of_a_blob_write_can_be_the_last(blob_segment, crashes):
    codes = crashes.codes(VersionedBlob.write)
    outcomes = set()
    for steps in itertools.count():
        _blob(blob_segment).write(1, b"old")
        with crashes.before_step(codes, steps) as crashed:
            _blob(blob_segment).write(1, b"the new one")
        found = _blob(blob_segment).read(1)
        assert found in (b"old", b"the new one")
        outcomes.add(found)
        _blob(blob_segment).write(1, b"next")
        assert _blob(blob_segment).read(1) == b"next"
        if not crashed[0]:
            break
    assert len(outcomes) == 2


def test_a_head_of_two_writes_vouches_for_nothing(blob_segment):
    """As a reader has it that was stopped behind the word: the word of one write, the rest of the next but one, not yet published."""
    blob = _blob(blob_segment)
    blob.write(1, b"one")
    word = blob_segment.words[blob._word]
    blob.write(1, b"two")
    blob.write(1, b"three")
    start = blob._offset + (word & 1) * blob._stride
    blob_segment.buf[start : start + 8] = word.to_bytes(8, sys.byteorder)
    blob_segment.words[blob._word] = word
    assert blob.read(1) is None


def test_a_blob_writer_killed_anywhere_is_never_half_seen(blob_segment, crashes):
    """With a reader that looks all the time, and versions that only grow."""
    reader, last = _blob(blob_segment), [0]

    def write():
        mine = _blob(blob_segment)
        start = int((mine.read(1) or b"0").split(b":")[0])
        for version in itertools.count(start + 1):
            mine.write(1, b"%d:" % version + bytes([version % 256]) * (version % 80))

    def observe():
        value = reader.read(1)
        if value is not None:
            number, _, body = value.partition(b":")
            version = int(number)
            assert body == bytes([version % 256]) * (version % 80)
            assert version >= last[0]
            last[0] = version

    codes = crashes.codes(write, VersionedBlob.write)
    crashes.storm(lambda: crashes.victim(write, codes), observe, kills=100, enough=lambda: last[0] > 30)


def test_actor_table_tells_what_actors_wrote(run):
    table = ActorTable.create(run, ["decode", "prefill"])
    reader = ActorTable.attach(run, writable=False)
    assert reader.actors == ("decode", "prefill")
    assert reader.read("prefill").state == ActorState.ABSENT
    status = table.writer("prefill", 4)
    status.set_state(ActorState.ACTIVE)
    status.set_queue_depth(3)
    with status.step(11, deadline_s=2.0):
        found = reader.read("prefill")
        assert (found.step_plan, found.steps) == (11, 0)
        assert found.step_deadline_ns == found.step_start_ns + 2_000_000_000
        assert not found.is_overdue(found.step_deadline_ns)
        assert found.is_overdue(found.step_deadline_ns + 1)
        status.postpone(5_000)
        assert reader.read("prefill").step_deadline_ns == found.step_deadline_ns + 5_000
    status.postpone(5_000)
    found = reader.read("prefill")
    assert (found.state, found.generation, found.pid, found.steps) == (ActorState.ACTIVE, 4, os.getpid(), 1)
    assert found.step_deadline_ns == 0 and not found.is_overdue(2**63)
    assert found.queue_depth == 3
    assert found.busy_ns > 0 and found.started_ns > 0
    assert reader.read("decode").state == ActorState.ABSENT
    for thing in (table, reader):
        thing.close()


def test_counts_of_an_actor_begin_anew_with_each_generation(run):
    table = ActorTable.create(run, ["decode"])
    status = table.writer("decode", 1)
    status.set_guesses(7 + (5 << 32), 3)
    status.set_borrowed(1 << 40)
    found = table.read("decode")
    assert (found.num_guesses, found.num_right_guesses, found.borrowed_ns) == (7, 3, 1 << 40)
    table.writer("decode", 2)
    found = table.read("decode")
    assert (found.num_guesses, found.num_right_guesses, found.borrowed_ns) == (0, 0, 0)
    table.close()


def test_a_step_that_raises_stands(run):
    """It is what the process dies of; the next generation looks."""
    table = ActorTable.create(run, ["video"])
    status = table.writer("video", 1)
    status.set_inheritance(5, 3, 77)
    with pytest.raises(RuntimeError), status.step(9, 1.0):
        raise RuntimeError
    found = table.read("video")
    assert found.step_deadline_ns > 0 and found.raised and found.step_plan == 9 and found.steps == 0
    assert (found.oom_kills, found.crashes, found.step_cost_ns) == (5, 3, 77)
    table.writer("video", 2).set_step_cost(78)
    found = table.read("video")
    assert not found.raised and (found.oom_kills, found.crashes, found.step_cost_ns) == (0, 0, 78)
    table.close()


def test_unknown_actors_are_named(run):
    table = ActorTable.create(run, ["video"])
    with pytest.raises(ValueError, match=r"no actor 'vidoe' in this run \(there are video\)"):
        table.read("vidoe")
    table.close()
    run.segment_path("actors").unlink()
    with pytest.raises(ValueError, match="1 to 32 bytes"):
        ActorTable.create(run, ["x" * 33])
    with pytest.raises(MissingError):
        ActorTable.attach(run)


def test_actors_join_and_leave_and_keep_their_numbers(run):
    table = ActorTable.create(run, ["decode", "prefill"])
    reader = ActorTable.attach(run, writable=False)
    version = reader.version
    table.set_membership("decode.1", Membership.PRESENT)
    assert reader.actors == reader.present == ("decode", "prefill", "decode.1") and reader.version > version
    table.writer("decode.1", 3).set_state(ActorState.ACTIVE)
    table.set_membership("decode.1", Membership.LEAVING)
    assert reader.present == reader.actors and reader.leaving == ("decode.1",)
    table.set_membership("decode.1", Membership.GONE)
    table.set_membership("encoder", Membership.PRESENT)
    assert reader.actors == ("decode", "prefill", "decode.1", "encoder")
    assert reader.present == ("decode", "prefill", "encoder") and reader.leaving == ()
    assert reader.read("decode.1").generation == 3, "its words stay"
    table.set_membership("decode.1", Membership.PRESENT)
    assert reader.actors.index("decode.1") == 2
    table.set_membership("decode.1", Membership.PRESENT, 1)
    table.set_membership("decode.1", Membership.LEAVING)
    assert reader.devices == {"decode": 0, "prefill": 0, "decode.1": 1, "encoder": 0} and reader.leaving == ("decode.1",)
    for number in range(60):
        table.set_membership(f"video.{number}", Membership.PRESENT)
    with pytest.raises(ValueError, match="at most 64 actors"):
        table.set_membership("one more", Membership.PRESENT)
    for thing in (table, reader):
        thing.close()


def test_a_supervisor_that_dies_as_an_actor_joins_leaves_a_whole_table(run, crashes):
    ActorTable.create(run, ["decode"]).close()
    for steps in itertools.count():
        table = ActorTable.attach(run, writable=True)
        before = table.actors
        with crashes.before_step(crashes.codes(ActorTable.set_membership), steps) as crashed:
            table.set_membership(f"decode.{steps}", Membership.PRESENT)
        table.close()
        reader = ActorTable.attach(run, writable=False)
        assert reader.actors in (before, (*before, f"decode.{steps}"))
        reader.close()
        if not crashed[0]:
            break
    assert steps > 10


def test_a_new_generation_never_shows_the_old_ones_words(run, crashes):
    """Exhaustive over the instructions at which the new writer dies while it takes the row over."""
    table = ActorTable.create(run, ["decode"])
    states = set()
    for steps in itertools.count():
        old = table.writer("decode", 1)
        old.set_state(ActorState.ACTIVE)
        old.begin_step(99, 5.0)
        with crashes.before_step(crashes.codes(ActorStatus.__init__, ActorStatus.set_state), steps) as crashed:
            table.writer("decode", 2)
        found = table.read("decode")
        states.add((found.generation, found.state))
        if found.generation == 2:
            assert (found.step_deadline_ns, found.step_plan, found.steps) == (0, 0, 0)
        elif found.generation == 1:
            assert found.step_plan == 99
        if not crashed[0]:
            break
    assert states == {(1, ActorState.ACTIVE), (0, ActorState.ABSENT), (2, ActorState.STARTING)}
    table.close()


def test_status_is_there_when_nobody_lives(run, crashes):
    def controller_and_actor():
        ActorTable.create(run, ["decode"]).writer("decode", 3).set_state(ActorState.ACTIVE)
        ControllerStats.create(run).publish(snapshot)
        os.kill(os.getpid(), signal.SIGKILL)

    snapshot = StatsSnapshot(epoch=2, running=4, generated_tokens_total=2**40, pools={"kv": PoolUse(10, 3)}, tbt_s=0.5)
    child = crashes.Child(controller_and_actor)
    assert child.wait() == -signal.SIGKILL
    actors, stats = ActorTable.attach(run, writable=False), ControllerStats.attach(run)
    assert actors.read("decode").pid == child.pid
    assert stats.read() == snapshot
    actors.close()
    stats.close()


def test_stats_before_the_first(run):
    stats = ControllerStats.create(run)
    assert stats.read() == StatsSnapshot()
    stats.publish(StatsSnapshot(waiting=1))
    stats.publish(StatsSnapshot(waiting=2))
    assert stats.read().waiting == 2
    stats.close()


def test_others_see_who_computes_until_it_says_or_dies(run, crashes):
    """Its death is Linux's to note: nobody else lives who could, and no later generation comes."""
    table = ActorTable.create(run, ["decode", "prefill", "encoder"])
    look = ActorTable.attach(run).lookout(["encoder", "prefill", "decode"])

    def compute_and_die():
        ActorTable.attach(run).writer("prefill", 1).set_computing(True)
        assert look() == 0b110
        os.kill(os.getpid(), signal.SIGKILL)

    decode = table.writer("decode", 1)
    assert look() == 0
    decode.set_computing(True)
    assert look() == 0b100
    assert crashes.Child(compute_and_die).wait() == -signal.SIGKILL
    assert look() == 0b100
    decode.set_computing(False)
    assert look() == 0
    prefill = table.writer("prefill", 2)
    prefill.set_computing(True)
    assert look() == 0b010
    prefill.set_computing(False)
    with pytest.raises(ValueError, match="no actor 'video'"):
        table.lookout(["decode", "video"])
    table.close()


def test_an_actor_computes_in_one_thread(run):
    """Also in a process of several: a thread that ends computes no more, and another one does not speak for it."""
    table = ActorTable.create(run, ["decode"])
    status, look = table.writer("decode", 1), table.lookout(["decode"])
    thread = threading.Thread(target=status.set_computing, args=(True,))
    thread.start()
    thread.join()
    until_s = time.monotonic() + 30
    while look():  # Python joins a thread before Linux has ended it
        assert time.monotonic() < until_s
        time.sleep(0.001)
    status.set_computing(True)
    with pytest.raises(RuntimeError, match="another thread"):
        status.set_computing(True)
    status.set_computing(False)
    table.close()


@pytest.mark.parametrize(("holder", "others"), [(0x3FFF_FFFF, 0), (0, 0x5A5A_5A5A_5A5A_5A5A)])
def test_what_a_generation_leaves_there_does_not_outlast_it(run, holder, others):
    """Linux clears nothing where a process that is killed for memory loses its stack before its locks, and one that was taken over can
    write any bytes into its own page."""
    table = ActorTable.create(run, ["decode"])
    table.writer("decode", 1)
    table._own["decode"][16] |= holder
    table._own["decode"][17:] |= others
    look = table.lookout(["decode"])
    assert look() == bool(holder)
    status = table.writer("decode", 2)
    assert look() == 0
    status.set_computing(True)
    assert look() == 1
    status.set_computing(False)
    table.close()
