"""Variants for ahead-of-time compilation: the kernel at the 7B, 3B and small shapes, over plain and quantized pages.

Heads of 256, which no model here has, and heads of 128 in float32 spill and are not guarded.
"""

from collections.abc import Iterator
from typing import Any

from mmrt.triton_kernels.paged_extend.config import extend_launch
from mmrt.triton_kernels.paged_extend.kernel import extend_kernel

from .ahead_of_time import Budget, Variant

_STRIDES = tuple(f"stride_{name}" for name in ("qn", "qh", "on", "oh", "nt", "nh", "kp", "kt", "kh"))
_TYPES = dict.fromkeys((*_STRIDES, "stride_sp", "stride_st", "stride_sh", "stride_bt"), "i64")
_TYPES |= {"table_ptr": "*i32", "blocks_ptr": "*i32", "k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32", "scale": "fp32"}
_PRODUCTS = {80: "mma", 90: "wgmma", 100: "tcgen05"}
_LONG, _SHORT = 8192, 8


def _extend(name: str, q: str, kv: str, head_dim: int, group: int, chunk: int, limits: dict[int, tuple[int, int]]) -> Iterator[Variant]:
    """One variant for each architecture, since tiles depend on it. ``limits``: registers and bytes of shared memory."""
    pointers = dict.fromkeys(("q_ptr", "k_new_ptr", "v_new_ptr", "out_ptr"), f"*{q}") | {"k_ptr": f"*{kv}", "v_ptr": f"*{kv}"}
    for architecture, (registers, shared_bytes) in limits.items():
        launch = extend_launch(head_dim, group, chunk, 4 if q == "fp32" else 2, architecture)
        constants: dict[str, Any] = {"GROUP": group, "HEAD_DIM": head_dim, "PAGE_TOKENS": 16}
        if kv == q:
            constants |= {"k_scales_ptr": None, "v_scales_ptr": None}
        products = () if q == "fp32" else (_PRODUCTS[architecture],)
        budgets = {architecture: Budget(registers, shared_bytes, (*products, "cp_async", "wide_loads"))}
        yield Variant(name, extend_kernel, _TYPES | pointers, constants, _STRIDES, launch, budgets)


VARIANTS = (
    *_extend("bf16_d128_g7", "bf16", "bf16", 128, 7, _LONG, {80: (255, 72_700), 90: (240, 146_000), 100: (240, 146_000)}),
    *_extend("bf16_d128_g7_short", "bf16", "bf16", 128, 7, _SHORT, {80: (255, 59_200), 90: (255, 128_000), 100: (192, 128_000)}),
    *_extend("fp16_d64_g4", "fp16", "fp16", 64, 4, _LONG, {80: (188, 55_200), 90: (137, 73_800), 100: (147, 73_900)}),
    *_extend("fp16_d64_g4_short", "fp16", "fp16", 64, 4, _SHORT, {80: (182, 46_200), 90: (141, 64_800), 100: (81, 64_900)}),
    *_extend("fp32_d64_g4", "fp32", "fp32", 64, 4, _LONG, {80: (227, 40_600), 90: (214, 40_600), 100: (220, 40_600)}),
    *_extend("int8_d128_g8", "bf16", "i8", 128, 8, _LONG, {80: (255, 91_600), 90: (255, 144_000), 100: (253, 145_000)}),
    *_extend("int8_d128_g8_short", "bf16", "i8", 128, 8, _SHORT, {80: (255, 60_000), 90: (255, 126_000), 100: (228, 126_000)}),
    *_extend("e4m3_d128_g8", "bf16", "fp8e4nv", 128, 8, _LONG, {90: (255, 144_000), 100: (255, 145_000)}),
    *_extend("e4m3_d128_g8_short", "bf16", "fp8e4nv", 128, 8, _SHORT, {90: (255, 126_000), 100: (223, 126_000)}),
)
