"""The processors of machines made of files, and the threads that follow for every stage."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.runtime.config.runtime_config import parse_config
from mmrt.runtime.errors import ConfigError
from mmrt.runtime.process.processors import Claim, Processors, check_processors, divide, keep_to, plan_threads, read_processors
from mmrt.runtime.stage_table import InstanceId, stage_of

COMPUTING = ("decode", "prefill", "encoder", "video", "memory")


class Machine:
    """/sys/devices/system, /proc and /sys/fs/cgroup made of files: ``nodes`` of so many cores, each of so many hardware threads."""

    def __init__(self, path: Path, nodes: int, cores: int, threads: int) -> None:
        self.system, self.proc, self.cgroups = path / "system", path / "proc", path / "cgroup"
        self.usable = range(nodes * cores * threads)
        num_cores = nodes * cores
        for cpu in self.usable:  # as Linux numbers them: first the first threads of all cores
            siblings = ",".join(str(cpu % num_cores + num_cores * thread) for thread in range(threads))
            self.write(self.system / f"cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
        for node in range(nodes):
            first = [node * cores + num_cores * thread for thread in range(threads)]
            self.write(self.system / f"node/node{node}/cpulist", ",".join(f"{start}-{start + cores - 1}" for start in first))

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def read(self, usable: range | None = None) -> Processors:
        return read_processors(self.usable if usable is None else usable, self.system, self.proc, self.cgroups)


@pytest.mark.parametrize(
    ("nodes", "cores", "threads", "found"),
    [(1, 1, 1, (1, 1)), (1, 4, 2, (4, 4)), (2, 32, 2, (64, 32)), (4, 16, 1, (64, 16))],
)
def test_cores_and_not_threads_are_counted(tmp_path: Path, nodes: int, cores: int, threads: int, found: tuple[int, int]) -> None:
    assert Machine(tmp_path, nodes, cores, threads).read() == found


def test_only_what_this_process_may_use_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2, 8, 2)
    assert machine.read(range(6)) == (6, 6), "taskset -c 0-5"
    assert machine.read(range(12)) == (12, 8)
    assert machine.read(range(4, 12)) == (8, 4), "half of either node"


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert read_processors(range(3), tmp_path, tmp_path, tmp_path) == (3, 3)


@pytest.mark.parametrize(
    ("line", "files", "num_cores"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000"}, 8),
        ("0::/a/b", {"a/b/cpu.max": "250000 100000"}, 2),
        ("0::/a/b", {"a/b/cpu.max": "600000 100000", "a/cpu.max": "300000 100000"}, 3),
        ("0::/a/b", {"a/b/cpu.max": "20000 100000"}, 1),
        ("0::/", {"cpu.max": "400000 100000"}, 4),
        ("4:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, 8),
        ("4:cpu:/x", {"cpu/x/cpu.cfs_quota_us": "500000", "cpu/x/cpu.cfs_period_us": "100000"}, 5),
        ("4:memory:/x", {"memory/x/cpu.max": "100000 100000"}, 8),
    ],
)
def test_limits_of_control_groups(tmp_path: Path, line: str, files: dict[str, str], num_cores: int) -> None:
    machine = Machine(tmp_path, 1, 8, 1)
    machine.write(machine.proc / "self" / "cgroup", line)
    for name, text in files.items():
        machine.write(machine.cgroups / name, text)
    assert machine.read().num_cores == num_cores


@pytest.mark.parametrize(
    ("num_local", "threads"),
    [
        (1, (1, 1, 1, 1, 1)),
        (2, (1, 1, 1, 1, 1)),
        (3, (1, 1, 1, 1, 1)),
        (4, (2, 2, 2, 1, 1)),
        (8, (4, 4, 4, 2, 1)),
        (96, (48, 48, 48, 24, 1)),
    ],
)
def test_the_plan(num_local: int, threads: tuple[int, ...]) -> None:
    config = plan_threads(parse_config(""), Processors(2 * num_local, num_local))
    assert tuple(config.actor(name).threads for name in COMPUTING) == threads


@pytest.mark.parametrize("settings", ['[scheduling]\npreset = "monolithic"\n', '[actors]\nturns = "layers"\nlayout = "2E+P+2D"\n'])
@pytest.mark.parametrize(("num_local", "threads"), [(1, (1, 1, 1, 1, 1)), (2, (2, 2, 2, 1, 1)), (8, (8, 8, 8, 2, 1))])
def test_stages_that_compute_one_at_a_time_have_all_cores(num_local: int, threads: tuple[int, ...], settings: str) -> None:
    config = plan_threads(parse_config(settings), Processors(num_local, num_local))
    assert tuple(config.actor(name).threads for name in COMPUTING) == threads


def test_devices_divide_the_cores_of_stages_that_compute_one_at_a_time() -> None:
    two = '[actors]\nturns = "plans"\nlayout = "2EPD@*"\n[[devices]]\nname = "a"\n[[devices]]\nname = "b"\n'
    config = plan_threads(parse_config(two), Processors(8, 8))
    assert [config.actor(name).threads for name in ("encoder", "prefill", "decode")] == [4, 4, 4]


@given(num_cores=st.integers(1, 128), layout=st.sampled_from(["E+P+D", "2E+P+D", "8E+8P+D", "EPD"]))
def test_any_plan_gives_all_a_thread_and_none_more_than_there_are(num_cores: int, layout: str) -> None:
    config = plan_threads(parse_config(f'[actors]\nlayout = "{layout}"\n'), Processors(num_cores, num_cores))
    sums = dict.fromkeys(COMPUTING, 0)
    for actor in config.instances:
        if stage_of(actor) in sums:
            assert config.actor(actor).threads >= 1
            sums[stage_of(actor)] += config.actor(actor).threads
    counts = {stage: sum(stage_of(actor) == stage for actor in config.instances) for stage in sums}
    for stage in ("prefill", "encoder"):
        assert sums[stage] <= max(counts[stage], num_cores // 2) and sums["decode"] <= max(1, num_cores // 2)
    assert plan_threads(config, Processors(1, 1)) == config, "what is configured stays"


def test_nobody_that_decode_waits_for_is_nicer_than_decode() -> None:
    settings = '[actors]\nturns = "layers"\n[actors.decode]\nnice = 1\n[actors.encoder]\nnice = 7\n'
    config = plan_threads(parse_config(settings), Processors(2, 2))
    assert [config.actor(name).nice for name in ("decode", "prefill", "encoder", "video")] == [1, 1, 7, 4]
    assert plan_threads(config, Processors(2, 2)) == config
    assert [plan_threads(parse_config(""), Processors(2, 2)).actor(name).nice for name in ("prefill", "encoder")] == [2, 2]


def test_what_is_configured_stays() -> None:
    config = plan_threads(parse_config("[actors.decode]\nthreads = 7\n"), Processors(8, 8))
    assert (config.actor("decode").threads, config.actor("prefill").threads) == (7, 4)


DEVICES = '[[devices]]\nname = "a"\ncpus = "0-2"\n[[devices]]\nname = "b"\n[actors]\nlayout = "EP@a+D@b"\n'


def test_processors_of_devices_must_be_there() -> None:
    config = parse_config(DEVICES)
    check_processors(config, {0, 1, 2})
    with pytest.raises(ConfigError) as refusal:
        check_processors(config, {0, 2})
    assert str(refusal.value) == "device 'a': processor 1 of cpus = \"0-2\" cannot be used here"


def test_a_process_keeps_to_the_processors_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: kept.append((pid, sorted(cpus))))
    for actor in ("prefill", "decode", "gateway"):
        keep_to(parse_config(DEVICES), InstanceId(actor))
    assert kept == [(0, [0, 1, 2])], "b is any"


@pytest.mark.parametrize(
    ("settings", "num_cores", "expected"),
    [
        ("", 1, [(1, 1), (1, 1), (1, 1), (1, 1)]),
        ("", 2, [(1, 2), (1, 2), (1, 2), (1, 1)]),
        ("", 16, [(8, 16), (8, 16), (8, 16), (4, 4)]),
        ('[actors]\nlayout = "2E+P+D"\n', 16, [(4, 16), (8, 16), (8, 16), (4, 4)]),
        ("[actors.prefill]\nthreads = 3\n", 8, [(4, 8), (3, 3), (4, 8), (2, 2)]),
        ("[actors.prefill]\nmost_threads = 6\n[actors.decode]\nmost_threads = 1\n", 8, [(4, 8), (4, 6), (1, 1), (2, 2)]),
        ("[actors.prefill]\nthreads = 2\nmost_threads = 5\n", 8, [(4, 8), (2, 5), (4, 8), (2, 2)]),
        ('[actors]\nturns = "layers"\n', 2, [(2, 2), (2, 2), (2, 2), (1, 1)]),
        ('[actors]\nlayout = "2EPD@*"\n[[devices]]\nname = "a"\n[[devices]]\nname = "b"\n', 8, [(2, 4), (2, 4), (2, 4), (2, 2)]),
    ],
)
def test_threads_with_cores_that_others_leave_idle(settings: str, num_cores: int, expected: list[tuple[int, int]]) -> None:
    config = plan_threads(parse_config(settings), Processors(num_cores, num_cores))
    assert [(config.actor(name).threads, config.most_threads(name)) for name in ("encoder", "prefill", "decode", "video")] == expected


CLAIMS = st.tuples(st.integers(1, 9), st.integers(0, 20)).map(lambda sizes: Claim(sizes[0], sum(sizes)))


@given(num_cores=st.integers(1, 40), claims=st.lists(CLAIMS, min_size=1, max_size=9))
def test_cores_are_divided(num_cores: int, claims: list[Claim]) -> None:
    found = divide(num_cores, claims)
    assert all(claim.share <= threads <= claim.most for claim, threads in zip(claims, found, strict=True))
    assert sum(found) <= max(num_cores, sum(claim.share for claim in claims))
    if sum(found) < num_cores:
        assert found == [claim.most for claim in claims], "nothing is left idle that somebody may have"
    more = [threads - claim.share for claim, threads in zip(claims, found, strict=True) if threads < claim.most]
    assert not more or more == sorted(more, reverse=True) and more[0] - more[-1] <= 1, "equal parts, the first ones first"
