"""Counts of a run: what counts as a leak, and what as growth."""

import asyncio
import signal
import subprocess
import sys
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from mmrt.bench.processes import OTHER, SUPERVISOR, descendants, send_signal
from mmrt.shm.run_directory import RunDirectory
from mmrt_lab.chaos.census import Count, compare, first_count, slope_problems, theil_sen
from mmrt_lab.chaos.run_view import RunView

BASE = Count(
    processes={"decode": 1, "zygote": 1},
    fds={"decode": 20, "zygote": 9},
    threads={"decode": 3, "zygote": 1},
    files=["bus", "journal"],
    pages_used={"kv": 0},
    rows_used=0,
    requests=0,
    plans=0,
    shm_bytes=1000,
    own_bytes={"zygote": 1 << 20},
)


def but(**changes: Any) -> Count:
    return msgspec.structs.replace(BASE, **changes)


def test_nothing_has_changed() -> None:
    assert compare(BASE, BASE) == []
    assert compare(but(fds={"decode": 21, "zygote": 9}), BASE) == []  # opened when it was first needed


def test_a_gateway_has_one_process_for_grammars_at_most() -> None:
    one, two = but(processes={**BASE.processes, "grammars": 1}), but(processes={**BASE.processes, "grammars": 2})
    assert compare(BASE, one) == compare(one, BASE) == []
    assert "processes are" in compare(two, one)[0] and "processes are" in compare(two, BASE)[0]


@pytest.mark.parametrize("lives", ["a moment", "for ever"])
def test_a_program_that_a_library_starts_for_a_moment_is_not_of_the_undisturbed_run(run: RunDirectory, lives: str) -> None:
    source = f"import subprocess; subprocess.run(['sleep', '{0.3 if lives == 'a moment' else 60}']); input()"
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE) as parent:
        view = RunView(run.path, parent.pid)
        while OTHER not in descendants(parent.pid).values():
            time.sleep(0.001)
        found = asyncio.run(first_count(view, 20.0 if lives == "a moment" else 0.3))
        assert found.processes == {SUPERVISOR: 1} | ({OTHER: 1} if lives == "for ever" else {})
        view.close()
        for pid in descendants(parent.pid):
            send_signal(pid, signal.SIGKILL)


def test_what_stays_of_an_actor_that_has_left() -> None:
    kept = ["decode.1.lock", "flight-decode.1.408913008bfe", "decode.1.exit"]
    assert compare(but(files=[*BASE.files, *kept], fds={"decode": 23, "zygote": 9}), BASE) == []
    assert compare(but(files=[*BASE.files, *kept], fds={"decode": 24, "zygote": 9}), BASE) == ["decode has 24 fds, at first it had 20"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pages_used": {"kv": 3}}, "3 pages of pool kv"),
        ({"rows_used": 1}, "1 rows"),
        ({"plans": 2}, "2 plans"),
        ({"processes": {"decode": 2, "zygote": 1}}, "processes are"),
        ({"processes": {"decode": 1}}, "processes are"),
        ({"fds": {"decode": 30, "zygote": 9}}, "decode has 30 fds"),
        ({"threads": {"decode": 30, "zygote": 1}}, "decode has 30 threads"),
        ({"files": ["bus", "journal", ".bus.N"]}, "has .bus.N"),
        ({"files": ["bus"]}, "has lost journal"),
    ],
)
def test_what_is_a_leak(changes: dict[str, Any], problem: str) -> None:
    (found,) = compare(but(**changes), BASE)
    assert problem in found


def test_a_slope_is_found_in_noise_and_outliers() -> None:
    times = np.arange(30.0) / 60
    values = 1000 + times * 360 + np.random.default_rng(1).normal(0, 5, 30)
    values[[3, 11, 20]] = 0, 5000, 9000
    slope, least = theil_sen(times, values)
    assert 300 < least < slope < 420
    assert theil_sen(times, np.random.default_rng(2).normal(1000, 5, 30))[1] < 0


def test_only_growth_is_a_slope() -> None:
    steady = [(60.0 * n, but(own_bytes={"zygote": (1 << 20) + 4096 * (n % 3)})) for n in range(30)]
    assert slope_problems(steady) == []
    shrinking = [(60.0 * n, but(fds={"decode": 50 - n})) for n in range(30)]
    assert slope_problems(shrinking) == []
    leaking = [(60.0 * n, but(fds={"decode": 20 + n // 5})) for n in range(30)]
    (problem,) = slope_problems(leaking)
    assert problem.startswith("descriptors grow by 12 an hour (")
    assert slope_problems(leaking[:3]) == []  # too few for a line
    growing = [(60.0 * n, but(own_bytes={"zygote": (1 << 20) + 4096 * n})) for n in range(30)]
    assert [problem.split(" grow")[0] for problem in slope_problems(growing)] == ["bytes of memory", "bytes of memory of zygote"]
