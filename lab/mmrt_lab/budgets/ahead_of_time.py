"""Compiles kernels for GPUs that need not be present, and checks the results against written budgets.

    python -m mmrt_lab.budgets.ahead_of_time [--arch 80|90|100 ...] [OP ...]

prints a table and ends with status 1 if a budget is exceeded. An operation is a module beside this one, by the name of the
package of its kernels, with ``VARIANTS``, a sequence of ``Variant``, each compiled for the architectures that it has a budget for. Must
not run under ``TRITON_INTERPRET=1``.
"""

import argparse
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mmrt.triton_kernels.launch import Launch

ARCHITECTURES = (80, 90, 100)

# Features that a kernel was written for and that a small change loses silently, as named in PTX.
_FEATURES = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "mma": r"\bmma\.sync",
    "cp_async": r"cp\.async\.c[ag]",
    "tma": r"cp\.async\.bulk\.tensor",
    "wide_loads": r"ld\.global[^;]*\.(v4\.[bf]32|v2\.[bf]64|v8\.[bf]32|v4\.[bf]64)",
}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper limits for one architecture; spills are always 0. ``needs``: names of features that must appear, see ``Compiled``."""

    registers: int
    shared_bytes: int
    needs: tuple[str, ...] = ()


def everywhere(registers: int, shared_bytes: int, *needs: str) -> dict[int, Budget]:
    """The same budget for all architectures."""
    return dict.fromkeys(ARCHITECTURES, Budget(registers, shared_bytes, needs))


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialization of a kernel.

    ``types`` of the arguments that are not constants, as Triton writes them ("*bf16", "i32", "i64", "fp32"); ``constants``: values of
    ``tl.constexpr`` parameters, those of ``launch.tiles`` aside; ``divisible`` names integer arguments that are multiples of 16
    (pointers are taken to be aligned); ``budgets`` by compute capability without its dot: 80, 90, 100.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: tuple[str, ...]
    launch: Launch
    budgets: Mapping[int, Budget]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Per thread: ``registers``, and bytes of ``spills`` and stack. ``features``: wgmma, tcgen05, mma, cp_async, tma, wide_loads."""

    registers: int
    spills: int
    shared_bytes: int
    features: frozenset[str]
    seconds: float


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compile for compute capability 80, 90 or 100. Raises: any error of Triton's compiler or ptxas."""
    names, chosen = variant.kernel.arg_names, {**variant.launch.tiles, **variant.constants}
    types = {name: "constexpr" if name in chosen else variant.types[name] for name in names}
    aligned = {(i,): _ALIGNED for i, name in enumerate(names) if types[name].startswith("*") or name in variant.divisible}
    constants = {(names.index(name),): value for name, value in chosen.items()}
    source = ASTSource(fn=variant.kernel, signature=types, constexprs=constants, attrs=aligned)
    options = {"num_warps": variant.launch.num_warps, "num_stages": variant.launch.num_stages}
    start = time.perf_counter()
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    seconds = time.perf_counter() - start
    registers, spills = _resources(kernel.asm["cubin"])
    features = frozenset(name for name, pattern in _FEATURES.items() if re.search(pattern, kernel.asm["ptx"]))
    return Compiled(registers, spills, kernel.metadata.shared, features, seconds)


def check(variant: Variant, capability: int) -> list[str]:
    """The violations of the variant's budget for this architecture, in words. Raises: KeyError where it has none."""
    return violations(compile_variant(variant, capability), variant.budgets[capability])


def violations(compiled: Compiled, budget: Budget) -> list[str]:
    """The violations of ``budget``, in words."""
    found = []
    if compiled.spills:
        found.append(f"{compiled.spills} bytes of stack and spills per thread (0 allowed)")
    if compiled.registers > budget.registers:
        found.append(f"{compiled.registers} registers ({budget.registers} allowed)")
    if compiled.shared_bytes > budget.shared_bytes:
        found.append(f"{compiled.shared_bytes} bytes of shared memory ({budget.shared_bytes} allowed)")
    return found + [f"no {name} instruction" for name in budget.needs if name not in compiled.features]


def find_operations() -> list[str]:
    """Names of the modules beside this one."""
    here = Path(__file__)
    return [module.name for module in pkgutil.iter_modules([str(here.parent)]) if module.name != here.stem]


def load_variants(operation: str) -> Sequence[Variant]:
    """``VARIANTS`` of an operation."""
    variants: Sequence[Variant] = importlib.import_module(f".{operation}", __package__).VARIANTS
    return variants


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([_TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _selected(operations: Sequence[str], architectures: Sequence[int]) -> Iterator[tuple[str, Variant, int]]:
    for operation in operations:
        for variant in load_variants(operation):
            for architecture in architectures:
                if architecture in variant.budgets:
                    yield operation, variant, architecture


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mmrt_lab.budgets.ahead_of_time", description="Compile kernels and check budgets.")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHITECTURES, help="may be repeated; all by default")
    parser.add_argument("operations", nargs="*", metavar="OP")
    options = parser.parse_args()
    unknown = set(options.operations) - set(find_operations())
    if unknown:
        parser.error(f"no variants of {', '.join(sorted(unknown))}; there are those of {', '.join(find_operations())}")
    selected = _selected(options.operations or find_operations(), options.arch or ARCHITECTURES)
    num_bad = 0
    print(f"{'kernel':44} {'arch':6} {'regs':>9} {'shared':>15} {'s':>5}  features")
    for operation, variant, architecture in selected:
        compiled, budget = compile_variant(variant, architecture), variant.budgets[architecture]
        found = violations(compiled, budget)
        num_bad += bool(found)
        registers, shared = f"{compiled.registers}/{budget.registers}", f"{compiled.shared_bytes}/{budget.shared_bytes}"
        features = " ".join(sorted(compiled.features))
        row = (
            f"{operation + '/' + variant.name:44} sm_{architecture:<3} {registers:>9} {shared:>15} {compiled.seconds:5.1f}  {features}"
        )
        print("; ".join([row, *found]), flush=True)
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
