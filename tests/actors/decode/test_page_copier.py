"""decode copies KV pages of another device: real pools, a real table and real plans."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmrt.actors.decode import page_copier
from mmrt.actors.decode.page_copier import PageCopier
from mmrt.models.architecture import KvPart
from mmrt.runtime.bus.copy_plans import Transfer, TransferChunk
from mmrt.runtime.bus.messages import ItemError, PlanDone, Run, Skipped, Transferred
from mmrt.runtime.bus.wire import encode
from mmrt.schema.rows import Phase
from mmrt.shm.flight_recorder import FlightRecorder
from mmrt.shm.layer_progress import LayerCounter, LayerProgress
from mmrt.shm.plan_table import PlanTable
from mmrt.shm.pool import PagePool
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable

PAGE_BYTES = 64
SOURCE, TARGET = [6, 0, 3, 5], [1, 7, 2, 4, 3]


class Place:
    """A row of four pages, filled in the pool of device 0; its own are on device 1."""

    def __init__(self, path: Path) -> None:
        self.run = RunDirectory.create(path / "run", {})
        self.source, self.target = (PagePool.create(self.run, name, 8, PAGE_BYTES) for name in ("kv", "kv.1"))
        self.table = SequenceTable.create(self.run, 1, 128, 8, max_spec_bytes=64, max_state_bytes=64)
        self.plans = PlanTable.create(self.run, 4, 1024)
        self.table.begin(0)
        self.table.append_source_pages(0, 0, SOURCE)
        self.table.append_pages(0, 0, TARGET)
        self.table.set_phase(0, Phase.PREPARE)
        for page in range(8):
            self.source.write_bytes([page], bytes([page + 65]) * PAGE_BYTES)
        self.recorder = FlightRecorder.create(self.run, "decode")
        self.sent: list[PlanDone] = []
        self.copier = self.process()

    def process(self, generation: int = 1, layers: Sequence[KvPart] = ()) -> PageCopier:
        """A new generation of decode."""
        flight = self.recorder.writer(generation)
        actor: Any = SimpleNamespace(run=self.run, name="decode", generation=generation, flight=flight, send=self.sent.append)
        return PageCopier(actor, self.target, self.table, 16, layers=layers)

    def order(
        self, start: int, end: int, number: int = 1, behind: tuple[int, int] | None = None, filled: int = 0, **others: Any
    ) -> Run:
        plan = Transfer("kv", [TransferChunk(0, int(self.table.generation[0]), 0, start, end, filled=filled, **others)], behind)
        self.plans.write(0, number, 0, encode(plan))
        return Run(1, 0, number)

    @property
    def results(self) -> list[tuple[int, object]]:
        return [(done.plan_id, done.result) for done in self.sent]

    @property
    def held(self) -> str:
        return "".join(chr(self.target.page(page)[0]) for page in TARGET)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """There is time for whole copies, however slow the machine is."""
    monkeypatch.setattr(page_copier, "COPY_S", 600.0)
    place = Place(tmp_path)
    with closing(place.source), closing(place.target), closing(place.table), closing(place.plans), closing(place.recorder):
        yield place
    place.run.destroy()


def test_pages_go_to_the_same_places_of_the_block_table(place: Place) -> None:
    place.copier.take(place.order(16, 50))
    assert place.copier.is_busy
    place.copier.go_on()
    assert place.results == [(1, Transferred(3 * PAGE_BYTES))] and not place.copier.is_busy
    assert place.held == "\0ADF\0", "the last page is not full"


def test_a_copy_gives_way_to_a_step(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(100))
    monkeypatch.setattr(page_copier, "COPY_S", 2.5)
    monkeypatch.setattr(page_copier.time, "monotonic", lambda: float(next(times)))
    place.copier.take(place.order(0, 64))
    place.copier.go_on()
    assert place.held[0] == "G" and place.copier.is_busy and place.sent == []
    while place.copier.is_busy:
        place.copier.go_on()
    assert place.held == "GADF\0" and place.results == [(1, Transferred(4 * PAGE_BYTES))], "all of it counts"


def test_a_state_and_its_log_are_copied_behind_the_pages_part_by_part(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = {name: PagePool.create(place.run, name, 3, 100) for name in ("state", "state.1", "log", "log.1")}
    state, log = bytes(range(100)), bytes(range(100, 200))
    pools["state"].write_bytes([2], state)
    pools["log"].write_bytes([0], log)
    times = iter(range(100))
    monkeypatch.setattr(page_copier, "COPY_S", 1.5)
    monkeypatch.setattr(page_copier, "STATE_PART_BYTES", 30)
    monkeypatch.setattr(page_copier.time, "monotonic", lambda: float(next(times)))
    place.copier.take(place.order(48, 50, state=(2, 1), log=(0, 2)))
    seen = set()
    while place.copier.is_busy:
        place.copier.go_on()
        seen.add(bytes(pools["state.1"].page(1)))
    assert {state[:n].ljust(100, b"\0") for n in (0, 30, 60, 90, 100)} >= seen and len(seen) > 2
    assert bytes(pools["state.1"].page(1)) == state and bytes(pools["log.1"].page(2)) == log
    assert place.results == [(1, Transferred(PAGE_BYTES + 200))] and place.held == "\0\0\0F\0"
    assert not pools["state.1"].data[[0, 2]].any() and not pools["log.1"].data[:2].any(), "other pages stay"
    for pool in pools.values():
        pool.close()


def test_an_order_that_comes_again_is_answered_and_not_done_again(place: Place) -> None:
    order = place.order(0, 16)
    place.copier.take(order)
    place.copier.take(order)
    place.copier.go_on()
    place.source.write_bytes([SOURCE[0]], b"z" * PAGE_BYTES)
    place.copier.take(order)
    place.copier.go_on()
    assert place.results == [(1, Transferred(PAGE_BYTES))] * 2 and place.held[0] == "G"


def test_a_new_process_copies_again(place: Place) -> None:
    order = place.order(0, 64)
    place.copier.take(order)
    place.copier.go_on()
    place.target.write_bytes([TARGET[0]], b"?" * PAGE_BYTES)  # as if it had died in the middle
    successor = place.process(2)
    successor.take(order)
    successor.go_on()
    assert place.held == "GADF\0" and [done.generation for done in place.sent] == [1, 2]


def test_a_plan_that_cannot_be_done_ends_its_request(place: Place) -> None:
    place.table.append_source_pages(0, 0, [99])
    place.copier.take(place.order(48, 70))
    place.copier.go_on()
    ((_, result),) = place.results
    assert isinstance(result, ItemError) and result.status == 500 and "plan 1 of decode failed" in result.message
    assert place.held == "\0\0\0F\0" and not place.copier.is_busy


def test_a_plan_that_is_obsolete_or_not_wanted_is_not_done(place: Place) -> None:
    obsolete = place.order(0, 16)
    place.plans.clear(0)
    place.copier.take(obsolete)
    place.copier.go_on()
    assert place.sent == [] and not place.copier.is_busy
    place.copier.take(Run(1, 0, 2, deadline_s=0.001))
    place.order(0, 16, number=2)
    place.copier.go_on()
    order = place.order(0, 16, number=3)
    place.table.set_phase(0, Phase.ENDING)
    place.copier.take(order)
    place.copier.go_on()
    assert place.results == [(2, Skipped()), (3, Skipped())] and place.held == "\0" * 5


# -------------------------------------------------------------------------------------------------- behind a prefill

PREFILL, SLOT = (3 << 32) + 70, 2
LAYERS = [
    KvPart(0, slice(0, 16)),
    KvPart(1, slice(32, 48)),
    KvPart(3, slice(16, 32)),
]  # of two groups; layer 2 has no K and V of its own


class Follow:
    """decode copies pages 1 to 3 behind a prefill of four layers; page 0 is filled."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.words = LayerProgress.create(place.run)
        self.copier = place.process(layers=LAYERS)
        place.plans.write(SLOT, PREFILL, 1, b"of prefill")
        self.copier.take(place.order(0, 64, behind=(PREFILL, SLOT), filled=16))

    def prefill(self, generation: int = 1, first: int = 0) -> LayerCounter:
        """A new generation of prefill begins the plan, in a pipeline with layer ``first``."""
        counter = LayerCounter(self.words, generation, first=first)
        counter.begin(PREFILL)
        return counter

    def write(self, letter: str) -> None:
        """prefill writes its pages."""
        for page in SOURCE[1:]:
            self.place.source.write_bytes([page], letter.encode() * PAGE_BYTES)

    @property
    def held(self) -> list[str]:
        """What the pages have that are copied: a letter per part, one behind the other."""
        self.copier.go_on()
        return ["".join(chr(self.place.target.page(page)[at]) for at in (0, 16, 32, 48)) for page in TARGET[:4]]


