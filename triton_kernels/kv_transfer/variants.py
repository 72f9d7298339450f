"""7B (4 KV heads of 128) in bfloat16, packed and as bits, and quantized pages as they are."""

from typing import Any

from ..ahead_of_time import Budget, Variant
from .config import launch
from .kernel import transfer_rows

_STRIDES = ("stride_page", "stride_token", "stride_head")
_SCALE_STRIDES = ("stride_scale_page", "stride_scale_token", "stride_scale_head")


def _variant(name: str, page: str, values: str, packing: int, gather: bool, registers: int, shared_bytes: int) -> Variant:
    config = launch(128)
    constants: dict[str, Any] = {"NUM_KV_HEADS": 4, "HALF": 64, "PAGE_TOKENS": 16, "PACKING": packing, "GATHER": gather}
    if page != "i8":
        constants |= {"k_scales_ptr": None, "v_scales_ptr": None}
        constants |= {} if packing else {"scales_ptr": None}
    return Variant(
        name=name,
        kernel=transfer_rows,
        types={
            "k_pages_ptr": f"*{page}",
            "v_pages_ptr": f"*{page}",
            "values_ptr": f"*{values}",
            "page_ids_ptr": "*i32",
            "num_tokens": "i32",
            **dict.fromkeys(("k_scales_ptr", "v_scales_ptr", "scales_ptr"), "*fp32"),
            **dict.fromkeys((*_STRIDES, *_SCALE_STRIDES), "i64"),
        },
        constants={**constants, **config.tiles},
        divisible=_STRIDES,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        budgets=dict.fromkeys((80, 90, 100), Budget(registers, shared_bytes, needs=("wide_loads",))),
    )


VARIANTS = (
    _variant("gather_int4", "bf16", "u8", 4, True, 56, 256),
    _variant("gather_int8", "bf16", "i8", 8, True, 56, 256),
    _variant("gather_bf16", "i16", "i16", 0, True, 40, 0),
    _variant("gather_scaled_i8", "i8", "i8", 0, True, 40, 0),
    _variant("scatter_int4", "bf16", "u8", 4, False, 56, 4608),
    _variant("scatter_int8", "bf16", "i8", 8, False, 56, 4608),
    _variant("scatter_bf16", "i16", "i16", 0, False, 40, 0),
    _variant("scatter_scaled_i8", "i8", "i8", 0, False, 40, 0),
)
