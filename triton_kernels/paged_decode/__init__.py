"""Attention of one new token per sequence over its paged KV cache: split over tokens, grouped heads, optionally quantized pages."""

from .op import DecodeWorkspace, paged_decode, plan_decode
from .reference import paged_decode_reference

__all__ = ["DecodeWorkspace", "paged_decode", "paged_decode_reference", "plan_decode"]
