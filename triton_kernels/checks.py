"""Checks of tensors that wrappers make before a launch. A refusal names the value and the limit."""

from collections.abc import Collection, Sequence

import torch
import triton
from torch import Tensor

ALIGNMENT = 16  # bytes of a wide load; and the multiple of strides, in elements, that Triton knows how to use


def check_tensor(name: str, tensor: Tensor, shape: Sequence[int | None], dtypes: Collection[torch.dtype], device: torch.device) -> None:
    """Check dtype, device and shape; None in ``shape`` allows any size. Raises: ValueError."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, not on {device} as the others")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, not one of {', '.join(str(dtype) for dtype in dtypes)}")
    sizes = list(tensor.shape)
    if len(sizes) != len(shape) or any(want is not None and size != want for size, want in zip(sizes, shape, strict=True)):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {sizes}, not [{wanted}]")


def check_device(name: str, device: torch.device) -> None:
    """Kernels run on the current CUDA device, since Triton launches there wherever tensors are, and on the CPU in Triton's interpreter.

    Raises: ValueError.
    """
    if device.type == "cuda":
        current = torch.cuda.current_device()
        if device.index != current:
            raise ValueError(f"{name} is on {device}, not on cuda:{current}, the current device")
    elif not triton.knobs.runtime.interpret:
        raise ValueError(f"{name} is on {device}: kernels need a CUDA device")


def check_dense(name: str, tensor: Tensor) -> None:
    """Check that elements of the last axis are neighbours. Raises: ValueError."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last axis, not 1")


def check_same_strides(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raises: ValueError."""
    if tensor.stride() != other.stride():
        raise ValueError(f"{name} has strides {list(tensor.stride())} and {other_name} {list(other.stride())}; they must be equal")


def check_aligned(name: str, tensor: Tensor) -> None:
    """Check that the last axis is dense, other strides are multiples of 16 elements, and the start is a multiple of 16 bytes:
    otherwise a kernel would lose its wide and asynchronous loads. Raises: ValueError."""
    check_dense(name, tensor)
    for axis in range(tensor.dim() - 1):
        if tensor.stride(axis) % ALIGNMENT:
            raise ValueError(f"{name} has stride {tensor.stride(axis)} in axis {axis}, not a multiple of {ALIGNMENT}")
    if tensor.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name} starts {tensor.data_ptr() % ALIGNMENT} bytes after a multiple of {ALIGNMENT}")
