"""The demo data's answers, found again in pixels and waves by other means; the same seed gives the same; files can be read."""

import colorsys
import io
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmrt.media.audio import decode_audio
from mmrt.media.image import decode_image
from mmrt.media.limits import MediaLimits
from mmrt.media.video import decode_frames
from mmrt.media.video_info import analyse
from mmrt_demo_model.data import (
    MEDIA,
    SOUND_RATE,
    TASKS,
    Clip,
    Medium,
    Picture,
    Question,
    Sample,
    Shares,
    Sound,
    encode,
    history,
    roundtrip,
    sample,
    strange_pictures,
    strange_sounds,
)
from mmrt_demo_model.data.clips import SPEEDS
from mmrt_demo_model.data.drawing import COLOURS, DIGIT_STYLES, SHAPES, colour_of, colours_near, draw_digits, shape_mask
from mmrt_demo_model.data.facts import FACTS
from mmrt_demo_model.data.greetings import GREETINGS
from mmrt_demo_model.data.kinds import NUMBERS, normalised
from mmrt_demo_model.data.phrases import PHRASES, plural
from mmrt_demo_model.data.strange import OTHERWISE, strange
from mmrt_demo_model.data.unknowns import UNKNOWN

Array = npt.NDArray[np.float64]
SEED = 8


@lru_cache(maxsize=600)
def made(index: int, medium: Medium, degraded: bool | None) -> Sample:
    return sample(SEED, index, medium, degraded)


def samples(medium: Medium, num: int, degraded: bool | None = False) -> Iterator[Sample]:
    return (made(index, medium, degraded) for index in range(num))


def answers(one: Sample, task: str) -> list[str]:
    return [question.answer for question in one.questions if question.task == task]


def same(one: Sample, other: Sample) -> bool:
    def arrays(s: Sample) -> list[bytes]:
        return [(m.pixels if isinstance(m, Picture) else m.frames if isinstance(m, Clip) else m.pcm).tobytes() for m in s.media]

    return one.questions == other.questions and one.degraded == other.degraded and arrays(one) == arrays(other)


@pytest.mark.parametrize("medium", MEDIA)
def test_a_sample_is_a_function_of_seed_and_number(medium: Medium) -> None:
    first = [sample(SEED, index, medium) for index in range(3)]
    again = [sample(SEED, index, medium) for index in (2, 1, 0)][::-1]
    assert all(same(one, other) for one, other in zip(first, again, strict=True))
    assert not same(first[0], first[1])
    assert not same(first[0], sample(SEED + 1, 0, medium))


@pytest.mark.parametrize("medium", MEDIA)
def test_half_is_degraded_and_says_so(medium: Medium) -> None:
    drawn = [sample(SEED, index, medium).degraded for index in range(40)]
    assert (not any(drawn)) if medium == "text" else 8 <= sum(drawn) <= 32
    if medium != "text":
        assert sample(SEED, 0, medium, True).degraded and not sample(SEED, 0, medium, False).degraded


def dominant(pixels: npt.NDArray[np.uint8], x: float, y: float) -> npt.NDArray[np.float64]:
    """Median colour of the nine pixels around a place given in 0 to 1."""
    row, column = int(y * pixels.shape[0]), int(x * pixels.shape[1])
    patch = pixels[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2].reshape(-1, 3)
    return np.median(patch, axis=0)


def colour_name(rgb: Array) -> str:
    """By hue, saturation and value: borders lie in the middle between the ranges of the generator."""
    hue, saturation, value = colorsys.rgb_to_hsv(*(rgb / 255))
    if value < 0.2:
        return "black"
    if saturation < 0.25:
        return "white"
    borders = (("red", 15), ("orange", 43), ("yellow", 80), ("green", 180), ("blue", 256), ("purple", 330), ("red", 361))
    return next(name for name, end in borders if hue * 360 < end)


