"""Tokens from logits: guidance, penalties and temperature in one pass, then top-k, top-p and min-p without a sort."""

from .op import SamplingWorkspace, count_tokens, sample
from .rows import SamplingRows

__all__ = ["SamplingRows", "SamplingWorkspace", "count_tokens", "sample"]
