"""What a processor does best is tried once, in a moment of the first start, and kept beside the kernels (``kernel_files``).

A choice is made again when the kernels' code, the module of the trial, torch, the processor, or a variable changes that says what
libraries use of it, and how.
"""

import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch

from . import kernel_files
from .kernel import sources_digest
from .processor import processor_flags, processor_name

log = logging.getLogger(__name__)

_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
)
_TIMES = 3  # each candidate is timed


def kept(name: str, find: Callable[[], str]) -> str:
    """What ``find`` returned in this process or an earlier one, in words for people. ``name`` says what was tried, and is a file's."""
    return _kept(name, find, _key(inspect.getfile(find)))


def _kept(name: str, find: Callable[[], str], key: bytes | None) -> str:
    file = name + kernel_files.CHOICE
    if key is None:
        return _said(name, find)
    if (body := kernel_files.read(file, key)) is not None:
        return body.decode()
    with kernel_files.alone(file):  # trials at once would be in each other's way, and could find different things
        if (body := kernel_files.read(file, key)) is not None:
            return body.decode()
        found = _said(name, find)
        kernel_files.write(file, key, found.encode())
    return found


def fastest(name: str, candidates: Mapping[str, Callable[[], object]]) -> str:
    """The name, one word, of the candidate that takes the least time of this process, all threads together. All are of one module."""
    key = _key(inspect.getfile(next(iter(candidates.values()))))
    return _kept(name, lambda: _timed(candidates), key).split()[0]


def _said(name: str, find: Callable[[], str]) -> str:
    begun_s = time.perf_counter()
    found = find()
    log.info("tried %s in %.2f s: %s", name, time.perf_counter() - begun_s, found)
    return found


def _timed(candidates: Mapping[str, Callable[[], object]]) -> str:
    """The fastest one and the times of all, each the shortest of some that take turns."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(1 + _TIMES):  # the first makes machine code
        for name, compute in candidates.items():
            begun_s = time.process_time()
            compute()
            times[name].append(time.process_time() - begun_s)
    best = {name: 1000 * min(found[1:]) for name, found in times.items()}
    order = sorted(best, key=lambda name: best[name])
    return f"{order[0]} ({', '.join(f'{name} {best[name]:.2f} ms' for name in order)})"


@cache
def _key(module: str) -> bytes | None:
    """Of all that choices by the trials of a module depend on; None where the kernels' own is not known, or the module is gone."""
    sources = sources_digest()
    try:
        trials = Path(module).read_bytes()
    except OSError:
        return None
    if sources is None:
        return None
    facts = [torch.__version__, processor_name(), *sorted(processor_flags()), *(os.environ.get(name, "") for name in _VARIABLES)]
    return blake2b("\n".join(facts).encode() + trials, key=sources, digest_size=32).digest()
