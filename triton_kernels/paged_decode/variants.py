"""What ahead-of-time compilation guards: the kernels of the 7B, 3B and small shapes, in each kind of cache."""

from typing import Any

from ..ahead_of_time import Budget, Variant
from .config import CHUNK_TOKENS, MAX_ROWS, REDUCE_ITEMS, decode_launch
from .kernel import attend_kernel, plan_kernel, reduce_kernel

_STRIDES = tuple(f"stride_{name}" for name in ("qb", "qh", "ob", "oh", "kp", "kt", "kh"))
_SCALE_STRIDES = ("stride_sp", "stride_st", "stride_sh")
_TYPES = dict.fromkeys((*_STRIDES, *_SCALE_STRIDES, "stride_bt"), "i64")
_TYPES |= dict.fromkeys(("table_ptr", "items_ptr", "rows_ptr", "lengths_ptr"), "*i32")
_TYPES |= dict.fromkeys(("partial_ptr", "lse_ptr", "k_scales_ptr", "v_scales_ptr"), "*fp32")
_TYPES |= {"scale": "fp32", "num_rows": "i32", "num_items": "i32"}


def _attend(name: str, q: str, kv: str, head_dim: int, group: int, budgets: dict[int, Budget]) -> Variant:
    launch = decode_launch(head_dim, group, 1 if kv in ("i8", "fp8e4nv", "fp8e5") else 2)
    constants: dict[str, Any] = {"GROUP": group, "HEAD_DIM": head_dim, "PAGE_TOKENS": 16, **launch.tiles}
    if kv == q:
        constants |= {"k_scales_ptr": None, "v_scales_ptr": None}
    types = _TYPES | {"q_ptr": f"*{q}", "k_ptr": f"*{kv}", "v_ptr": f"*{kv}", "out_ptr": f"*{q}"}
    return Variant(name, attend_kernel, types, constants, _STRIDES, launch.num_warps, launch.num_stages, budgets)


def _other(name: str, kernel: Any, constants: dict[str, Any], budget: Budget) -> Variant:
    return Variant(name, kernel, _TYPES | {"out_ptr": "*bf16"}, constants, ("stride_ob", "stride_oh"), 4, 3, {90: budget})


_NEEDS = ("mma", "cp_async", "wide_loads")
_BF16 = {80: Budget(185, 80_000, _NEEDS), 90: Budget(175, 80_000, _NEEDS), 100: Budget(172, 80_000, _NEEDS)}
VARIANTS = (
    _attend("bf16_d128_g7", "bf16", "bf16", 128, 7, _BF16),
    _attend("fp16_d64_g4", "fp16", "fp16", 64, 4, {90: Budget(135, 80_000, _NEEDS)}),
    _attend("int8_d128_g7", "bf16", "i8", 128, 7, {90: Budget(150, 35_000, _NEEDS)}),
    _attend("fp8_d128_g8", "bf16", "fp8e4nv", 128, 8, {90: Budget(150, 35_000, _NEEDS)}),
    _other("reduce_d128", reduce_kernel, {"HEAD_DIM": 128, "BLOCK_ITEMS": REDUCE_ITEMS}, Budget(48, 2_300, ("wide_loads",))),
    _other("plan", plan_kernel, {"CHUNK": CHUNK_TOKENS, "MAX_ROWS": MAX_ROWS}, Budget(106, 2_300)),
)
