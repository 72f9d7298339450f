"""The MLP's activation: silu(gate) x up."""

from .op import silu_mul

__all__ = ["silu_mul"]
