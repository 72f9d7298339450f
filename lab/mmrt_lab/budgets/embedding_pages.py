"""Both directions at the shape of a 7B model: hidden size 3584 in bfloat16."""

from mmrt.triton_kernels.embedding_pages.config import launch
from mmrt.triton_kernels.embedding_pages.kernel import copy_rows

from .ahead_of_time import Variant, everywhere

_STRIDES = ("stride_row", "stride_page", "stride_token")
_POINTERS = ("rows_ptr", "pages_ptr", "pv_indptr", "pv_page_indptr", "pv_page_indices", "pv_cu_page_len")
_TYPES = dict.fromkeys(_POINTERS, "*i32") | dict.fromkeys(_STRIDES, "i64")
_NUM_WORDS = 3584 // 2


def _variant(name: str, write: bool) -> Variant:
    constants = {"NUM_WORDS": _NUM_WORDS, "PAGE_TOKENS": 32, "WRITE": write}
    return Variant(name, copy_rows, _TYPES, constants, _STRIDES, launch(_NUM_WORDS), everywhere(64, 0, "wide_loads"))


VARIANTS = (_variant("read_3584", False), _variant("write_3584", True))
