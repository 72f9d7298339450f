"""What is compiled for GPUs that are not here, and what is noticed when it goes wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mmrt.triton_kernels
from mmrt_lab.budgets.ahead_of_time import ARCHITECTURES, Budget, Compiled, Variant, find_operations, load_variants, violations

KERNELS = Path(mmrt.triton_kernels.__file__).parent
GOOD = Compiled(registers=128, spills=0, shared_bytes=1000, features=frozenset({"mma", "cp_async"}), seconds=1.0)
NARROW = """
from dataclasses import replace
from mmrt_lab.budgets.ahead_of_time import check
from mmrt_lab.budgets.paged_decode import VARIANTS
print(*check(replace(VARIANTS[0], divisible=()), 90), sep="; ")
"""


def run(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a process in which kernels are compiled, not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def guarded(operation: str, architecture: int) -> list[Variant]:
    return [variant for variant in load_variants(operation) if architecture in variant.budgets]


def test_every_operation_has_budgets() -> None:
    assert find_operations() == sorted(path.parent.name for path in KERNELS.glob("*/op.py"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("operation", find_operations())
def test_every_kernel_has_budgets_for_every_architecture(operation: str, architecture: int) -> None:
    """CI checks that they are kept for one architecture, the slow lane for all: it takes minutes."""
    wrapper = KERNELS / operation / "op.py"
    launched = set(re.findall(r"^ *(?:kernel\.)?(\w+)\[.*\]\(", wrapper.read_text(), re.MULTILINE))
    assert {variant.kernel.__name__ for variant in guarded(operation, architecture)} == launched


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("operation", ["paged_decode", "paged_extend"])
def test_attention_has_budgets_for_every_kind_of_page(operation: str, architecture: int) -> None:
    """E4M3 needs sm_90."""
    kinds = {"*fp32", "*fp16", "*bf16", "*i8", "*fp8e4nv"} - ({"*fp8e4nv"} if architecture == 80 else set())
    assert {variant.types["k_ptr"] for variant in guarded(operation, architecture) if "k_ptr" in variant.types} == kinds


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_budget_is_kept(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "mmrt_lab.budgets.ahead_of_time")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {f"sm_{architecture}" for architecture in ARCHITECTURES} == set(re.findall(r" (sm_\d+) ", done.stdout))


@pytest.mark.slow
def test_a_stride_not_known_to_be_divisible_is_noticed(tmp_path: Path) -> None:
    """The mistake that wrappers guard against by their checks of strides."""
    done = run(tmp_path, "-c", NARROW)
    assert "spills" in done.stdout and "no cp_async instruction" in done.stdout, done.stderr


def test_unknown_operations_are_named(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "mmrt_lab.budgets.ahead_of_time", "paged_decod")
    assert done.returncode == 2 and "no variants of paged_decod; there are those of" in done.stderr


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (Budget(128, 1000, ("mma",)), []),
        (Budget(127, 1000), ["128 registers (127 allowed)"]),
        (Budget(128, 999), ["1000 bytes of shared memory (999 allowed)"]),
        (Budget(128, 1000, ("wgmma", "mma")), ["no wgmma instruction"]),
    ],
)
def test_violations(budget: Budget, expected: list[str]) -> None:
    assert violations(GOOD, budget) == expected


def test_a_spill_is_never_allowed() -> None:
    spilling = Compiled(128, 8, 1000, frozenset(), 1.0)
    assert violations(spilling, Budget(255, 10_000)) == ["8 bytes of stack and spills per thread (0 allowed)"]
