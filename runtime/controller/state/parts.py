"""The parts of a request, each with the transitions that it can make (pure). ``Request`` has one of each.

A method that needs a certain state asserts it; other modules read fields and call methods, and assign none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ....schema.rows import SNAPSHOT_SLOT
from ...bus.plan_base import Place
from ...stage_table import InstanceId
from ..scheduling.guidance import Lengths
from ..scheduling.page_keys import PageKeys
from .embedding_tracker import EmbeddingTracker, Part
from .known_media import MediaKey
from .state_pages import NO_STATES, StatePages

Tables = tuple[list[int], list[int]]
"""Pages per member."""


def _no_pages() -> Tables:
    return [], []


def _none() -> list[int]:
    return [0, 0]


@dataclass(slots=True, eq=False)
class Windows:
    """A row's pages of layers with a window, per member, in one pool. ``firsts``: places in the tables of the first pages that are the
    row's: others are before. ``gaps``: places before pages that are to be loaded, which have one page alone, and are not for chunks."""

    tables: Tables = field(default_factory=_no_pages)
    firsts: list[int] = field(default_factory=_none)
    gaps: list[range] = field(default_factory=lambda: [range(0), range(0)])

    def append(self, member: int, pages: Sequence[int]) -> None:
        self.tables[member].extend(pages)

    def own(self, member: int) -> list[int]:
        """Return a member's pages."""
        return self.tables[member][self.firsts[member] :]

    def leave(self, member: int, first: int) -> list[int]:
        """The windows of all tokens to come begin at the page in this place or later. Returns the pages that nobody reads any more."""
        pages = self.tables[member][self.firsts[member] : first]
        self.firsts[member] = max(first, self.firsts[member])
        return pages


