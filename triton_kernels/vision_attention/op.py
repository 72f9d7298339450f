"""The checked wrappers: rotation, and attention within frames or windows. The tower's forward
(``models/families/qwen2_5/vision_tower``) calls them once per block, in the encoder actor."""

import torch
import triton
from torch import Tensor

from ..checks import check_aligned, check_device, check_tensor
from ..launch import architecture
from . import config, kernel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(q k' / sqrt(D)) v within each sequence, every token over all tokens of its sequence.

    ``q``, ``k``, ``v`` [T, H, D] bfloat16, float16 or float32, D of 16, 32, 64, 80 or 128, the last dimension dense: views of a fused
    projection will do. ``cu_seqlens`` int32 [S + 1] from 0, not falling, as Qwen2.5-VL's for frames (full attention) and for
    windows; empty sequences are allowed. ``max_length`` of a sequence, known where ``cu_seqlens`` is made: up to 64 a program takes
    a whole sequence. -> [T, H, D] in ``out`` where given, sums in float32; tokens after the last sequence stay
    unchanged. The values of ``cu_seqlens`` are not checked: they lie on the device.

    Raises: ValueError for tensors that do not fit together.
    """
    num_tokens, num_heads, head_dim = _check(q, k, v, cu_seqlens, max_length)
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    check_tensor("out", out, q.shape, (q.dtype,), q.device)
    check_aligned("out", out)
    scale = head_dim**-0.5
    num_sequences = cu_seqlens.numel() - 1
    if not num_tokens or not num_sequences:
        return out
    strides = [tensor.stride(i) for tensor in (q, k, v, out) for i in (0, 1)]
    if max_length <= config.MAX_WINDOW:
        launch = config.windows_launch(head_dim, q.element_size(), max_length)
        kernel.windows_kernel[(num_sequences, num_heads)](q, k, v, out, cu_seqlens, scale, *strides, **launch.arguments())
    else:
        launch = config.sequences_launch(head_dim, q.element_size(), architecture(q.device))
        grid = (num_tokens // launch.tiles["BLOCK_M"] + num_sequences, num_heads)
        kernel.sequences_kernel[grid](q, k, v, out, cu_seqlens, num_sequences, scale, *strides, **launch.arguments())
    return out


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn element j of every head with j + D / 2 by the token's angle j, in place: x cos + rotate_half(x) sin in float32, rounded once
    (RoPE: Su et al., 2021).

    ``q``, ``k`` [T, H, D] as in ``attend``, not overlapping. ``cos``, ``sin`` float32 [T, D / 2], contiguous. Raises: ValueError.
    """
    num_tokens, num_heads, head_dim = _check_heads(q=q, k=k)
    for name, tensor in (("cos", cos), ("sin", sin)):
        check_tensor(name, tensor, (num_tokens, head_dim // 2), (torch.float32,), q.device)
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {list(tensor.stride())}, not those of a contiguous tensor")
    if not num_tokens or not num_heads:
        return
    launch = config.rotation_launch(num_heads, head_dim)
    grid = num_tokens, triton.cdiv(num_heads, launch.tiles["BLOCK_HEADS"])
    strides = [tensor.stride(i) for tensor in (q, k) for i in (0, 1)]
    kernel.rotate_kernel[grid](q, k, cos, sin, *strides, NUM_HEADS=num_heads, HALF=head_dim // 2, **launch.arguments())


def _check_heads(**heads: Tensor) -> tuple[int, int, int]:
    q = heads["q"]
    check_device("q", q.device)
    check_tensor("q", q, (None, None, None), _DTYPES, q.device)
    num_tokens, num_heads, head_dim = q.shape
    if head_dim not in config.HEAD_DIMS:
        raise ValueError(f"q has heads of {head_dim}, not one of {', '.join(map(str, config.HEAD_DIMS))}")
    for name, tensor in heads.items():
        check_tensor(name, tensor, q.shape, (q.dtype,), q.device)
        check_aligned(name, tensor)
    return num_tokens, num_heads, head_dim


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int) -> tuple[int, int, int]:
    sizes = _check_heads(q=q, k=k, v=v)
    check_tensor("cu_seqlens", cu_seqlens, (None,), (torch.int32,), q.device)
    if not cu_seqlens.numel() or not cu_seqlens.is_contiguous():
        raise ValueError(f"cu_seqlens has {cu_seqlens.numel()} elements at stride {cu_seqlens.stride(0)}, not at least 1 at stride 1")
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}, not at least 1")
    return sizes
