"""The processor at hand, as Linux describes it: its name and its instructions."""

import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path

PROC = Path("/proc")


def processor_name(proc: Path = PROC) -> str:
    """Return the name of the processor's model; of its architecture where Linux knows no more."""
    return _value(_lines(proc), ("model name", "cpu model")) or platform.processor() or platform.machine()


@cache
def processor_flags(proc: Path = PROC) -> frozenset[str]:
    """Return the instructions that the processor has, by Linux's names; none where they are not known.

    A virtual machine can hide some that others imply.
    """
    return frozenset(_value(_lines(proc), ("flags", "features")).split())  # the last on Arm


def _lines(proc: Path) -> Sequence[str]:
    try:
        return (proc / "cpuinfo").read_text().splitlines()
    except OSError:
        return ()


def _value(lines: Sequence[str], names: tuple[str, ...]) -> str:
    """Return what follows the first of these names."""
    return next((line.partition(":")[2].strip() for line in lines if line.lower().startswith(names)), "")
