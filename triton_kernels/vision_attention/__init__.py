"""Attention of vision towers, many sequences one after another: frames (full attention) or windows (Qwen2.5-VL); and rotation."""

from .config import HEAD_DIMS
from .op import attend, rotate

__all__ = ["HEAD_DIMS", "attend", "rotate"]