@dataclass(slots=True, eq=False)
class Kv:
    """A row's KV pages and the tokens in them, per member: a copy of the row's words, which are written with it. Of a model with
    recurrent states also their pages: which of two has the state of the prefilled tokens' last border."""

    lengths: Lengths = ()  # of the prompts, once prepared
    tables: Tables = field(default_factory=_no_pages)  # that decode reads and writes
    source_tables: Tables = field(default_factory=_no_pages)  # where the prompt is prefilled, if that is another pool
    prefilled: list[int] = field(default_factory=_none)
    copied: list[int] = field(default_factory=_none)  # tokens whose pages are in both pools: see ``transfer``
    states: tuple[StatePages, StatePages] = NO_STATES
    source_states: tuple[StatePages, StatePages] = NO_STATES  # likewise
    slots: list[int] = field(default_factory=_none)  # where the state of their prefilled tokens is: see ``SequenceTable.prefilled``
    windows: Windows = field(default_factory=Windows)  # of layers with a window, where they have pages of their own
    source_windows: Windows = field(default_factory=Windows)  # likewise

    def restore(
        self,
        tables: Tables,
        source_tables: Tables,
        prefilled: Sequence[int],
        states: tuple[StatePages, StatePages],
        source_states: tuple[StatePages, StatePages],
        slots: Sequence[int],
        windows: Tables,
        source_windows: Tables,
    ) -> None:
        """Take the words of a row from memory."""
        assert self.is_empty
        self.windows, self.source_windows = Windows(windows), Windows(source_windows)
        self.tables, self.source_tables, self.prefilled = tables, source_tables, list(prefilled)
        self.states, self.source_states, self.slots = states, source_states, list(slots)

    @property
    def is_empty(self) -> bool:
        is_free = not (any(self.tables) or any(self.windows.tables) or any(self.prefilled) or self.states != NO_STATES)
        return is_free and not self.has_source

    @property
    def has_source(self) -> bool:
        """True if it has pages of another pool than its own."""
        return any(self.source_tables) or any(self.source_windows.tables) or self.source_states != NO_STATES

    @property
    def prefill_states(self) -> tuple[StatePages, StatePages]:
        """The states of its prompts while they are prefilled."""
        return self.source_states if self.source_states != NO_STATES else self.states

    def bases(self, states: tuple[StatePages, StatePages]) -> list[int]:
        """Return the pages of recurrent states, of all members: those of the cache as long as nothing is prefilled behind them.
        ``states``: in its own pool, or where its prompt is prefilled."""
        pages = [page for member in states for page in member.bases if page >= 0]
        begun = zip(states, self.slots, strict=True)
        return pages + [member.snapshot for member, slot in begun if slot == SNAPSHOT_SLOT and member.snapshot >= 0]

    def prepare(self, lengths: Lengths) -> None:
        """The prompts are known."""
        assert not self.lengths
        self.lengths = lengths

    def append(self, member: int, pages: Sequence[int]) -> None:
        self.tables[member].extend(pages)

    def append_source(self, member: int, pages: Sequence[int]) -> None:
        self.source_tables[member].extend(pages)

    def reach(self, member: int) -> int:
        """Return the pages up to which a member has what decode writes."""
        table, windows = self.tables[member], self.windows.tables[member]
        return min(len(table), len(windows)) if windows else len(table)

    def take_states(self, member: int, pages: StatePages) -> None:
        """A member has pages of recurrent states from now on."""
        assert self.states[member] == StatePages()
        self.states = (pages, self.states[1]) if member == 0 else (self.states[0], pages)

    def take_source_states(self, member: int, pages: StatePages) -> None:
        """The same, where its prompt is prefilled, if that is another pool."""
        assert self.source_states[member] == StatePages()
        self.source_states = (pages, self.source_states[1]) if member == 0 else (self.source_states[0], pages)

    def next_slot(self, member: int) -> int:
        """Return where the next chunk's state goes."""
        return 0 if self.slots[member] == SNAPSHOT_SLOT else 1 - self.slots[member]

    def swap_states(self, member: int) -> int:
        """A chunk has read one state and written another, which is that of the prefilled tokens now. Returns the page of the cache that
        nobody will read for it any more, or -1."""
        pages, slot = self.prefill_states[member], self.slots[member]
        if not pages.is_whole:
            return -1
        self.slots[member] = self.next_slot(member)
        return pages.snapshot if slot == SNAPSHOT_SLOT else -1

    def begin_from_snapshot(self, member: int) -> None:
        """The state of its prefilled tokens is the cache's."""
        self.slots[member] = SNAPSHOT_SLOT

    def advance(self, member: int, start: int, end: int) -> bool:
        """Tokens [start, end) are prefilled, or were loaded. False if they were before."""
        if self.prefilled[member] >= end:
            return False
        assert self.prefilled[member] == start, "tokens were prefilled behind some that are not there"
        self.prefilled[member] = end
        return True

    def copy(self, member: int, start: int, end: int) -> None:
        """Tokens [start, end) are copied. Nothing changes if those before them are not known to be."""
        if self.copied[member] == start:
            self.copied[member] = end

    def is_copied(self, targets: Sequence[int]) -> bool:
        return all(done >= target for done, target in zip(self.copied, targets, strict=False))

    def leave_source(self) -> None:
        """All pages are copied: the row has those of its own pool alone."""
        assert self.has_source
        self.source_tables, self.source_states, self.copied = _no_pages(), NO_STATES, _none()
        self.source_windows = Windows()

    def clear(self) -> None:
        """All pages are given back."""
        self.tables, self.source_tables, self.prefilled, self.copied = _no_pages(), _no_pages(), _none(), _none()
        self.states, self.source_states, self.slots = NO_STATES, NO_STATES, _none()
        self.windows, self.source_windows = Windows(), Windows()


