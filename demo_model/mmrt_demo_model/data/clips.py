"""Video clips: something moves, two things appear, or something blinks; and what can be asked about it.

Speeds are in widths (left, right) or heights (up, down) of the picture per second. What is fast comes in again where it left. Models
look at two frames a second: phases last a second or more.
"""

import numpy as np

from . import phrases
from .degrade import noise
from .drawing import (
    COLOURS,
    SHAPES,
    Canvas,
    Mask,
    Rgb,
    Rng,
    background,
    background_colours,
    colour_of,
    lay,
    pixels,
    shape_mask,
    upright_angle,
)
from .kinds import NUMBERS, Clip, Pixels, Placed, Question, Shares, chance, counted, pick, sentence
from .picture_questions import name

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
SPEEDS = {"slow": (0.05, 0.12), "fast": (0.26, 0.5)}
_NOISE_FIELDS = 4


class _Stage:
    """A background and the things that come and go on it, drawn once and laid frame by frame."""

    def __init__(self, rng: Rng, degraded: bool, num_things: int) -> None:
        short = int(rng.integers(96, 177)) if chance(rng, 0.85) else int(rng.integers(64, 225))
        long = min(320, round(short * pick(rng, (1.0, 4 / 3, rng.uniform(1, 1.8)))))
        self.width, self.height = (long, short) if chance(rng, 0.65) else (short, long)
        self.fps = pick(rng, (8.0, 10.0, 12.0, 12.0, 15.0, 15.0, 24.0, 25.0, 30.0))
        shapes = [SHAPES[k] for k in rng.permutation(len(SHAPES))[:num_things]]
        colours = [COLOURS[k] for k in rng.permutation(len(COLOURS))[:num_things]]
        low, high = (0.14, 0.2) if degraded and chance(rng, 0.3) else (0.18, 0.34)
        self.masks: list[Mask] = []
        self.rgb: list[Rgb] = []
        for shape, colour in zip(shapes, colours, strict=True):
            size = max(14, round(rng.uniform(low, high) * short))
            self.masks.append(shape_mask(shape, size, upright_angle(rng, shape)))
            self.rgb.append(colour_of(rng, colour))
        self.names = list(zip(shapes, colours, strict=True))
        self.ground: Canvas = background(rng, self.width, self.height, background_colours(rng, self.rgb, brightness=15.0))
        self._degraded, self._rng = degraded, rng

    def room(self, thing: int) -> tuple[int, int]:
        """Where its left and top corner may be at most."""
        return self.width - self.masks[thing].shape[1], self.height - self.masks[thing].shape[0]

    def anywhere(self, thing: int) -> tuple[int, int]:
        return int(self._rng.integers(0, self.room(thing)[0] + 1)), int(self._rng.integers(0, self.room(thing)[1] + 1))

    def placed(self, thing: int, left: int, top: int) -> Placed:
        height, width = self.masks[thing].shape
        box = (left / self.width, top / self.height, (left + width) / self.width, (top + height) / self.height)
        return Placed(*self.names[thing], box)

    def lay(self, canvas: Canvas, thing: int, left: int, top: int) -> None:
        lay(canvas, self.masks[thing], left, top, self.rgb[thing])

    def scenes(self, scenes: list[tuple[tuple[int, int, int], ...]]) -> tuple[tuple[Placed, ...], ...]:
        """The same with names and boxes."""
        return tuple(tuple(self.placed(*thing) for thing in scene) for scene in scenes)

    def film(self, scenes: list[tuple[tuple[int, int, int], ...]]) -> Pixels:
        """Frames uint8 [T, H, W, 3] of scenes of (thing, left, top). Equal scenes in a row are drawn once."""
        rng = self._rng
        way = pick(rng, ("noise", "contrast", "soft")) if self._degraded else ""
        factor, level = np.float32(rng.uniform(0.4, 0.6)), np.float32(rng.uniform(105, 150))
        fields = [noise(rng, (self.height, self.width), rng.uniform(12, 26)) for _ in range(_NOISE_FIELDS if way == "noise" else 0)]
        frames = np.empty((len(scenes), self.height, self.width, 3), np.uint8)
        for number, scene in enumerate(scenes):
            if number and scene == scenes[number - 1] and not fields:
                frames[number] = frames[number - 1]
                continue
            canvas = self.ground.copy()
            for thing, left, top in scene:
                self.lay(canvas, thing, left, top)
            if way == "contrast":
                canvas = level + (canvas - np.float32(127)) * factor
            elif way == "soft":
                canvas = _coarse(canvas)
            if fields:
                canvas += fields[number % _NOISE_FIELDS]
            frames[number] = pixels(canvas)
        return frames


