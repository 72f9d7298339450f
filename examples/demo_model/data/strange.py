"""Media of kinds that the demo model's world does not have, and the sentence that says so.

Its last lesson: without it a photograph is taken for the nearest of its own pictures. ``held_out`` kinds are in no training.
"""

import numpy as np
from PIL import Image

from . import phrases, strange_pictures, strange_sounds, talk
from .drawing import Rng
from .kinds import Clip, Medium, Picture, Pixels, Question, Sound, Thing, pick
from .pictures import picture_size
from .strange_pictures import Draw, strange_pixels
from .strange_sounds import strange_wave

TASK = "strange"
OTHERWISE: dict[Medium, str] = {
    "image": "I only know pictures of simple shapes and numbers, not this.",
    "video": "I only know videos of simple shapes, not this.",
    "audio": "I only know tones, beeps and noise, not this.",
}
_OPEN = {"image": ("describe",), "video": ("video_describe", "video_seen"), "audio": ("sound_describe",)}
_FPS, _LEAST_S, _MOST_S = 10.0, 2.0, 5.0


def strange(rng: Rng, medium: Medium, held_out: bool = False) -> tuple[Thing, list[Question]]:
    """Something strange, what is in it, and a question as of the medium's own. medium: a key of OTHERWISE."""
    answer = OTHERWISE[medium]
    thing: Thing
    if medium == "audio":
        thing = Sound(strange_wave(rng, pick(rng, strange_sounds.HELD_OUT if held_out else strange_sounds.KINDS)), "strange", ())
    else:
        kinds = strange_pictures.HELD_OUT if held_out else strange_pictures.KINDS
        if medium == "image":
            thing = Picture(strange_pixels(rng, *picture_size(rng), pick(rng, kinds)), ())
        else:
            frames = _film(rng, kinds)
            thing = Clip(frames, _FPS, "strange", (), ((),) * len(frames))
    opened = phrases.asker(rng)(TASK, answer, phrase=pick(rng, _OPEN[medium]))
    return thing, [opened, Question(TASK, talk.asked_about(rng, medium), answer)]


def _film(rng: Rng, kinds: tuple[Draw, ...]) -> Pixels:
    """A camera that goes over a picture, nearer or further, with a cut at times. uint8 [T, H, W, 3]."""
    short = int(rng.integers(96, 177))
    width, height = short * 4 // 3 // 2 * 2, short // 2 * 2
    frames: list[Pixels] = []
    for part_s in rng.dirichlet(np.ones(int(rng.integers(1, 4)))) * rng.uniform(_LEAST_S, _MOST_S):
        picture = Image.fromarray(strange_pixels(rng, width * 3 // 2, height * 3 // 2, pick(rng, kinds)))
        first, last = (_view(rng, *picture.size) for _ in range(2))
        for along in np.linspace(0, 1, max(1, round(part_s * _FPS))):
            box = tuple((first + (last - first) * along).tolist())
            frames.append(np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR, box)))
    return np.stack(frames)


def _view(rng: Rng, width: int, height: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What the camera sees of a picture: left, top, right, bottom."""
    share = rng.uniform(0.5, 1)
    left, top = rng.uniform(0, 1 - share), rng.uniform(0, 1 - share)
    return np.array([left * width, top * height, (left + share) * width, (top + share) * height])