@pytest.fixture
def follow(place: Place) -> Iterator[Follow]:
    follow = Follow(place)
    with closing(follow.words):
        yield follow


def test_a_layer_is_copied_once_it_is_stored(follow: Follow) -> None:
    copier = follow.copier
    assert follow.held == ["GGGG", *["\0\0\0\0"] * 3] and copier.is_busy and copier.is_waiting, "prefill has not begun"
    prefill = follow.prefill()
    assert follow.held[1] == "\0\0\0\0"
    prefill.stored()
    assert follow.held[1:] == [f"{letter}\0\0\0" for letter in "ADF"] and copier.is_waiting
    prefill.stored()
    prefill.stored()
    assert follow.held[1:] == [f"{letter}\0{letter}\0" for letter in "ADF"], "the third stores nothing"
    assert follow.place.sent == []
    prefill.done()
    assert follow.held[1:] == [f"{letter}{letter}{letter}\0" for letter in "ADF"]
    assert follow.place.results == [(1, Transferred(PAGE_BYTES + 3 * 48))] and not copier.is_busy


def test_all_layers_are_copied_anew_when_another_process_does_the_plan_anew(follow: Follow) -> None:
    """Also those that the first one had stored: what is copied is of one process."""
    first = follow.prefill()
    follow.write("x")
    for _ in range(3):
        first.stored()
    assert follow.held[1] == "x\0x\0"
    second = follow.prefill(2)
    follow.write("y")
    second.stored()
    assert follow.held[1] == "y\0x\0" and follow.place.sent == []
    second.done()
    assert follow.held[1:] == ["yyy\0"] * 3 and len(follow.place.sent) == 1


