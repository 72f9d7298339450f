"""The simulated runs find what can be wrong with the owners of rows: each of these bugs fails within some seeds."""

import random
from pathlib import Path
from typing import Any

import pytest

from mmrt.runtime.controller.rows import outages, ownership
from mmrt.runtime.controller.state.request import Request
from mmrt.runtime.controller.state.state import ControllerState
from mmrt.runtime.stage_table import InstanceId, stage_of
from mmrt.schema.rows import Phase
from mmrt.shm.sequence_table import SequenceTable
from mmrt.tests.runtime.controller import recovery_world
from mmrt.tests.runtime.controller.injected_bugs import Bug, must_find, name_of
from mmrt.tests.runtime.controller.recovery_world import World

SEARCH = random.Random(4).sample(range(10**6), 600)


def take_every_row(patch: pytest.MonkeyPatch) -> None:
    """A decode runs rows of others."""
    patch.setattr(SequenceTable, "rows_of", lambda table, decode: table.rows_in(Phase.DECODE))


def give_before_it_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """The next owner gets the row while the last one has it."""
    take_back = ownership.take_back

    def take(state: ControllerState, request: Request) -> None:
        take_back(state, request)
        if request.phase == Phase.DECODE and not request.is_finished:
            before, request.ownership.drop_ticket = request.record.member_of, 0
            others = [actor for actor in state.limits.actors if stage_of(actor) == "decode" and actor != before]
            with pytest.MonkeyPatch.context() as chosen:
                chosen.setattr(ownership, "choose_decode", lambda *_: (*others, before)[0])
                ownership.hand_over(state, request)

    for module in (ownership, recovery_world):
        patch.setattr(module, "take_back", take)


def believe_the_supervisor(patch: pytest.MonkeyPatch) -> None:
    """A decode that is said to be broken is taken for dead: its next generation may have begun. Here outages are many and short."""
    leave_lost, begin, break_actor = ownership.leave_lost, World.__init__, World.break_actor

    def leave(state: ControllerState) -> None:
        leave_lost(state)
        ownership.on_gone(state, ownership.undropped(state))

    def begin_stormy(world: World, *arguments: Any, **options: Any) -> None:
        begin(world, *arguments, **options)
        world.crash_rate, world.break_share = 0.5, 0.8

    patch.setattr(outages, "leave_lost", leave)
    patch.setattr(World, "__init__", begin_stormy)
    patch.setattr(World, "break_actor", lambda world, name, for_s: break_actor(world, name, min(for_s, 0.5)))


def keep_the_owner_word(patch: pytest.MonkeyPatch) -> None:
    """A dead decode's successor still finds the rows that were taken from it."""
    set_owner = ownership.set_owner

    def forget(state: ControllerState, request: Request, actor: InstanceId | None) -> None:
        if actor is None:
            request.ownership.decode = None
        else:
            set_owner(state, request, actor)

    patch.setattr(ownership, "set_owner", forget)


BUGS: dict[Bug, tuple[int, ...]] = {
    take_every_row: (247514, 318031, 108177),
    give_before_it_is_dropped: (108177, 502140, 94476),
    believe_the_supervisor: (465045, 38593, 410838),
    keep_the_owner_word: (645327, 347148, 979978),
}


@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_the_world_finds(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    must_find(BUGS[bug], place)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_a_search_finds(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    must_find(SEARCH, place)
