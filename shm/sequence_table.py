"""The sequence table: one row per live sequence, and the truth about it. A CFG pair is one row with two members.

The controller writes the spec, prompt, block tables, phase, owner and its own state; the decode actor that owns the row appends ids and
sets the end, as prefill may with the first id before there is an owner; all others read. So each word has one writer at a time. A row's
contents belong to its generation: a reader that asks for another one finds nothing committed and nothing ended.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..schema.rows import EndCode, Phase
from .errors import StaleRow
from .fence import fence
from .logprob_file import LogprobFile
from .page_table import PageTable
from .run_directory import RunDirectory
from .segment import Field, Layout, Segment
from .vector_file import VectorFile
from .versioned import VersionedBlob

NUM_MEMBERS = 2  # conditional, companion

_KIND = "sequence"
_NAME = "sequences"
_LOW = 0xFFFFFFFF


def split_prefilled(words: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens and the slots of words of ``SequenceTable.prefilled``."""
    return (words & _LOW).astype(np.int64), (words >> 32).astype(np.int64)


class _Geometry(NamedTuple):
    num_rows: int
    max_context: int
    max_pages: int
    max_spec_bytes: int
    max_state_bytes: int


class _Fields:
    """The places of all fields. Fields of different writers lie on different cache lines."""

    def __init__(self, geometry: _Geometry) -> None:
        rows, max_context, max_pages, max_spec_bytes, max_state_bytes = geometry
        self.layout = layout = Layout()
        self.generation = layout.add(rows, np.uint64)
        self.phases = layout.add(rows, np.uint64)
        self.owners = layout.add(rows, np.uint64)
        self.num_pages = layout.add((rows, NUM_MEMBERS), np.uint64)
        self.num_source_pages = layout.add((rows, NUM_MEMBERS), np.uint64)
        self.num_window_pages = layout.add((rows, NUM_MEMBERS), np.uint64)
        self.num_source_windows = layout.add((rows, NUM_MEMBERS), np.uint64)
        self.prefilled = layout.add((rows, NUM_MEMBERS), np.uint64)
        self.state_table = layout.add((rows, NUM_MEMBERS, 2), np.int64)
        self.snapshot_page = layout.add((rows, NUM_MEMBERS), np.int64)
        self.log_page = layout.add((rows, NUM_MEMBERS), np.int64)
        self.source_states = layout.add((rows, NUM_MEMBERS, 4), np.int64)
        self.spec_words = layout.add(rows, np.uint64)
        self.state_words = layout.add(rows, np.uint64)
        self.counts = layout.add(rows, np.uint64)
        self.ends = layout.add(rows, np.uint64)
        self.first_times = layout.add((rows, 2), np.uint64)
        self.block_table = layout.add((rows, NUM_MEMBERS, max_pages), np.uint32)
        self.source_table = layout.add((rows, NUM_MEMBERS, max_pages), np.uint32)
        self.window_table = layout.add((rows, NUM_MEMBERS, max_pages), np.uint32)
        self.source_window_table = layout.add((rows, NUM_MEMBERS, max_pages), np.uint32)
        self.prompt = layout.add((rows, NUM_MEMBERS, max_context), np.int32)
        self.ids = layout.add((rows, max_context), np.int32)
        self.specs = layout.add((rows, max_spec_bytes), np.uint8)
        self.states = layout.add((rows, 2 * VersionedBlob.slot_bytes(max_state_bytes)), np.uint8)


