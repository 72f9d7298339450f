"""Records of log-probabilities: what is written is read, a row's memory comes back, and an unused file takes none."""

import os

import numpy as np
import pytest

from mmrt.schema.rows import Phase
from mmrt.shm.logprob_file import ANSWER, MAX_ALTERNATIVES, PROMPT, LogprobFile, Logprobs
from mmrt.shm.sequence_table import SequenceTable

CONTEXT = 300


def records(num: int, alternatives: int, seed: int = 0) -> Logprobs:
    random = np.random.default_rng(seed)
    own, rank = random.normal(size=num).astype(np.float32), random.integers(1, 99, num, np.int32)
    ids = random.integers(0, 99, (num, alternatives), np.int32)
    return Logprobs(own, rank, ids, random.normal(size=(num, alternatives)).astype(np.float32))


def same(one: Logprobs, other: Logprobs) -> bool:
    return all(map(np.array_equal, one, other))


@pytest.fixture
def table(run):
    with_rows = SequenceTable.create(run, 3, CONTEXT, 4)
    yield with_rows
    with_rows.close()


@pytest.mark.parametrize("alternatives", [0, 1, MAX_ALTERNATIVES])
def test_what_is_written_is_read(run, table, alternatives):
    reader = SequenceTable.attach(run, writable=False).logprobs
    written = {(row, part): records(CONTEXT, alternatives, 10 * row + part) for row in (0, 2) for part in (PROMPT, ANSWER)}
    for (row, part), one in written.items():
        for first, last in ((0, 1), (1, 130), (130, CONTEXT)):
            table.logprobs.write(row, part, first, Logprobs(*(column[first:last] for column in one)))
    for (row, part), one in written.items():
        assert same(reader.read(row, part, 0, CONTEXT, alternatives), one)
        assert same(reader.read(row, part, 17, 140, alternatives), Logprobs(*(column[17:140] for column in one)))
    reader.close()


def test_a_free_row_gives_its_memory_back(run, table):
    file = run.segment_path("logprobs")
    assert file.stat().st_blocks == 0, "nobody has asked"
    table.begin(1)
    table.set_phase(1, Phase.PREPARE)
    for row in (0, 1):
        table.logprobs.write(row, ANSWER, 0, records(CONTEXT, 20))
    used = file.stat().st_blocks
    table.set_phase(1, Phase.FREE)
    assert file.stat().st_blocks <= used // 2 + 8
    assert same(table.logprobs.read(0, ANSWER, 0, CONTEXT, 20), records(CONTEXT, 20)), "another row's stay"


def test_records_that_are_not_there(run, table):
    with pytest.raises(ValueError, match="row 2 has no records of tokens 0 to 5"):
        table.logprobs.read(2, PROMPT, 0, 5, 3)


def test_a_full_file_system_raises(run, table, monkeypatch):
    table.logprobs.write(0, ANSWER, 0, records(1, 0))
    full = LogprobFile(run, CONTEXT, writable=True)
    monkeypatch.setattr(full, "_fd", os.open("/dev/full", os.O_RDWR))
    with pytest.raises(OSError, match="No space left"):
        full.write(0, ANSWER, 0, records(1, 0))
    full.close()
