"""New tokens' K and V into pages, quantized or not, fused with QK-norm and (M-)RoPE."""

from .op import QkNorm, Rotary, rotate_and_write_kv

__all__ = ["QkNorm", "Rotary", "rotate_and_write_kv"]
