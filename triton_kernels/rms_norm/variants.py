"""Hidden sizes of 3B and 7B models in bfloat16."""

from ..ahead_of_time import Budget, Variant
from .config import launch
from .kernel import norm_row

_STRIDES = ("stride_x", "stride_residual", "stride_out")
_POINTERS = ("x_ptr", "residual_ptr", "weight_ptr", "out_ptr")


def _variant(name: str, size: int, add: bool) -> Variant:
    config = launch(size)
    return Variant(
        name=name,
        kernel=norm_row,
        types={**dict.fromkeys(_POINTERS, "*bf16"), **dict.fromkeys(_STRIDES, "i64"), "epsilon": "fp32"},
        constants={"SIZE": size, "ADD": add, **config.tiles},
        divisible=_STRIDES,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        budgets=dict.fromkeys((80, 90, 100), Budget(registers=48, shared_bytes=32, needs=("wide_loads",))),
    )


VARIANTS = (_variant("add_3584", 3584, True), _variant("plain_2048", 2048, False))
