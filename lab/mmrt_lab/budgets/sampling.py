"""Variants of the sampling kernels for ahead-of-time compilation, with budgets. A vocabulary of 152,064 tokens: 38 tiles of 4096."""

from collections.abc import Mapping
from typing import Any

from mmrt.triton_kernels.launch import Launch
from mmrt.triton_kernels.sampling import config, kernel

from .ahead_of_time import Budget, Variant, everywhere

_VOCABULARY = 152064
_TYPES = {
    **dict.fromkeys(("longs_ptr", "masses_ptr", "edge_masses_ptr", "kept_ptr", "tokens_ptr"), "*i64"),
    **dict.fromkeys(("ints_ptr", "counts_ptr", "counts_rows_ptr", "num_tokens_ptr", "top_ids_ptr"), "*i32"),
    **dict.fromkeys(("edge_counts_ptr", "candidate_ids_ptr"), "*i32"),
    **dict.fromkeys(("floats_ptr", "scores_ptr", "tops_ptr", "candidate_scores_ptr"), "*fp32"),
    **dict.fromkeys(("stride", "vocabulary", "num_tiles"), "i32"),
    **dict.fromkeys(("stride_logits", "stride_counts", "stride_tokens"), "i64"),
}
_DIVISIBLE = ("vocabulary", "stride_logits", "stride_counts")


def _variant(
    name: str,
    function: Any,
    launch: Launch,
    budgets: dict[int, Budget],
    constants: Mapping[str, Any] | None = None,
    logits: str = "fp32",
) -> Variant:
    return Variant(name, function, _TYPES | {"logits_ptr": f"*{logits}"}, constants or {}, _DIVISIBLE, launch, budgets)


_LIMIT = {"MAX_CANDIDATES": 16384}
_BARE = {"counts_ptr": None}
_PREPARE = config.prepare_launch(_VOCABULARY)

VARIANTS = (
    _variant("draw", kernel.draw_kernel, config.draw_launch(_VOCABULARY), everywhere(183, 9_000, "wide_loads"), _LIMIT),
    _variant("prepare", kernel.prepare_kernel, _PREPARE, everywhere(130, 100, "wide_loads")),
    _variant("prepare_bare", kernel.prepare_kernel, _PREPARE, everywhere(65, 100, "wide_loads"), _BARE),
    _variant("prepare_bf16", kernel.prepare_kernel, _PREPARE, everywhere(130, 9_000, "wide_loads"), logits="bf16"),
    _variant("measure", kernel.measure_kernel, config.measure_launch(_VOCABULARY), everywhere(93, 100, "wide_loads")),
    _variant("gather", kernel.gather_kernel, config.measure_launch(_VOCABULARY), everywhere(117, 18_000, "wide_loads"), _LIMIT),
    _variant("count", kernel.count_kernel, config.count_launch(), everywhere(34, 100), {"IS_PROMPT": False}),
    _variant("count_prompt", kernel.count_kernel, config.count_launch(), everywhere(34, 100), {"IS_PROMPT": True}),
)
