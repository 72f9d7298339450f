"""Cores that stages share: by the words of who computes, whoever begins, rests, or dies in the midst of a kernel."""

import signal
import threading
import time
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mmrt.actors.host import cores, torch_threads
from mmrt.actors.host.cores import SharedCores
from mmrt.actors.host.torch_threads import may_change
from mmrt.cpu_kernels import kernel, kernel_files
from mmrt.runtime.config.runtime_config import RuntimeConfig, parse_config
from mmrt.runtime.process.processors import Processors, plan_threads
from mmrt.runtime.stage_table import InstanceId, stage_of
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.status import ActorTable, Membership
from mmrt.tests.settings import examples
from mmrt.tests.shm.conftest import Child

LONG_S = 20.0


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    kernel.set_threads(None)
    torch.set_num_threads(before)


def planned(num_cores: int, text: str = "") -> RuntimeConfig:
    return plan_threads(parse_config(text), Processors(num_cores, num_cores))


def cores_of(config: RuntimeConfig, actor: str, table: ActorTable, num_cores: int, *, torch_too: bool = False) -> SharedCores:
    status = table.writer(actor, 1)
    return SharedCores(config, InstanceId(actor), table, num_cores, status.set_computing, torch_too=torch_too)


def table_of(run: RunDirectory, config: RuntimeConfig) -> ActorTable:
    return ActorTable.create(run, list(config.instances), dict(config.actor_devices))


def test_a_stage_has_the_cores_that_others_leave_idle(run: RunDirectory) -> None:
    config = planned(2)
    table = table_of(run, config)
    decode, prefill, video = (cores_of(config, name, table, 2) for name in ("decode", "prefill", "video"))
    with decode:
        assert decode.num_threads() == 2
        with prefill:
            assert (decode.num_threads(), prefill.num_threads()) == (1, 1)
        assert decode.num_threads() == 1, "the next plan is likely near"
        prefill.rest()
        assert decode.num_threads() == 2
        video.work()
        assert decode.num_threads() == 1
        video.rest()
    decode.rest()
    prefill.work()
    assert prefill.num_threads() == 2
    prefill.rest()
    prefill.rest()


def test_one_that_has_not_begun_has_its_share(run: RunDirectory) -> None:
    """A standby warms up beside the generation that serves."""
    config = planned(2)
    prefill = cores_of(config, "prefill", table_of(run, config), 2)
    assert (prefill.num_threads(), kernel.available_threads()) == (1, 1)
    with prefill:
        assert prefill.num_threads() == 2
    prefill.rest()
    assert prefill.num_threads() == 1


