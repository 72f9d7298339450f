"""What the demo data asks and how: wordings, slips, what nobody can know, and whether the answers about several things are true."""

import re
import string
from collections import Counter

import numpy as np
import pytest

from mmrt_demo_model.data import MEDIA, Medium, Picture, sample
from mmrt_demo_model.data.drawing import COLOURS, SHAPES
from mmrt_demo_model.data.facts import FACTS
from mmrt_demo_model.data.greetings import GREETINGS
from mmrt_demo_model.data.habits import typed
from mmrt_demo_model.data.kinds import NUMBERS, normalised
from mmrt_demo_model.data.phrases import plural
from mmrt_demo_model.data.unknown_media import FOREIGN, HEARD, INJECTED, SEEN, WATCHED
from mmrt_demo_model.data.unknown_world import WORLD
from mmrt_demo_model.data.unknowns import UNKNOWN, unknown

SEED = 77


def draws(text: str, num: int) -> Counter[str]:
    rng = np.random.default_rng(SEED)
    return Counter(typed(rng, text) for _ in range(num))


def test_people_type_in_many_ways_and_names_stay() -> None:
    text = "What is the colour of the orange circle?"
    found = draws(text, 600)
    assert found[text] > 200 and len(found) > 60
    assert all("orange circle" in one.lower() for one in found)
    for sign in ("What's", "Hi! ", " Please.", "what is the colour of the orange circle?", "orange circle"):
        assert any(sign in one for one in found), sign
    slipped = [one for one in found if "what" in one.lower() and "colour" not in one]
    assert slipped, "a letter of colour is wrong at times"


@pytest.mark.parametrize("text", ["Hello!", "Thanks!", "...", "ok"])
def test_what_is_no_question_gets_no_words_around_it(text: str) -> None:
    assert all(one.strip() and len(one) <= len(text) + 1 for one in draws(text, 300))


@pytest.mark.parametrize("medium", MEDIA)
def test_what_nobody_knows_is_nothing_that_the_model_knows(medium: Medium) -> None:
    rng = np.random.default_rng(SEED)
    known = {normalised(text).rstrip("?!") for questions in (FACTS | GREETINGS).values() for text in questions}
    found = [unknown(rng, medium) for _ in range(2000)]
    assert {one.answer for one in found} == {UNKNOWN}
    assert all(one.text.strip() for one in found)
    assert not known & {normalised(one.text).rstrip("?!") for one in found}
    assert len({one.text for one in found}) > 1200


def test_templates_have_slots_that_are_filled() -> None:
    slots = {"noun", "noun2", "verb", "adjective", "name", "place", "language", "food", "a", "b", "c"}
    for template in (*WORLD, *SEEN, *WATCHED, *HEARD):
        assert {name for _, name, _, _ in string.Formatter().parse(template) if name is not None} <= slots, template
    assert not [text for text in (*FOREIGN, *INJECTED) if "<|" in text]


def test_counts_of_some_things_and_what_is_not_there() -> None:
    tasks: Counter[str] = Counter()
    for index in range(150):
        one = sample(SEED, index, "image")
        (picture,) = one.media
        assert isinstance(picture, Picture)
        for question in one.questions:
            words = re.findall(r"[a-z]+", question.text.lower())
            shapes = [shape for shape in SHAPES if {shape, plural(shape)} & {*words}]
            colours = [colour for colour in COLOURS if colour in words]
            meant = [t for t in picture.objects if (not shapes or t.label in shapes) and (not colours or t.colour in colours)]
            if question.task == "count_some":
                assert question.answer == f"{NUMBERS[len(meant)].capitalize()}."
                tasks["both" if shapes and colours else "one"] += 1
            if question.task == "absent":
                named = question.answer.rstrip(".").split()
                assert named[:2] == ["I", "see"] and named[2] in ("no", "nothing")
                assert not [t for t in picture.objects if {*named[3:]} <= {t.label, t.colour}], question
                tasks["absent both" if len(named) == 5 else "absent"] += 1
    assert min(tasks[kind] for kind in ("both", "one", "absent", "absent both")) >= 4, tasks
