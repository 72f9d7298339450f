"""What ahead-of-time compilation guards: the kernel at the 7B, 3B and small shapes, over plain and quantized pages."""

from typing import Any

from ..ahead_of_time import Budget, Variant
from .config import extend_launch
from .kernel import extend_kernel

_STRIDES = tuple(f"stride_{name}" for name in ("qn", "qh", "on", "oh", "nt", "nh", "kp", "kt", "kh"))
_TYPES = dict.fromkeys((*_STRIDES, "stride_sp", "stride_st", "stride_sh", "stride_bt"), "i64")
_TYPES |= {"table_ptr": "*i32", "blocks_ptr": "*i32", "k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32", "scale": "fp32"}


def _extend(name: str, q: str, kv: str, head_dim: int, group: int, chunk: int, budgets: dict[int, Budget]) -> Variant:
    launch = extend_launch(head_dim, group, chunk, 2)
    constants: dict[str, Any] = {"GROUP": group, "HEAD_DIM": head_dim, "PAGE_TOKENS": 16, **launch.tiles}
    if kv == q:
        constants |= {"k_scales_ptr": None, "v_scales_ptr": None}
    pointers = dict.fromkeys(("q_ptr", "k_new_ptr", "v_new_ptr", "out_ptr"), f"*{q}") | {"k_ptr": f"*{kv}", "v_ptr": f"*{kv}"}
    return Variant(name, extend_kernel, _TYPES | pointers, constants, _STRIDES, launch.num_warps, launch.num_stages, budgets)


_HOPPER = ("wgmma", "cp_async", "wide_loads")
_BF16 = {
    80: Budget(255, 109_000, ("mma", "cp_async")),
    90: Budget(240, 146_000, _HOPPER),
    100: Budget(240, 146_000, ("tcgen05", "cp_async")),
}
VARIANTS = (
    _extend("bf16_d128_g7", "bf16", "bf16", 128, 7, 8192, _BF16),
    _extend("bf16_d128_g7_short", "bf16", "bf16", 128, 7, 8, {90: Budget(255, 128_000, _HOPPER)}),
    _extend("int8_d128_g8", "bf16", "i8", 128, 8, 8192, {90: Budget(255, 144_000, _HOPPER)}),
)
