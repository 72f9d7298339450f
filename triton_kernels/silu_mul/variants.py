"""The intermediate size of a 7B model in bfloat16."""

from ..ahead_of_time import Budget, Variant
from .config import launch
from .kernel import silu_mul_rows

_STRIDES = ("stride_gate_up", "stride_out")
_SIZE = 18944
_CONFIG = launch(_SIZE)

VARIANTS = (
    Variant(
        name=f"bf16_{_SIZE}",
        kernel=silu_mul_rows,
        types={"gate_up_ptr": "*bf16", "out_ptr": "*bf16", **dict.fromkeys(_STRIDES, "i64")},
        constants={"SIZE": _SIZE, **_CONFIG.tiles},
        divisible=_STRIDES,
        num_warps=_CONFIG.num_warps,
        num_stages=_CONFIG.num_stages,
        budgets=dict.fromkeys((80, 90, 100), Budget(registers=40, shared_bytes=0, needs=("wide_loads",))),
    ),
)
