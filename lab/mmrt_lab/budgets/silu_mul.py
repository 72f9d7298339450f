"""The intermediate sizes, in bfloat16, of a 7B model and of its vision tower, whose gate and up are two matrices."""

from mmrt.triton_kernels.silu_mul.config import launch
from mmrt.triton_kernels.silu_mul.kernel import silu_mul_rows

from .ahead_of_time import Variant, everywhere

_STRIDES = ("stride_gate", "stride_up", "stride_out")


def _variant(size: int, step: int, *needs: str) -> Variant:
    types = dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), "*bf16") | dict.fromkeys(_STRIDES, "i64")
    divisible = _STRIDES if step == 16 else ()
    return Variant(
        f"bf16_{size}", silu_mul_rows, types, {"SIZE": size, "STEP": step}, divisible, launch(size), everywhere(40, 0, *needs)
    )


VARIANTS = (_variant(18944, 16, "wide_loads"), _variant(3420, 4))