def test_layers_of_earlier_stages_are_copied_when_the_last_one_begins(follow: Follow) -> None:
    assert follow.held[1] == "\0\0\0\0"
    first = follow.prefill(first=2)
    assert follow.held[1] == "A\0A\0"
    first.stored()
    second = follow.prefill(2, first=2)
    follow.write("y")
    assert follow.held[1:] == ["y\0y\0"] * 3, "these layers anew, though their stage did not begin anew"
    second.stored()
    second.done()
    assert follow.held[1:] == ["yyy\0"] * 3 and len(follow.place.sent) == 1


def test_what_is_copied_while_another_process_begins_does_not_count(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one has done it and dies before it says so; the second begins in the middle of the copy of the last layer."""
    follow.prefill().done()
    follow.write("x")
    times = iter(range(1000))
    monkeypatch.setattr(page_copier, "COPY_S", 1.5)  # a piece each time
    monkeypatch.setattr(page_copier.time, "monotonic", lambda: float(next(times)))
    while follow.held[3][1] != "x":  # the last layer's part of the last page
        assert follow.place.sent == []
    second = follow.prefill(2)
    follow.write("y")
    monkeypatch.setattr(page_copier, "COPY_S", 600.0)
    assert follow.held[1] == "xxx\0" and follow.place.sent == []
    second.done()
    assert follow.held[1:] == ["yyy\0"] * 3 and len(follow.place.sent) == 1


def test_a_plan_that_left_the_table_undone_is_followed_no_more(follow: Follow) -> None:
    prefill = follow.prefill()
    prefill.stored()
    assert follow.held[1] == "A\0\0\0"
    follow.place.plans.clear(SLOT)
    assert follow.held[1] == "A\0\0\0" and follow.place.results == [(1, Skipped())] and not follow.copier.is_busy


def test_a_plan_that_left_the_table_done_is_copied(follow: Follow) -> None:
    """Its word stays when a later plan has its slot."""
    follow.prefill().done()
    follow.place.plans.write(SLOT, PREFILL + 1, 1, b"the next one")
    LayerCounter(follow.words, 1).begin(PREFILL + 1)
    assert follow.held[1:] == [f"{letter * 3}\0" for letter in "ADF"] and len(follow.place.sent) == 1


def test_other_pages_are_copied_while_a_plan_waits(follow: Follow) -> None:
    follow.prefill()
    assert follow.held[0] == "GGGG"
    plan = Transfer("kv", [TransferChunk(0, int(follow.place.table.generation[0]), 0, 48, 64)])
    follow.place.plans.write(1, 2, 0, encode(plan))
    follow.copier.take(Run(1, 1, 2))
    assert not follow.copier.is_waiting
    assert follow.held[3] == "FFFF" and follow.place.results == [(2, Transferred(PAGE_BYTES))] and follow.copier.is_waiting


def test_whole_pages_are_copied_at_the_end_where_layers_do_not_lie_apart(follow: Follow) -> None:
    follow.copier = follow.place.process()
    follow.copier.take(follow.place.order(0, 64, behind=(PREFILL, SLOT), filled=16))
    prefill = follow.prefill()
    prefill.stored()
    assert follow.held[1] == "\0\0\0\0"
    prefill.done()
    assert follow.held[1:] == ["AAAA", "DDDD", "FFFF"]


def test_of_windows_the_pages_from_a_place_on_are_copied(place: Place) -> None:
    """Whole ones of what is filled, and behind a prefill each layer with a window once it is stored."""
    theirs, ours = (PagePool.create(place.run, name, 8, PAGE_BYTES) for name in ("window", "window.1"))
    for page in range(8):
        theirs.write_bytes([page], bytes([page + 97]) * PAGE_BYTES)
    place.table.append_window_pages(0, 0, [7, 7, 5, 2], is_source=True)
    place.table.append_window_pages(0, 0, [0, 0, 3, 6, 1])
    place.plans.write(SLOT, PREFILL, 1, b"of prefill")
    layers = [KvPart(0, slice(0, 16), in_window=True), KvPart(1, slice(0, 64)), KvPart(2, slice(16, 64), in_window=True)]
    copier = place.process(layers=layers)
    copier.take(place.order(0, 64, behind=(PREFILL, SLOT), filled=48, windows=2))

    def held() -> list[str]:
        copier.go_on()
        return ["".join(chr(ours.page(page)[at]) for at in (0, 16)) for page in (0, 3, 6, 1)]

    with closing(theirs), closing(ours), closing(LayerProgress.create(place.run)) as words:
        prefill = LayerCounter(words, 1)
        prefill.begin(PREFILL)
        assert held() == ["\0\0", "ff", "\0\0", "\0\0"] and place.held == "GAD\0\0"
        prefill.stored()
        assert held()[2] == "c\0" and place.held == "GAD\0\0"
        prefill.stored()
        assert held()[2] == "c\0" and place.held == "GADF\0"
        prefill.done()
        assert held() == ["\0\0", "ff", "cc", "\0\0"]
        assert place.results == [(1, Transferred((4 + 2) * PAGE_BYTES))] and not copier.is_busy