@dataclass(slots=True, eq=False)
class Caches:
    """What caches have of a row's KV pages, and what they get of it, per member."""

    keys: tuple[PageKeys, ...] = ()  # if pages have names
    num_cached: list[int] = field(default_factory=_none)  # leading tokens that were not computed
    num_named: list[int] = field(default_factory=_none)  # leading pages of ``prefill_tables`` that have got their names
    may_load: bool = False  # files may have the pages behind those; until they have been asked, nothing is prefilled
    num_loads: int = 0  # plans to load pages, since the grant of its KV pages
    num_waiting: list[int] = field(default_factory=_none)  # pages that were loaded, and count once what is at their end is
    borders: list[list[int]] = field(default_factory=lambda: [[], []])  # tokens at which prefill leaves snapshots, in order
    shared_borders: tuple[int, int] = (0, 0)  # of them, that of the first message; and one at which other prompts were seen to part

    def set_keys(self, keys: tuple[PageKeys, ...]) -> None:
        """Its pages will have these names."""
        assert not self.keys
        self.keys = keys

    def set_borders(self, borders: list[list[int]], first: int) -> None:
        """Prefill is to leave snapshots there. ``first``: the end of the first message."""
        self.borders, self.shared_borders = borders, (first, 0)

    def learn_border(self, border: int) -> None:
        """Another prompt parts from that of the first member there."""
        self.borders[0] = sorted({*self.borders[0], border})
        self.shared_borders = self.shared_borders[0], border

    def forget_keys(self) -> None:
        """Its names are of another era: it gets others before its grant."""
        assert not any(self.num_named)
        self.keys = ()

    def learn(self, ids: Sequence[int]) -> None:
        """Ids were generated, behind those known."""
        for keys in self.keys:
            keys.extend(ids)

    def hit(self, member: int, num_pages: int, num_tokens: int) -> None:
        """The grant found leading pages, which have names."""
        assert not self.num_cached[member] and not self.num_named[member]
        self.num_named[member], self.num_cached[member] = num_pages, num_tokens

    def begin(self, *, may_load: bool) -> None:
        """KV pages are granted. ``may_load``: files or other pools may have pages that the cache lacks."""
        self.may_load, self.num_loads, self.num_waiting = may_load, 0, _none()

    def load(self) -> None:
        """A plan loads pages."""
        assert self.may_load
        self.num_loads += 1

    def loaded(self, member: int, end: int) -> None:
        """Tokens up to ``end`` were loaded."""
        self.num_cached[member], self.num_waiting[member] = end, 0

    def load_before_state(self, member: int, num_pages: int) -> None:
        """So many pages behind those with names were loaded. They count once the state at their end is loaded as well."""
        self.num_waiting[member] = max(num_pages, self.num_waiting[member])

    def end_loading(self, *, may_load: bool = False) -> None:
        """Nobody has more pages, or, by ``may_load``, the answer of a plan leaves that open."""
        self.may_load = may_load

    def name(self, member: int, num_pages: int) -> None:
        """The next pages have got their names."""
        self.num_named[member] += num_pages

    def forget_names(self) -> None:
        """The pages with names are left behind: those of the row's own pool get theirs."""
        self.num_named = _none()

    def clear(self) -> None:
        """The row's KV pages are given back."""
        self.num_cached, self.num_named = _none(), _none()


@dataclass(slots=True, eq=False)
class Media:
    """The segments of a row's media that its prompt waits for, and those who need the same. ``ItemRecord`` has their stages."""

    tracker: EmbeddingTracker | None = None  # once prepared, with media
    num_consumed: dict[Place, int] = field(default_factory=dict)  # embedding pages of segments that have been given back
    keys: list[MediaKey | None] = field(default_factory=list)  # per item; none: its media are not shared
    page_keys: dict[int, list[list[bytes]]] = field(default_factory=dict)  # of embedding pages, by item and segment; once computed
    has_one_twice: bool = False  # of those: embedding pages may be of two of its segments
    is_shared: bool = False  # others may do work of it: a row has equal media, or had, or the cache has some of them

    def lay_out(self, tracker: EmbeddingTracker) -> None:
        """The places of its media in the prompt are known."""
        assert self.tracker is None
        self.tracker = tracker

    def set_page_keys(self, item: int, keys: list[list[bytes]]) -> None:
        """The keys of an item's embedding pages are computed."""
        assert item not in self.page_keys
        self.page_keys[item] = keys

    def mark_ready(self, place: Place) -> None:
        """The embedding pages of a segment are written, or not needed."""
        assert self.tracker is not None
        self.tracker.mark_ready(*place)

    def part(self, place: Place) -> Part:
        assert self.tracker is not None
        return self.tracker.part(*place)

    def consume(self, part: Part, prefilled: int) -> slice:
        """Tokens [0, prefilled) are in the KV cache. Returns which embedding pages of a part are no longer needed since then."""
        assert self.tracker is not None
        place = part.item, part.segment
        before, count = self.num_consumed.pop(place, 0), self.tracker.num_consumed_pages(part, prefilled)
        if prefilled < part.end:
            self.num_consumed[place] = count
        return slice(before, count)

    def unread(self, place: Place, pages: list[int]) -> list[int]:
        """Return which of a segment's embedding pages it still has."""
        return pages[self.num_consumed.get(place, 0) :]

    def skip(self, place: Place) -> None:
        """A segment is not needed: its tokens are in the KV cache."""
        self.num_consumed.pop(place, None)
        self.mark_ready(place)

    def lose(self, place: Place) -> None:
        """The pages of a segment are given up: it is to be decoded again."""
        self.num_consumed.pop(place, None)
        if self.tracker is not None:
            self.tracker.mark_unready(*place)

    def join(self, keys: list[MediaKey | None]) -> None:
        """Rows with equal media know of it from now on."""
        assert not self.keys
        self.keys = keys
        known = [key for key in keys if key is not None]
        self.has_one_twice = len(set(known)) < len(known)

    def leave(self) -> None:
        """They no longer do: the row ends."""
        self.keys = []

    def share(self) -> None:
        """Others may have done work of it."""
        self.is_shared = True

    def give_up(self) -> None:
        """Some pages are given up: the cache may have them."""
        self.is_shared = bool(self.keys)

    def end_sharing(self) -> None:
        """Nothing is left to take from others."""
        self.is_shared = False