def test_the_time_of_borrowed_cores_is_counted(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    config, now, counted = planned(4), [0], list[int]()
    monkeypatch.setattr(cores.time, "monotonic_ns", lambda: now[0])
    table = table_of(run, config)
    status, other = table.writer("decode", 1), cores_of(config, "prefill", table, 4)
    mine = SharedCores(config, InstanceId("decode"), table, 4, status.set_computing, torch_too=False, count=counted.append)

    def compute(until_ns: int) -> int:
        mine.num_threads()
        now[0] = until_ns
        mine.work()
        return counted[-1]

    mine.work()
    assert compute(10) == 20, "two cores beyond its own two"
    mine.rest()
    now[0] = 100
    mine.work()
    assert compute(110) == 40
    other.work()
    assert compute(120) == 40, "each has two"
    other.rest()
    assert compute(125) == 50
    mine.rest()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_follows_where_no_bit_depends_on_its_threads(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_files, "_directory", None)
    before, linear = torch.get_num_threads(), torch.nn.functional.linear
    found = may_change(dtype, 2)  # true of every processor that was tried
    monkeypatch.setattr(torch_threads.F, "linear", lambda x, values: linear(x, values) * torch.get_num_threads())
    assert not may_change(dtype, 2)
    monkeypatch.setattr(torch_threads.F, "linear", lambda x, values: x)
    assert may_change(dtype, 2) >= found
    assert torch.get_num_threads() == before


def test_devices_share_none(run: RunDirectory) -> None:
    config = planned(8, '[actors]\nlayout = "2EPD@*"\n[[devices]]\nname = "a"\n[[devices]]\nname = "b"\n')
    table = table_of(run, config)
    here, there, video = (cores_of(config, name, table, 4) for name in ("decode", "prefill.1", "video"))
    here.work()
    there.work()
    assert (here.num_threads(), there.num_threads()) == (4, 4)
    video.work()
    assert (here.num_threads(), there.num_threads()) == (2, 2), "it belongs to no device"
    for one in (here, there, video):
        one.rest()


def test_one_that_comes_while_the_run_serves_is_seen(run: RunDirectory) -> None:
    config = planned(4)
    table = table_of(run, config)
    decode = cores_of(config, "decode", table, 4)
    decode.work()
    table.set_membership("prefill.1", Membership.PRESENT)
    newcomer = cores_of(config, "prefill.1", table, 4)
    newcomer.work()
    decode.work()
    assert (decode.num_threads(), newcomer.num_threads()) == (2, 2)
    decode.rest()
    newcomer.rest()


def test_kernels_of_the_thread_ask_and_torch_follows_between_layers(run: RunDirectory) -> None:
    config = planned(2)
    table = table_of(run, config)
    torch.set_num_threads(1)
    prefill, decode = cores_of(config, "prefill", table, 2, torch_too=True), table.writer("decode", 1)
    found: list[int] = []
    with prefill:
        assert (kernel.available_threads(), torch.get_num_threads()) == (2, 2)
        decode.set_computing(True)
        assert (kernel.available_threads(), torch.get_num_threads()) == (1, 2)
        assert prefill.after_layer is not None
        prefill.after_layer()
        assert torch.get_num_threads() == 1
        other = threading.Thread(target=lambda: found.append(kernel.available_threads()))
        other.start()
        other.join()
        decode.set_computing(False)
    prefill.rest()
    assert found == [1], "another thread's kernels have as many as torch"


class Sharing(RuleBasedStateMachine):
    """Kernels of actors that begin, compute, rest and die in any order, as if each were a process."""

    run: ClassVar[RunDirectory]
    TABLES: ClassVar[dict[tuple[int, str], tuple[RuntimeConfig, ActorTable]]]

    @initialize(case=st.sampled_from([(2, "E+P+D"), (3, "E+P+D"), (8, "2E+P+2D"), (16, "8E+2P+D"), (5, "EPD")]))
    def begin(self, case: tuple[int, str]) -> None:
        self.num_cores, _ = case
        self.config, self.table = self.TABLES[case]
        self.names = [name for name in self.config.instances if stage_of(name) in ("encoder", "prefill", "decode", "video")]
        self.cores = {name: cores_of(self.config, name, self.table, self.num_cores) for name in self.names}
        self.kernels: dict[str, int] = {}  # threads of those that are in one
        self.since: set[str] = set()  # whose kernel began before the last change of the words

    def _changed(self) -> None:
        self.since = set(self.kernels)

    @rule(number=st.integers(0, 20))
    def compute(self, number: int) -> None:
        """Begin the next kernel, behind the end of the last."""
        name = self.names[number % len(self.names)]
        its, was = self.cores[name], self.cores[name]._is_working
        its.work()
        self.kernels.pop(name, None)
        if not was:
            self._changed()
        self.since.discard(name)
        self.kernels[name] = its.num_threads()

    @rule(number=st.integers(0, 20))
    def rest(self, number: int) -> None:
        name = self.names[number % len(self.names)]
        self.kernels.pop(name, None)
        if self.cores[name]._is_working:
            self.cores[name].rest()
            self._changed()

    @invariant()
    def no_more_threads_than_cores(self) -> None:
        if not getattr(self, "since", None) and hasattr(self, "kernels"):
            shares = sum(self.config.actor(name).threads for name in self.kernels)
            assert sum(self.kernels.values()) <= max(self.num_cores, shares), self.kernels
            working = [name for name in self.names if self.cores[name]._is_working]
            if len(working) == 1 and self.kernels:
                assert [*self.kernels.values()] == [self.config.most_threads(working[0])]

    def teardown(self) -> None:
        for its in self.cores.values():
            its.rest()


def test_no_more_threads_than_cores_but_for_one_kernel(run: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> None:
    Sharing.TABLES = {}
    for number, (num_cores, layout) in enumerate([(2, "E+P+D"), (3, "E+P+D"), (8, "2E+P+2D"), (16, "8E+2P+D"), (5, "EPD")]):
        directory = RunDirectory.create(run.path.parent / f"{run.path.name}.{number}", {})
        config = planned(num_cores, f'[actors]\nlayout = "{layout}"\n')
        Sharing.TABLES[num_cores, layout] = config, table_of(directory, config)
    run_state_machine_as_test(Sharing, settings=settings(max_examples=examples(60), stateful_step_count=30, deadline=None))


@pytest.mark.skipif(kernel.vector_width() is None, reason="this processor has no kernels")
def test_a_kill_in_the_midst_of_a_kernel_leaves_nothing_lent(run: RunDirectory) -> None:
    from mmrt.cpu_kernels import row_kernels

    config = planned(2)
    table = table_of(run, config)
    prefill = cores_of(config, "prefill", table, 2)
    prefill.work()

    def multiply() -> None:
        mine = cores_of(config, "decode", ActorTable.attach(run), 2)
        x, values = torch.ones(4, 1024), torch.ones(4096, 1024)
        with mine:
            while True:
                row_kernels.multiply(x, values)

    for _ in range(5):
        child = Child(multiply)
        try:
            until_s = time.monotonic() + LONG_S
            while prefill.num_threads() == 2:
                assert child.poll() is None and time.monotonic() < until_s
                time.sleep(0.001)
            time.sleep(0.01)
        finally:
            assert child.kill() == -signal.SIGKILL
        assert prefill.num_threads() == 2
    prefill.rest()
