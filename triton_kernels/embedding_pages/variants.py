"""Both directions at the shape of a 7B model: hidden size 3584 in bfloat16."""

from ..ahead_of_time import Budget, Variant
from .config import launch
from .kernel import copy_rows

_TYPES = {
    "rows_ptr": "*i32",
    "pages_ptr": "*i32",
    "pv_indptr": "*i32",
    "pv_page_indptr": "*i32",
    "pv_page_indices": "*i32",
    "pv_cu_page_len": "*i32",
    "stride_row": "i64",
    "stride_page": "i64",
    "stride_token": "i64",
}
_NUM_WORDS = 3584 // 2
_STRIDES = ("stride_row", "stride_page", "stride_token")


def _variant(name: str, write: bool) -> Variant:
    config = launch(_NUM_WORDS)
    return Variant(
        name=name,
        kernel=copy_rows,
        types=_TYPES,
        constants={"NUM_WORDS": _NUM_WORDS, "PAGE_TOKENS": 32, "WRITE": write, **config.tiles},
        divisible=_STRIDES,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        budgets=dict.fromkeys((80, 90, 100), Budget(registers=64, shared_bytes=0, needs=("wide_loads",))),
    )


VARIANTS = (_variant("read_3584", False), _variant("write_3584", True))
