"""What the video actor has to do for a medium, estimated before it is done (pure). For the controller's order and for the actor."""

import msgspec

from .messages import MediaItem

SMALL_WORK = 1 << 24  # pixels: some 0.3 s of a processor


def estimated_work(media: MediaItem) -> int:
    """In pixels. Sounds and videos do not say beforehand what they take: all count as large, the more the more bytes they have."""
    return media.work if media.kind == "image" else SMALL_WORK + 1 + media.num_bytes


def corrected(media: MediaItem) -> MediaItem:
    """The same, known to be of large work."""
    return msgspec.structs.replace(media, work=SMALL_WORK + 1 + media.num_bytes)


def is_large(work: int) -> bool:
    """Whether others must not wait for it."""
    return work > SMALL_WORK
