"""The cases of a section: checks against references, and timings. Sections are modules with ``timings``, most with ``checks``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .results import Row
from .timing import Clock

Size = Literal["tiny", "device"]
"""Of checks: tiny ones for Triton's interpreter on a CPU."""


_SIZE_SHARES = {torch.float16: 4e-3, torch.bfloat16: 2e-2}
_VALUE_SHARE = 8e-3
_HEADROOM = 1.15  # of memory: activations, and the flushed memory


class WrongResult(Exception):
    """A kernel did not compute what its reference does."""


@dataclass(frozen=True, slots=True)
class Check:
    """``run`` calls a kernel and its reference and returns the largest difference; it can be called again. Raises: WrongResult."""

    name: str
    run: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Timing:
    """``is_peer``: third-party code, which may be absent or fail without failing the bench."""

    name: str
    run: Callable[[Clock], list[Row]]
    is_peer: bool = False


def require_close(name: str, actual: Tensor, expected: Tensor, *, atol: float | Tensor, rtol: float = 0.0) -> float:
    """The largest difference, NaN being equal to NaN; a tensor ``atol`` is broadcast. Raises: WrongResult, which says where it is."""
    if actual.shape != expected.shape:
        raise WrongResult(f"{name} has shape {list(actual.shape)}, expected {list(expected.shape)}")
    got, want = actual.double(), expected.double()
    same = (got == want) | (got.isnan() & want.isnan())
    difference = torch.where(same, 0.0, (got - want).abs())
    wrong = ~(difference <= atol + rtol * want.abs()) & ~same
    if not wrong.any():
        return float(difference.max()) if difference.numel() else 0.0
    place = tuple(int(index) for index in wrong.nonzero()[0])
    raise WrongResult(
        f"{name}{list(place)} is {float(got[place]):.6g}, expected {float(want[place]):.6g}; "
        f"{int(wrong.sum())} of {wrong.numel()} are wrong"
    )


def require_equal(name: str, actual: Tensor, expected: Tensor) -> float:
    """As ``require_close`` with no difference allowed."""
    return require_close(name, actual, expected, atol=0.0)


def require_attention(actual: Tensor, expected: Tensor) -> float:
    """As ``require_close`` for outputs [N, heads, D] of attention, within a share of the root mean square of each row and head.

    Over n tokens of unit variance that is about sqrt(e / n): a fixed tolerance would be wider than the whole output of a long row.
    Rounding the weights of tokens to the type of ``actual`` takes about half of it. A row over no tokens must be exactly 0.
    """
    size = expected.double().pow(2).mean(-1, keepdim=True).sqrt()
    return require_close("out", actual, expected, atol=_SIZE_SHARES[actual.dtype] * size, rtol=_VALUE_SHARE)


def type_name(dtype: torch.dtype) -> str:
    return {
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.float32: "fp32",
        torch.int8: "int8",
        torch.float8_e4m3fn: "e4m3",
    }[dtype]


PAGE_DTYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
)
"""Of queries and of pages, in the checks of attention."""


def can_read(dtype: torch.dtype, device: torch.device) -> bool:
    """True if kernels can read pages of this dtype there: E4M3 from compute capability 8.9 on."""
    return dtype != torch.float8_e4m3fn or device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def num_multiprocessors(device: torch.device) -> int:
    """2 on the CPU, where every program of a grid costs time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def missing_memory(num_bytes: int) -> Row | None:
    """The message where memory is too small."""
    need, free = num_bytes * _HEADROOM, torch.cuda.mem_get_info()[0]
    if need <= free:
        return None
    return Row(note=f"not measured: needs {need / 2**30:.0f} GiB, {free / 2**30:.0f} are free")
