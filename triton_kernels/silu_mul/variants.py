"""The intermediate sizes, in bfloat16, of a 7B model and of its vision tower, whose gate and up are two matrices."""

from ..ahead_of_time import Budget, Variant
from .config import launch
from .kernel import silu_mul_rows

_STRIDES = ("stride_gate", "stride_up", "stride_out")


def _variant(size: int, step: int, budget: Budget) -> Variant:
    config = launch(size)
    return Variant(
        name=f"bf16_{size}",
        kernel=silu_mul_rows,
        types=dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), "*bf16") | dict.fromkeys(_STRIDES, "i64"),
        constants={"SIZE": size, "STEP": step, **config.tiles},
        divisible=_STRIDES if step == 16 else (),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        budgets=dict.fromkeys((80, 90, 100), budget),
    )


VARIANTS = (
    _variant(18944, 16, Budget(registers=40, shared_bytes=0, needs=("wide_loads",))),
    _variant(3420, 4, Budget(registers=40, shared_bytes=0)),
)
