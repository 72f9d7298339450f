"""Which actors a fault may have replaced, and how often."""

import msgspec
import pytest

from mmrt_lab.chaos.bystanders import Bystanders
from mmrt_lab.chaos.faults import Cell, Fault

UNDISTURBED = {"prefill": 1, "decode": 1, "gateway": 1}


def fault(kind: str, target: str, second: str = "") -> Fault:
    cell = Cell(kind, target, "mid-stream")  # type: ignore[arg-type]
    return Fault(seed=1, index=1, cell=cell, delay_s=0, length_s=0, second=second)


def bystanders(*together: str) -> Bystanders:
    """``together`` share a process."""
    return Bystanders(lambda names: names | ({*together} if names & {*together} else set()), UNDISTURBED)


def after(**changed: int) -> dict[str, int]:
    return UNDISTURBED | changed


@pytest.mark.parametrize("kind", ["kill", "stop", "term", "exit", "oom", "restart"])
def test_the_target_is_replaced_once(kind: str) -> None:
    assert bystanders().check(after(decode=2), fault(kind, "decode")) == []
    (problem,) = bystanders().check(after(decode=3), fault(kind, "decode"))
    assert problem == "decode was replaced 2 times, but it was hit once: its generation is 3"
    (problem,) = bystanders().check(after(decode=2, prefill=2), fault(kind, "decode"))
    assert problem == "prefill was replaced once, but nothing has hit it: its generation is 2"


@pytest.mark.parametrize("kind", ["pause", "lost", "late", "scale"])
def test_these_replace_nobody(kind: str) -> None:
    assert len(bystanders().check(after(decode=2), fault(kind, "decode"))) == 1


def test_a_death_between_two_faults_is_seen_at_the_next_look() -> None:
    watched = bystanders()
    assert watched.check(after(decode=2), fault("kill", "decode")) == []
    assert len(watched.check(after(decode=3))) == 1  # at a quiet point
    assert watched.check(after(decode=3)) == []
    assert len(watched.check(after(decode=4, prefill=2), fault("kill", "prefill"))) == 1


def test_a_death_may_come_after_its_fault() -> None:
    watched = bystanders()
    assert watched.check(after(), fault("oom", "decode")) == []
    assert watched.check(after()) == []
    assert watched.check(after(decode=2, prefill=2), fault("kill", "prefill")) == []
    assert len(watched.check(after(decode=3, prefill=2))) == 1


def test_those_of_one_process_go_together() -> None:
    assert bystanders("prefill", "decode").check(after(decode=2, prefill=2), fault("kill", "decode")) == []
    assert len(bystanders("prefill", "decode").check(after(gateway=2), fault("kill", "decode"))) == 1


def test_second_faults_and_a_full_file_system() -> None:
    assert bystanders().check(after(decode=4, prefill=2), fault("kill", "decode", "prefill")) == []
    assert len(bystanders().check(after(gateway=2), fault("kill", "decode", "prefill"))) == 1
    assert bystanders().check(after(decode=3, gateway=2), fault("enospc", "all")) == []


def test_those_that_another_layout_lacks_come_again_once() -> None:
    before = after(encoder=1) | {"decode.1": 1}
    changed = msgspec.structs.replace(fault("layout", "all"), layout="2E+P+D")
    watched = Bystanders(lambda names: names, before)
    assert watched.check(before | {"decode.1": 2}, changed) == []
    (problem,) = watched.check(before | {"decode.1": 3, "decode": 2}, changed)
    assert problem == "decode was replaced once, but nothing has hit it: its generation is 2"


def test_actors_come_and_go() -> None:
    watched = bystanders()
    assert watched.check(after() | {"decode.1": 1}, fault("scale", "decode")) == []
    assert watched.check(after(), fault("late", "decode")) == []
    assert watched.check(after() | {"decode.1": 2}, fault("scale", "decode")) == []
