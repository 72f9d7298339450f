"""Pictures: one thing, several things, or printed digits; pairs of pictures; and what can be asked about them."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass

from . import phrases
from .degrade import degrade_picture
from .drawing import (
    COLOURS,
    DIGIT_STYLES,
    SHAPES,
    Mask,
    Rgb,
    Rng,
    background,
    background_colours,
    colour_of,
    colours_near,
    draw_digits,
    lay,
    pixels,
    shape_mask,
    upright_angle,
)
from .kinds import NUMBERS, Box, Picture, Placed, Question, chance, pick, sentence

SIZES = {"small": (0.13, 0.24), "middle": (0.28, 0.38), "big": (0.48, 0.78)}  # of the shorter side
TINY = (0.075, 0.11)
LEAST_PIXELS = 13
LEAST_SHARE = 0.085  # of the side of a square that is as large as the picture: models see pictures at a fixed area
_GAP = 0.05  # how far from the border of a third of the picture the middle of a thing stays
_ROWS, _COLUMNS = ("top", "", "bottom"), ("left", "", "right")


def picture_size(rng: Rng) -> tuple[int, int]:
    """Width, height: mostly 112 to 280 pixels on the shorter side, up to twice as much on the longer, never above 640."""
    short = int(rng.integers(112, 281)) if chance(rng, 0.85) else int(rng.integers(80, 401))
    long = min(640, round(short * pick(rng, (1.0, 4 / 3, 1.5, rng.uniform(1, 2)))))
    return (long, short) if chance(rng, 0.6) else (short, long)


@dataclass(slots=True)
class _Thing:
    shape: str
    colour: str
    rgb: Rgb
    mask: Mask
    left: int
    top: int
    digits: tuple[Box, ...] = ()  # in the mask


def _draw(
    rng: Rng, width: int, height: int, things: list[_Thing], degraded: bool, gentle: bool = False, brightness: float = 15.0
) -> Picture:
    colours = [thing.rgb for thing in things]
    grounds = background_colours(rng, colours, brightness)
    canvas = background(rng, width, height, grounds)
    placed = []
    for thing in things:
        lay(canvas, thing.mask, thing.left, thing.top, thing.rgb)
        right, bottom = thing.left + thing.mask.shape[1], thing.top + thing.mask.shape[0]
        box = (thing.left / width, thing.top / height, right / width, bottom / height)
        digits = tuple(
            ((thing.left + x0) / width, (thing.top + y0) / height, (thing.left + x1) / width, (thing.top + y1) / height)
            for x0, y0, x1, y1 in thing.digits
        )
        placed.append(Placed(thing.shape, thing.colour, box, digits))
    detail = min(min(thing.mask.shape) for thing in things)
    ground = tuple(name for colour in grounds for name in colours_near(colour))
    return Picture(degrade_picture(rng, canvas, detail, colours, gentle) if degraded else pixels(canvas), tuple(placed), ground)


def _thing(rng: Rng, shape: str, colour: str, size: int) -> _Thing:
    return _Thing(shape, colour, colour_of(rng, colour), shape_mask(shape, size, upright_angle(rng, shape)), 0, 0)


def _pixels_of(rng: Rng, width: int, height: int, size: str, tiny: bool) -> int:
    low, high = TINY if tiny else SIZES[size]
    return _at_least(width, height, rng.uniform(low, high) * min(width, height))


def _at_least(width: int, height: int, size: float) -> int:
    """The size in pixels, or the least that is still seen in such a picture."""
    return max(LEAST_PIXELS, round(LEAST_SHARE * math.sqrt(width * height)), round(size))


def single(rng: Rng, degraded: bool, extent: tuple[int, int], size: str = "", shape: str = "", colour: str = "") -> tuple[Picture, str]:
    """One thing, in the middle of one of nine fields, and its size. extent: width, height of the picture."""
    width, height = extent
    tiny = degraded and not size and chance(rng, 0.2)
    if not size:
        size = "small" if tiny else pick(rng, ("small", "middle", "big"))
    thing = _thing(rng, shape or pick(rng, SHAPES), colour or pick(rng, COLOURS), _pixels_of(rng, width, height, size, tiny))
    row, column = (int(field) for field in rng.integers(0, 3, 2))
    tall, wide = thing.mask.shape
    thing.left = _place(rng, width, wide, column)
    thing.top = _place(rng, height, tall, row)
    return _draw(rng, width, height, [thing], degraded, gentle=tiny), size


def _place(rng: Rng, extent: int, length: int, field: int) -> int:
    """Where a thing of this length begins, its middle well within the field, or as near to it as the picture's edge allows."""
    middle = rng.uniform(field / 3 + (_GAP if field else 0), (field + 1) / 3 - (_GAP if field < 2 else 0)) * extent
    edge = min(round(0.02 * extent), (extent - length) // 2)
    return max(edge, min(extent - length - edge, round(middle - length / 2)))


def position_name(thing: Placed) -> str:
    """'top left', 'centre', …; empty when the middle of the thing is near a border between fields."""
    fields = []
    for middle in thing.centre:
        if min(abs(middle - 1 / 3), abs(middle - 2 / 3)) < 0.8 * _GAP:
            return ""
        fields.append(int(middle * 3))
    return f"{_ROWS[fields[1]]} {_COLUMNS[fields[0]]}".strip() or "centre"


def several(rng: Rng, degraded: bool, number: int = 0) -> Picture:
    """Two to five things that do not touch, or ``number`` of them."""
    width, height = picture_size(rng)
    number = number or int(rng.integers(2, 6))
    kind = pick(rng, ("same", "mixed", "mixed", "few"))
    shapes = [pick(rng, SHAPES) for _ in range(1 if kind == "same" else 2)] if kind != "mixed" else list(SHAPES)
    colours = [pick(rng, COLOURS) for _ in range(1 if kind == "same" else 2)] if kind != "mixed" else list(COLOURS)
    tiny = degraded and chance(rng, 0.2)
    largest = {1: 0.45, 2: 0.45, 3: 0.42, 4: 0.4, 5: 0.33}[number]
    things: list[_Thing] = []
    boxes: list[tuple[int, int, int, int]] = []
    alike = rng.uniform(0.15, largest)
    same_size = chance(rng, 0.5)
    while len(things) < number:
        share = rng.uniform(0.09, 0.12) if tiny else alike if same_size else rng.uniform(0.15, largest)
        for _ in range(40):
            size = _at_least(width, height, share * min(width, height))
            thing = _thing(rng, pick(rng, shapes), pick(rng, colours), size)
            tall, wide = thing.mask.shape
            gap = max(3, round(0.035 * min(width, height)))
            thing.left, thing.top = int(rng.integers(0, width - wide + 1)), int(rng.integers(0, height - tall + 1))
            box = (thing.left - gap, thing.top - gap, thing.left + wide + gap, thing.top + tall + gap)
            if all(box[2] <= b[0] or b[2] <= box[0] or box[3] <= b[1] or b[3] <= box[1] for b in boxes):
                things.append(thing)
                boxes.append((thing.left, thing.top, thing.left + wide, thing.top + tall))
                break
            share *= 0.97
    return _draw(rng, width, height, things, degraded, gentle=tiny)


def digits(rng: Rng, degraded: bool) -> Picture:
    """One to four digits in a row, 18 % of the picture's height or more."""
    text = "".join(str(digit) for digit in rng.integers(0, 10, int(rng.integers(1, 5))))
    width, height = picture_size(rng)
    style, gap, angle = pick(rng, DIGIT_STYLES), rng.uniform(0.02, 0.16), 0.0 if chance(rng, 0.4) else rng.uniform(-9, 9)
    if height > width and len(text) > 2:
        width, height = height, width
    tiny = degraded and chance(rng, 0.3)
    share = rng.uniform(0.18, 0.26) if tiny else rng.uniform(0.2, 0.7)
    size = max(15, round(share * height))
    mask, boxes = draw_digits(text, size, style, gap, angle)
    widest, highest = 0.85 * width, 0.9 * height
    while mask.shape[1] > widest or mask.shape[0] > highest:
        size = min(size - 1, int(size * min(widest / mask.shape[1], highest / mask.shape[0])))
        mask, boxes = draw_digits(text, size, style, gap, angle)
    colour = pick(rng, COLOURS) if chance(rng, 0.6) else pick(rng, ("black", "white"))
    left, top = (
        int(rng.integers(edge, max(edge + 1, room - edge)))
        for edge, room in ((round(0.02 * width), width - mask.shape[1]), (round(0.02 * height), height - mask.shape[0]))
    )
    number = _Thing(text, colour, colour_of(rng, colour), mask, left, top, boxes)
    return _draw(rng, width, height, [number], degraded, gentle=tiny, brightness=50.0)


def crowd(rng: Rng, degraded: bool) -> Picture:
    """Six to fifteen things and numbers in rows: too many to ask about, and much to learn to see from."""
    width, height = picture_size(rng)
    rows = int(rng.integers(2, 4))
    columns = max(3, min(5, round(rows * width / height)))
    wide, tall = width / columns, height / rows
    colours = [pick(rng, COLOURS) for _ in range(3)]
    things = []
    for row, column in itertools.product(range(rows), range(columns)):
        size = _at_least(width, height, rng.uniform(0.4, 0.85) * min(wide, tall))
        colour = pick(rng, colours)
        if chance(rng, 0.4):
            thing = _thing(rng, pick(rng, SHAPES), colour, size)
        else:
            text = "".join(str(digit) for digit in rng.integers(0, 10, int(rng.integers(1, 3))))
            size = max(15, size)
            mask, boxes = draw_digits(text, size, pick(rng, DIGIT_STYLES), rng.uniform(0.02, 0.16), rng.uniform(-9, 9))
            if mask.shape[1] > 0.95 * wide:
                text = text[0]
                mask, boxes = draw_digits(text, size, pick(rng, DIGIT_STYLES), 0.02, rng.uniform(-9, 9))
            thing = _Thing(text, colour, colour_of(rng, colour), mask, 0, 0, boxes)
        high, across = thing.mask.shape
        thing.left = round(column * wide + rng.uniform(0, max(0.0, wide - across)))
        thing.top = round(row * tall + rng.uniform(0, max(0.0, tall - high)))
        things.append(thing)
    return _draw(rng, width, height, things, degraded, gentle=True)


def name(thing: Placed, article: bool = False) -> str:
    return _named(thing.label, thing.colour) if article else f"{thing.colour} {thing.label}"


def _named(label: str, colour: str) -> str:
    return f"{'an' if colour == 'orange' else 'a'} {colour} {label}"


def description(objects: tuple[Placed, ...]) -> str:
    """'A red circle and two blue stars.', in the order of SHAPES, then COLOURS."""
    ordered = sorted(objects, key=lambda thing: (SHAPES.index(thing.label), COLOURS.index(thing.colour)))
    names = []
    for (label, colour), number in Counter((thing.label, thing.colour) for thing in ordered).items():
        if number == 1:
            names.append(_named(label, colour))
        else:
            names.append(f"{NUMBERS[number]} {colour} {phrases.plural(label)}")
    return sentence(" and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names))


def image(rng: Rng, degraded: bool) -> tuple[Picture, list[Question]]:
    """A picture and all questions about it."""
    kind = rng.random()
    if kind < 0.25:
        picture, size = single(rng, degraded, picture_size(rng))
        return picture, single_questions(rng, picture, size)
    if kind < 0.7:
        picture = several(rng, degraded)
        return picture, several_questions(rng, picture)
    picture = digits(rng, degraded)
    return picture, digit_questions(rng, picture.objects[0])


def single_questions(rng: Rng, picture: Picture, size: str) -> list[Question]:
    ask = phrases.asker(rng)
    thing = picture.objects[0]
    words = {"shape": thing.label, "colour": thing.colour}
    questions = [
        ask("shape", sentence(f"a {thing.label}")),
        ask("colour", sentence(thing.colour)),
        ask("describe", description((thing,))),
        _exists(rng, picture),
    ]
    if size != "middle":
        questions.append(ask("size", sentence(size), **words))
    if position := position_name(thing):
        questions.append(ask("position", sentence(position), **words))
    if chance(rng, 0.35):
        questions.append(ask("count", sentence("one")))
    if chance(rng, 0.25):
        questions.append(_absent(rng, picture))
    if chance(rng, 0.15):
        questions.append(ask("digits", "I see no number."))
    return questions


def _exists(rng: Rng, picture: Picture) -> Question:
    """Yes and no are equally likely; a no is often half right. Nobody asks about the background."""
    ask = phrases.asker(rng)
    present = {(thing.label, thing.colour) for thing in picture.objects}
    shape, colour = pick(rng, sorted(present))
    others = {*COLOURS} - {*picture.ground} - {thing.colour for thing in picture.objects}
    kind = pick(rng, ("exists", "exists_shape", "exists_colour" if others else "exists"))
    is_there = chance(rng, 0.5)
    while not is_there:
        if kind != "exists" or chance(rng, 0.7):
            shape, colour = (pick(rng, SHAPES), colour) if chance(rng, 0.5) else (shape, pick(rng, COLOURS))
        else:
            shape, colour = pick(rng, SHAPES), pick(rng, COLOURS)
        if kind == "exists_colour" and colour in picture.ground:
            continue
        if not any(s == shape or kind == "exists_colour" for s, c in present if c == colour or kind == "exists_shape"):
            break
    return ask("exists", "Yes." if is_there else "No.", phrase=kind, shape=shape, colour=colour, a="an" if colour == "orange" else "a")


def _absent(rng: Rng, picture: Picture) -> Question:
    """A question about a shape or a colour that is not there, nor that of the background."""
    ask = phrases.asker(rng)
    objects = picture.objects
    seen = {*picture.ground, *(thing.colour for thing in objects)}
    if chance(rng, 0.3) and (others := [colour for colour in COLOURS if colour not in seen]):
        colour = pick(rng, others)
        return ask("absent", f"I see nothing {colour}.", phrase=pick(rng, ("find_shape", "count_colour")), colour=colour)
    kinds = {(thing.label, thing.colour) for thing in objects}
    apart = sorted({(one.label, other.colour) for one in objects for other in objects} - kinds)
    if apart and chance(rng, 0.4):
        shape, colour = pick(rng, apart)
        return ask("absent", f"I see no {colour} {shape}.", phrase="count_both", shape=shape, colour=colour)
    shape = pick(rng, [shape for shape in SHAPES if all(thing.label != shape for thing in objects)])
    phrase = pick(rng, ("find_colour", "count_shape", "count_both", "position", "size"))
    return ask("absent", f"I see no {shape}.", phrase=phrase, naming="{shape", shape=shape, colour=pick(rng, COLOURS))


def several_questions(rng: Rng, picture: Picture) -> list[Question]:
    ask = phrases.asker(rng)
    objects = picture.objects
    shapes = Counter(thing.label for thing in objects)
    colours = Counter(thing.colour for thing in objects)
    kinds = Counter((thing.label, thing.colour) for thing in objects)
    questions = [ask("count", sentence(NUMBERS[len(objects)])), _exists(rng, picture)]
    shape, colour = pick(rng, sorted(shapes)), pick(rng, sorted(colours))
    shape = max(shapes, key=lambda s: (shapes[s], s)) if chance(rng, 0.6) else shape
    colour = max(colours, key=lambda c: (colours[c], c)) if chance(rng, 0.6) else colour
    both = max(kinds, key=lambda kind: (kinds[kind], kind)) if chance(rng, 0.5) else pick(rng, sorted(kinds))
    numbers = {"count_shape": shapes[shape], "count_colour": colours[colour], "count_both": kinds[both]}
    by = pick(rng, [by for by, number in numbers.items() for _ in range(number)])
    slots = {"shape": both[0], "colour": both[1]} if by == "count_both" else {"shape": shape, "colour": colour}
    questions.append(ask("count_some", sentence(NUMBERS[numbers[by]]), phrase=by, **slots))
    if single_shapes := sorted(s for s, n in shapes.items() if n == 1):
        shape = pick(rng, single_shapes)
        questions.append(ask("find_colour", sentence(next(t.colour for t in objects if t.label == shape)), shape=shape))
    if single_colours := sorted(c for c, n in colours.items() if n == 1):
        colour = pick(rng, single_colours)
        found = next(t.label for t in objects if t.colour == colour)
        questions.append(ask("find_shape", sentence(f"a {found}"), colour=colour))
    if chance(rng, 0.35):
        questions.append(_absent(rng, picture))
    questions += _find_place(rng, objects)
    if len(kinds) <= 4:
        questions.append(ask("list", description(objects), phrase="describe"))
    unique = [thing for thing in objects if kinds[thing.label, thing.colour] == 1]
    if len(unique) >= 2:
        first, second = (unique[int(k)] for k in rng.permutation(len(unique))[:2])
        if abs(first.centre[0] - second.centre[0]) > 0.15:
            side = "left" if first.centre[0] < second.centre[0] else "right"
            questions.append(ask("side", sentence(side), one=name(first), other=name(second)))
    return questions


def _find_place(rng: Rng, objects: tuple[Placed, ...]) -> list[Question]:
    """Where one of several things is: a question by its shape, where no other has it, or by its shape and colour; at most one."""
    askable = []
    for thing in objects:
        alike = [other for other in objects if other.label == thing.label]
        naming = "{colour}" if len(alike) > 1 else "{shape}"
        if position_name(thing) and sum(other.colour == thing.colour for other in alike) == 1:
            askable.append((thing, naming))
    if not askable:
        return []
    thing, naming = pick(rng, askable)
    answer = sentence(position_name(thing))
    return [phrases.asker(rng)("find_place", answer, phrase="position", naming=naming, shape=thing.label, colour=thing.colour)]


def digit_questions(rng: Rng, thing: Placed) -> list[Question]:
    ask = phrases.asker(rng)
    questions = [ask("digits", f"{thing.label}."), ask("digits", f"{thing.label}.")]
    if chance(rng, 0.3):
        questions.append(ask("shape", "I see no shape."))
    if chance(rng, 0.3):
        questions.append(ask("colour", sentence(thing.colour), phrase="number_colour"))
    if chance(rng, 0.6):
        questions.append(ask("describe", sentence(f"the number {thing.label}")))
    return questions


def two_images(rng: Rng, degraded: bool) -> tuple[tuple[Picture, Picture], list[Question]]:
    """Two pictures with things to count, or with one thing each, and comparisons."""
    ask = phrases.asker(rng)
    if chance(rng, 0.45):
        same = chance(rng, 0.33)
        counts = [int(n) for n in (rng.permutation(5)[:2] + 1 if not same else [rng.integers(1, 6)] * 2)]
        one, two = (several(rng, degraded, count) for count in counts)
        more = "The same." if counts[0] == counts[1] else "The first." if counts[0] > counts[1] else "The second."
        questions = [
            ask("pair_more", more),
            ask("pair_count", sentence(NUMBERS[counts[0]]), nth="first"),
            ask("pair_count", sentence(NUMBERS[counts[1]]), nth="second"),
        ]
        return (one, two), questions
    sizes = ["small", "big"] if chance(rng, 0.5) else ["big", "small"]
    shape = pick(rng, SHAPES) if chance(rng, 0.4) else ""
    colour = pick(rng, COLOURS) if chance(rng, 0.43) else ""
    extent = picture_size(rng)
    pair = [single(rng, degraded, extent, size, shape, colour)[0] for size in sizes]
    first, second = (picture.objects[0] for picture in pair)
    questions = [
        ask("pair_bigger", "The first." if sizes[0] == "big" else "The second."),
        ask("pair_colour", "Yes." if first.colour == second.colour else "No."),
        ask("pair_shape", "Yes." if first.label == second.label else "No."),
        ask("pair_which", sentence(name(first, True)), nth="first"),
        ask("pair_which", sentence(name(second, True)), nth="second"),
    ]
    return (pair[0], pair[1]), questions
