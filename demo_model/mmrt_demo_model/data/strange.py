"""Media of kinds that the demo model's world does not have, and the sentence that says so.

Without them a photograph is taken for the nearest of the model's own pictures. ``held_out`` kinds are in no training.
"""

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from . import phrases, strange_pictures, strange_sounds, talk
from .drawing import Rng
from .kinds import Clip, Medium, Picture, Pixels, Question, Sound, Thing, chance, pick
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
_FPS, _LEAST_S, _MOST_S, _MOST_FRAMES = 10.0, 0.3, 60.0, 40
_SOUND_S = (0.5, 8.0)


def strange(rng: Rng, medium: Medium, held_out: bool = False, seconds: float = 0.0) -> tuple[Thing, list[Question]]:
    """Something strange, what is in it, and questions as of the medium's own. medium: a key of OTHERWISE; seconds: of a sound, 0 draws
    them."""
    answer = OTHERWISE[medium]
    thing: Thing
    if medium == "audio":
        make = pick(rng, strange_sounds.HELD_OUT if held_out else strange_sounds.KINDS)
        thing = Sound(strange_wave(rng, make, seconds or between(rng, *_SOUND_S)), "strange", ())
    else:
        kinds = strange_pictures.HELD_OUT if held_out else strange_pictures.KINDS
        if medium == "image":
            thing = Picture(strange_pixels(rng, *picture_size(rng), pick(rng, kinds)), ())
        else:
            frames, fps = _film(rng, kinds)
            thing = Clip(frames, fps, "strange", (), ((),) * len(frames))
    opened = phrases.asker(rng)(TASK, answer, phrase=pick(rng, _OPEN[medium]))
    others = (pick(rng, phrases.ANYTHING), talk.asked_about(rng, medium))
    return thing, [opened, *(Question(TASK, text, answer) for text in others)]


def between(rng: Rng, least: float, most: float) -> float:
    """A number between two, as likely to be twice as much as half as much."""
    return float(least * (most / least) ** rng.random())


def _film(rng: Rng, kinds: tuple[Draw, ...]) -> tuple[Pixels, float]:
    """A camera that stands or goes over a picture, nearer or further, with things that pass, cuts and fades. uint8 [T, H, W, 3], and
    frames per second: long films have few."""
    short, long = int(rng.integers(96, 177)), pick(rng, (1.0, 4 / 3, 16 / 9, 16 / 9))
    width, height = round(short * long) // 2 * 2, short // 2 * 2
    if chance(rng, 0.2):
        width, height = height, width
    seconds = between(rng, _LEAST_S, _MOST_S)
    fps = min(_FPS, _MOST_FRAMES / seconds)
    frames: list[Pixels] = []
    for part_s in rng.dirichlet(np.ones(int(rng.integers(1, 5)))) * seconds:
        frames += _shot(rng, kinds, width, height, max(1, round(part_s * fps)))
    film = np.stack(frames)
    if chance(rng, 0.2):  # it begins or ends in black
        light = np.interp(np.arange(len(film)), (0, max(1, len(film) // 3)), (0, 1))
        light = light[::-1] if chance(rng, 0.5) else light
        film = (film * light[:, None, None, None]).astype(np.uint8)
    return film, fps


def _shot(rng: Rng, kinds: tuple[Draw, ...], width: int, height: int, num: int) -> list[Pixels]:
    """Frames without a cut."""
    picture = Image.fromarray(strange_pixels(rng, width * 3 // 2, height * 3 // 2, pick(rng, kinds)))
    first, last = (_view(rng, *picture.size) for _ in range(2))
    if chance(rng, 0.4):
        last = first  # on a tripod
    passing = Image.fromarray(strange_pixels(rng, width, height, pick(rng, kinds))) if chance(rng, 0.4) else None
    mask, ways = _blot(rng, width, height), rng.uniform(-0.6, 0.6, (2, 2)) * (width, height)
    frames = []
    for along in np.linspace(0, 1, num):
        frame = picture.resize((width, height), Image.Resampling.BILINEAR, tuple((first + (last - first) * along).tolist()))
        if passing is not None:
            x, y = (ways[0] + (ways[1] - ways[0]) * along + rng.normal(0, 1, 2)).round().astype(int).tolist()
            frame.paste(passing, (x, y), mask)
        frames.append(np.asarray(frame))
    return frames


def _blot(rng: Rng, width: int, height: int) -> Image.Image:
    """Where something is that passes: one to four round parts that touch, with a soft edge."""
    mask = Image.new("L", (width, height))
    draw = ImageDraw.Draw(mask)
    x, y = width / 2, height / 2
    for _ in range(int(rng.integers(1, 5))):
        across, down = rng.uniform(0.08, 0.3, 2) * min(width, height)
        draw.ellipse((x - across, y - down, x + across, y + down), fill=255)
        x, y = x + rng.uniform(-1, 1) * across, y + rng.uniform(-1, 1) * down
    return mask.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 2)))


def _view(rng: Rng, width: int, height: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What the camera sees of a picture: left, top, right, bottom."""
    share = rng.uniform(0.5, 1)
    left, top = rng.uniform(0, 1 - share), rng.uniform(0, 1 - share)
    return np.array([left * width, top * height, (left + share) * width, (top + share) * height])
