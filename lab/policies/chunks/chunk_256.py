"""``weighted`` with a budget of 256 effective tokens (CW4, US10)."""

from mmrt.runtime.controller.scheduling.weighted import Weighted

policy = Weighted(chunk_tokens=256)
