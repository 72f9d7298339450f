"""What is compiled for GPUs that are not here, and what is noticed when it goes wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrt.triton_kernels.ahead_of_time import ARCHITECTURES, Budget, Compiled, find_operations, load_variants, violations

GOOD = Compiled(registers=128, spills=0, shared_bytes=1000, features=frozenset({"mma", "cp_async"}), seconds=1.0)
NARROW = """
from dataclasses import replace
from mmrt.triton_kernels.ahead_of_time import check
from mmrt.triton_kernels.paged_decode.variants import VARIANTS
print(*check(replace(VARIANTS[0], divisible=()), 90), sep="; ")
"""


def run(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a process in which kernels are compiled, not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("operation", find_operations())
def test_every_operation_has_budgets_for_all_architectures(operation: str) -> None:
    """That they are kept, the command says, which CI runs: it takes more than a minute."""
    assert {architecture for variant in load_variants(operation) for architecture in variant.budgets} == set(ARCHITECTURES)


@pytest.mark.slow
def test_a_stride_not_known_to_be_divisible_is_noticed(tmp_path: Path) -> None:
    """The mistake that wrappers guard against by their checks of strides."""
    done = run(tmp_path, "-c", NARROW)
    assert "spills" in done.stdout and "no cp_async instruction" in done.stdout, done.stderr


def test_unknown_operations_are_named(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "mmrt.triton_kernels.ahead_of_time", "paged_decod")
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
