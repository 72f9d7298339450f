"""Sequence table: what is committed stays, what is not is not seen, and nobody reads another generation's words."""

import json
import random
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mmrt.schema.rows import EndCode, Phase
from mmrt.shm.errors import StaleRow
from mmrt.shm.sequence_table import SequenceTable
from mmrt.shm.versioned import VersionedBlob
from mmrt.tests.settings import examples

ROWS, CONTEXT, PAGES = 3, 6, 5
row_numbers = st.integers(0, ROWS - 1)
blobs = st.binary(max_size=40)


class Row:
    def __init__(self, generation):
        self.generation = generation
        self.phase = Phase.FREE
        self.owner = None
        self.pages = [[], []]
        self.spec = self.state = None
        self.ids = []
        self.end = EndCode.NONE


class TableMachine(RuleBasedStateMachine):
    """Three mappings (controller, decode, reader) against a list of rows. ``…_and_die`` stops a call before any instruction."""

    run: ClassVar
    crashes: ClassVar

    @initialize()
    def create(self):
        for name in ("sequences", "logprobs", "vectors"):
            self.run.segment_path(name).unlink(missing_ok=True)
        self.controller = SequenceTable.create(self.run, ROWS, CONTEXT, PAGES, max_spec_bytes=40, max_state_bytes=40)
        self.decode = SequenceTable.attach(self.run)
        self.reader = SequenceTable.attach(self.run, writable=False)
        self.rows = [Row(0) for _ in range(ROWS)]
        self.random = random.Random(0)

    def dying(self, function, steps, *arguments):
        """Call a method of the controller's or decode's table until it dies; attach again."""
        name = function.__name__
        owner = "decode" if name == "commit" else "controller"
        with self.crashes.before_step(self.crashes.codes(function, VersionedBlob.write), steps):
            getattr(getattr(self, owner), name)(*arguments)
        getattr(self, owner).close()
        setattr(self, owner, SequenceTable.attach(self.run))

    @rule(row=row_numbers, steps=st.none() | st.integers(0, 90))
    def begin(self, row, steps):
        if self.rows[row].phase == Phase.FREE:
            if steps is not None:
                self.dying(SequenceTable.begin, steps, row)
                assert self.controller.phase(row)[1] == Phase.FREE
            generation = self.controller.begin(row)
            assert generation > self.rows[row].generation
            self.rows[row] = Row(generation)

    @rule(row=row_numbers, phase=st.sampled_from(Phase), steps=st.none() | st.integers(0, 30))
    def set_phase(self, row, phase, steps):
        mine = self.rows[row]
        if not mine.generation:
            return
        if steps is None:
            self.controller.set_phase(row, phase)
            mine.phase = phase
        else:
            self.dying(SequenceTable.set_phase, steps, row, phase)
            generation, found = self.controller.phase(row)
            assert (generation, found) == (mine.generation, phase) or found == mine.phase
            self.controller.set_phase(row, found)
            mine.phase = found

    @rule(row=row_numbers, owner=st.none() | st.integers(0, 7), steps=st.none() | st.integers(0, 30))
    def set_owner(self, row, owner, steps):
        mine = self.rows[row]
        if not mine.generation:
            return
        if steps is None:
            self.controller.set_owner(row, owner)
            mine.owner = owner
        else:
            self.dying(SequenceTable.set_owner, steps, row, owner)
            found = self.controller.owner(row, mine.generation)
            assert found in (mine.owner, owner)
            mine.owner = found

    @rule(
        row=row_numbers,
        member=st.integers(0, 1),
        pages=st.lists(st.integers(0, 2**32 - 1), max_size=3),
        steps=st.none() | st.integers(0, 80),
    )
    def append_pages(self, row, member, pages, steps):
        mine = self.rows[row].pages[member]
        if not self.rows[row].generation:
            return
        if len(mine) + len(pages) > PAGES:
            with pytest.raises(ValueError, match=f"exceed its block table of {PAGES}"):
                self.controller.append_pages(row, member, pages)
        elif steps is None:
            self.controller.append_pages(row, member, pages)
            mine.extend(pages)
        else:
            self.dying(SequenceTable.append_pages, steps, row, member, pages)
            found = self.controller.pages(row, member).tolist()
            assert found in (mine, mine + pages)
            self.rows[row].pages[member] = found

    @rule(row=row_numbers, spec=blobs, steps=st.none() | st.integers(0, 90))
    def write_spec(self, row, spec, steps):
        mine = self.rows[row]
        if not mine.generation or mine.spec is not None:
            return
        if steps is not None:
            self.dying(SequenceTable.write_spec, steps, row, spec)
        self.controller.write_spec(row, spec)
        mine.spec = spec

    @rule(row=row_numbers, state=blobs, steps=st.none() | st.integers(0, 160))
    def write_state(self, row, state, steps):
        mine = self.rows[row]
        if not mine.generation:
            return
        if steps is None:
            self.controller.write_state(row, state)
            mine.state = state
        else:
            self.dying(SequenceTable.write_state, steps, row, state)
            found = self.controller.read_state(row)
            assert found in (mine.state, state)
            mine.state = found

    @rule(
        chosen=st.sets(row_numbers, min_size=1),
        stale=st.sets(row_numbers),
        most=st.none() | st.integers(1, 4),
        steps=st.none() | st.integers(0, 120),
    )
    def commit(self, chosen, stale, most, steps):
        chosen = sorted(row for row in chosen if self.rows[row].generation)
        if not chosen:
            return
        rows = np.array(chosen)
        generations = np.array([self.rows[row].generation - (row in stale) for row in chosen])
        nums = [self.random.randint(1, most or 1) for _ in chosen]
        several = [[self.random.randrange(-(2**31), 2**31) for _ in range(most or 1)] for _ in chosen]
        what = (rows, generations, *((np.array(several)[:, 0],) if most is None else (np.array(several), np.array(nums))))
        fresh = [row not in stale for row in chosen]
        if any(now and len(self.rows[row].ids) + num > CONTEXT for row, now, num in zip(chosen, fresh, nums, strict=True)):
            with pytest.raises(ValueError, match=f"rows .* have no room for more ids than {CONTEXT}"):
                self.decode.commit(*what)
            return
        if steps is None:
            counts = self.decode.commit(*what)
        else:
            self.dying(SequenceTable.commit, steps, *what)
            counts = [
                self.reader.committed(row, self.rows[row].generation) * current for row, current in zip(chosen, fresh, strict=True)
            ]
        for row, current, tokens, num, count in zip(chosen, fresh, several, nums, counts, strict=True):
            if current and (steps is None or count > len(self.rows[row].ids)):
                self.rows[row].ids += tokens[:num]
            assert count == (len(self.rows[row].ids) if current else 0)

    @rule(row=row_numbers, code=st.sampled_from(EndCode), stale=st.booleans())
    def set_end(self, row, code, stale):
        mine = self.rows[row]
        if mine.generation:
            self.decode.set_end(row, mine.generation - stale, code)
            if not stale:
                mine.end = code

    @invariant()
    def equal(self):
        if not hasattr(self, "rows"):
            return
        for row, mine in enumerate(self.rows):
            generation = mine.generation
            assert self.reader.end(row, generation) == mine.end
            assert self.reader.committed(row, generation) == len(mine.ids)
            assert self.reader.ids[row, : len(mine.ids)].tolist() == mine.ids
            for other in (generation - 1, generation + 1):
                if other > 0:
                    assert self.reader.committed(row, other) == 0
                    assert self.reader.end(row, other) == EndCode.NONE
                    with pytest.raises(StaleRow):
                        self.reader.read_spec(row, other)
            assert self.reader.read_state(row) == mine.state
            assert [self.reader.pages(row, member).tolist() for member in (0, 1)] == mine.pages
            if mine.spec is None:
                with pytest.raises(StaleRow, match=f"row {row} has no spec of generation {max(1, generation)}"):
                    self.reader.read_spec(row, max(1, generation))
            else:
                assert self.reader.read_spec(row) == self.reader.read_spec(row, generation) == mine.spec
            if mine.phase != Phase.FREE:
                assert self.reader.phase(row) == (generation, mine.phase)
        for phase in (Phase.PREPARE, Phase.DECODE, Phase.ENDING):
            expected = [(row, mine.generation) for row, mine in enumerate(self.rows) if mine.phase == phase]
            assert self.reader.rows_in(phase) == expected
        for owner in range(8):
            expected = [(row, r.generation) for row, r in enumerate(self.rows) if r.phase == Phase.DECODE and r.owner == owner]
            assert self.reader.rows_of(owner) == expected
        for row, mine in enumerate(self.rows):
            assert self.reader.owner(row, mine.generation) == mine.owner
            assert self.reader.owner(row, mine.generation + 1) is None

    def teardown(self):
        for table in (self.controller, self.decode, self.reader):
            table.close()