def _coarse(canvas: Canvas) -> Canvas:
    """Averaged with its neighbours."""
    canvas = (canvas + np.roll(canvas, 1, 0)) * np.float32(0.5)
    return (canvas + np.roll(canvas, 1, 1)) * np.float32(0.5)


def moves(rng: Rng, degraded: bool) -> tuple[Clip, str]:
    """One thing moves, at times past one that rests. Returns the clip and 'fast' or 'slow'."""
    resting = chance(rng, 0.35)
    stage = _Stage(rng, degraded, 2 if resting else 1)
    direction, pace = pick(rng, tuple(DIRECTIONS)), pick(rng, tuple(SPEEDS))
    speed = rng.uniform(*SPEEDS[pace])
    axis = 0 if direction in ("left", "right") else 1
    extent = (stage.width, stage.height)[axis]
    length = stage.masks[0].shape[1 - axis]
    room = stage.room(0)[axis]
    wraps = pace == "fast" and chance(rng, 0.5)
    if wraps:
        duration = rng.uniform(2.0, 6.0)
    else:
        longest = room / extent / speed
        duration = rng.uniform(
            *((min(2.0, longest), min(3.0, longest)) if pace == "fast" else (min(0.15 / speed, 7.0), min(8.0, longest)))
        )
        duration = max(2.0, duration)
        speed = min(speed, longest * speed / duration)
    num = max(2, round(duration * stage.fps))
    travel = speed * extent * np.arange(num) / stage.fps
    sign = sum(DIRECTIONS[direction])
    spare = max(0.0, room - travel[-1])
    start = rng.uniform(0, spare) if sign > 0 else room - rng.uniform(0, spare)
    path = start + sign * travel
    if wraps:
        path = (path + length) % (extent + length) - length
    across = int(rng.integers(0, stage.room(0)[1 - axis] + 1))
    along = np.rint(path).astype(int)
    scenes: list[tuple[tuple[int, int, int], ...]] = []
    other = ((1, *_beside(rng, stage, axis, across)),) if resting else ()
    for position in along.tolist():
        scenes.append((*other, (0, position, across) if axis == 0 else (0, across, position)))
    objects = [stage.placed(*scenes[0][-1])] + [stage.placed(*thing) for thing in other]
    film, known = stage.film(scenes), stage.scenes(scenes)
    return Clip(film, stage.fps, "moves", tuple(objects), known, direction, float(speed)), pace


def _beside(rng: Rng, stage: _Stage, axis: int, across: int) -> tuple[int, int]:
    """A place for the resting thing off the way of the moving one, if there is one."""
    length, resting = stage.masks[0].shape[axis], stage.masks[1].shape[axis]
    for _ in range(20):
        place = stage.anywhere(1)
        if place[1 - axis] + resting <= across or place[1 - axis] >= across + length:
            break
    return place


def appears(rng: Rng, degraded: bool) -> Clip:
    """Two things appear one after the other, 1.2 s or more apart, and stay."""
    stage = _Stage(rng, degraded, 2)
    first_s = 0.0 if chance(rng, 0.4) else rng.uniform(0.7, 1.5)
    second_s = first_s + rng.uniform(1.2, 2.2)
    duration = second_s + rng.uniform(1.2, 2.0)
    places = [stage.anywhere(0)]
    for _ in range(50):
        left, top = stage.anywhere(1)
        if abs(left - places[0][0]) > 0.4 * stage.width or abs(top - places[0][1]) > 0.4 * stage.height:
            break
    places.append((left, top))
    scenes = []
    for number in range(round(duration * stage.fps)):
        seen = (first_s <= number / stage.fps, second_s <= number / stage.fps)
        scenes.append(tuple((thing, *places[thing]) for thing in (0, 1) if seen[thing]))
    objects = tuple(stage.placed(thing, *places[thing]) for thing in (0, 1))
    return Clip(stage.film(scenes), stage.fps, "appears", objects, stage.scenes(scenes), times_s=(first_s, second_s))


