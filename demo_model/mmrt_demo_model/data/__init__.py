"""Demo data: synthetic pictures, clips and sounds with questions and answers, as functions of a seed.

For the training of the demo model (models/) and for the exam. Nothing here is random but by the generator of a sample:
sample ``index`` of ``seed`` is the same whatever was made before it.
"""

from .codecs import decode_frames, encode, encode_frames, roundtrip
from .drawing import COLOURS, SHAPES
from .histories import history
from .kinds import SHARES, SOUND_RATE, Clip, Medium, Picture, Placed, Question, Sample, Shares, Sound, Thing, normalised
from .samples import MEDIA, TASKS, crowded, sample

__all__ = [
    "COLOURS",
    "MEDIA",
    "SHAPES",
    "SHARES",
    "SOUND_RATE",
    "TASKS",
    "Clip",
    "Medium",
    "Picture",
    "Placed",
    "Question",
    "Sample",
    "Shares",
    "Sound",
    "Thing",
    "crowded",
    "decode_frames",
    "encode",
    "encode_frames",
    "history",
    "normalised",
    "roundtrip",
    "sample",
]
