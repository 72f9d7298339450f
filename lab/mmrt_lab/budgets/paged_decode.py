"""Variants for ahead-of-time compilation: the kernels of the 7B, 3B and small shapes, in each kind of cache."""

from dataclasses import replace
from typing import Any

from mmrt.triton_kernels.launch import Launch
from mmrt.triton_kernels.paged_decode.config import (
    CHUNK_TOKENS,
    MAX_ROWS,
    NUM_WARPS,
    PROGRAMS_PER_SM,
    REDUCE_ITEMS,
    WIDE_PROGRAMS_PER_SM,
    WIDE_WARPS,
    decode_launch,
)
from mmrt.triton_kernels.paged_decode.kernel import attend_kernel, plan_kernel, reduce_kernel

from .ahead_of_time import ARCHITECTURES, Budget, Variant

_STRIDES = tuple(f"stride_{name}" for name in ("qb", "qh", "ob", "oh", "kp", "kt", "kh"))
_SCALE_STRIDES = ("stride_sp", "stride_st", "stride_sh")
_TYPES = dict.fromkeys((*_STRIDES, *_SCALE_STRIDES, "stride_bt"), "i64")
_TYPES |= dict.fromkeys(("table_ptr", "items_ptr", "rows_ptr", "lengths_ptr"), "*i32")
_TYPES |= dict.fromkeys(("partial_ptr", "lse_ptr", "k_scales_ptr", "v_scales_ptr"), "*fp32")
_TYPES |= {"scale": "fp32", "num_rows": "i32", "num_items": "i32", "window": "i32"}


# A multiprocessor has 65,536 registers and hands them to threads by eights.
_MOST_REGISTERS = 65_536 // (PROGRAMS_PER_SM * NUM_WARPS * 32) // 8 * 8
_MOST_REGISTERS_WIDE = 65_536 // (WIDE_PROGRAMS_PER_SM * WIDE_WARPS * 32) // 8 * 8


def _attend(name: str, q: str, kv: str, head_dim: int, group: int, budgets: dict[int, Budget]) -> Variant:
    launch = decode_launch(head_dim, group, {"fp32": 4, "fp16": 2, "bf16": 2}.get(kv, 1))
    constants: dict[str, Any] = {"GROUP": group, "HEAD_DIM": head_dim, "PAGE_TOKENS": 16}
    if kv == q:
        constants |= {"k_scales_ptr": None, "v_scales_ptr": None}
    types = _TYPES | {"q_ptr": f"*{q}", "k_ptr": f"*{kv}", "v_ptr": f"*{kv}", "out_ptr": f"*{q}"}
    most = _MOST_REGISTERS if head_dim <= 256 else _MOST_REGISTERS_WIDE
    fitting = {arch: replace(budget, registers=min(budget.registers, most)) for arch, budget in budgets.items()}
    return Variant(name, attend_kernel, types, constants, _STRIDES, launch, fitting)


def _other(name: str, kernel: Any, constants: dict[str, Any], budgets: dict[int, Budget]) -> Variant:
    return Variant(name, kernel, _TYPES | {"out_ptr": "*bf16"}, constants, ("stride_ob", "stride_oh"), Launch({}, 4, 3), budgets)


def _budgets(registers: tuple[int, ...], shared_bytes: int, *needs: str) -> dict[int, Budget]:
    """``registers`` for sm_80, sm_90 and sm_100; the last two alone for E4M3, which needs sm_90."""
    return {arch: Budget(count, shared_bytes, needs) for arch, count in zip(ARCHITECTURES[-len(registers) :], registers, strict=True)}


_LOADS = ("cp_async", "wide_loads")
VARIANTS = (
    _attend("bf16_d128_g7", "bf16", "bf16", 128, 7, _budgets((185, 175, 172), 80_000, "mma", *_LOADS)),
    _attend("bf16_d256_g8", "bf16", "bf16", 256, 8, _budgets((174, 169, 170), 83_000, "mma", *_LOADS)),
    _attend("bf16_d512_g8", "bf16", "bf16", 512, 8, _budgets((107, 119, 119), 91_000, "mma", *_LOADS)),
    _attend("int8_d512_g8", "bf16", "i8", 512, 8, _budgets((128, 114, 128), 74_000, "mma", *_LOADS)),
    _attend("fp16_d64_g4", "fp16", "fp16", 64, 4, _budgets((106, 135, 136), 80_000, "mma", *_LOADS)),
    _attend("fp32_d64_g4", "fp32", "fp32", 64, 4, _budgets((66, 183, 115), 25_000, *_LOADS)),
    _attend("int8_d128_g7", "bf16", "i8", 128, 7, _budgets((185, 150, 156), 35_000, "mma", *_LOADS)),
    _attend("e4m3_d128_g8", "bf16", "fp8e4nv", 128, 8, _budgets((124, 152), 35_000, "mma", *_LOADS)),
    _other("reduce_d128", reduce_kernel, {"HEAD_DIM": 128, "BLOCK_ITEMS": REDUCE_ITEMS}, _budgets((48, 48, 48), 2_300, "wide_loads")),
    _other("plan", plan_kernel, {"CHUNK": CHUNK_TOKENS, "MAX_ROWS": MAX_ROWS}, _budgets((130, 130, 132), 2_300)),
)
