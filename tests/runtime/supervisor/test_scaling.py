"""Changes of a layout that cannot be done: what is refused, and what is taken back. ``end_to_end/test_scale`` has those that can."""

import asyncio
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmrt.runtime.config.runtime_config import RuntimeConfig, parse_config
from mmrt.runtime.errors import RunError
from mmrt.runtime.process.host_room import HostRoom
from mmrt.runtime.process.run import run_info
from mmrt.runtime.supervisor import scaling
from mmrt.runtime.supervisor.managed_actor import SupervisedActor
from mmrt.runtime.supervisor.processes import anonymous_bytes
from mmrt.runtime.supervisor.scaling import Scaling
from mmrt.runtime.supervisor.specs import actor_specs
from mmrt.runtime.supervisor.supervisor import RunSetup, Supervisor
from mmrt.shm.errors import SpaceError
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.status import ActorTable

MEBI = 1 << 20


class Host:
    """A supervisor whose processes are all this one."""

    def __init__(self, settings: str) -> None:
        self.config: RuntimeConfig = parse_config(settings)
        self.can_scale = True
        self.actors = {spec.name: SupervisedActor(spec, self) for spec in actor_specs(self.config)}  # type: ignore[arg-type]
        self.tasks = self
        for actor in self.actors.values():
            actor.current = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()), is_debugger=False)  # type: ignore[assignment]

    def say(self, text: str) -> None:
        pass

    def set_config(self, config: RuntimeConfig) -> None:
        self.config = config

    def begin(self, actor: SupervisedActor) -> None:
        actor.current = self.actors["decode"].current

    async def ended(self, name: str) -> None:
        pass

    def on_outage(self, actor: SupervisedActor) -> None:
        pass


class Holding:
    """The controller's word: these actors hold work for ever."""

    def drained(self, version: int) -> list[str]:
        return []