def things_in(picture: Picture) -> list[tuple[float, float]]:
    """Middles (0 to 1) of the connected areas that have the colour of one of the objects."""
    pixels = picture.pixels[::2, ::2].astype(np.int32)
    height, width = pixels.shape[:2]
    mask = np.zeros((height, width), bool)
    for thing in picture.objects:
        mask |= np.abs(pixels - dominant(picture.pixels, *thing.centre)).max(axis=-1) < 30
    labels = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    before = np.zeros_like(labels)
    while not np.array_equal(before, labels):  # the largest number spreads over each area
        before = labels
        grown = np.pad(labels, 1)
        neighbours = (grown[1:-1, 1:-1], grown[:-2, 1:-1], grown[2:, 1:-1], grown[1:-1, :-2], grown[1:-1, 2:])
        labels = np.where(mask, np.maximum.reduce(neighbours), 0)
    middles = []
    for label in np.unique(labels[mask]):
        rows, columns = np.nonzero(labels == label)
        if len(rows) > 10:
            middles.append(((columns.min() + columns.max() + 1) / 2 / width, (rows.min() + rows.max() + 1) / 2 / height))
    return middles


def test_colour_and_position_of_one_thing() -> None:
    num = 0
    for one in samples("image", 120):
        (picture,) = one.media
        assert isinstance(picture, Picture)
        if len(picture.objects) != 1 or picture.objects[0].label not in SHAPES:
            continue
        num += 1
        assert answers(one, "colour") == [colour_name(dominant(picture.pixels, *picture.objects[0].centre)).capitalize() + "."]
        for position in answers(one, "position"):
            ((x, y),) = things_in(picture)
            row, column = ("top", "", "bottom")[int(3 * y)], ("left", "", "right")[int(3 * x)]
            assert normalised(position) == (f"{row} {column}".strip() or "centre")
            assert min(abs(edge / 3 - at) for edge in (1, 2) for at in (x, y)) > 0.02
    assert num > 30


def test_counts_by_connected_areas() -> None:
    num = 0
    for one in samples("image", 120):
        (picture,) = one.media
        assert isinstance(picture, Picture)
        if len(picture.objects) > 1:
            num += 1
            assert answers(one, "count") == [NUMBERS[len(things_in(picture))].capitalize() + "."]
            for thing in picture.objects:
                assert colour_name(dominant(picture.pixels, *thing.centre)) == thing.colour
    assert num > 30


def test_sides_sizes_and_yes_and_no() -> None:
    tasks = Counter(question.task for one in samples("image", 150, None) for question in one.questions)
    assert min(tasks[task] for task in ("exists", "side", "size")) > 15
    for one in samples("image", 150, None):
        (picture,) = one.media
        assert isinstance(picture, Picture)
        seen = {(thing.colour, thing.label) for thing in picture.objects}
        for question in one.questions:
            text = question.text.lower()
            if question.task == "exists":
                colours = [c for c in COLOURS if c in re.findall(r"[a-z]+", text)]
                shapes = [s for s in SHAPES if s in text]
                there = any((not colours or c in colours) and (not shapes or s in shapes) for c, s in seen)
                assert question.answer == ("Yes." if there else "No."), question
            if question.task == "side":
                where = [(text.index(f"{t.colour} {t.label}"), t.centre[0]) for t in picture.objects if f"{t.colour} {t.label}" in text]
                (_, first), (_, second) = sorted(where)
                if {"from", "side"} & set(text[: min(where)[0]].split()):
                    first, second = second, first
                assert question.answer == ("Left." if first < second else "Right."), question
            if question.task == "size":
                box = picture.objects[0].box
                height, width = picture.pixels.shape[:2]
                share = max((box[2] - box[0]) * width, (box[3] - box[1]) * height) / min(width, height)
                assert question.answer == ("Small." if share < 0.26 else "Big.") and not 0.26 < share < 0.46


def test_a_number_in_a_question_is_that_of_the_things_or_is_put_right() -> None:
    replies: Counter[str] = Counter()
    for one in samples("image", 400, None):
        (picture,) = one.media
        assert isinstance(picture, Picture)
        for question in one.questions:
            if question.task != "exists_number":
                continue
            assert question.wording is not None
            slots = dict(question.wording.slots)
            group = slots["group"].split()
            shape = next((shape for shape in SHAPES if plural(shape) == group[-1]), "")
            colour = group[0] if group[0] in COLOURS else ""
            number = sum(shape in ("", thing.label) and colour in ("", thing.colour) for thing in picture.objects)
            is_so = NUMBERS[number] == slots["number"]
            assert question.answer == ("Yes." if is_so else f"No, {NUMBERS[number] if number else 'none'}."), question
            said = f" {re.sub('[,?.]', ' ', question.text.lower())} "
            assert f" {slots['number']} " in said and slots["number"] in NUMBERS[2:], question
            replies[question.answer] += 1
    assert replies.total() > 60 and 0.35 < replies["Yes."] / replies.total() < 0.65, replies
    assert set(replies) == {"Yes.", "No, none.", *(f"No, {number}." for number in NUMBERS[1:])}


