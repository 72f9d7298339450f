"""From RGB frames to the rows that a vision tower reads, bit-equal to transformers' torchvision processors. For the video actor.

Rows stay uint8: the encoder normalises them as ``(row - mean * 255) / (std * 255)`` in float32, as transformers does
before it cuts patches, so a row costs a quarter of the memory. (transformers' Pillow image processor, its fallback without
torchvision, resizes with Pillow's own bicubic and differs by 1–2 levels of 255.)

A frame is RGB [height, width, 3] as decoded, and *planes* [3, height, width] once it has the target size. T, P, M are the temporal
patch size, the patch size and the merge size of the rules.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image

from .rules import PatchRules, Resample

Pixels = npt.NDArray[np.uint8]


def resize(frame: Pixels, height: int, width: int, resample: Resample = "bicubic") -> Pixels:
    """Antialiased. frame uint8 [*, *, 3] -> planes uint8 [3, height, width]. Lanczos is Pillow's."""
    if frame.shape[:2] == (height, width):
        return frame.transpose(2, 0, 1)
    if resample == "lanczos":
        return np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.LANCZOS)).transpose(2, 0, 1)
    writable = frame if frame.flags.writeable else frame.copy()
    planes = torch.from_numpy(writable).permute(2, 0, 1)[None]
    resized = F.interpolate(planes, (height, width), mode=resample, antialias=True)
    planes_resized: Pixels = resized[0].numpy()
    return planes_resized


def row_size(rules: PatchRules) -> int:
    """Bytes of one patch row: 3 * T * P * P."""
    return 3 * rules.temporal_patch_size * rules.patch_size**2


def patch_rows(planes: Pixels, rules: PatchRules) -> Pixels:
    """One temporal patch: planes uint8 [T, 3, height, width] -> rows uint8 [height * width / P², 3 * T * P * P].

    Height and width are multiples of P * M. Rows come in the order in which the tower merges them: M x M blocks, row by row.
    """
    num_frames, _, height, width = planes.shape
    patch, merge = rules.patch_size, rules.merge_size
    assert num_frames == rules.temporal_patch_size
    assert height % (patch * merge) == 0 and width % (patch * merge) == 0, (height, width)
    blocks = planes.reshape(num_frames, 3, height // patch // merge, merge, patch, width // patch // merge, merge, patch)
    return blocks.transpose(2, 5, 3, 6, 1, 0, 4, 7).reshape(-1, row_size(rules))


def image_rows(frame: Pixels, height: int, width: int, rules: PatchRules) -> Pixels:
    """The rows of a still image at this target size: the frame stands T times in its one temporal patch."""
    planes = resize(frame, height, width)
    return patch_rows(np.broadcast_to(planes, (rules.temporal_patch_size, *planes.shape)), rules)


def video_rows(frames: Iterable[Pixels], height: int, width: int, rules: PatchRules) -> Iterator[Pixels]:
    """The rows of each temporal patch of a video in turn, at this target size."""
    yield from temporal_rows((resize(frame, height, width) for frame in frames), rules)


def temporal_rows(planes: Iterable[Pixels], rules: PatchRules) -> Iterator[Pixels]:
    """As ``video_rows``, for frames that have the target size; an incomplete last temporal patch repeats the last frame."""
    pending: list[Pixels] = []
    for frame in planes:
        pending.append(frame)
        if len(pending) == rules.temporal_patch_size:
            yield patch_rows(np.stack(pending), rules)
            pending.clear()
    if pending:
        pending.extend([pending[-1]] * (rules.temporal_patch_size - len(pending)))
        yield patch_rows(np.stack(pending), rules)
