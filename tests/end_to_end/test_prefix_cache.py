"""Prompts that begin as earlier ones did: their KV pages are found again, and the tokens stay transformers' argmax."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mmrt.shm.controller_stats import ControllerStats, StatsSnapshot
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.end_to_end.conftest import Server, also_slow
from mmrt.tests.end_to_end.oracle import Media, Oracle, check_argmax
from mmrt.tests.end_to_end.test_guidance import companion, guided
from mmrt.tests.end_to_end.test_media import image_part, picture, text
from mmrt.tests.end_to_end.test_sound_tracks import WITH_SOUND, film

PAGE = 16
LONG = "Tell me, in as many words as you like, how the weather was on the coast last week. "


class Answer:
    """An answer to a request that is alone, and how many tokens of its prompt were found in the cache, as its usage says."""

    def __init__(self, server: Server, content: Any, **options: Any) -> None:
        wait_for_stats(server, lambda stats: not any(pool.used for pool in stats.pools.values()))
        self.text, self.ids = "", list[int]()
        extra = {"cache_salt": "shared", **options.pop("extra_body", {})}
        for chunk in server.stream(content, **options, extra_body=extra, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                self.text += choice.delta.content or ""
                self.ids += getattr(choice, "token_ids", None) or []
        self.num_cached = int(chunk.usage.prompt_tokens_details.cached_tokens)


def wait_for_stats(server: Server, condition: Callable[[StatsSnapshot], bool]) -> StatsSnapshot:
    """Return the controller's counts once they fulfil this."""
    with RunDirectory.attach(server.run_path) as run, closing(ControllerStats.attach(run)) as table:
        deadline_s = time.monotonic() + 30
        while not condition(stats := table.read()):
            assert time.monotonic() < deadline_s, stats
            time.sleep(0.02)
    return stats


def whole_pages(num_tokens: int) -> int:
    return num_tokens // PAGE * PAGE


def test_the_next_turn_finds_prompt_and_answer(own: Server, oracle: Oracle) -> None:
    messages = [{"role": "user", "content": LONG}]
    length = 0
    for _ in range(4):
        inputs = oracle.inputs(messages)
        answer = Answer(own, messages)
        oracle.check_greedy(inputs, answer.ids)
        assert answer.num_cached >= whole_pages(length), "the prompt before it"
        length = inputs["input_ids"].shape[1]
        again = Answer(own, messages)
        assert again.ids == answer.ids and again.num_cached == whole_pages(length - 1)
        messages = [*messages, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "Go on."}]


def test_pictures(own: Server, oracle: Oracle) -> None:
    pixels = [picture(seed, 90 + 30 * seed, 200) for seed in range(3)]
    parts = [image_part(p) for p in pixels]
    content = [text("First"), parts[0], text("then"), parts[1], text("Compare.")]
    plain = [text("First"), {"type": "image"}, text("then"), {"type": "image"}, text("Compare.")]
    inputs = oracle.inputs([{"role": "user", "content": plain}], Media(images=pixels[:2]))
    first, second = Answer(own, content), Answer(own, content)
    oracle.check_greedy(inputs, first.ids)
    assert second.ids == first.ids and second.num_cached == whole_pages(inputs["input_ids"].shape[1] - 1)
    longer = [*plain, {"type": "image"}, text("And that?")]
    inputs = oracle.inputs([{"role": "user", "content": longer}], Media(images=pixels))
    third = Answer(own, [*content, parts[2], text("And that?")])
    oracle.check_greedy(inputs, third.ids)
    assert third.num_cached > second.num_cached - 2 * PAGE