def test_nobody_sees_a_number_where_there_is_none() -> None:
    answers = [
        (isinstance(one.media[0], Picture) and one.media[0].objects[0].label.isdigit(), question.answer)
        for one in samples("image", 400, None)
        for question in one.questions
        if question.wording is not None and question.wording.phrase == "digits"
    ]
    assert {answer for has_number, answer in answers if not has_number} == {"I see no number."}
    assert all(answer[:-1].isdigit() for has_number, answer in answers if has_number)


def test_one_of_several_things_is_where_the_answer_says() -> None:
    asked = 0
    for one in samples("image", 150, None):
        (picture,) = one.media
        assert isinstance(picture, Picture)
        for question in one.questions:
            if question.task != "find_place":
                continue
            asked += 1
            words = re.findall(r"[a-z]+", question.text.lower())
            colours = [colour for colour in COLOURS if colour in words]
            (thing,) = [t for t in picture.objects if t.label in words and (not colours or t.colour in colours)]
            across, down = thing.centre
            row, column = ("top", "", "bottom")[int(down * 3)], ("left", "", "right")[int(across * 3)]
            assert question.answer.lower() == (f"{row} {column}".strip() or "centre") + "."
    assert asked > 20


def test_digits_are_large_enough_and_look_different() -> None:
    num = 0
    for one in samples("image", 150, None):
        (picture,) = one.media
        assert isinstance(picture, Picture)
        thing = picture.objects[0]
        if not thing.label.isdigit():
            continue
        num += 1
        assert answers(one, "digits")[0] == f"{thing.label}." and 1 <= len(thing.label) <= 4
        x0, y0, x1, y1 = thing.box
        assert 0 <= x0 and x1 <= 1 and 0 <= y0 and y1 <= 1
        assert x1 - x0 <= 0.86 and y1 - y0 >= 0.17
    assert num > 20
    for style in ("font", "bold", "bitmap", "segments"):
        glyphs = {digit: draw_digits(digit, 20, style, 0.1, 0.0).mask for digit in "0123456789"}
        for one_digit, other in combinations(glyphs, 2):
            a, b = (np.asarray(Image.fromarray(glyphs[d]).resize((14, 20))) for d in (one_digit, other))
            if one_digit != "1" and other != "1":  # a one is narrow: stretched to the same width it is a bar
                assert np.abs(a - b).mean() > 0.05, (style, one_digit, other)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text("0123456789", min_size=1, max_size=4),
    height=st.integers(20, 90),
    style=st.sampled_from(DIGIT_STYLES),
    gap=st.floats(0.02, 0.16),
    angle=st.floats(-9, 9),
)
def test_the_box_of_each_digit_holds_its_ink(text: str, height: int, style: str, gap: float, angle: float) -> None:
    mask, boxes = draw_digits(text, height, style, gap, angle)
    assert len(boxes) == len(text)
    tilted = math.sin(math.radians(abs(angle))) * height + 2
    covered = np.zeros_like(mask)
    for digit, (x0, y0, x1, y1) in zip(text, boxes, strict=True):
        alone = draw_digits(digit, height, style, gap, angle).mask
        columns = slice(max(0, round(x0 - tilted / 2)), round(x1 + tilted / 2))
        rows = slice(max(0, round(y0 - 2 - tilted / 8)), round(y1 + 2 + tilted / 8))
        covered[rows, columns] = 1
        assert mask[rows, columns].sum() > 0.9 * alone.sum()
        ys, xs = np.nonzero(alone > 0.5)
        assert abs((x1 - x0) - (np.ptp(xs) + 1)) < tilted + 2
    assert (mask * covered).sum() > 0.97 * mask.sum()


def test_nobody_asks_whether_there_is_something_in_the_colour_of_the_background() -> None:
    num = 0
    for index in range(400):
        one = sample(5, index, "image", False)
        (found,) = one.media
        assert isinstance(found, Picture)
        for question in one.questions:
            named = [colour for colour in COLOURS if re.search(rf"\b{colour}\b", question.text.lower())]
            if question.answer in ("No.", *(f"I see nothing {colour}." for colour in COLOURS)) and not names_a_shape(question.text):
                num += bool(named)
                assert not set(named) & set(found.ground), (question, found.ground)
    assert num > 20
    assert (
        colours_near((250, 250, 250)) == ("white",) and colours_near((20, 20, 20)) == ("black",) and colours_near((128, 128, 128)) == ()
    )
    assert "yellow" in colours_near((240, 230, 60)) and "red" in colours_near((200, 40, 60))


