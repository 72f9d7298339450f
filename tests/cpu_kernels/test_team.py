"""Threads that compute together: who works, who is waited for, and that nobody is busy without work."""

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from mmrt.cpu_kernels import kernel, row_kernels
from mmrt.cpu_kernels.team import Team
from mmrt.cpu_kernels.team_code import END, LEADER_SLEEPS, SYSCALL

pytestmark = pytest.mark.skipif(kernel.vector_width() is None, reason="this processor has no kernels")


FUTEX_WAIT = 128  # between threads of one process


@pytest.fixture
def team() -> Iterator[Team]:
    yield Team(kernel._team_code())
    gc.collect()


def call(team: Team, work: Callable[[], None], num_threads: int = 2) -> None:
    """Let each thread of a call do some work in Python."""
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda call: work())
    team.call(ctypes.cast(function, ctypes.c_void_p).value or 0, b"", num_threads)


def names_of_workers(team: Team, num_threads: int) -> list[str]:
    """Return the names of the threads at a call. It lasts until so many have come. Another may take the place of one that left."""
    found: list[str] = []
    all_came = threading.Event()

    def note() -> None:
        found.append(threading.current_thread().name)
        if len(found) >= num_threads:
            all_came.set()
        all_came.wait(30)

    call(team, note, num_threads)
    return sorted(found)


def test_a_call_is_computed_by_the_leader_and_as_many_helpers_as_it_wants(team: Team) -> None:
    me = threading.current_thread().name
    assert names_of_workers(team, 1) == [me]
    for _ in range(20):
        two = names_of_workers(team, 2)
        assert me in two and len({*two}) == len(two) >= 2
        assert names_of_workers(team, 4) == sorted([me, "helper-1", "helper-2", "helper-3"])
        assert names_of_workers(team, 1) == [me]


def test_helpers_that_sleep_come(team: Team) -> None:
    for _ in range(5):
        assert len(names_of_workers(team, 3)) == 3
        time.sleep(0.02)


def test_nobody_waits_for_a_helper_that_has_not_begun(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    done: list[int] = []
    for number in range(3):
        call(team, lambda number=number: done.append(number), 3)
    assert done == [0, 1, 2]


def test_what_cannot_be_started_is_done_without(team: Team, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    for number in range(2):
        call(team, lambda number=number: done.append(number), 2)
    assert done == [0, 1]
    assert [record.getMessage() for record in caplog.records] == [
        "helper-1 of 1 cannot start, and computes nothing: can't start new thread"
    ]


def test_numbers_of_calls_begin_anew(team: Team) -> None:
    """The gate has 20 bits for them."""
    names_of_workers(team, 4)
    shared = team._shared
    gate = ctypes.c_uint32.from_address(shared.address)
    while gate.value & 0x7FF:
        time.sleep(0.001)
    gate.value = (0xFFFFF000 - (100 << 12)) & 0xFFFFF000
    for _ in range(100):
        assert len(names_of_workers(team, 2)) >= 2
        assert len(names_of_workers(team, 4)) == 4
    assert gate.value < 1000 << 12


def test_a_leader_sleeps_while_a_helper_works(team: Team) -> None:
    names_of_workers(team, 2)  # the helper has begun to live
    helper_came, helper_left, in_time = threading.Event(), threading.Event(), list[bool]()

    def work() -> None:
        if threading.current_thread().name.startswith("helper"):
            helper_came.set()
            time.sleep(0.5)
            helper_left.set()
        else:
            in_time.append(helper_came.wait(30))

    start_s = time.thread_time()
    call(team, work)
    assert in_time == [True] and helper_left.is_set() and time.thread_time() - start_s < 0.1


def test_a_leader_sleeps_by_the_number_of_its_call(team: Team) -> None:
    """Else a helper that is late with its wake-up would end the leader's wait for the helpers of another call."""
    kind = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p)
    system = kind(("syscall", ctypes.CDLL(None)))
    slept: list[int] = []

    def note(number: int, place: int, operation: int, value: int, end: int | None) -> int:
        if (place, operation) == (team._shared.address + 8 * LEADER_SLEEPS, FUTEX_WAIT):
            slept.append(value)
        return int(system(number, place, operation, value, end))

    noted, others = kind(note), set(threading.enumerate())
    word = ctypes.c_void_p.from_address(team._shared.address + 8 * SYSCALL)
    before_test, word.value = word.value, ctypes.cast(noted, ctypes.c_void_p).value
    gates: list[int] = []
    try:
        while len(slept) < 2:
            helper_came = threading.Event()

            def work(came: threading.Event = helper_came) -> None:
                if threading.current_thread().name.startswith("helper"):
                    came.set()
                    time.sleep(0.05)
                else:
                    came.wait(30)

            before = len(slept)
            call(team, work)
            gate = ctypes.c_uint32.from_address(team._shared.address).value
            gates += [gate] * (len(slept) > before)
    finally:
        team._shared.run(END)
        for helper in set(threading.enumerate()) - others:  # while ``noted`` lives
            helper.join(30)
        word.value = before_test
    assert [value >> 12 for value in dict.fromkeys(slept)] == [gate >> 12 for gate in gates] and all(value & 1 for value in slept)


def test_helpers_use_no_processor_time_without_work() -> None:
    values = torch.randn(1500, 256)
    torch.set_num_threads(2)
    for _ in range(50):
        row_kernels.multiply(torch.randn(1, 256), values)
    time.sleep(0.05)
    start_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - start_s < 0.05


def test_helpers_end_with_their_team() -> None:
    team = Team(kernel._team_code())
    before = set(threading.enumerate())
    names_of_workers(team, 3)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    del team
    gc.collect()
    for helper in helpers:
        helper.join(30)
        assert not helper.is_alive()


def test_threads_that_compute_at_once_have_teams_of_their_own() -> None:
    values, x = torch.randn(1500, 256), torch.randn(3, 256)
    torch.set_num_threads(1)
    expected = row_kernels.multiply(x, values)
    results: list[bool] = []

    def compute() -> None:
        torch.set_num_threads(3)
        results.extend(torch.equal(row_kernels.multiply(x, values), expected) for _ in range(200))

    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 600 and all(results)


def test_a_fork_computes_without_its_parents_helpers_beside_it() -> None:
    program = f"""
import os, torch
from {row_kernels.__name__} import multiply
torch.set_num_threads(2)
values, x = torch.randn(1500, 256), torch.randn(3, 256)
expected = multiply(x, values)
if child := os.fork():
    for _ in range(500):
        assert torch.equal(multiply(x, values), expected)
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os._exit(0 if all(torch.equal(multiply(x, values), expected) for _ in range(500)) else 3)
"""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=120).returncode == 0
