"""The quality bench: which questions it asks, how it counts, and a run on a tiny checkpoint whose answers are transformers'."""

import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from rich.console import Console

from mmrt.models.make.checkpoint import make_checkpoint
from mmrt_demo_model.data import COLOURS, SHAPES, strange_pictures, strange_sounds
from mmrt_demo_model.data.facts import FACTS
from mmrt_demo_model.data.greetings import GREETINGS
from mmrt_demo_model.data.kinds import normalised
from mmrt_demo_model.data.phrases import ORDERS, PHRASES, plural
from mmrt_demo_model.data.strange import OTHERWISE as STRANGE_ANSWERS
from mmrt_demo_model.data.unknown_media import FOREIGN, HEARD, INJECTED, SEEN, WATCHED
from mmrt_demo_model.data.unknown_world import ADJECTIVES, FOODS, LANGUAGES, NAMES, NOUNS, PLACES, VERBS, WORLD
from mmrt_demo_model.exam.cases import COMBINED, ONE_OF_TWO, OTHER_MEDIUM, REWORDED, ROWS, STRANGE_MEDIA, STRANGER, body_of, select
from mmrt_demo_model.exam.command import HELD_OUT_SEED, main
from mmrt_demo_model.exam.report import QualityBench, Row, Setting, Share, changes, guided_of_answers, refusals, shortcomings, show
from mmrt_demo_model.exam.strangers import STRANGE
from mmrt_demo_model.exam.wordings import OTHERWISE, TALK_OTHERWISE
from mmrt_demo_model.training.recipe import load_recipe

Script = Callable[[web.StreamResponse, dict[str, Any]], Awaitable[None]]
StartServer = Callable[[Script], str]


def test_every_row_is_asked_half_about_degraded_media() -> None:
    cases = select(3, 2, ["shape", "side", "beeps", "talk", ONE_OF_TWO, OTHER_MEDIUM])
    counts = Counter(case.row for case in cases)
    assert all(counts[row] >= 2 for row in ("shape", "side", "beeps", "talk", ONE_OF_TWO, OTHER_MEDIUM))
    for row in ("shape", "side", "beeps", ONE_OF_TWO):
        assert 2 * sum(case.degraded for case in cases if case.row == row) == counts[row]
    assert not any(case.degraded for case in cases if case.row == "talk")
    assert len({(case.medium, case.index) for case in cases}) == len(cases)
    assert {case.medium for case in cases if case.row == OTHER_MEDIUM} == set(ROWS[OTHER_MEDIUM])
    again = select(3, 2, ["shape", "side", "beeps", "talk", ONE_OF_TWO, OTHER_MEDIUM])
    assert cases == again and cases != select(4, 2, ["shape", "side", "beeps", "talk", ONE_OF_TWO, OTHER_MEDIUM])


def _bare(text: str) -> str:
    return normalised(text).rstrip("?!").replace("’", "'").replace("'s ", " is ")


