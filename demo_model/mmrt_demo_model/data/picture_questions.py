"""What can be asked about a picture, and about two."""

from collections import Counter

from . import phrases
from .drawing import COLOURS, SHAPES, Rng
from .kinds import NUMBERS, Picture, Placed, Question, Shares, chance, pick, sentence
from .pictures import digits, picture_size, position_name, several, single


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


def image(rng: Rng, degraded: bool, shares: Shares) -> tuple[Picture, list[Question]]:
    """A picture and all questions about it."""
    kind = rng.random()
    if kind < shares.single:
        picture, size = single(rng, degraded, picture_size(rng))
        return picture, single_questions(rng, picture, size)
    if kind < shares.single + shares.several:
        picture = several(rng, degraded, mixes=shares.mixes)
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
        questions.append(_no_number(rng))
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


def _exists_number(rng: Rng, picture: Picture) -> Question:
    """Whether there are exactly two, three, four or five things, of a shape, of a colour or of any. A no says how many there are."""
    groups = Counter(group for thing in picture.objects for group in phrases.groups(thing.label, thing.colour))
    group = pick(rng, [one for one, number in sorted(groups.items()) for _ in range(number * number)])  # where there are many
    if chance(rng, 0.15):
        colours = [colour for colour in COLOURS if colour not in picture.ground]
        group = pick(rng, phrases.groups(pick(rng, SHAPES), pick(rng, colours)))
    number = groups[group]
    is_so = number > 1 and chance(rng, 0.7)
    others = [other for other in range(2, len(NUMBERS)) if other != number for _ in range(len(NUMBERS) - abs(other - number))]
    asked = number if is_so else pick(rng, others)  # what is near is likelier
    answer = "Yes." if is_so else sentence(f"no, {NUMBERS[number] if number else 'none'}")
    return phrases.asker(rng)("exists_number", answer, number=NUMBERS[asked], group=group)


def _absent(rng: Rng, picture: Picture) -> Question:
    """A question about a shape or a colour that is not there, nor that of the background."""
    ask = phrases.asker(rng)
    objects = picture.objects
    seen = {*picture.ground, *(thing.colour for thing in objects)}
    if chance(rng, 0.3) and (others := [colour for colour in COLOURS if colour not in seen]):
        colour = pick(rng, others)
        return ask("absent", f"I see nothing {colour}.", phrase=pick(rng, ("find_shape", "count_colour")), colour=colour)
    kinds = {(thing.label, thing.colour) for thing in objects}
    apart = sorted({(thing.label, colour) for thing in objects for colour in COLOURS if colour not in picture.ground} - kinds)
    if apart and chance(rng, 0.4):
        shape, colour = pick(rng, apart)
        return ask("absent", f"I see no {colour} {shape}.", phrase="count_both", shape=shape, colour=colour)
    shape = pick(rng, [shape for shape in SHAPES if all(thing.label != shape for thing in objects)])
    phrase = pick(rng, ("find_colour", "count_shape", "count_both", "position", "size"))
    return ask("absent", f"I see no {shape}.", phrase=phrase, naming="{shape", shape=shape, colour=pick(rng, COLOURS))


def _no_number(rng: Rng) -> Question:
    return phrases.asker(rng)("absent", "I see no number.", phrase="digits")


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
    if chance(rng, 0.06):
        questions.append(_no_number(rng))
    if chance(rng, 0.4):
        questions.append(_exists_number(rng, picture))
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


def two_images(rng: Rng, degraded: bool, shares: Shares) -> tuple[tuple[Picture, Picture], list[Question]]:
    """Two pictures with things to count, or with one thing each, and comparisons."""
    ask = phrases.asker(rng)
    if chance(rng, shares.counted_pairs):
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