@pytest.fixture
def place(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create(tmp_path / "run", {}) as run:
        yield run


def scaling_of(run: RunDirectory, settings: str) -> tuple[Scaling, Host]:
    host = Host(settings)
    ActorTable.create(run, host.config.instances).close()
    return Scaling(run, Holding(), host), host  # type: ignore[arg-type]


def refused(change: Any) -> str:
    with pytest.raises(RunError) as refusal:
        asyncio.run(change)
    return str(refusal.value)


def test_more_than_there_is_memory_for_is_refused(place: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    changer, host = scaling_of(place, "")
    monkeypatch.setattr(scaling, "read_host_room", lambda _: HostRoom(3 * MEBI, 9 * MEBI))
    message = refused(changer.scale("decode", 3))
    assert message.startswith("decode.1, decode.2 need ") and message.endswith(" MiB, as those of their stage do; 3 MiB are free")
    assert ActorTable.attach(place).actors == host.config.instances


def test_what_one_process_has_mapped_is_not_needed_again(tmp_path: Path) -> None:
    """A shared mapping is of its file, also where one process alone has it; what a process fills itself is its own."""
    before = anonymous_bytes(os.getpid())
    assert before is not None
    with open(tmp_path / "weights", "w+b") as file:
        file.truncate(64 * MEBI)
        with mmap.mmap(file.fileno(), 64 * MEBI) as weights:
            weights[::4096] = b"w" * (64 * MEBI // 4096)
            mapped = anonymous_bytes(os.getpid())
    with mmap.mmap(-1, 16 * MEBI, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as own:
        own[::4096] = b"o" * (16 * MEBI // 4096)
        filled = anonymous_bytes(os.getpid())
    assert mapped is not None and mapped - before < 8 * MEBI
    assert filled is not None and 15 * MEBI < filled - mapped < 24 * MEBI
    assert anonymous_bytes(2**22 + 1) is None, "no process has such a number"


def test_one_that_keeps_work_stays(place: RunDirectory) -> None:
    changer, host = scaling_of(place, '[actors]\nlayout = "E+P+2D"\n[supervisor]\ndrain_s = 0.05\n')
    assert refused(changer.scale("decode", 1)) == "decode.1 still had work after 0.05 s (supervisor.drain_s), and stays"
    table = ActorTable.attach(place)
    assert table.leaving == () and table.present == host.config.instances and host.config.actors.layout == "E+P+2D"


def test_those_that_have_come_are_named_where_others_stay(place: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    changer, host = scaling_of(place, '[actors]\nlayout = "2E+P+D"\n[supervisor]\ndrain_s = 0.05\n')

    async def all_serve(_: object) -> None:
        return None

    monkeypatch.setattr(changer, "_all_serve", all_serve)
    monkeypatch.setattr(scaling, "read_host_room", lambda _: HostRoom(1 << 50, 1 << 50))
    assert refused(changer.change("E+P+2D")) == (
        "encoder.1 still had work after 0.05 s (supervisor.drain_s), and stays; "
        "decode.1: in the run, and serving, and the layout is 2E+P+2D"
    )
    assert host.config.actors.layout == "2E+P+2D" and {"encoder.1", "decode.1"} <= {*ActorTable.attach(place).present}


def test_one_that_served_hands_its_work_over_before_it_is_taken_back(place: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two new decodes one does not come up; the other has rows by then."""
    changer, host = scaling_of(place, "")
    seen: list[tuple[str, ...]] = []

    class Draining:
        def drained(self, version: int) -> list[str]:
            seen.append(ActorTable.attach(place).leaving)
            return ["decode.1", "decode.2"] if len(seen) > 4 else ["decode.2"]

    async def all_serve(names: list[str]) -> SupervisedActor:
        failed = host.actors["decode.2"]
        failed.state = "broken"
        return failed

    async def stop(actor: SupervisedActor) -> None:
        assert len(seen) > 4, "it holds work"

    changer._tables = Draining()  # type: ignore[assignment]
    monkeypatch.setattr(changer, "_all_serve", all_serve)
    monkeypatch.setattr(SupervisedActor, "stop", stop)
    assert refused(changer.scale("decode", 3)) == "decode.2 does not come up, and nothing has changed: it is broken"
    assert {*seen} == {("decode.1", "decode.2")}
    table = ActorTable.attach(place)
    assert table.present == host.config.instances and host.config.actors.layout == "E+P+D" and "decode.1" not in host.actors


def test_nobody_leaves_a_run_that_ends(place: RunDirectory) -> None:
    changer, host = scaling_of(place, '[actors]\nlayout = "E+P+2D"\n')
    host.can_scale = False
    assert "the run is starting or ending" in refused(changer.scale("decode", 1))


def test_one_that_is_being_replaced_does_not_leave(place: RunDirectory) -> None:
    changer, host = scaling_of(place, '[actors]\nlayout = "E+P+2D"\n')
    host.actors["decode.1"].is_being_restarted = True
    assert refused(changer.scale("decode", 1)) == "decode.1 is being restarted already"


def test_a_layout_on_a_device_is_fixed(place: RunDirectory) -> None:
    changer, _ = scaling_of(place, '[model]\ndevice = "cuda"\n')
    assert refused(changer.scale("decode", 2)).startswith("on cuda pools take the memory that processes leave")


def test_a_process_stays_on_its_device(place: RunDirectory) -> None:
    devices = '[[devices]]\nname = "a"\n[[devices]]\nname = "b"\n'
    changer, _ = scaling_of(place, devices + '[actors]\nlayout = "EP@a+D@b"\n')
    assert refused(changer.change("EP@a+D@a")) == (
        "in 'EP@a+D@a' decode is on device a, now it is on b: that needs another start (mmrt up)"
    )
    assert refused(changer.change("EP@a+D@c")) == "decode on 'c': no such device, there are a, b"


def test_one_that_comes_has_its_device_in_the_table(place: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    changer, host = scaling_of(place, '[[devices]]\nname = "a"\n[[devices]]\nname = "b"\n[actors]\nlayout = "EP@a+D@b"\n')

    async def all_serve(_: object) -> None:
        return None

    monkeypatch.setattr(changer, "_all_serve", all_serve)
    monkeypatch.setattr(scaling, "read_host_room", lambda _: HostRoom(1 << 50, 1 << 50))
    layout, _ = asyncio.run(changer.scale("decode", 2))
    assert layout == "EP@a+2D@b" and host.config.actor_devices["decode.1"] == 1
    assert ActorTable.attach(place).devices["decode.1"] == 1


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """One that has not begun."""
    config = parse_config('[actors]\nlayout = "E+P+2D"\n')
    setup = RunSetup(
        path=tmp_path / "run",
        info=run_info(config, tmp_path, 1234),
        specs=actor_specs(config),
        environment={},
        log_directory=tmp_path / "logs",
    )
    made = Supervisor(setup, SimpleNamespace(message=lambda text: None))  # type: ignore[arg-type]
    yield made
    made._logs.close()


def test_a_run_ends_while_an_actor_leaves_it(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    crew, stopped = supervisor.crew, list[str]()
    names = list(crew.actors)

    async def stop(actor: SupervisedActor) -> None:
        stopped.append(actor.name)
        crew.actors.pop("decode.1", None)  # a change that was under way has ended

    monkeypatch.setattr(crew, "_stop", stop)
    asyncio.run(crew._stop_actors())
    assert stopped[0] == "gateway" and sorted(stopped) == sorted(names)


def test_a_layout_that_cannot_be_written_is_not_the_layout_of_now(supervisor: Supervisor) -> None:
    def full(_: object) -> None:
        raise OSError("no room")

    supervisor._run = SimpleNamespace(rewrite=full)  # type: ignore[assignment]
    with pytest.raises(OSError, match="no room"):
        supervisor.crew.set_config(parse_config(""))
    assert supervisor.crew.config.actors.layout == "E+P+2D"


def test_without_room_for_flight_recorders_nothing_changes(place: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SpaceError("no room for the flight recorder", 2, 1)

    changer, host = scaling_of(place, "")
    monkeypatch.setattr(scaling.FlightRecorder, "create", full)
    monkeypatch.setattr(scaling, "read_host_room", lambda _: HostRoom(1 << 50, 1 << 50))
    assert refused(changer.scale("decode", 2)) == "no room for the flight recorder"
    assert ActorTable.attach(place).actors == host.config.instances and host.config.actors.layout == "E+P+D"
