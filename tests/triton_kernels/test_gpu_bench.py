"""The GPU bench: its checks at tiny sizes against the real kernels, and every timing up to the launch, on tensors without memory."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys

import pytest
import torch

import mmrt.triton_kernels
from mmrt.bench.gpu import row_kernels
from mmrt.bench.gpu.case import Check
from mmrt.bench.gpu.results import judge
from mmrt.bench.gpu.section import MODULES, execute

LAUNCHES = """
import importlib, json, torch
from mmrt.tests.triton_kernels.launch_keys import record
from mmrt.bench.gpu import steps
from mmrt.bench.gpu.section import MODULES, execute
from mmrt.bench.gpu.timing import Timed

modules = {section: importlib.import_module("mmrt.bench.gpu." + name) for section, name in MODULES.items()}
found, rows = record(), {}
steps._missing = lambda num_bytes: None

class Clock:
    device = torch.device("meta")

    def time(self, launches, *, in_graph=True):
        for launch in launches:
            launch()
        return Timed(10.0 * len(launches), 0.1)

for section, module in modules.items():
    for timing in module.timings(False):
        rows.setdefault(section, []).extend([row.case, row.failed, timing.is_peer, row.note] for row in execute(timing, Clock(), None))
print(json.dumps([rows, sorted(found)]))
"""


def nothing() -> None:
    pass


def test_every_operation_has_a_section() -> None:
    packages = {module.name for module in pkgutil.iter_modules(mmrt.triton_kernels.__path__) if module.ispkg}
    named = {name for section in MODULES for name in section.split(", ")}
    assert packages <= named


@pytest.mark.parametrize("name", MODULES.values())
def test_checks_pass(name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    for check in importlib.import_module(f"mmrt.bench.gpu.{name}").checks(device, "tiny"):
        difference = check.run()
        assert 0 <= difference <= 1, check.name


def test_a_wrong_result_is_a_failed_row(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    right = row_kernels.silu_reference.silu_mul

    def wrong(gate_up: torch.Tensor, out: torch.Tensor) -> None:
        right(gate_up, out)
        out[1, 2] += 1

    monkeypatch.setattr(row_kernels.silu_reference, "silu_mul", wrong)
    check = next(check for check in row_kernels.checks(device, "tiny") if check.name.startswith("silu_mul"))
    (row,) = execute(check, None, nothing)
    assert row.failed and row.note.startswith("WrongResult: out[1, 2] is ") and row.note.endswith("; 1 of 144 are wrong")
    assert judge(row, {}, "H200").verdict == "FAILED"


def test_a_result_of_nan_is_a_failed_row(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(row_kernels, "silu_mul", lambda gate_up, out: None)
    check = next(check for check in row_kernels.checks(device, "tiny") if check.name.startswith("silu_mul"))
    (row,) = execute(check, None, nothing)
    assert row.failed and "is nan" in row.note


def test_the_first_of_two_runs_pays_for_compiling(device: torch.device) -> None:
    runs: list[int] = []
    (row,) = execute(Check("op", lambda: float(len(runs)) + (runs.append(1) or 0)), None, nothing)  # type: ignore[func-returns-value]
    assert len(runs) == 2 and row.difference == 1.0 and row.first_s is not None and judge(row, {}, "").verdict == "ok"


def test_a_quick_run_times_some_of_it() -> None:
    for name in MODULES.values():
        module = importlib.import_module(f"mmrt.bench.gpu.{name}")
        whole, quick = ([timing.name for timing in module.timings(is_quick)] for is_quick in (False, True))
        assert set(quick) <= set(whole) and (quick or name == "sweep")


def test_every_timing_launches_what_it_says() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", LAUNCHES], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows, kernels = json.loads(done.stdout)
    assert set(rows) == set(MODULES)
    for section, found in rows.items():
        for case, failed, is_peer, note in found:
            assert not failed, (section, case, note)
            assert case and (section == "peers") <= is_peer
    expected = {"attend_kernel", "plan_kernel", "reduce_kernel", "extend_kernel", "copy_rows", "write_heads", "rotate_and_write_heads"}
    expected |= {"norm_row", "silu_mul_rows", "transfer_rows", "prepare_kernel", "draw_kernel", "sequences_kernel", "windows_kernel"}
    assert expected <= set(kernels)