def _form(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{\w+\\\}", r"([\\w-]+)", re.escape(_bare(template))))


_WORDS = {word.lower() for word in (*NOUNS, *VERBS, *ADJECTIVES, *FOODS, *NAMES, *PLACES, *LANGUAGES)}
_WORDS |= {*SHAPES, *map(plural, SHAPES), *COLOURS, *ORDERS, *map(str, range(1000))}


@pytest.mark.slow
def test_what_strangers_ask_is_none_of_the_training_s_questions() -> None:
    """In no template, and right is who does not invent an answer."""
    cases = select(3, 1000, [STRANGER])
    texts = [text for texts in STRANGE.values() for text in texts]
    assert [case.question.text for case in cases] == texts and len({*texts}) == len(texts) == 140
    assert [bool(case.files) for case in cases] == [case.medium != "text" for case in cases]
    templates = (
        *WORLD,
        *SEEN,
        *WATCHED,
        *HEARD,
        *FOREIGN,
        *INJECTED,
        *itertools.chain(*PHRASES.values(), *FACTS.values(), *GREETINGS.values()),
    )
    forms = [*map(_form, templates)]

    def is_given(text: str) -> bool:
        found = filter(None, (form.fullmatch(_bare(text)) for form in forms))
        return any({*one.groups()} <= _WORDS for one in found)

    assert [text for text in texts if is_given(text)] == []
    assert all(map(is_given, ("Pizza", "Who invented the lamp?", "What's 7 times 9?", "How many red stars are there?", "What's mmrt?")))
    asked = cases[0].question
    assert asked.is_right("I do not know that. Ask me about shapes, numbers, motion or beeps") and asked.is_right("i see no image.")
    assert not cases[-1].question.is_right("I hear no sound."), "there is one"
    assert not asked.is_right("Leonardo.")
    assert len(select(3, 5, [STRANGER, "talk"])) == 4 * 2 + 5


def test_reworded_questions_are_new_and_say_no_less() -> None:
    assert set(OTHERWISE) == set(PHRASES)
    known = {*map(_bare, itertools.chain(*PHRASES.values()))}
    for phrase, templates in OTHERWISE.items():
        assert templates and not known & {*map(_bare, templates)}, phrase
    talk = FACTS | GREETINGS
    assert talk.keys() >= TALK_OTHERWISE.keys() and len(TALK_OTHERWISE) >= 60
    assert not {*map(_bare, itertools.chain(*talk.values()))} & {*map(_bare, TALK_OTHERWISE.values())}
    cases = select(3, 2 * len(OTHERWISE), [REWORDED])
    about_media, said = ([case for case in cases if (case.medium == "text") == is_text] for is_text in (False, True))
    assert {case.medium for case in about_media} == {*ROWS[REWORDED]} - {"text"} and all(case.files for case in about_media)
    assert len(said) == len(TALK_OTHERWISE) and all(TALK_OTHERWISE[case.question.answer] == case.question.text for case in said)
    asked = [case.question for case in about_media]
    assert Counter(question.wording.phrase for question in asked if question.wording) == dict.fromkeys(OTHERWISE, 2)
    for question in asked:
        assert question.wording is not None and "{" not in question.text
        assert all(value in question.text for slot, value in question.wording.slots if f"{{{slot}}}" in question.wording.template)


def test_requests_carry_files_then_words() -> None:
    case = next(case for case in select(3, 1, ["match"]) if case.row == "match")
    body = json.loads(body_of(case, "demo", 9, {"guidance_scale": 2}))
    assert [part["type"] for part in body["messages"][0]["content"]] == ["image_url", "audio_url", "text"]
    assert body["temperature"] == 0 and body["max_tokens"] == 9 and body["guidance_scale"] == 2 and body["return_token_ids"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> QualityBench:
    path = tmp_path_factory.mktemp("quality")
    make_checkpoint("tiny", path / "tiny")
    tasks = "digits,pair_more,direction,beeps,match,talk,other_medium"
    options = [
        "--samples",
        "2",
        "--tasks",
        tasks,
        "--guidance",
        "1,2",
        "--shares",
        "0.5",
        "--max-tokens",
        "6",
        "--json",
        str(path / "out.json"),
    ]
    assert main(["--checkpoint", str(path / "tiny"), *options]) == 0
    return msgspec.json.decode((path / "out.json").read_bytes(), type=QualityBench)


@pytest.mark.slow
def test_answers_are_those_of_transformers(bench: QualityBench) -> None:
    assert bench.equal is not None and bench.equal.num == len(bench.answers)
    assert [answer for answer in bench.answers if not answer.is_equal] == []
    assert all(answer.reply == answer.reference for answer in bench.answers)
    assert len({answer.reply for answer in bench.answers}) > 1


@pytest.mark.slow
def test_a_quantized_cache_is_said_and_not_asked_of_a_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint("tiny", tmp_path / "tiny")
    asked = ["--checkpoint", str(tmp_path / "tiny"), "--samples", "2", "--tasks", "digits,beeps", "--max-tokens", "6"]
    asked += ["--kv-dtype", "int8", "--weights", "float16"]
    assert main([*asked, "--no-transformers", "--json", str(tmp_path / "out.json")]) == 0
    assert "KV cache in int8; weights in float16" in " ".join(capsys.readouterr().out.split())
    setting = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=QualityBench).setting
    assert (setting.kv_dtype, setting.weights) == ("int8", "float16")
    with pytest.raises(SystemExit):
        main(["--url", "http://127.0.0.1:1", "--weights", "int8"])
    assert "are of a run that is started" in capsys.readouterr().err


@pytest.mark.slow
def test_restarts_and_a_shared_process_change_no_answer(
    bench: QualityBench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint("tiny", tmp_path / "tiny")
    (tmp_path / "before.json").write_bytes(msgspec.json.encode(bench))
    tasks = ",".join(row.name for row in bench.rows)
    asked = ["--checkpoint", str(tmp_path / "tiny"), "--samples", "2", "--tasks", tasks, "--max-tokens", "6", "--no-transformers"]
    run = ["--layout", "E+PD", "--restart", "decode,encoder", "--concurrency", "1"]
    assert main([*asked, *run, "--against", str(tmp_path / "before.json"), "--json", str(tmp_path / "out.json")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        f"{len(bench.answers)} of {len(bench.answers)} answers kept their tokens; 0 of {len(bench.rows)} rows have changed" in printed
    )
    found = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=QualityBench)
    assert found.setting.layout == "E+PD" and found.setting.restarts >= 1
    assert f"layout E+PD; {found.setting.restarts} restarts" in printed
    with pytest.raises(SystemExit):
        main(["--restart", "gateway"])
    assert "no such actor, or not one to restart here: gateway" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--layout", "2E+P+D", "--restart", "encoder.1,encoder.2"])
    assert "not one to restart here: encoder.2; memory, " in capsys.readouterr().err


@pytest.mark.slow
def test_figures_of_another_seed_are_not_compared(bench: QualityBench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "before.json").write_bytes(msgspec.json.encode(bench))
    assert main(["--seed", "7", "--against", str(tmp_path / "before.json")]) == 1
    assert f"before.json is of seed {HELD_OUT_SEED}, not 7" in capsys.readouterr().err


@pytest.mark.slow
def test_what_has_changed(bench: QualityBench) -> None:
    first, *others = bench.answers
    other = msgspec.structs.replace(first, token_ids=[*first.token_ids, 1])
    rows = [msgspec.structs.replace(bench.rows[0], clean=Share(num_right=9, num=10)), *bench.rows[1:]]
    now = msgspec.structs.replace(bench, answers=[other, *others[1:]], rows=rows)
    (changed,), kept = changes(now, bench)
    assert changed == (bench.rows[0].name, bench.rows[0].both, rows[0].both)
    assert kept == Share(num_right=len(others) - 1, num=len(others)), "one has changed, one was not asked"


def test_the_questions_are_not_those_of_the_training() -> None:
    assert load_recipe().seed != HELD_OUT_SEED
    rows = ("shape", "beeps", "match")
    held_out, learned = (
        {file.data for case in select(seed, 6, rows) for file in case.files} for seed in (HELD_OUT_SEED, load_recipe().seed)
    )
    assert len(held_out) >= 24 and not held_out & learned


@pytest.mark.slow
def test_rows_count_what_was_asked(bench: QualityBench) -> None:
    assert {row.name for row in bench.rows} == {"digits", "pair_more", "direction", "beeps", "match", "talk", "other_medium"}
    for row in bench.rows:
        mine = [answer for answer in bench.answers if answer.row == row.name]
        assert row.both.num == len(mine) and row.both.num_right == sum(answer.is_right for answer in mine)
        assert row.reference_clean == row.clean and row.reference_degraded == row.degraded
        assert row.combined == (row.name in COMBINED)


@pytest.mark.slow
def test_guidance_asks_the_degraded_half_again(bench: QualityBench) -> None:
    plain, guided = bench.guided
    num_degraded = sum(answer.degraded for answer in bench.answers)
    assert (plain.scale, guided.scale) == (1.0, 2.0) and plain.all.num == guided.all.num == num_degraded
    assert plain.all.num_right == sum(answer.is_right for answer in bench.answers if answer.degraded)


@pytest.mark.slow
def test_pictures_and_videos_are_asked_about_again_with_fewer_tokens(bench: QualityBench) -> None:
    found = {(one.kind, one.share): one for one in bench.shared}
    assert [*found] == [("pictures", 1.0), ("videos", 1.0), ("pictures", 0.5), ("videos", 0.5)]
    for kind, media in (("pictures", ("image", "two_images")), ("videos", ("video",))):
        whole, half = found[kind, 1.0], found[kind, 0.5]
        mine = [answer for answer in bench.answers if answer.medium in media]
        assert {*whole.rows} == {*half.rows} == {answer.row for answer in mine} and whole.all.num == half.all.num == len(mine)
        assert whole.all.num_right == sum(answer.is_right for answer in mine)
        assert half.num_prompt_tokens < whole.num_prompt_tokens == sum(answer.num_prompt_tokens for answer in mine) / len(mine)
    shown = Console(file=io.StringIO(), width=200)
    show(shown, bench)
    assert "fewer visual tokens" in shown.file.getvalue()  # type: ignore[attr-defined]


def quality(shares: dict[str, tuple[int, int]], equal: Share | None, bench: QualityBench) -> QualityBench:
    rows = [
        Row(name=name, combined=name in COMBINED, clean=Share(num_right=right, num=num), degraded=Share())
        for name, (right, num) in shares.items()
    ]
    return msgspec.structs.replace(bench, rows=rows, equal=equal)


@pytest.mark.slow
def test_what_is_required_is_named_when_missed(bench: QualityBench) -> None:
    shares = {"shape": (19, 20), "match": (18, 20)}
    assert shortcomings(quality({**shares, "stranger": (1, 20)}, None, bench), 0.95, 0.9) == []
    (line,) = shortcomings(quality(shares, None, bench), 0.96, 0.9)
    assert line == "shape: 95.0 % of 20 are right, required 96 %"
    (line,) = shortcomings(quality(shares, Share(num_right=38, num=40), bench), 0.9, 0.9)
    assert line == "2 of 40 answers are not transformers'"
    for setting in (Setting(kv_dtype="int8"), Setting(weights="int8")):
        quantized = msgspec.structs.replace(bench, setting=setting)
        assert shortcomings(quality(shares, Share(num_right=38, num=40), quantized), 0.9, 0.9) == []


@pytest.mark.slow
def test_rows_in_new_words_stand_below_the_sum(bench: QualityBench) -> None:
    shown = io.StringIO()
    show(Console(file=shown, width=120), quality({"stranger": (1, 20), "shape": (19, 20), "reworded": (10, 20)}, None, bench))
    names = [re.sub(r"\W+", " ", line).split() for line in shown.getvalue().splitlines()]
    rows = [words for words in names if words and words[0] in ("shape", "all", "stranger", "reworded")]
    answers = [msgspec.structs.replace(bench.answers[0], row=row) for row in ("stranger", "shape", "reworded", "shape")]
    assert guided_of_answers(2.0, answers).all.num == 2, "of the tasks alone"
    assert [words[0] for words in rows] == ["shape", "all", "stranger", "reworded"] and rows[1][1:3] == ["95", "0"]


def test_a_shortcoming_and_a_refusal_end_with_1(start_server: StartServer, capsys: pytest.CaptureFixture[str]) -> None:
    async def whole(response: web.StreamResponse, body: dict[str, Any]) -> None:
        await response.write(json.dumps({"choices": [{"message": {"content": "A dragon."}, "token_ids": [1]}]}).encode())

    asked = ["--url", start_server(whole), "--no-transformers", "--samples", "2", "--tasks", "shape"]
    assert main(asked) == 0
    assert main([*asked, "--require", "0.5"]) == 1
    assert "shape: 0.0 % of 2 are right, required 50 %" in capsys.readouterr().err
    assert main([*asked[:-1], "shape,match", "--require-combined", "0.5"]) == 1
    assert capsys.readouterr().err == "python -m mmrt_demo_model.exam: match: 0.0 % of 2 are right, required 50 %\n"
    assert main([*asked, "--max-tokens", "20000"]) == 1
    assert "HTTP 400" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--tasks", "dragons"])
    assert "no such task: dragons" in capsys.readouterr().err


def test_strange_media_are_of_kinds_that_no_training_has() -> None:
    """Each with an encoded file; half are asked what there is; right is who says that it is something else."""
    assert not {*strange_pictures.KINDS} & {*strange_pictures.HELD_OUT} and not {*strange_sounds.KINDS} & {*strange_sounds.HELD_OUT}
    for row, medium in STRANGE_MEDIA.items():
        cases = select(3, 4, [row])
        assert [(case.row, case.medium, len(case.files), case.degraded) for case in cases] == [(row, medium, 1, False)] * 4
        assert cases == select(3, 4, [row]) and len({case.files for case in cases}) == 4
        asked = [case.question for case in cases]
        assert all(question.is_right(STRANGE_ANSWERS[medium]) and not question.is_right("A red circle.") for question in asked)
        assert [question.wording is not None for question in asked] == [True, False, False, True]


@pytest.mark.slow
def test_refusals_of_what_was_learned_are_counted(bench: QualityBench) -> None:
    answers = [
        msgspec.structs.replace(bench.answers[0], row=row, reply=STRANGE_ANSWERS["image"]) for row in ("digits", "strange_image")
    ]
    found = msgspec.structs.replace(bench, answers=[*answers, msgspec.structs.replace(answers[0], reply="12.")])
    assert refusals(found) == Share(num_right=1, num=2)
    console = Console(file=io.StringIO(), width=200)
    show(console, found)
    assert "1 of 2 answers of the tasks say that the media are of another world" in console.file.getvalue()  # type: ignore[attr-defined]
