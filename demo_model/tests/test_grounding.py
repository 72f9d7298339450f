"""What the demo model's towers and heads are told besides the answers: hints and looks."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from mmrt.demo_model.tests.small_training import Prepared
from mmrt_demo_model.data import Clip, Picture, Placed, Sound, sample
from mmrt_demo_model.data.kinds import NUMBERS, Note, Question
from mmrt_demo_model.data.phrases import PHRASES, TOLD, fill
from mmrt_demo_model.training.grounding import COLOURS, FACTS, NAMED, OTHER_WORDS, OTHERS, SLOTS, THINGS, WORDS, Looks, looks, missed
from mmrt_demo_model.training.hints import IGNORED, INKS, LABELS, PACES, heard, seen
from mmrt_demo_model.training.prompts import TokenRow
from mmrt_demo_model.training.scene import Vocabulary, scenes_of


def test_what_a_picture_hints_at() -> None:
    digits = ((0.5, 0.75, 0.75, 1.0), (0.75, 0.75, 1.0, 1.0))
    things = (Placed("star", "red", (0.0, 0.0, 0.5, 0.5)), Placed("12", "black", (0.5, 0.75, 1.0, 1.0), digits))
    hints = seen([things], (1, 4, 4))
    by_patch = torch.empty(4, 4, 8, dtype=torch.int64)
    for token, (row, column) in enumerate([(0, 0), (0, 2), (2, 0), (2, 2)]):
        by_patch[row : row + 2, column : column + 2] = hints[token, :, :8].view(2, 2, 8)
    star, one, two = LABELS.index("star"), LABELS.index("1"), LABELS.index("2")
    assert by_patch[..., 0].tolist() == [[star, star, 0, 0], [star, star, 0, 0], [0, 0, 0, 0], [0, 0, one, two]]
    assert by_patch[0, 0, 1] == INKS.index("red") and by_patch[3, 3, 1] == INKS.index("black")
    assert (by_patch[..., 2] == IGNORED).sum() == 10 and by_patch[0, 0, 2] > by_patch[3, 3, 2]
    assert by_patch[..., 3].nonzero().tolist() == by_patch[..., 4].nonzero().tolist() == [[1, 1], [3, 3]]
    middles = {(row, column): by_patch[row, column, 5:7].tolist() for row, column in by_patch[..., 5].nonzero().tolist()}
    red, black = INKS.index("red"), INKS.index("black")
    assert middles == {(1, 1): [star, red], (3, 2): [one, black], (3, 3): [two, black]}
    assert (by_patch[..., 7] == IGNORED).all(), "pictures say nothing of motion"
    assert hints[..., 8].tolist() == [[0] * 4, [0] * 4, [0] * 4, [2, 3, 0, 0]], "the first digit of the number is 1, the second 2"


def test_what_a_clip_hints_at() -> None:
    left, right = (Placed("heart", "blue", (x, 0.0, x + 0.25, 0.25)) for x in (0.0, 0.75))
    hints = seen([(left,), (right,), (), (right,), ()], (3, 4, 4)).view(3, 2, 2, 2, 2, 9)
    first, last = hints[..., 3], hints[..., 4]
    assert first[0].nonzero().tolist() == [[0, 0, 0, 0]] and last[0].nonzero().tolist() == [[0, 1, 0, 1]]
    assert not first[1].any() and last[1].any()
    assert (hints[..., 5] > 0).sum(dim=(1, 2, 3, 4)).tolist() == [2, 1, 0], "the middles of all frames"
    assert not hints[2, ..., 0].any()
    assert (hints[..., 7] == IGNORED).all(), "what jumps has come in again"
    clip = sample(3, 0, "video_audio", False).media[0]
    assert isinstance(clip, Clip) and len(clip.scenes) == len(clip.frames)
    assert {bool(scene) for scene in clip.scenes} == {True, False} or clip.count == 1


def test_what_a_sound_hints_at() -> None:
    notes = (Note(0.1, 0.3, (440.0,)), Note(0.5, 0.7, (880.0, 440.0)))
    hints = heard(Sound(np.zeros(16000, np.float32), "beeps", notes), 25)[:, 0]
    assert hints[:, 0].tolist() == [0] * 2 + [1] * 5 + [0] * 5 + [1] * 5 + [0] * 8
    assert hints[:, 2].nonzero().flatten().tolist() == [2, 12]
    assert hints[12, 1] - hints[16, 1] == 5 and hints[5, 1] == hints[16, 1] and hints[0, 1] == IGNORED
    assert heard(Sound(np.zeros(16000, np.float32), "noise", (Note(0.0, 1.0),)), 25)[:, 0, 0].unique().tolist() == [2]


Told = dict[tuple[tuple[int, int], int], dict[int, float]]


def told(
    prepared: Prepared, things: Sequence[Picture | Clip | Sound], questions: Sequence[Question]
) -> tuple[Told, TokenRow, list[int], list[list[int]]]:
    """(slot, position) -> {position: share}; the row; positions of the media's tokens; how many and how they compare, of each answer's
    first token."""
    found, row, media, facts = told_of_each_token(prepared, things, questions)
    return found, row, media, [one[0][:COMPARING] for one in facts]


def told_of_each_token(
    prepared: Prepared, things: Sequence[Picture | Clip | Sound], questions: Sequence[Question]
) -> tuple[Told, TokenRow, list[int], list[list[list[int]]]]:
    """As ``told``, with the facts of each token of each answer."""
    media = [prepared.batches._prepare(thing, number) for number, thing in enumerate(things)]
    row = prepared.batches._builder.shared([one.item for one in media], questions, "", 1000)
    found: Told = {}
    targets, facts = looks(row, scenes_of(row, prepared.config, media), Vocabulary(prepared.tokenizer))
    assert len(facts) == sum(map(len, row.answers))
    for slot, position, target in targets:
        found[SLOTS[slot], position] = {int(at): pytest.approx(target[at]) for at in np.flatnonzero(target)}
    config = prepared.config
    ends = np.cumsum([len(answer) for answer in row.answers])
    media_tokens = np.flatnonzero(np.isin(row.ids, (config.image_token_id, config.video_token_id))).tolist()
    return found, row, media_tokens, [part.tolist() for part in np.split(facts, ends[:-1])]


def picture(*things: Placed, width: int = 84) -> Picture:
    return Picture(np.zeros((84, width, 3), np.uint8), things)


COMPARING = 7  # of the facts: numbers, and what compares; behind them is what is common to all
NONE = [1] * 5  # of the facts that compare
RED, BLUE = Placed("circle", "red", (0.3, 0.0, 0.6, 0.3)), Placed("circle", "blue", (0.3, 0.35, 0.65, 0.65))  # tokens 1 and 9 of 16


def test_words_that_heads_are_told_about_are_one_token_each(prepared: Prepared) -> None:
    for word in TOLD:
        assert len(prepared.tokenizer.encode(f" {word}")) == 1, word


def test_a_number_in_a_question_is_compared(prepared: Prepared) -> None:
    questions = [
        Question("exists_number", "Are there two circles?", "Yes."),
        Question("exists_number", "Are there three things?", "No, two."),
        Question("exists_number", "Are there two red things?", "No, one."),
        Question("exists_number", "Is the number of green things two?", "No, none."),
        Question("exists", "Is there a red thing?", "Yes."),
    ]
    more = [*FACTS].index("more")
    beeps = Sound(np.zeros(16000, np.float32), "beeps", tuple(Note(at, at + 0.1, (440.0,)) for at in (0.2, 0.5, 0.8)))
    three = picture(RED, BLUE, Placed("circle", "green", (0.7, 0.7, 0.9, 0.9)))
    for media, asked, expected in (
        ([picture(RED, BLUE)], questions, [1, 0, 0, 0, 1]),
        ([three], questions[:1], [2]),
        ([picture(RED, BLUE), beeps], questions[:3], [1, 0, 0]),
        ([beeps], questions[:1], [1]),
        ([], questions[:1], [1]),
    ):
        assert [one[more] for one in told(prepared, media, asked)[3]] == expected, media


def test_the_number_is_found_in_every_wording(prepared: Prepared) -> None:
    numbers = Vocabulary(prepared.tokenizer).number
    for phrase in PHRASES["exists_number"]:
        for number, word in enumerate(NUMBERS[2:], 2):
            ids = prepared.tokenizer.encode(fill(phrase, number=word, group="red circles"))
            assert [found for found in numbers[ids] if found] == [number], phrase


def test_heads_are_told_to_look_at_what_is_asked_about(prepared: Prepared) -> None:
    questions = [
        Question("count_some", "How many circles are there?", "Two."),
        Question("exists", "Is there a green circle?", "No."),
        Question("find_shape", "What shape is red?", "A circle."),
        Question("side", "Is the blue circle left or right of the red circle?", "Left."),
        Question("list", "What do you see?", "A red circle and a blue circle."),
    ]
    found, row, media, facts = told_of_each_token(prepared, [picture(RED, BLUE)], questions)
    assert len(media) == 16
    red, blue = media[1], media[9]
    firsts = [int(answer[0]) - 1 for answer in row.answers]
    assert found[THINGS, firsts[0]] == {0: 1 / 3, red: 1 / 3, blue: 1 / 3}, "two things, counted against the first token"
    assert found[THINGS, firsts[1]] == {0: 1.0}, "no green circle"
    assert found[THINGS, firsts[2]] == {0: 0.5, red: 0.5}
    assert found[THINGS, firsts[3]] == {0: 0.5, blue: 0.5} and found[OTHERS, firsts[3]] == {0: 0.5, red: 0.5}
    texts = [prepared.tokenizer.decode([id]).strip() for id in row.ids]
    assert found[COLOURS, texts.index("green")] == {0: 1.0} and red in found[COLOURS, texts.index("red")]
    assert found[WORDS, firsts[2]] == found[OTHER_WORDS, firsts[2]] == {texts.index("red"): 1.0}
    words = [[texts[at] for at in found[slot, firsts[3]]] for slot in (WORDS, OTHER_WORDS)]
    assert words == [["blue", "circle"], ["red", "circle"]]
    listed = [int(at) - 1 for at in row.answers[4]]
    assert [texts[at + 1].lower() for at in listed[:7]] == ["a", "red", "circle", "and", "a", "blue", "circle"]
    one, other = {0: 0.5, red: 0.5}, {0: 0.5, blue: 0.5}
    assert [found.get((NAMED, at)) for at in listed[:7]] == [one, {red: 1.0}, {red: 1.0}, None, other, {blue: 1.0}, {blue: 1.0}]
    said = [[texts[at] for at in found[WORDS, at]] for at in listed[:7]]
    assert said == [[""], [""], [""], ["red", "circle"], ["red", "circle"], ["red", "circle"], ["red", "circle"]], "what was said last"
    assert [found[OTHER_WORDS, at] for at in listed] == [found[WORDS, at] for at in listed]
    both, last = {0: 1 / 3, red: 1 / 3, blue: 1 / 3}, {0: 0.5, blue: 0.5}
    assert [found[OTHERS, at] for at in listed[:8]] == [both, both, both, last, last, last, last, {0: 1.0}], "what is not yet listed"
    assert [one[0][:COMPARING] for one in facts] == [
        [2, 0, *NONE], [0, 0, *NONE], [1, 0, *NONE], [1, 1, 0, *NONE[1:]], [1, 2, *NONE],
    ], "the red one is further up; of the two of the list the first is one"  # fmt: skip
    assert [numbers[:2] for numbers in facts[4][:8]] == [[1, 2], [2, 2], [2, 2], [2, 1], [1, 1], [2, 1], [2, 1], [2, 0]]


def test_of_two_pictures_each_is_looked_at_by_its_head(prepared: Prepared) -> None:
    question = Question("pair_more", "Which picture has more things?", "The first.")
    found, row, media, facts = told(prepared, [picture(RED, BLUE), picture(BLUE)], [question])
    first = int(row.answers[0][0]) - 1
    assert found[THINGS, first] == {0: 1 / 3, media[1]: 1 / 3, media[9]: 1 / 3}
    assert found[OTHERS, first] == {0: 0.5, media[25]: 0.5}
    assert facts == [[2, 1, 1, 1, 2, 1, 1]], "the first are more"
    _, _, _, facts = told(prepared, [picture(RED), picture(BLUE)], [question])
    assert facts == [[1, 1, 1, 1, 1, 2, 0]], "as many; the shape is the same, the colour is not"


def test_what_is_common_to_all_that_is_looked_at_is_told(prepared: Prepared) -> None:
    question = Question("pair_more", "Which picture has more things?", "The first.")
    _, _, _, facts = told_of_each_token(prepared, [picture(RED, BLUE), picture(BLUE)], [question])
    circle, blue = LABELS.index("circle"), INKS.index("blue")
    assert list(FACTS)[COMPARING:] == ["label_here", "ink_here", "label_there", "ink_there", "pace"]
    assert [one[COMPARING:-1] for one in facts[0]] == [[circle, 0, circle, blue]] * len(facts[0]), "two colours have none in common"
    _, _, _, facts = told_of_each_token(prepared, [picture(BLUE)], [Question("count", "How many things are there?", "One.")])
    assert facts[0][0][COMPARING:-1] == [circle, blue, 0, 0], "there is no second picture"


def clip(*scenes: tuple[Placed, ...]) -> Clip:
    return Clip(np.zeros((len(scenes), 84, 84, 3), np.uint8), 2.0, "", (), scenes)


def star(x: float) -> tuple[Placed]:
    return (Placed("star", "red", (x, 0.0, x + 0.25, 0.25)),)


def test_how_far_things_move_is_hinted_at() -> None:
    resting = Placed("heart", "blue", (0.0, 0.75, 0.25, 1.0))
    hints = seen([(resting, *star(0.0)), (resting, *star(0.25))], (1, 4, 4)).view(2, 2, 2, 2, 9)[..., 7]
    moved = bisect_left(PACES, 0.25)
    assert {tuple(at): int(hints[tuple(at)]) for at in (hints != IGNORED).nonzero().tolist()} == {
        (0, 0, 0, 0): moved,  # where the star begins
        (0, 0, 0, 1): moved,  # and where it ends
        (1, 0, 1, 0): 0,
    }


@pytest.mark.parametrize(("steps", "pace"), [((0.0,) * 4, 0), ((0.0, 0.05, 0.1, 0.15), 1), ((0.0, 0.2, 0.4, 0.6), 2)])
def test_whether_what_is_asked_about_moves_and_how_fast_is_told(prepared: Prepared, steps: tuple[float, ...], pace: int) -> None:
    asked = [Question("speed", "How fast is the star?", "Fast."), Question("speed", "How fast is the circle?", "Fast.")]
    _, _, _, facts = told_of_each_token(prepared, [clip(*((*star(x), RESTING) for x in steps))], asked)
    assert [{one[-1] for one in answer} for answer in facts] == [{pace}, {0}]


RESTING = Placed("circle", "green", (0.7, 0.7, 0.9, 0.9))
WHAT = Question("talk", "What is this?", "I do not know.")


def test_what_moves_is_looked_at_where_it_begins_and_ends(prepared: Prepared) -> None:
    found, row, media, facts = told(prepared, [clip(*(star(x) for x in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75)))], [WHAT])
    first, tokens = int(row.answers[0][0]) - 1, len(media) // 4
    assert found[THINGS, first] == {0: 0.5, media[0]: 0.5}
    assert found[OTHERS, first] == {0: 0.5, media[3 * tokens + math.isqrt(tokens) - 1]: 0.5}
    assert facts == [[1, 1, 1, 2, 1, 1, 1]], "to the right"
    resting = Placed("heart", "blue", (0.0, 0.7, 0.3, 1.0))
    _, _, _, facts = told(prepared, [clip(*((*star(x), resting) for x in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75)))], [WHAT])
    assert facts == [[1, 1, 1, 2, 1, 1, 1]], "beside something that rests"
    moves = Question("video_describe", "What happens?", "A red star moves to the right.")
    _, _, _, facts = told(prepared, [clip(*(star(x) for x in (0.0, 0.2, 0.4, 0.75)))], [moves])
    assert facts == [[1, 1, 1, 2, 1, 1, 1]], "one, in however many frames"
    _, _, _, facts = told(prepared, [clip(*(star(x) for x in (0.3, 0.3, 0.2, 0.2)))], [WHAT])
    assert facts == [[1, 1, 1, 0, 1, 1, 1]], "less than a token to the left"


def test_what_comes_in_again_is_looked_at_before_that(prepared: Prepared) -> None:
    found, row, media, facts = told(prepared, [clip(*(star(x) for x in (0.4, 0.7, 0.0, 0.3)))], [WHAT])
    counts_known = set(found[OTHERS, int(row.answers[0][0]) - 1])
    assert 0 in counts_known and len(counts_known) > 1 and counts_known <= {0, *media[: len(media) // 2]}
    assert facts == [[1, 1, 1, 2, 1, 1, 1]]


def test_what_blinks_is_looked_at_wherever_it_appears(prepared: Prepared) -> None:
    lit = star(0.0)
    found, row, media, facts = told(prepared, [clip(lit, lit, (), (), (), lit, lit, ())], [WHAT])
    first, tokens = int(row.answers[0][0]) - 1, len(media) // 4
    assert found[THINGS, first] == {0: 1 / 3, media[0]: 1 / 3, media[2 * tokens]: 1 / 3}
    assert found[OTHERS, first] == {0: 0.5, media[3 * tokens]: 0.5}
    assert facts == [[2, 1, *NONE]]


def test_beeps_are_counted(prepared: Prepared) -> None:
    sound = Sound(np.zeros(32000, np.float32), "beeps", tuple(Note(at, at + 0.2, (440.0,)) for at in (0.2, 0.9, 1.5)))
    _, _, _, facts = told(prepared, [sound], [WHAT])
    assert facts == [[0, 3, *NONE]]
    _, _, _, facts = told(prepared, [picture(RED, BLUE), sound], [WHAT])
    assert facts == [[2, 3, 1, 1, 0, 1, 1]], "fewer things than beeps"
    beep = Sound(np.zeros(32000, np.float32), "beeps", (Note(0.2, 0.4, (440.0,)),))
    _, _, _, facts = told(
        prepared, [picture(RED, BLUE), beep], [Question("list", "What do you see?", "A red circle and a blue circle.")]
    )
    assert facts == [[1, 1, 1, 1, 2, 1, 1]], "more things than beeps, of which the first is about to be named"


def test_what_something_is_seen_from_comes_second(prepared: Prepared) -> None:
    for question in (
        "Is the red circle left or right of the blue circle?",
        "On which side of the blue circle is the red circle?",
        "Left or right: where is the red circle from the blue circle?",
        "Seen from the blue circle, is the red circle left or right?",
    ):
        found, row, media, facts = told(prepared, [picture(RED, BLUE)], [Question("side", question, "Left.")])
        first = int(row.answers[0][0]) - 1
        assert found[THINGS, first] == {0: 0.5, media[1]: 0.5} and found[OTHERS, first] == {0: 0.5, media[9]: 0.5}
        assert facts == [[1, 1, 2, *NONE[1:]]], question


def test_words_for_one_of_several_are_looked_at(prepared: Prepared) -> None:
    found, row, _, _ = told(prepared, [clip((), star(0.0))], [Question("first", "What appears first?", "A red star.")])
    (at,) = found[WORDS, int(row.answers[0][0]) - 1]
    assert prepared.tokenizer.decode([int(row.ids[at])]) == " first"


def test_a_head_is_told_to_read_digit_by_digit(prepared: Prepared) -> None:
    """The number 337, each digit with its middle in another token."""
    digits = tuple((k / 3, 0.1, (k + 1) / 3, 0.4) for k in range(3))
    number = picture(Placed("337", "black", (0.0, 0.1, 1.0, 0.4), digits), width=168)
    found, row, media, _ = told(prepared, [number], [Question("digits", "What is the number?", "337.")])
    across = prepared.batches._prepare(number).item.grid[2] // 2
    assert [found[NAMED, int(at) - 1] for at in row.answers[0][:3]] == [{media[int(across * k / 6)]: 1.0} for k in (1, 3, 5)]
    assert found[NAMED, int(row.answers[0][2])] == {0: 1.0}, "there is no fourth"


def test_what_heads_miss_is_the_divergence_from_where_they_should_look() -> None:
    target = torch.tensor([[0.5, 0.5, 0.0]])
    attention = [torch.full((1, 4, 3, 3), 1 / 3) for _ in range(3)]
    look = Looks(torch.tensor([SLOTS.index(THINGS)]), torch.tensor([0]), torch.tensor([2]), target)
    assert missed(look, attention).item() == pytest.approx(np.log(1.5), abs=1e-3)
    attention[THINGS[0]][0, THINGS[1], 2] = target[0]
    assert missed(look, attention).item() == pytest.approx(0, abs=1e-3)


def test_an_answer_in_a_conversation_is_about_the_last_medium(prepared: Prepared) -> None:
    things = [picture(RED), picture(BLUE)]
    media = [prepared.batches._prepare(thing) for thing in things]
    asked = Question("colour", "What colour is the circle?", "Red.")
    questions = [asked, Question("talk", "Hello!", "Hello!"), replace(asked, answer="Blue."), replace(asked, answer="Blue.")]
    row = prepared.batches._builder.conversation([one.item for one in media], questions, "", turns=(0, 2))
    assert row.about == [(0, 1), (0, 1), (1, 2), (1, 2)]
    first, second = (span.start for span in row.spans)
    assert (row.ids[[first, second]] == prepared.config.image_token_id).all() and second > row.answers[1][-1]
    targets, _ = looks(row, scenes_of(row, prepared.config, media), Vocabulary(prepared.tokenizer))
    seen = {
        number: {
            int(at)
            for slot, position, target in targets
            if SLOTS[slot] == THINGS and position == answer[0] - 1
            for at in np.flatnonzero(target)
        }
        for number, answer in enumerate(row.answers)
    }
    assert seen[0] == {0, first + 1} and seen[2] == seen[3] == {0, second + 9}
