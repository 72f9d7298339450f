"""The MLP's activation: silu(gate) x up."""

from .op import silu_mul, silu_mul_pair

__all__ = ["silu_mul", "silu_mul_pair"]
