"""Attention of prompt chunks over the pages before them and causally over themselves, for several sequences at once."""

from .op import ExtendPlan, paged_extend, plan_extend
from .reference import paged_extend_reference

__all__ = ["ExtendPlan", "paged_extend", "paged_extend_reference", "plan_extend"]
