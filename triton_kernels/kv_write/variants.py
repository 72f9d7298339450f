"""7B (28 query, 4 KV heads of 128, M-RoPE) and a model with QK-norm, onto pages of bf16, INT8 and FP8. E4M3 needs sm_90."""

from ..ahead_of_time import Budget, Variant
from .config import launch
from .kernel import rotate_and_write_heads, write_heads

_LARGEST = {"bf16": 0.0, "i8": 127.0, "fp8e4nv": 448.0, "fp8e5": 57344.0}
_POINTERS = {"slots_ptr": "*i64", "k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"}
_NO_SCALES = {"k_scales_ptr": None, "v_scales_ptr": None}
_NO_NORM = {"q_norm_ptr": None, "k_norm_ptr": None}
_STRIDES = ("stride_token", "stride_page", "stride_page_token", "stride_page_head")
_SCALE_STRIDES = ("stride_scale_page", "stride_scale_token", "stride_scale_head")
_ALL_STRIDES = {name: "i64" for name in (*_STRIDES, *_SCALE_STRIDES, "stride_axis")}


def _pages(dtype: str) -> dict[str, str]:
    return {**_POINTERS, **_ALL_STRIDES, "k_pages_ptr": f"*{dtype}", "v_pages_ptr": f"*{dtype}"}


def _budgets(dtype: str, registers: int, shared_bytes: int) -> dict[int, Budget]:
    architectures = (90, 100) if dtype == "fp8e4nv" else (80, 90, 100)
    return dict.fromkeys(architectures, Budget(registers, shared_bytes, needs=("wide_loads",)))


def _plain(dtype: str, registers: int, shared_bytes: int) -> Variant:
    config = launch(0, 4, 128)
    return Variant(
        name=f"plain_{dtype}",
        kernel=write_heads,
        types={**_pages(dtype), "k_ptr": "*bf16", "v_ptr": "*bf16"},
        constants={
            "NUM_KV_HEADS": 4,
            "HALF": 64,
            "PAGE_TOKENS": 16,
            **({} if _LARGEST[dtype] else _NO_SCALES),
            "LARGEST": _LARGEST[dtype],
            **config.tiles,
        },
        divisible=_STRIDES,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        budgets=_budgets(dtype, registers, shared_bytes),
    )


def _fused(dtype: str, norm: bool, registers: int, shared_bytes: int, num_heads: int = 28) -> Variant:
    config = launch(num_heads, 4, 128)
    constants = {"NUM_HEADS": num_heads, "NUM_KV_HEADS": 4, "HALF": 64, "PAGE_TOKENS": 16, "FIRST_H": 16, "FIRST_W": 40}
    return Variant(
        name=f"{'fused' if num_heads else 'keys'}_{dtype}{'_norm' if norm else ''}",
        kernel=rotate_and_write_heads,
        types={
            **_pages(dtype),
            "heads_ptr": "*bf16",
            "positions_ptr": "*i64",
            "frequencies_ptr": "*fp32",
            "q_norm_ptr": "*bf16",
            "k_norm_ptr": "*bf16",
            "epsilon": "fp32",
        },
        constants={
            **constants,
            **({} if norm else _NO_NORM),
            **({} if _LARGEST[dtype] else _NO_SCALES),
            "LARGEST": _LARGEST[dtype],
            **config.tiles,
        },
        divisible=_STRIDES,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        budgets=_budgets(dtype, registers, shared_bytes),
    )


VARIANTS = (
    _fused("bf16", False, 56, 512),
    _fused("bf16", True, 64, 512),
    _fused("i8", False, 64, 512),
    _fused("i8", True, 64, 512),
    _fused("fp8e4nv", False, 64, 512),
    _fused("fp8e4nv", True, 64, 512),
    _fused("fp8e5", False, 64, 512),
    _fused("fp8e5", True, 64, 512),
    _fused("bf16", False, 68, 512, num_heads=0),
    _plain("bf16", 64, 0),
    _plain("i8", 64, 0),
    _plain("fp8e4nv", 64, 0),
    _plain("fp8e5", 64, 0),
)