def blinks(rng: Rng, degraded: bool, count: int) -> Clip:
    """A thing is there ``count`` times. Every phase lasts a second or more."""
    stage = _Stage(rng, degraded, 1)
    most = {1: 2.2, 2: 1.6, 3: 1.3, 4: 1.12}[count]
    lit_first = chance(rng, 0.5) if count < 4 else True
    num_phases = 2 * count - 1 + (not lit_first)
    if chance(rng, 0.5) or num_phases == 1:
        num_phases += 1
    num_phases = min(num_phases, 7)
    most = min(most, 8.0 / num_phases)
    times, now = [], 0.0
    for _ in range(num_phases):
        times.append(now)
        now += rng.uniform(1.02, most)
    place = stage.anywhere(0)
    scenes: list[tuple[tuple[int, int, int], ...]] = []
    for number in range(round(now * stage.fps)):
        phase = sum(number / stage.fps >= time for time in times) - 1
        scenes.append(((0, *place),) if (phase % 2 == 0) == lit_first else ())
    objects = (stage.placed(0, *place),)
    film, known = stage.film(scenes), stage.scenes(scenes)
    return Clip(film, stage.fps, "blinks", objects, known, count=count, times_s=tuple(times), lit_first=lit_first)


def video(rng: Rng, degraded: bool, shares: Shares) -> tuple[Clip, list[Question]]:
    """A clip and all questions about it."""
    ask = phrases.asker(rng)
    kind = rng.random()
    if kind < shares.moving:
        clip, pace = moves(rng, degraded)
        thing = clip.objects[0]
        words = {"shape": thing.label, "colour": thing.colour}
        direction = clip.direction if clip.direction in ("up", "down") else f"to the {clip.direction}"
        absent = [ask("video_absent", "It does not blink.", phrase="blinks", naming="blink", **words)] if chance(rng, 0.45) else []
        return clip, [
            *absent,
            ask("moving", sentence(name(thing, True))),
            ask("direction", sentence(clip.direction), **words),
            ask("speed", sentence(pace), **words),
            _described(rng, sentence(f"{name(thing, True)} moves {direction}")),
        ]
    if kind < (1 + shares.moving) / 2:
        clip = appears(rng, degraded)
        first, second = (name(thing, True) for thing in clip.objects)
        return clip, [
            *_still(rng, clip.objects[0]),
            ask("first", sentence(first), nth="first"),
            ask("first", sentence(second), nth=pick(rng, ("second", "last"))),
            _described(rng, sentence(f"{first} appears, then {second}")),
        ]
    clip = blinks(rng, degraded, int(rng.integers(1, 5)))
    return clip, blink_questions(rng, clip)


def _still(rng: Rng, thing: Placed) -> list[Question]:
    """At times somebody asks about a move that there is not."""
    if not chance(rng, 0.6):
        return []
    ask = phrases.asker(rng)
    phrase = pick(rng, ("direction", "speed"))
    return [ask("video_absent", "It does not move.", phrase=phrase, shape=thing.label, colour=thing.colour)]


def _described(rng: Rng, answer: str) -> Question:
    return phrases.asker(rng)("video_describe", answer, phrase="video_seen" if chance(rng, 0.3) else "video_describe")


def blink_questions(rng: Rng, clip: Clip) -> list[Question]:
    ask = phrases.asker(rng)
    thing = clip.objects[0]
    times = counted(clip.count, "time")
    return [
        *_still(rng, thing),
        ask("blinks", sentence(NUMBERS[clip.count]), shape=thing.label, colour=thing.colour),
        _described(rng, sentence(f"{name(thing, True)} blinks {times}")),
    ]
