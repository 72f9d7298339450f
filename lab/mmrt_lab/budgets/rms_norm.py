"""Hidden sizes of 3B and 7B models in bfloat16."""

from mmrt.triton_kernels.rms_norm.config import launch
from mmrt.triton_kernels.rms_norm.kernel import norm_row

from .ahead_of_time import Variant, everywhere

_STRIDES = ("stride_x", "stride_residual", "stride_out")
_POINTERS = ("x_ptr", "residual_ptr", "weight_ptr", "out_ptr")


def _variant(name: str, size: int, add: bool) -> Variant:
    types = {**dict.fromkeys(_POINTERS, "*bf16"), **dict.fromkeys(_STRIDES, "i64"), "epsilon": "fp32"}
    return Variant(name, norm_row, types, {"SIZE": size, "ADD": add}, _STRIDES, launch(size), everywhere(48, 32, "wide_loads"))


VARIANTS = (_variant("add_3584", 3584, True), _variant("plain_2048", 2048, False))