def test_a_picture_in_the_next_turn(own: Server, oracle: Oracle) -> None:
    pixels = picture(7, 150, 213)
    user, plain = [image_part(pixels), text("What is it?")], [{"type": "image"}, text("What is it?")]
    first = Answer(own, [{"role": "user", "content": user}])
    rest = [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Are you sure?"}]
    inputs = oracle.inputs([{"role": "user", "content": plain}, *rest], Media(images=[pixels]))
    second = Answer(own, [{"role": "user", "content": user}, *rest])
    oracle.check_greedy(inputs, second.ids)
    one_turn = oracle.inputs([{"role": "user", "content": plain}], Media(images=[pixels]))["input_ids"].shape[1]
    assert second.num_cached >= whole_pages(one_turn)


@pytest.mark.slow
def test_a_video_with_sound(own: Server, oracle: Oracle) -> None:
    made = film(5.0, 5.0, 440)
    media = Media(videos=[(made.frames, 2.0)], audios=[made.samples], use_audio_in_video=True)
    for words in ("What happens?", "What happens? Say it loudly.", "What happens?"):
        inputs = oracle.inputs([{"role": "user", "content": [{"type": "video"}, text(words)]}], media)
        answer = Answer(own, [made.part, text(words)], extra_body=WITH_SOUND)
        oracle.check_greedy(inputs, answer.ids)
    assert answer.num_cached == whole_pages(inputs["input_ids"].shape[1] - 1)
    silent = Answer(own, [made.part, text(words)])
    assert silent.num_cached < 3 * PAGE, "other options make other tokens"


def test_a_guidance_pair(own: Server, oracle: Oracle) -> None:
    pixels = picture(9, 98, 126)
    content, plain = [image_part(pixels), text(LONG)], [{"type": "image"}, text(LONG)]
    conditional = oracle.inputs([{"role": "user", "content": plain}], Media(images=[pixels]))
    options: dict[str, Any] = {"extra_body": {"guidance_scale": 2.0, "negative_prompt": LONG + "Answer rudely."}}
    first, second = Answer(own, content, **options), Answer(own, content, **options)
    assert first.ids == second.ids and second.num_cached == whole_pages(conditional["input_ids"].shape[1] - 1)
    check_argmax(guided(oracle, conditional, companion(oracle, LONG + "Answer rudely."), second.ids, 2.0), second.ids)


def test_other_bytes_options_or_salts_find_nothing(own: Server, oracle: Oracle) -> None:
    pixels, other = picture(11, 112, 140), picture(12, 112, 140)
    words = text("Which one is it?")
    Answer(own, [image_part(pixels), words])
    before_it = oracle.inputs([{"role": "user", "content": [words]}])["input_ids"].shape[1]  # more than stands before a picture
    assert Answer(own, [image_part(other), words]).num_cached < before_it
    assert Answer(own, [{**image_part(pixels), "max_pixels": 10_000}, words]).num_cached < before_it
    inputs = oracle.inputs([{"role": "user", "content": [{"type": "image"}, words]}], Media(images=[other]))
    oracle.check_greedy(inputs, Answer(own, [image_part(other), words]).ids)
    salted = [Answer(own, [image_part(pixels), words], extra_body={"cache_salt": salt}) for salt in ("a", "b", "a")]
    assert [answer.num_cached > 0 for answer in salted] == [False, False, True]


def test_a_killed_controller_forgets_nothing(own: Server, oracle: Oracle) -> None:
    pixels = picture(13, 130, 170)
    content = [image_part(pixels), text("And this?")]
    first = Answer(own, content)
    pid = own.pid("controller")
    own.kill("controller")
    own.wait(lambda status: any(a["name"] == "controller" and a["pid"] != pid for a in status["actors"]), "a new controller")
    second = Answer(own, content)
    inputs = oracle.inputs([{"role": "user", "content": [{"type": "image"}, text("And this?")]}], Media(images=[pixels]))
    assert second.ids == first.ids and second.num_cached == whole_pages(inputs["input_ids"].shape[1] - 1)


@pytest.mark.parametrize("victim", ["decode", *also_slow("controller", "prefill")])
def test_a_kill_while_a_prompt_from_the_cache_is_answered(own: Server, victim: str) -> None:
    """Most pages of the row belong to the cache; of the others what was written is kept or written again."""
    prompt = [{"role": "user", "content": f"{victim}: {LONG}"}]
    options: dict[str, Any] = {"max_tokens": 300, "extra_body": {"cache_salt": "shared", "ignore_eos": True}}
    _, expected = own.chat(prompt, **options)
    pid = own.pid(victim)
    stream = own.stream(prompt, **options)
    ids: list[int] = []
    for chunk in stream:
        if not ids and pid:
            os.kill(pid, signal.SIGKILL)
            pid = 0
        ids += [token for choice in chunk.choices for token in (getattr(choice, "token_ids", None) or [])]
    assert ids == expected
    own.wait_until_empty()


@pytest.mark.slow
def test_after_preemption(launch: Callable[..., Server], oracle: Oracle) -> None:
    """Long answers in memory for less than two: rows lose their pages, and find most of them again. They do not where each answer ends
    before the next has waited for long, so there are rounds."""
    server = launch("qwen2_5_omni", "[memory]\nkv_tokens = 640\n")
    answers: dict[str, list[int]] = {}

    def ask(prompt: str) -> None:
        answers[prompt] = server.chat(prompt, max_tokens=330, extra_body={"ignore_eos": True})[1]

    with RunDirectory.attach(server.run_path) as run, closing(ControllerStats.attach(run)) as table:
        while not table.read().preempted_total:
            assert len(answers) < 30
            threads = [threading.Thread(target=ask, args=(f"{len(answers) + number}. {LONG}",)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            time.sleep(0.5)  # the controller writes its counts now and then
    for prompt, answer in answers.items():
        assert len(answer) == 330
        oracle.check_greedy(oracle.inputs([{"role": "user", "content": prompt}]), answer)
    server.down()


@pytest.mark.slow
def test_pages_outlive_the_run(launch: Callable[..., Server], oracle: Oracle, tmp_path: Path) -> None:
    """The second turn of yesterday's chat, with its picture, in today's run; and what the pool of that has evicted."""
    server = launch(settings=f'[memory]\nkv_tokens = 640\n[cache]\ndir = "{tmp_path / "pages"}"\n')
    pixels = picture(1, 120, 200)
    messages = [{"role": "user", "content": [image_part(pixels), text("What is it?")]}]
    first = Answer(server, messages)
    server.down()
    server.up()
    again = Answer(server, messages)
    plain = [{"role": "user", "content": [{"type": "image"}, text("What is it?")]}]
    length = oracle.inputs(plain, Media(images=[pixels]))["input_ids"].shape[1]
    assert again.ids == first.ids and again.num_cached == whole_pages(length - 1)
    turn = [*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Go on."}]
    assert Answer(server, turn).num_cached >= whole_pages(length)
    server.kill("encoder")
    _, ids = server.chat([text("In new words:"), image_part(pixels), text("What is it?")], extra_body={"cache_salt": "shared"})
    new_words = [text("In new words:"), {"type": "image"}, text("What is it?")]
    oracle.check_greedy(oracle.inputs([{"role": "user", "content": new_words}], Media(images=[pixels])), ids)
    for number in range(5):
        Answer(server, f"{number}. {20 * LONG}"[: 4 * 160], max_tokens=1)
    server.kill("prefill")
    evicted = Answer(server, messages)
    assert evicted.ids == first.ids and evicted.num_cached == whole_pages(length - 1)
    trace = server.mmrt("trace", "-o", "-").stdout
    assert '"name":"load"' in trace and '"name":"load_segments"' in trace
    assert '"name":"preprocess"' not in trace and '"name":"encode"' not in trace, "its pages were loaded for the new words"
    server.down()