@dataclass(slots=True, eq=False)
class Answer:
    """What decode has written of an answer, as far as the controller has read it, and how fast it writes."""

    committed: int = 0
    ids: list[int] = field(default_factory=list)  # of the committed ones; those that have been read
    end_code: int = 0
    counts_known: bool = True  # ``committed`` has been read since decode dropped the row
    begins_in_prefill: bool = False  # prefill, which computes the prompt's last token too, draws the first one of the answer
    rate: float = 0.0  # tokens/s, measured
    window: tuple[float, int] | None = None  # (time, committed) at the start of the measurement

    def restore(self, committed: int, ids: Sequence[int], end_code: int) -> None:
        """Take the words of a row from memory."""
        assert not self.committed and not self.ids and not self.end_code
        self.committed, self.ids, self.end_code = committed, list(ids), end_code

    def commit(self, committed: int) -> None:
        """So many ids were committed when the count was read. Reads can be late."""
        if committed > self.committed:
            self.committed = committed

    def learn(self, ids: Sequence[int]) -> None:
        """Committed ids were read, behind those known."""
        self.ids.extend(ids)

    def finish(self, end_code: int) -> None:
        """decode has ended the answer."""
        assert end_code and not self.end_code
        self.end_code = end_code

    def note_counts(self, are_known: bool) -> None:
        """The count is the final one of decode's last membership, or may not be."""
        self.counts_known = are_known

    def begin_in_prefill(self, begins: bool) -> None:
        """Prefill draws the first token, or decode does."""
        self.begins_in_prefill = begins

    def begin_window(self, now: float) -> None:
        self.window = now, self.committed

    def forget_window(self) -> None:
        """Time from now on does not count as time between tokens."""
        self.window = None

    def end_window(self, now: float) -> int:
        """Measure the rate, and begin the next window. Returns the ids of this one."""
        assert self.window is not None
        began_s, began = self.window
        num_ids = self.committed - began
        self.rate = num_ids / (now - began_s)
        self.begin_window(now)
        return num_ids


@dataclass(slots=True, eq=False)
class Ownership:
    """The decode that has the row, and the moves of row and plans between actors: see ``ownership`` and ``absence``."""

    decode: InstanceId | None = None  # the owner, by the row's word; matters in phase DECODE
    drop_ticket: int = 0  # of the Drop that is to be answered; 0: none is
    drop_sent_s: float = 0.0
    moved_at: int = -1  # committed ids when it was last taken from a decode that was away
    has_moved: bool = False  # a plan of it was taken from an actor that was away, and none has been done since

    def give(self, decode: InstanceId | None) -> None:
        """The row has this owner, or none."""
        self.decode = decode

    def ask_to_drop(self, ticket: int) -> None:
        """The decode that has it as a member has to drop it."""
        assert not self.drop_ticket
        self.drop_ticket = ticket

    def sent_drop(self, now: float) -> None:
        assert self.drop_ticket
        self.drop_sent_s = now

    def send_drop_again(self) -> None:
        """What was sent has gone to a process that is dead."""
        self.drop_sent_s = -math.inf

    def dropped(self) -> None:
        """The decode has dropped it, or is dead."""
        assert self.drop_ticket
        self.drop_ticket, self.drop_sent_s = 0, -math.inf

    def move_row(self, committed: int) -> None:
        """The row leaves a decode that is away, with so many ids."""
        self.moved_at = committed

    def move_plan(self, *, is_away: bool) -> None:
        """A plan is taken from a lost actor: one that is away, or broken."""
        self.has_moved = is_away

    def plan_done(self) -> None:
        self.has_moved = False
