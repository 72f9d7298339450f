"""Variants of the sampling kernels for ahead-of-time compilation, with budgets. A vocabulary of 152,064 tokens: 38 tiles of 4096."""

from collections.abc import Mapping
from typing import Any

from ..ahead_of_time import Budget, Variant
from ..launch import Launch
from . import config, kernel

_VOCABULARY = 152064
_TYPES = {
    "longs_ptr": "*i64",
    "ints_ptr": "*i32",
    "floats_ptr": "*fp32",
    "masks_ptr": "*i32",
    "counts_ptr": "*i32",
    "counts_rows_ptr": "*i32",
    "scores_ptr": "*fp32",
    "tops_ptr": "*fp32",
    "top_ids_ptr": "*i32",
    "masses_ptr": "*i64",
    "edge_counts_ptr": "*i32",
    "edge_masses_ptr": "*i64",
    "candidate_scores_ptr": "*fp32",
    "candidate_ids_ptr": "*i32",
    "kept_ptr": "*i64",
    "tokens_ptr": "*i64",
    "num_tokens_ptr": "*i32",
    "stride": "i32",
    "vocabulary": "i32",
    "mask_words": "i32",
    "num_tiles": "i32",
    "stride_logits": "i64",
    "stride_mask": "i64",
    "stride_counts": "i64",
    "stride_tokens": "i64",
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
    types = _TYPES | {"logits_ptr": f"*{logits}"}
    values = {**launch.tiles, **(constants or {})}
    return Variant(name, function, types, values, _DIVISIBLE, launch.num_warps, launch.num_stages, budgets)


def _everywhere(registers: int, shared_bytes: int, needs: tuple[str, ...] = ()) -> dict[int, Budget]:
    return dict.fromkeys((80, 90, 100), Budget(registers, shared_bytes, needs))


_LIMIT = {"MAX_CANDIDATES": 16384}
_BARE = {"masks_ptr": None, "counts_ptr": None}
_WIDE = ("wide_loads",)
_PREPARE = config.prepare_launch(_VOCABULARY)

VARIANTS = (
    _variant("draw", kernel.draw_kernel, config.draw_launch(_VOCABULARY), _everywhere(183, 9_000, _WIDE), _LIMIT),
    _variant("prepare", kernel.prepare_kernel, _PREPARE, _everywhere(130, 100, _WIDE)),
    _variant("prepare_bare", kernel.prepare_kernel, _PREPARE, _everywhere(65, 100, _WIDE), _BARE),
    _variant("prepare_bf16", kernel.prepare_kernel, _PREPARE, _everywhere(130, 9_000, _WIDE), logits="bf16"),
    _variant("measure", kernel.measure_kernel, config.measure_launch(_VOCABULARY), _everywhere(93, 100, _WIDE)),
    _variant("gather", kernel.gather_kernel, config.gather_launch(_VOCABULARY), _everywhere(117, 18_000, _WIDE), _LIMIT),
    _variant("count", kernel.count_kernel, config.count_launch(), _everywhere(34, 100), {"IS_PROMPT": False}),
    _variant("count_prompt", kernel.count_kernel, config.count_launch(), _everywhere(34, 100), {"IS_PROMPT": True}),
)
