"""Presets: what makes a run one of the papers' baselines (``scheduling.preset``): layout, turns, policy and budgets by one name.

A layout of the same processes in other numbers is the same baseline, with several instances (TI16): 2EPD, 2EP+3D.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ..stage_table import STAGES, parse_layout

Values = dict[str, object]
"""By configuration key, such as "actors.layout"."""


class Preset(NamedTuple):
    """``fixed`` values make it what it is; ``defaults`` are replaced by what is configured."""

    fixed: Values
    defaults: Values


def has_same_kinds(layout: str, other: str) -> bool:
    """Return whether the layouts differ in the numbers of their processes alone. Raises: ConfigError if one is malformed."""
    return _kinds(layout) == _kinds(other)


def _kinds(layout: str) -> set[tuple[str, ...]]:
    return {part.stages for part in parse_layout(layout) if any(STAGES[stage].has_device for stage in part.stages)}


_BUDGETS: Values = {"scheduling.prefill_budget_tokens": 2048, "scheduling.encode_budget_tokens": 8192}  # US11; four rows make a token

PRESETS: Mapping[str, Preset] = {
    # US15, TI16: vLLM and SGLang with chunked prefill. One engine, which does one thing at a time.
    "monolithic": Preset({"actors.layout": "EPD", "actors.turns": "plans", "scheduling.policy": "monolithic"}, _BUDGETS),
    # US15: vLLM and SGLang with prefill and decode apart, DistServe.
    "split": Preset({"actors.layout": "EP+D", "actors.turns": "off", "scheduling.policy": "split"}, _BUDGETS),
}