def test_table_is_its_rows(run, crashes):
    TableMachine.run, TableMachine.crashes = run, crashes
    run_state_machine_as_test(TableMachine, settings=settings(max_examples=examples(60), stateful_step_count=30, deadline=None))


@pytest.fixture
def table(run):
    table = SequenceTable.create(run, 8, 64, 8, max_spec_bytes=2048, max_state_bytes=4096)
    yield table
    table.close()


def test_limits_are_named(table):
    table.begin(0)
    for call, message in (
        (lambda: table.write_spec(0, bytes(2049)), "2049 bytes exceeds 2048"),
        (lambda: table.write_state(0, bytes(4097)), "4097 bytes .* exceeds 4096"),
        (lambda: table.write_prompt(0, 0, [1] * 65), "65 tokens exceeds the context of 64"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    table.write_spec(0, bytes(2048))
    table.write_state(0, bytes(4096))
    table.write_prompt(0, 1, range(64))
    assert table.prompt_ids(0, 1, 64).tolist() == list(range(64))


@pytest.mark.parametrize("row", [-1, ROWS])
def test_no_row_outside_the_table_is_written(run, row):
    """A negative index would name a row from the end: the record, pages or ids of another request."""
    table = SequenceTable.create(run, ROWS, CONTEXT, PAGES)
    for number in range(ROWS):
        table.begin(number)
    before = bytes(table._segment.buf)
    for write in (
        lambda: table.begin(row),
        lambda: table.set_phase(row, Phase.DECODE),
        lambda: table.set_owner(row, 1),
        lambda: table.write_prompt(row, 0, [1]),
        lambda: table.append_pages(row, 0, [1]),
        lambda: table.write_spec(row, b"spec"),
        lambda: table.write_state(row, b"state"),
        lambda: table.set_end(row, 1, EndCode.LENGTH),
        lambda: table.commit(np.array([0, row]), np.array([1, 1]), np.array([7, 7])),
    ):
        with pytest.raises((AssertionError, IndexError), match=rf"(?i)no row {row}|index {row}"):
            write()
    assert bytes(table._segment.buf) == before
    table.close()


def test_a_row_in_use_is_not_begun(table):
    table.begin(1)
    table.set_phase(1, Phase.PREPARE)
    with pytest.raises(AssertionError, match="row 1 is in use"):
        table.begin(1)


def test_a_commit_to_an_earlier_life_of_a_row_is_left_out(table):
    rows, now = np.arange(3), np.array([table.begin(row) for row in range(3)])
    table.commit(rows, now, np.array([7, 7, 7]))
    assert table.commit(rows, now - np.array([0, 1, 0]), np.array([8, 9, 8])).tolist() == [2, 0, 2]
    assert [table.committed(row, now[row]) for row in rows] == [2, 1, 2]


@pytest.mark.parametrize("rows", [1, 64])
def test_commit_is_cheap(run, rows):
    """Well under 50 µs for 64 rows; the bound here only catches loops over rows on a busy machine."""
    import timeit

    table = SequenceTable.create(run, rows, 4096, 8)
    generations = np.array([table.begin(row) for row in range(rows)])
    numbers = np.arange(rows)
    best = min(timeit.repeat(lambda: table.commit(numbers, generations, numbers), number=50, repeat=20)) / 50
    table.close()
    assert best < 100e-6


def _token(row, generation, position):
    return (row * 1_000_003 + generation * 7919 + position * 31) % 2**31


def test_decode_killed_anywhere_loses_and_invents_nothing(run, crashes, table):
    """This process is the controller and the reader; each decode continues from what the table says."""
    for row in range(table.num_rows):
        table.begin(row)
        table.set_phase(row, Phase.DECODE)
    seen = [0] * table.num_rows
    finished = [0]

    def decode():
        mine = SequenceTable.attach(run)
        choice = random.Random()
        while True:
            live = [(row, generation) for row, generation in mine.rows_in(Phase.DECODE) if not mine.end(row, generation)]
            batch = choice.sample(live, min(len(live), choice.randrange(1, 9)))
            batch = [pair for pair in batch if mine.committed(*pair) < mine.max_context]
            rows, generations = (np.array([pair[part] for pair in batch], np.int64) for part in (0, 1))
            counts = [mine.committed(*pair) for pair in batch]
            nums = np.array([min(choice.randint(1, 3), mine.max_context - count) for count in counts], np.int64)
            tokens = np.array(
                [[_token(*pair, at + more) for more in range(3)] for pair, at in zip(batch, counts, strict=True)], np.int64
            )
            if batch and choice.random() < 0.5:
                mine.commit(rows, generations, tokens[:, 0])
            elif batch:
                mine.commit(rows, generations, tokens, nums)
            for pair in live:
                if mine.committed(*pair) == mine.max_context:
                    mine.set_end(*pair, EndCode.LENGTH)

    def observe():
        for row in range(table.num_rows):
            generation = table.phase(row)[0]
            ended = table.end(row, generation)
            ids = table.ids[row, : table.committed(row, generation)].tolist()
            assert ids == [_token(row, generation, position) for position in range(len(ids))], f"row {row}"
            assert len(ids) >= seen[row]
            seen[row] = len(ids)
            if ended:
                assert len(ids) == table.max_context
                for phase in (Phase.ENDING, Phase.FREE):
                    table.set_phase(row, phase)
                assert table.begin(row) == generation + 1
                table.set_phase(row, Phase.DECODE)
                seen[row] = 0
                finished[0] += 1

    functions = (decode, SequenceTable.commit, SequenceTable.set_end, SequenceTable.rows_in, SequenceTable._tagged)
    crashes.storm(
        lambda: crashes.victim(decode, crashes.codes(*functions)), observe, kills=120, enough=lambda: finished[0] + sum(seen) > 0
    )
    print(f"{finished[0]} sequences")
    assert finished[0] + sum(seen) > 0


def test_controller_killed_anywhere_leaves_only_whole_rows(run, crashes, table):
    """Spec, state, pages and phase of every row belong together, whenever a new controller or a reader looks."""
    versions = {}

    def spec(row, generation):
        return json.dumps([row, generation, "d" * ((row * 131 + generation * 17) % 1500)]).encode()

    def state(row, generation, version):
        return json.dumps([row, generation, version, "s" * ((version * 331 + generation) % 3000)]).encode()

    def control():
        mine = SequenceTable.attach(run)
        for row in range(mine.num_rows):  # a new controller takes every row to its end
            mine.set_phase(row, Phase.FREE)
        while True:
            for row in range(mine.num_rows):
                generation = mine.begin(row)
                mine.append_pages(row, 0, [row + generation])
                mine.write_state(row, state(row, generation, 0))
                mine.set_phase(row, Phase.PREPARE)
                mine.write_spec(row, spec(row, generation))
                mine.set_phase(row, Phase.DECODE)
                for version in range(1, 4):
                    mine.append_pages(row, 0, [row + generation + 2 * version - 1, row + generation + 2 * version])
                    mine.write_state(row, state(row, generation, version))
                mine.set_phase(row, Phase.FREE)

    def observe():
        for row in range(table.num_rows):
            generation, phase = table.phase(row)
            if phase == Phase.FREE:
                continue
            record = table.read_state(row)
            pages = table.pages(row, 0).tolist()
            try:
                found = table.read_spec(row, generation)
            except StaleRow:
                found = None
            if table.phase(row) != (generation, phase) or table.generation[row] != generation:
                continue  # the living child moved on while this was read
            assert pages == [row + generation + step for step in range(len(pages))]
            assert record is not None
            version = json.loads(record)[2]
            assert record == state(row, generation, version)
            assert version >= versions.get((row, generation), 0)
            versions[row, generation] = version
            assert 2 * version + 1 <= len(pages) <= 7
            assert found == spec(row, generation) or (phase == Phase.PREPARE and found is None)

    functions = (control, SequenceTable.begin, SequenceTable.set_phase, SequenceTable.append_pages)
    blobs = (SequenceTable.write_spec, SequenceTable.write_state, VersionedBlob.write)
    codes = crashes.codes(*functions, *blobs)
    crashes.storm(lambda: crashes.victim(control, codes), observe, kills=120, enough=lambda: len(versions) > 3)
