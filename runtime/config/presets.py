"""Presets: what makes a run one of the papers' baselines (``scheduling.preset``): layout, turns, policy and budgets by one name."""

from collections.abc import Mapping
from typing import NamedTuple

Values = dict[str, object]
"""By configuration key, such as "actors.layout"."""


class Preset(NamedTuple):
    """``fixed`` values make it what it is; ``defaults`` are replaced by what is configured."""

    fixed: Values
    defaults: Values


_BUDGETS: Values = {"scheduling.prefill_budget_tokens": 2048, "scheduling.encode_budget_tokens": 8192}  # US11; four rows make a token

PRESETS: Mapping[str, Preset] = {
    # US15, TI16: vLLM and SGLang with chunked prefill. One engine, which does one thing at a time.
    "monolithic": Preset({"actors.layout": "EPD", "actors.turns": "plans", "scheduling.policy": "monolithic"}, _BUDGETS),
    # US15: vLLM and SGLang with prefill and decode apart, DistServe.
    "split": Preset({"actors.layout": "EP+D", "actors.turns": "off", "scheduling.policy": "split"}, _BUDGETS),
}