def names_a_shape(text: str) -> bool:
    return any(shape in text.lower() for shape in SHAPES)


def test_shapes_fill_their_box_differently() -> None:
    filled = {shape: float(shape_mask(shape, 120, 0.0).mean()) for shape in SHAPES}
    assert filled["square"] > 0.97
    assert filled["circle"] == pytest.approx(np.pi / 4, abs=0.02)
    assert filled["triangle"] == pytest.approx(0.5, abs=0.02)
    assert filled["cross"] == pytest.approx(5 / 9, abs=0.02)
    assert filled["star"] < 0.45 and 0.55 < filled["heart"] < 0.75
    for shape in SHAPES:
        mask = shape_mask(shape, 40, 0.2)
        assert max(mask.shape) == 40 and mask.min() >= 0 and mask.max() == 1


def test_colours_are_called_by_their_names() -> None:
    rng = np.random.default_rng(1)
    for name in COLOURS:
        for _ in range(200):
            assert colour_name(np.array(colour_of(rng, name))) == name


def test_comparisons_of_two_pictures() -> None:
    tasks = Counter(question.task for one in samples("two_images", 60, None) for question in one.questions)
    assert min(tasks[task] for task in ("pair_more", "pair_colour", "pair_shape", "pair_bigger")) > 15
    for one in samples("two_images", 60, None):
        first, second = one.media
        assert isinstance(first, Picture) and isinstance(second, Picture)
        more = len(first.objects) - len(second.objects)
        for answer in answers(one, "pair_more"):
            assert answer == ("The same." if more == 0 else "The first." if more > 0 else "The second.")
        one_thing, other = first.objects[0], second.objects[0]
        for answer in answers(one, "pair_colour"):
            assert answer == ("Yes." if one_thing.colour == other.colour else "No.")
        for answer in answers(one, "pair_shape"):
            assert answer == ("Yes." if one_thing.label == other.label else "No.")
        for answer in answers(one, "pair_bigger"):
            assert first.pixels.shape == second.pixels.shape
            sizes = [max(t.box[2] - t.box[0], t.box[3] - t.box[1]) for t in (one_thing, other)]
            assert answer == ("The first." if sizes[0] > 1.5 * sizes[1] else "The second." if sizes[1] > 1.5 * sizes[0] else "?")


def colour_track(clip: Clip, thing: int) -> list[Array | None]:
    """Per frame the middle (0 to 1) of the pixels that have the thing's colour, None where there are none."""
    placed = clip.objects[thing]
    seen = {
        "moves": 0,
        "appears": -1,
        "blinks": int(clip.fps * (0.5 if clip.lit_first else 0.5 + clip.times_s[-1 - len(clip.times_s) % 2])),
    }
    rgb = dominant(clip.frames[seen[clip.kind]], *placed.centre)
    assert colour_name(rgb) == placed.colour
    track: list[Array | None] = []
    for frame in clip.frames:
        rows, columns = np.nonzero(np.abs(frame.astype(np.int32) - rgb).max(axis=-1) < 30)
        size = np.array([frame.shape[1], frame.shape[0]])
        track.append(np.array([columns.mean(), rows.mean()]) / size if len(rows) > 40 else None)
    return track


