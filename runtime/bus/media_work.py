"""Estimates of the video actor's work for a medium (pure). The controller orders work by them; the actor uses them too."""

import msgspec

from .messages import MediaItem

SMALL_WORK = 1 << 24  # pixels: some 0.3 s of a processor


def estimated_work(media: MediaItem) -> int:
    """Estimate the work in pixels. Sounds and videos do not state their cost: all count as large, and grow with their bytes."""
    return media.work if media.kind == "image" else SMALL_WORK + 1 + media.num_bytes


def corrected(media: MediaItem) -> MediaItem:
    """Return the medium marked as large work."""
    return msgspec.structs.replace(media, work=SMALL_WORK + 1 + media.num_bytes)


def is_large(work: int) -> bool:
    """Tell if other work must not wait for this work."""
    return work > SMALL_WORK
