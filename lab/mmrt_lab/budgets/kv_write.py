"""7B (28 query, 4 KV heads of 128, M-RoPE) and models with QK-norm, one with interleaved axes, onto pages of bf16, INT8 and FP8 (E4M3),
which needs sm_90."""

from typing import Any

from mmrt.triton_kernels.kv_write.config import launch
from mmrt.triton_kernels.kv_write.kernel import rotate_and_write_heads

from .ahead_of_time import Variant, everywhere

_LARGEST = {"bf16": 0.0, "i8": 127.0, "fp8e4nv": 448.0}
_POINTERS = {"heads_ptr": "*bf16", "q_norm_ptr": "*bf16", "k_norm_ptr": "*bf16", "positions_ptr": "*i64", "slots_ptr": "*i64"}
_POINTERS |= {"frequencies_ptr": "*fp32", "k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"}
_STRIDES = ("stride_token", "stride_page", "stride_page_token", "stride_page_head")
_ALL_STRIDES = (*_STRIDES, "stride_scale_page", "stride_scale_token", "stride_scale_head", "stride_axis")


def _variant(dtype: str, norm: bool, registers: int, num_heads: int = 28, interleaved: bool = False) -> Variant:
    constants: dict[str, Any] = {"NUM_HEADS": num_heads, "NUM_KV_HEADS": 4, "HALF": 64, "PAGE_TOKENS": 16, "FIRST_H": 16, "FIRST_W": 40}
    if interleaved:
        constants |= {"FIRST_H": 24, "FIRST_W": 44}
    constants |= {"INTERLEAVED": interleaved, "FACTOR": 1.0, "LARGEST": _LARGEST[dtype]}
    if not norm:
        constants |= {"q_norm_ptr": None, "k_norm_ptr": None}
    if not _LARGEST[dtype]:
        constants |= {"k_scales_ptr": None, "v_scales_ptr": None}
    types = _POINTERS | dict.fromkeys(_ALL_STRIDES, "i64") | {"k_pages_ptr": f"*{dtype}", "v_pages_ptr": f"*{dtype}", "epsilon": "fp32"}
    name = f"{'fused' if num_heads else 'keys'}_{dtype}{'_norm' if norm else ''}{'_interleaved' if interleaved else ''}"
    budgets = everywhere(registers, 512, "wide_loads")
    if dtype == "fp8e4nv":
        del budgets[80]
    return Variant(name, rotate_and_write_heads, types, constants, _STRIDES, launch(num_heads, 4, 128), budgets)


VARIANTS = (
    _variant("bf16", False, 56),
    _variant("bf16", True, 64),
    _variant("bf16", True, 64, interleaved=True),
    _variant("i8", False, 64),
    _variant("i8", True, 64),
    _variant("fp8e4nv", False, 64),
    _variant("fp8e4nv", True, 64),
    _variant("bf16", False, 68, num_heads=0),
)