class SequenceTable:
    """Words and arrays (R rows, M = 2 members):

    written by the controller: ``generation`` [R], ``phases`` [R] (generation << 8 | Phase), ``owners`` [R] (generation << 8 |
    number of the decode actor + 1, or 0: none), ``num_pages``, ``num_source_pages``, ``num_window_pages``, ``num_source_windows`` and
    ``prefilled`` [R, M] (slot << 32 | tokens) uint64; ``state_table`` [R, M, 2] int64: pages of recurrent states, ``snapshot_page``
    [R, M]: of one that the cache has, and ``log_page`` [R, M] int64, of the pools beside that in which the row is decoded, -1: none;
    ``source_states`` [R, M, 4]: the same (states, log, snapshot) where its prompt is prefilled, if elsewhere. The slot says which state
    is that of the prefilled tokens' last border: the first, the second, or the snapshot (``SNAPSHOT_SLOT``), until more are prefilled;
    ``block_table`` and ``source_table`` [R, M, max_pages] uint32: pages of the pool in which the row is decoded, and of the one in
    which its prompt is prefilled, where that is another; ``window_table`` and ``source_window_table`` alike: pages of the pools of
    layers with a window, of which those before the window are of others by now; ``prompt`` [R, M, max_context] int32;
    written by decode: ``counts`` [R] (generation << 32 | committed ids), ``ends`` [R] (generation << 32 | EndCode) uint64;
    ``ids`` [R, max_context] int32;
    written by prefill: ``first_times`` [R, 2] uint64: a generation, and when its first id was committed. ``logprobs`` are those of ids
    and prompts, ``vectors`` are pooled from prompts, where somebody asks.
    """

    def __init__(self, segment: Segment, run: RunDirectory) -> None:
        """Use ``create`` or ``attach``."""
        geometry = _Geometry(*segment.geometry[: len(_Geometry._fields)])
        fields = _Fields(geometry)
        segment.expect_bytes(fields.layout.num_bytes)
        self._segment = segment
        self.num_rows, self.max_context, self.max_pages, self.max_spec_bytes, self.max_state_bytes = geometry
        self.generation: NDArray[np.uint64] = segment.field(fields.generation)
        self.phases: NDArray[np.uint64] = segment.field(fields.phases)
        self.owners: NDArray[np.uint64] = segment.field(fields.owners)
        self.num_pages: NDArray[np.uint64] = segment.field(fields.num_pages)
        self.num_window_pages: NDArray[np.uint64] = segment.field(fields.num_window_pages)
        self.prefilled: NDArray[np.uint64] = segment.field(fields.prefilled)
        self.state_table: NDArray[np.int64] = segment.field(fields.state_table)
        self.snapshot_page: NDArray[np.int64] = segment.field(fields.snapshot_page)
        self.log_page: NDArray[np.int64] = segment.field(fields.log_page)
        self.source_states: NDArray[np.int64] = segment.field(fields.source_states)
        self.block_table: NDArray[np.uint32] = segment.field(fields.block_table)
        self.window_table: NDArray[np.uint32] = segment.field(fields.window_table)
        self.prompt: NDArray[np.int32] = segment.field(fields.prompt)
        self.counts: NDArray[np.uint64] = segment.field(fields.counts)
        self.ends: NDArray[np.uint64] = segment.field(fields.ends)
        self.first_times: NDArray[np.uint64] = segment.field(fields.first_times)
        self.ids: NDArray[np.int32] = segment.field(fields.ids)
        self.logprobs = LogprobFile(run, self.max_context, writable=segment.writable)
        self.vectors = VectorFile(run, writable=segment.writable)
        self._generation = _word(fields.generation)
        self._phase = _word(fields.phases)
        self._owner = _word(fields.owners)
        self._pages = PageTable(segment, fields.block_table, fields.num_pages)
        self._source_pages = PageTable(segment, fields.source_table, fields.num_source_pages)
        self._window_pages = PageTable(segment, fields.window_table, fields.num_window_pages)
        self._source_windows = PageTable(segment, fields.source_window_table, fields.num_source_windows)
        self._count = _word(fields.counts)
        self._end = _word(fields.ends)
        self._spec_word = _word(fields.spec_words)
        self._specs = fields.specs.offset
        stride = 2 * VersionedBlob.slot_bytes(self.max_state_bytes)
        self._states = [
            VersionedBlob(segment, _word(fields.state_words) + row, fields.states.offset + row * stride, self.max_state_bytes)
            for row in range(self.num_rows)
        ]

    @classmethod
    def create(
        cls,
        run: RunDirectory,
        num_rows: int,
        max_context: int,
        max_pages: int,
        *,
        max_spec_bytes: int = 65536,
        max_state_bytes: int = 131072,
    ) -> Self:
        """Make the table; ``max_pages`` is the length of one member's block table. Raises: SpaceError, FileExistsError."""
        geometry = _Geometry(num_rows, max_context, max_pages, max_spec_bytes, max_state_bytes)
        num_bytes = _Fields(geometry).layout.num_bytes
        table = cls(Segment.create(run.segment_path(_NAME), num_bytes, kind=_KIND, geometry=geometry), run)
        table.logprobs.create()
        table.vectors.create()
        return table

    @classmethod
    def attach(cls, run: RunDirectory, writable: bool = True) -> Self:
        """Map the table. Raises: MissingError, SegmentError."""
        return cls(Segment.attach(run.segment_path(_NAME), kind=_KIND, writable=writable), run)

    def close(self) -> None:
        """Drop the table's own views; the memory stays mapped while others are around."""
        del self.generation, self.phases, self.owners, self.num_pages, self.num_window_pages, self.prefilled
        del self._pages, self._source_pages, self._window_pages, self._source_windows
        del self.state_table, self.snapshot_page, self.log_page, self.source_states
        del self.block_table, self.window_table, self.prompt, self.counts, self.ends, self.ids
        del self.first_times
        self.logprobs.close()
        self.vectors.close()
        self._segment.close()

    def begin(self, row: int) -> int:
        """Give a FREE row its next generation and return it: no pages, nothing prefilled, and FREE until ``set_phase``.

        A controller that dies in between leaves a free row: write the spec or the state first, the phase last.
        """
        self._check_row(row)
        words = self._segment.words
        assert words[self._phase + row] & 0xFF == Phase.FREE, f"row {row} is in use"
        generation = words[self._generation + row] + 1
        words[self._generation + row] = generation
        fence()
        self.clear_pages(row)
        return generation

    def clear_pages(self, row: int) -> None:
        """Empty the row's tables of pages: nothing is prefilled."""
        self._check_row(row)
        for table in (self._pages, self._source_pages, self._window_pages, self._source_windows):
            table.clear(row)
        self.prefilled[row] = 0
        self.state_table[row] = self.snapshot_page[row] = self.log_page[row] = self.source_states[row] = -1

    def clear_source(self, row: int) -> None:
        """Empty the row's tables of pages of another pool than its own: that of KV pages last."""
        self.source_states[row] = -1
        self._source_windows.clear(row)
        self._source_pages.clear(row)

    def set_phase(self, row: int, phase: Phase) -> None:
        """Move the row's current generation to ``phase``; a reader that sees it also sees all earlier writes."""
        self._check_row(row)
        if phase == Phase.FREE:
            self.logprobs.release(row)
            self.vectors.release(row)
        fence()
        self._segment.words[self._phase + row] = self._segment.words[self._generation + row] << 8 | phase

    def set_owner(self, row: int, decode: int | None) -> None:
        """Give the row's current generation to the decode actor of this number, or to none. The one before has left it, or is dead."""
        self._check_row(row)
        fence()
        words, owner = self._segment.words, 0 if decode is None else decode + 1
        words[self._owner + row] = words[self._generation + row] << 8 | owner

    def set_prefilled(self, row: int, member: int, num_tokens: int, slot: int = 0) -> None:
        """Say how many tokens of a member are prefilled, and which of its states is theirs: one word."""
        self._check_row(row)
        self.prefilled[row, member] = slot << 32 | num_tokens

    def num_prefilled(self, row: int) -> tuple[int, int]:
        """The prefilled tokens per member."""
        first, second = (self.prefilled[row] & _LOW).tolist()
        return first, second

    def state_slots(self, row: int) -> tuple[int, int]:
        """Which of its states is that of the prefilled tokens' last border, per member."""
        first, second = (self.prefilled[row] >> 32).tolist()
        return first, second

    def state_pages(self, row: int, member: int) -> tuple[tuple[int, int], int, int]:
        """A member's pages of recurrent states, its log, and the snapshot that it begins from; -1 is none."""
        first, second = self.state_table[row, member].tolist()
        return (first, second), int(self.log_page[row, member]), int(self.snapshot_page[row, member])

    def set_state_pages(self, row: int, member: int, states: Sequence[int], log: int, snapshot: int = -1) -> None:
        """Give a member its pages of recurrent states, its log, and the snapshot that it begins from, or none (-1)."""
        self._check_row(row)
        self.snapshot_page[row, member] = snapshot
        self.log_page[row, member] = log
        self.state_table[row, member] = states

    def source_state_pages(self, row: int, member: int) -> tuple[tuple[int, int], int, int]:
        """The same, beside the pool in which its prompt is prefilled, where that is another."""
        *states, log, snapshot = self.source_states[row, member].tolist()
        return (states[0], states[1]), log, snapshot

    def set_source_state_pages(self, row: int, member: int, states: Sequence[int], log: int, snapshot: int = -1) -> None:
        """Give a member such pages beside the pool in which its prompt is prefilled, where that is another: the states last."""
        self.source_states[row, member, 2:] = log, snapshot
        self.source_states[row, member, :2] = states

    def write_prompt(self, row: int, member: int, ids: Sequence[int] | NDArray[Any]) -> None:
        """Write the prompt ids of one member. Raises: ValueError above ``max_context``."""
        self._check_row(row)
        if len(ids) > self.max_context:
            raise ValueError(f"a prompt of {len(ids)} tokens exceeds the context of {self.max_context}")
        self.prompt[row, member, : len(ids)] = ids

    def append_pages(self, row: int, member: int, pages: Sequence[int]) -> None:
        """Grow a member's block table. Raises: ValueError above ``max_pages``."""
        self._check_row(row)
        self._pages.append(row, member, pages)

    def append_source_pages(self, row: int, member: int, pages: Sequence[int]) -> None:
        """Grow a member's source table. Raises: ValueError above ``max_pages``."""
        self._check_row(row)
        self._source_pages.append(row, member, pages)

    def append_window_pages(self, row: int, member: int, pages: Sequence[int], is_source: bool = False) -> None:
        """Grow a member's table of windows, or the one where its prompt is prefilled. Raises: ValueError above ``max_pages``."""
        self._check_row(row)
        (self._source_windows if is_source else self._window_pages).append(row, member, pages)

    def write_spec(self, row: int, spec: bytes) -> None:
        """Write the spec, once per generation, before the row leaves PREPARE. Raises: ValueError above the limit."""
        self._check_row(row)
        if len(spec) > self.max_spec_bytes:
            raise ValueError(f"a spec of {len(spec)} bytes exceeds {self.max_spec_bytes}")
        words = self._segment.words
        start = self._specs + row * self.max_spec_bytes
        words[self._spec_word + row] = 0
        fence()
        self._segment.buf[start : start + len(spec)] = spec
        fence()
        words[self._spec_word + row] = words[self._generation + row] << 32 | len(spec)

    def write_state(self, row: int, state: bytes) -> None:
        """Replace the controller's own record of the row, atomically. Raises: ValueError above the limit."""
        self._check_row(row)
        self._states[row].write(self._segment.words[self._generation + row], state)

    def read_state(self, row: int) -> bytes | None:
        """The state last written for the row's current generation; None if none was."""
        return self._states[row].read(self._segment.words[self._generation + row])

    def commit(
        self, rows: NDArray[Any], generations: NDArray[Any], tokens: NDArray[Any], num_tokens: NDArray[Any] | None = None
    ) -> NDArray[np.int64]:
        """Append ids to each of these (distinct) rows: all ids, then all counts. Integer arrays [N]; with ``num_tokens`` [N], of which
        each is at least 1, ``tokens`` is [N, most of these].

        Rows whose generation is another by now are left alone. Returns the new counts [N], 0 for those.
        Raises: ValueError, with nothing committed, if a row is full.
        """
        assert np.min(rows, initial=0) >= 0, f"there is no row {np.min(rows)}"
        generations = np.asarray(generations, np.uint64)
        current = self.generation[rows] == generations
        if not current.all():
            counts = np.zeros(len(rows), np.int64)
            some = None if num_tokens is None else num_tokens[current]
            counts[current] = self.commit(rows[current], generations[current], tokens[current], some)
            return counts
        words = self.counts[rows]
        counts = np.where(words >> 32 == generations, words & _LOW, 0).view(np.int64)
        try:
            if num_tokens is None:
                self.ids[rows, counts] = tokens
            else:
                number_T = np.repeat(np.arange(len(rows)), num_tokens)
                place_T = np.arange(len(number_T)) - np.repeat(np.cumsum(num_tokens) - num_tokens, num_tokens)
                self.ids[rows[number_T], counts[number_T] + place_T] = tokens[number_T, place_T]
        except IndexError:
            full = np.asarray(rows)[counts + (1 if num_tokens is None else num_tokens) > self.max_context].tolist()
            raise ValueError(f"rows {full} have no room for more ids than {self.max_context}") from None
        fence()
        counts += 1 if num_tokens is None else num_tokens
        self.counts[rows] = generations << 32 | counts.view(np.uint64)
        return counts

    def note_first(self, rows: NDArray[Any], generations: NDArray[Any], now_ns: int) -> None:
        """Say when the first ids of these rows are committed, in ns of CLOCK_MONOTONIC: before the commit."""
        self.first_times[rows, 0] = 0
        fence()
        self.first_times[rows, 1] = now_ns
        fence()
        self.first_times[rows, 0] = generations

    def first_token_ns(self, row: int, generation: int) -> int | None:
        """When prefill committed the one id that the row has; None if there is another number of them, or decode did."""
        of, at_ns = self.first_times[row].tolist()
        return at_ns if of == generation and self.committed(row, generation) == 1 else None

    def set_end(self, row: int, generation: int, code: EndCode) -> None:
        """Say that decode appends nothing more to this generation of the row. After the last ``commit``."""
        self._check_row(row)
        words = self._segment.words
        if words[self._generation + row] == generation:
            fence()
            words[self._end + row] = generation << 32 | code

    def phase(self, row: int) -> tuple[int, Phase]:
        """The row's (generation, phase)."""
        word = self._segment.words[self._phase + row]
        fence()
        return word >> 8, Phase(word & 0xFF)

    def rows_in(self, phase: Phase) -> list[tuple[int, int]]:
        """All (row, generation) in a phase."""
        words = self.phases.copy()
        fence()
        rows = np.flatnonzero(words & 0xFF == phase)
        return list(zip(rows.tolist(), (words[rows] >> 8).tolist(), strict=True))

    def owner(self, row: int, generation: int) -> int | None:
        """The number of the decode actor that runs this generation of the row; None if it belongs to none."""
        word = self._segment.words[self._owner + row]
        return (word & 0xFF) - 1 if word >> 8 == generation and word & 0xFF else None

    def rows_of(self, decode: int) -> list[tuple[int, int]]:
        """All (row, generation) in phase DECODE that the decode actor of this number runs."""
        phases = self.phases.copy()
        fence()
        owners = self.owners.copy()
        rows = np.flatnonzero((phases & 0xFF == Phase.DECODE) & (owners == (phases & ~np.uint64(0xFF)) + np.uint64(decode + 1)))
        return list(zip(rows.tolist(), (phases[rows] >> 8).tolist(), strict=True))

    def committed(self, row: int, generation: int) -> int:
        """The number of committed ids of this generation; 0 if the row has another."""
        return self._tagged(self._count, row, generation)

    def end(self, row: int, generation: int) -> EndCode:
        """The end of this generation; NONE while it goes on or if the row has another. The count read after it is final."""
        return EndCode(self._tagged(self._end, row, generation))

    def _check_row(self, row: int) -> None:
        """Assert that there is such a row: a negative index would write the words of another one."""
        assert 0 <= row < self.num_rows, f"there is no row {row} in a table of {self.num_rows}"

    def _tagged(self, word: int, row: int, generation: int) -> int:
        words = self._segment.words
        value = words[word + row]
        fence()
        return value & _LOW if value >> 32 == generation == words[self._generation + row] else 0

    def prompt_ids(self, row: int, member: int, num_tokens: int) -> NDArray[np.int32]:
        """The first ``num_tokens`` prompt ids of a member: a view."""
        return self.prompt[row, member, :num_tokens]

    def pages(self, row: int, member: int) -> NDArray[np.uint32]:
        """A member's block table as far as it is filled: a view."""
        return self._pages.filled(row, member)

    def source_pages(self, row: int, member: int) -> NDArray[np.uint32]:
        """A member's source table as far as it is filled: a view."""
        return self._source_pages.filled(row, member)

    def window_pages(self, row: int, member: int) -> NDArray[np.uint32]:
        """A member's table of windows as far as it is filled: a view."""
        return self._window_pages.filled(row, member)

    def source_window_pages(self, row: int, member: int) -> NDArray[np.uint32]:
        """The same where its prompt is prefilled, if that is elsewhere: a view."""
        return self._source_windows.filled(row, member)

    def num_writable_pages(self, rows: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Pages per member [..., M] up to which decode can go on: of block tables, and of those of windows where there are such."""
        num_pages, num_windows = self.num_pages[rows].astype(np.int64), self.num_window_pages[rows].astype(np.int64)
        return np.where(num_windows > 0, np.minimum(num_pages, num_windows), num_pages)

    def prefill_pages(self, row: int, member: int) -> NDArray[np.uint32]:
        """The pages in which a member is prefilled: those of the source table, if there are any, else of the block table. A view."""
        source = self.source_pages(row, member)
        return source if len(source) else self.pages(row, member)

    def prefill_window_pages(self, row: int, member: int) -> NDArray[np.uint32]:
        """As ``prefill_pages``, of windows."""
        source = self.source_window_pages(row, member)
        return source if len(source) else self.window_pages(row, member)

    def read_spec(self, row: int, generation: int | None = None) -> bytes:
        """The spec of this generation (default: the row's own). Raises: StaleRow if the row has none of it."""
        words = self._segment.words
        wanted = words[self._generation + row] if generation is None else generation
        word = words[self._spec_word + row]
        fence()
        start = self._specs + row * self.max_spec_bytes
        spec = bytes(self._segment.buf[start : start + (word & _LOW)])
        fence()
        if word >> 32 != wanted or words[self._generation + row] != wanted:
            raise StaleRow(f"row {row} has no spec of generation {wanted} (it is at {words[self._generation + row]})")
        return spec


def _word(field: Field) -> int:
    """Index of a field's first word in ``Segment.words``."""
    return field.offset // 8
