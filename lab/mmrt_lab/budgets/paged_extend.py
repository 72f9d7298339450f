"""Variants for ahead-of-time compilation: the kernel at the 7B, 3B and small shapes, over plain and quantized pages, and at those of
Gemma, with windows and pictures.

Heads of 128 and more in float32, and of 512 with more than 16 query heads for a KV head, spill and are not guarded.
"""

from collections.abc import Iterator
from typing import Any

from mmrt.triton_kernels.paged_extend.config import extend_launch
from mmrt.triton_kernels.paged_extend.kernel import extend_kernel

from .ahead_of_time import Budget, Variant

_STRIDES = tuple(f"stride_{name}" for name in ("qn", "qh", "on", "oh", "nt", "nh", "kp", "kt", "kh"))
_TYPES = dict.fromkeys((*_STRIDES, "stride_sp", "stride_st", "stride_sh", "stride_bt"), "i64")
_TYPES |= {"table_ptr": "*i32", "blocks_ptr": "*i32", "ends_ptr": "*i32", "window": "i32", "scale": "fp32"}
_TYPES |= {"k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"}
_PRODUCTS = {80: "mma", 90: "wgmma", 100: "tcgen05"}
_LONG, _SHORT = 8192, 8
_OF_128 = {80: (220, 72_700), 90: (212, 146_000), 100: (212, 146_000)}
_OF_256 = {80: (255, 93_000), 90: (255, 146_000), 100: (255, 146_000)}
_OF_512 = {80: (239, 91_000), 90: (230, 164_000), 100: (230, 164_000)}


def _extend(
    name: str, q: str, kv: str, head_dim: int, group: int, chunk: int, limits: dict[int, tuple[int, int]], sees: str = ""
) -> Iterator[Variant]:
    """One variant for each architecture, since tiles depend on it. ``limits``: registers and bytes of shared memory. ``sees``:
    "window", "pictures" or both."""
    pointers = dict.fromkeys(("q_ptr", "k_new_ptr", "v_new_ptr", "out_ptr"), f"*{q}") | {"k_ptr": f"*{kv}", "v_ptr": f"*{kv}"}
    for architecture, (registers, shared_bytes) in limits.items():
        launch = extend_launch(head_dim, group, chunk, 4 if q == "fp32" else 2, architecture)
        constants: dict[str, Any] = {"GROUP": group, "HEAD_DIM": head_dim, "PAGE_TOKENS": 16}
        if kv == q:
            constants |= {"k_scales_ptr": None, "v_scales_ptr": None}
        constants |= {argument: None for word, argument in (("window", "window"), ("pictures", "ends_ptr")) if word not in sees}
        products = () if q == "fp32" else ("mma" if launch.tiles["BLOCK_M"] < 64 else _PRODUCTS[architecture],)
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
    *_extend("bf16_d128_g4_window", "bf16", "bf16", 128, 4, _LONG, _OF_128, "window"),
    *_extend("bf16_d256_g2_seeing", "bf16", "bf16", 256, 2, _LONG, _OF_256, "window, pictures"),
    *_extend("bf16_d256_g8_window", "bf16", "bf16", 256, 8, _LONG, _OF_256, "window"),
    *_extend("int8_d256_g8_window", "bf16", "i8", 256, 8, _LONG, _OF_256, "window"),
    *_extend("bf16_d256_g8", "bf16", "bf16", 256, 8, _LONG, _OF_256),
    *_extend("bf16_d512_g8", "bf16", "bf16", 512, 8, _LONG, _OF_512),
    *_extend("int8_d512_g8", "bf16", "i8", 512, 8, _LONG, _OF_512),
)
