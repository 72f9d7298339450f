"""The memory that a run may take, as Linux says it: of the machine, of control groups of both versions, of the file system."""

from pathlib import Path

import pytest

from mmrt.runtime.process.host_room import read_host_room

MIB = 1 << 20


class Machine:
    """A /proc and a /sys/fs/cgroup made of files."""

    def __init__(self, path: Path) -> None:
        self.proc, self.cgroups, self.run = path / "proc", path / "cgroup", path / "not" / "yet"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(f"MemTotal: {900 << 10} kB\nMemAvailable:   {700 << 10} kB\nBuffers: 1 kB\n")

    def join(self, line: str) -> None:
        (self.proc / "self" / "cgroup").write_text(f"3:cpuset:/\n{line}\n")

    def limit(self, path: str, limit: str, usage: int, cache: int, version: int = 2) -> None:
        group = self.cgroups / path
        group.mkdir(parents=True, exist_ok=True)
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for name, value in zip(names, (limit, usage), strict=True):
            (group / name).write_text(f"{value}\n")
        (group / "memory.stat").write_text(f"anon 5\n{'' if version == 2 else 'total_'}inactive_file {cache}\n")

    @property
    def memory_mib(self) -> int:
        return read_host_room(self.run, self.proc, self.cgroups).memory_bytes // MIB


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_limits_it_is_what_the_machine_has_available(machine: Machine) -> None:
    assert machine.memory_mib == 700
    machine.join("0::/user.slice/a.scope")
    assert machine.memory_mib == 700, "a group that is not visible from a container"


def test_each_group_above_counts_and_files_in_the_cache_are_given_up(machine: Machine) -> None:
    machine.join("0::/user.slice/a.scope")
    machine.limit("user.slice/a.scope", "max", 400 * MIB, 0)
    assert machine.memory_mib == 700
    machine.limit("user.slice", str(500 * MIB), 450 * MIB, 50 * MIB)
    assert machine.memory_mib == 100
    machine.limit("user.slice/a.scope", str(300 * MIB), 350 * MIB, 0)
    assert machine.memory_mib == 0, "over its limit for now"


def test_version_1_has_a_hierarchy_for_memory(machine: Machine) -> None:
    machine.join("8:memory:/docker/1f\n1:name=systemd:/x")
    machine.limit("memory/docker/1f", "9223372036854771712", 0, 0, version=1)
    assert machine.memory_mib == 700
    machine.limit("memory", str(90 * MIB), 40 * MIB, 10 * MIB, version=1)
    assert machine.memory_mib == 60


def test_the_file_system_of_the_run_counts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def usage(path: Path) -> object:
        asked.append(path)
        return type("Usage", (), {"free": 64 * MIB})

    monkeypatch.setattr("shutil.disk_usage", usage)
    room = read_host_room(machine.run, machine.proc, machine.cgroups)
    assert room.num_bytes == 64 * MIB and asked == [machine.run.parent.parent], "the directory is not made yet"


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    room = read_host_room(tmp_path)
    assert 0 < room.num_bytes <= room.memory_bytes
