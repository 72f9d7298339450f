"""Vectors of rows: what stands for how many tokens, whatever step its writer died in."""

from typing import Any

import numpy as np
import pytest

from mmrt.schema.rows import Phase
from mmrt.shm.sequence_table import SequenceTable
from mmrt.shm.vector_file import MAX_VECTOR, VectorFile


@pytest.fixture
def table(run: Any) -> Any:
    with_rows = SequenceTable.create(run, 3, 300, 4)
    yield with_rows
    with_rows.close()


def test_what_is_written_is_read(run: Any, table: Any) -> None:
    """Those of the last two chunks, in any of the rows."""
    reader = SequenceTable.attach(run, writable=False)
    vectors = {row: np.random.default_rng(row).normal(size=size) for row, size in ((0, 1), (2, MAX_VECTOR))}
    for row, vector in vectors.items():
        for start, end in ((0, 7), (7, 20), (20, 21)):
            table.vectors.write(row, start, end, end * vector)
    for row, vector in vectors.items():
        np.testing.assert_array_equal(reader.vectors.read(row, 21), 21 * vector)
        np.testing.assert_array_equal(reader.vectors.read(row, 20), 20 * vector)
        for end in (7, 22):
            with pytest.raises(ValueError, match=f"row {row} has no vector of {end} tokens"):
                reader.vectors.read(row, end)
    with pytest.raises(ValueError, match="row 1 has no vector of 7 tokens"):
        reader.vectors.read(1, 7)
    reader.close()


@pytest.mark.parametrize("num_writes", range(4))
def test_a_writer_that_dies_leaves_what_a_chunk_begins_with(table: Any, num_writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many of its three writes. The chunk is computed again."""
    table.vectors.write(1, 0, 4, np.full(5, 4.0))
    table.vectors.write(1, 4, 9, np.full(5, 9.0))
    write, left = VectorFile.write_at, [num_writes]

    class Died(Exception): ...

    def write_or_die(file: VectorFile, row: int, offset: int, data: bytes) -> None:
        if not left[0]:
            raise Died
        left[0] -= 1
        write(file, row, offset, data)

    monkeypatch.setattr(VectorFile, "write_at", write_or_die)
    if num_writes < 3:
        with pytest.raises(Died):
            table.vectors.write(1, 9, 12, np.full(5, 12.0))
        with pytest.raises(ValueError, match="no vector of 12 tokens"):
            table.vectors.read(1, 12)
    else:
        table.vectors.write(1, 9, 12, np.full(5, 12.0))
    assert table.vectors.read(1, 9).tolist() == [9.0] * 5
    monkeypatch.undo()
    table.vectors.write(1, 9, 12, np.full(5, 12.0))
    assert (table.vectors.read(1, 9).tolist(), table.vectors.read(1, 12).tolist()) == ([9.0] * 5, [12.0] * 5)


def test_a_row_that_begins_again(table: Any) -> None:
    """It was preempted. Its chunks end elsewhere, or where those before have ended."""
    for chunks in ([(0, 4), (4, 9), (9, 12)], [(0, 9), (9, 12)], [(0, 12)], [(0, 3), (3, 4), (4, 12)], [(0, 4), (4, 12)]):
        for start, end in chunks:
            value = 0 if start == 0 else table.vectors.read(1, start)[0]
            assert value == start
            table.vectors.write(1, start, end, np.full(5, float(end)))
        assert table.vectors.read(1, 12).tolist() == [12.0] * 5


def test_a_free_row_gives_its_memory_back(run: Any, table: Any) -> None:
    file = run.segment_path("vectors")
    assert file.stat().st_blocks == 0, "nobody has asked"
    table.begin(1)
    table.set_phase(1, Phase.PREPARE)
    table.vectors.write(1, 0, 4, np.ones(MAX_VECTOR))
    assert file.stat().st_blocks > 0
    table.set_phase(1, Phase.FREE)
    assert file.stat().st_blocks == 0
    with pytest.raises(ValueError, match="no vector of 4 tokens"):
        table.vectors.read(1, 4)