@pytest.mark.slow
def test_direction_and_speed_by_the_way_of_the_middle() -> None:
    num = 0
    for one in samples("video", 60):
        (clip,) = one.media
        assert isinstance(clip, Clip)
        assert 2.0 <= len(clip.frames) / clip.fps <= 8.1
        if clip.kind != "moves" or not answers(one, "direction"):
            continue
        centre = clip.objects[0].centre
        if not (0.02 < centre[0] < 0.98 and 0.02 < centre[1] < 0.98):
            continue  # it comes in from outside
        num += 1
        step = int(max(1, clip.fps // 4))
        track = colour_track(clip, 0)
        deltas = np.array([b - a for a, b in zip(track, track[step:], strict=False) if a is not None and b is not None])
        move = np.median(deltas, axis=0)
        axis = int(np.abs(move).argmax())
        direction = (("left", "right"), ("up", "down"))[axis][int(move[axis] > 0)]
        assert answers(one, "direction") == [direction.capitalize() + "."]
        assert abs(move[1 - axis]) < 0.01
        speed = abs(move[axis]) * clip.fps / step
        assert answers(one, "speed") == ["Slow." if speed < 0.14 else "Fast." if speed > 0.22 else "?"]
        assert clip.speed <= SPEEDS["fast"][1]
    assert num > 12


def runs(lit: list[bool]) -> int:
    return sum(now and not before for before, now in zip([False, *lit], lit, strict=False))


@pytest.mark.slow
def test_blinks_and_order_in_two_frames_a_second() -> None:
    num = Counter[str]()
    for one in samples("video", 60):
        (clip,) = one.media
        assert isinstance(clip, Clip)
        if clip.kind == "moves":
            continue
        num[clip.kind] += 1
        sampled = np.arange(0, len(clip.frames), clip.fps / 2).astype(int)
        presence = []
        for thing in range(len(clip.objects)):
            track = colour_track(clip, thing)
            presence.append([track[frame] is not None for frame in sampled])
        if clip.kind == "blinks":
            assert answers(one, "blinks") == [NUMBERS[runs(presence[0])].capitalize() + "."]
        else:
            assert presence[0].index(True) < presence[1].index(True) and presence[0][-1] and presence[1][-1]
            assert answers(one, "first")[0].endswith(f"{clip.objects[0].colour} {clip.objects[0].label}.")
    assert num["blinks"] > 5 and num["appears"] > 5


def loudness(pcm: npt.NDArray[np.float32]) -> Array:
    """Root mean square per 10 ms."""
    return np.sqrt((pcm[: len(pcm) // 160 * 160].astype(np.float64).reshape(-1, 160) ** 2).mean(axis=1))


def peak_hz(pcm: npt.NDArray[np.float32]) -> float:
    """The strongest frequency above 100 Hz."""
    spectrum = np.abs(np.fft.rfft(pcm * np.hanning(len(pcm)), 32768))
    hz = np.fft.rfftfreq(32768, 1 / SOUND_RATE)
    return float(hz[np.argmax(np.where(hz > 110, spectrum, 0))])


def test_beeps_by_their_envelope() -> None:
    num = 0
    for one in samples("audio", 100):
        (sound,) = one.media
        assert isinstance(sound, Sound)
        assert 0.5 <= len(sound.pcm) / SOUND_RATE <= 5 and np.abs(sound.pcm).max() <= 1
        if sound.kind == "beeps":
            num += 1
            lit = [bool(level > 0.04) for level in loudness(sound.pcm)]
            assert answers(one, "beeps") == [NUMBERS[runs(lit)].capitalize() + "."]
            gaps = "".join(".#"[level] for level in lit).strip(".")
            assert all(len(gap) >= 18 for gap in re.findall(r"\.+", gaps))
    assert num > 15


@pytest.mark.parametrize("degraded", [False, True])
def test_pitch_and_change_by_the_strongest_frequency(degraded: bool) -> None:
    num = Counter[str]()
    for one in samples("audio", 100, degraded):
        (sound,) = one.media
        assert isinstance(sound, Sound)
        num[sound.kind] += 1
        if sound.kind == "tone":
            assert peak_hz(sound.pcm) == pytest.approx(sound.frequencies_hz[0], rel=0.02)
            assert answers(one, "pitch") == ["High." if peak_hz(sound.pcm) > 600 else "Low."]
        if sound.kind == "glide":
            heard = sound.pcm[5000:-5000]
            start, end = peak_hz(heard[: len(heard) // 4]), peak_hz(heard[-len(heard) // 4 :])
            assert answers(one, "glide") == ["Rising." if end > 1.1 * start else "Falling." if start > 1.1 * end else "?"]
        if sound.kind == "noise":
            spectrum = np.abs(np.fft.rfft(sound.pcm)) ** 2
            assert spectrum.max() < 0.02 * spectrum.sum()
    assert min(num.values()) > 5


def test_the_sound_matches_or_does_not() -> None:
    assert sum(len(answers(one, "match")) for one in samples("image_audio", 60, None)) > 30
    for one in samples("image_audio", 60, None):
        picture, sound = one.media
        assert isinstance(picture, Picture) and isinstance(sound, Sound)
        for answer in answers(one, "match"):
            beeps, things = sound.count, len(picture.objects)
            assert answer.startswith("Yes, both are") == (beeps == things)
            assert NUMBERS[beeps] in answer and NUMBERS[things] in answer
    clip_sample = made(0, "video_audio", False)
    clip, sound = clip_sample.media
    assert isinstance(clip, Clip) and isinstance(sound, Sound)
    assert answers(clip_sample, "video_match")[0].startswith("Yes") == (clip.count == sound.count)


def asked(medium: Medium, num: int) -> list[Question]:
    return [question for one in samples(medium, num, None) for question in one.questions]


def test_no_answer_is_the_usual_one() -> None:
    by_task: dict[str, Counter[str]] = defaultdict(Counter)
    for medium, num in (("image", 150), ("two_images", 60), ("video", 60), ("audio", 100), ("image_audio", 60), ("video_audio", 25)):
        for question in asked(medium, num):  # type: ignore[arg-type]
            by_task[question.task][question.answer] += 1
    for index in range(200):
        for question in sample(SEED, index, "text").questions:
            by_task[question.task][question.answer] += 1
    assert set(by_task) == set(TASKS)
    for task, counts in by_task.items():
        if task != "unknown":
            most = 0.75 if len(counts) <= 2 or task == "exists_number" else 0.5
            assert max(counts.values()) <= most * counts.total(), (task, counts)


def test_questions_about_what_is_not_there() -> None:
    for medium in MEDIA:
        for question in asked(medium, 25):
            if question.task == "missing":
                assert question.answer in ("I see no image.", "I see no video.", "I hear no sound.")
                assert not (question.answer == "I see no image." and ("image" in medium or "video" in medium))
                assert not (question.answer == "I see no video." and "video" in medium)
                assert not (question.answer == "I hear no sound." and "audio" in medium)
            if question.task == "unknown":
                assert question.answer == UNKNOWN


@pytest.mark.parametrize("medium", ["image", "video", "audio"])
def test_as_much_is_strange_as_is_said_and_is_called_so(medium: Medium) -> None:
    """It is a function of the seed, is read from files, and nothing is in it that the model knows."""
    one = sample(SEED, 3, medium, None, Shares(strange=1.0))
    assert same(one, sample(SEED, 3, medium, None, Shares(strange=1.0))) and not same(
        one, sample(SEED, 4, medium, None, Shares(strange=1.0))
    )
    assert answers(one, "strange") == [OTHERWISE[medium]] * 3
    (thing,) = one.media
    known = thing.notes if isinstance(thing, Sound) else thing.objects
    assert known == () and type(roundtrip(thing, np.random.default_rng(0))) is type(thing)
    found = [bool(answers(sample(SEED, index, medium, None, Shares(strange=0.3)), "strange")) for index in range(40)]
    assert 4 <= sum(found) <= 22 and not any(answers(one, "strange") for one in samples(medium, 10))


def test_strange_media_of_every_kind_can_be_made() -> None:
    """At sizes as they come: of pictures no kind is nearly one colour, of sounds none is nearly silent."""
    for number, draw in enumerate((*strange_pictures.KINDS, *strange_pictures.HELD_OUT)):
        for width, height in ((112, 80), (300, 200)):
            pixels = strange_pictures.strange_pixels(np.random.default_rng((SEED, number)), width, height, draw)
            assert pixels.shape == (height, width, 3) and pixels.dtype == np.uint8 and pixels.std() > 4
    for number, make in enumerate((*strange_sounds.KINDS, *strange_sounds.HELD_OUT)):
        wave = strange_sounds.strange_wave(np.random.default_rng((SEED, number)), make, 2.0)
        assert wave.dtype == np.float32 and 0.2 < np.abs(wave).max() <= 1 and 3000 <= len(wave) <= 73000


def test_a_history_is_a_long_conversation_or_a_long_sound() -> None:
    shares = Shares(strange=0.5)
    histories = [history(SEED, index, shares) for index in range(24)]
    assert all(same(one, history(SEED, index, shares)) for index, one in enumerate(histories[:4]))
    long_s = [len(one.media[0].pcm) / SOUND_RATE for one in histories if len(one.media) == 1 and isinstance(one.media[0], Sound)]
    assert len(long_s) >= 3 and max(long_s) > 20
    assert max(len(one.media) for one in histories) >= 8 and max(len(one.questions) for one in histories) >= 12
    for one in histories:
        assert (
            len(one.turns) == len(one.media) and list(one.turns) == sorted(one.turns) and set(one.turns) <= {*range(len(one.questions))}
        )
    tasks = Counter(question.task for one in histories for question in one.questions)
    assert {"strange", "talk", "unknown", "missing"} <= set(tasks) and len(tasks) > 12


def test_strange_clips_are_short_and_long() -> None:
    clips = [strange(np.random.default_rng((SEED, number)), "video")[0] for number in range(12)]
    seconds = [len(clip.frames) / clip.fps for clip in clips if isinstance(clip, Clip)]
    assert len(seconds) == 12 and min(seconds) < 2 and max(seconds) > 15
    assert all(1 <= len(clip.frames) <= 44 for clip in clips if isinstance(clip, Clip))


def test_phrases_have_variety_and_one_meaning() -> None:
    assert all(len(set(phrases)) >= 8 for phrases in PHRASES.values())
    assert len(FACTS) >= 40
    meaning: dict[str, str] = {}
    for answer, questions in (FACTS | GREETINGS).items():
        assert len(set(questions)) >= 8
        for question in questions:
            assert meaning.setdefault(normalised(question).rstrip("?!"), answer) == answer, question
    about_media = {normalised(phrase).rstrip("?!") for phrases in PHRASES.values() for phrase in phrases}
    assert not about_media & set(meaning)


def test_judging_forgives_case_spaces_and_the_full_stop() -> None:
    question = Question("shape", "What shape is it?", "A circle.")
    assert all(question.is_right(reply) for reply in ("A circle.", " a  Circle"))
    assert not any(question.is_right(reply) for reply in ("A square.", "", "circle", "A circle. A square."))


@pytest.mark.parametrize(("medium", "num"), [("image", 8), ("video", 3), ("audio", 16)])
def test_a_file_is_a_function_of_sample_and_generator(medium: Medium, num: int) -> None:
    for index, one in enumerate(samples(medium, num)):
        files = [encode(thing, np.random.default_rng(index)) for thing in one.media * 3]
        assert files[0] == files[1] == files[2]


def test_pictures_are_read_from_files() -> None:
    rng = np.random.default_rng(0)
    types = set()
    for one in samples("image", 40, None):
        (picture,) = one.media
        assert isinstance(picture, Picture)
        data, mime = encode(picture, rng)
        types.add(mime)
        decoded = decode_image(io.BytesIO(data), MediaLimits())
        assert decoded.shape == picture.pixels.shape
        assert np.abs(decoded.astype(int) - picture.pixels).mean() < 30
        back = roundtrip(picture, rng)
        assert back.objects == picture.objects and back.pixels.shape == picture.pixels.shape
    assert types == {"image/jpeg", "image/png", "image/webp"}


def test_clips_are_read_from_files() -> None:
    rng = np.random.default_rng(0)
    for one in samples("video", 4):
        (clip,) = one.media
        assert isinstance(clip, Clip)
        data, mime = encode(clip, rng)
        assert mime == "video/mp4"
        info = analyse(io.BytesIO(data), MediaLimits())
        assert info.num_frames == len(clip.frames)
        wanted = list(range(0, len(clip.frames), 7))
        frames = np.stack([frame for _, frame in decode_frames(io.BytesIO(data), info, wanted)])
        height, width = (extent // 2 * 2 for extent in clip.frames.shape[1:3])
        assert frames.shape[1:3] == (height, width)
        assert np.abs(frames.astype(int) - clip.frames[wanted, :height, :width]).mean() < 12
    back = roundtrip(clip, rng)
    assert len(back.frames) == len(clip.frames) and back.objects == clip.objects


def test_sounds_are_read_from_files() -> None:
    rng = np.random.default_rng(0)
    types = set()
    for one in samples("audio", 60):
        (sound,) = one.media
        assert isinstance(sound, Sound)
        if sound.kind != "tone":
            continue
        data, mime = encode(sound, rng)
        types.add(mime)
        decoded = decode_audio(io.BytesIO(data), SOUND_RATE, MediaLimits())
        assert abs(len(decoded) - len(sound.pcm)) < 0.15 * SOUND_RATE
        assert peak_hz(decoded) == pytest.approx(sound.frequencies_hz[0], rel=0.02)
        assert roundtrip(sound, rng).count == sound.count
    assert len(types) >= 4
