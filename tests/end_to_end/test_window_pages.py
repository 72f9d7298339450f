"""Layers with a window keep its tokens alone, also on several devices: tokens are transformers', whoever is killed."""

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from mmrt.runtime.pools import kind_of_pool
from mmrt.shm.controller_stats import ControllerStats
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.test_prefix_cache import Answer
from mmrt.tests.end_to_end.test_text_families import TextOracle

DEVICES = '[actors]\nlayout = "EP@left+D@right"\n[[devices]]\nname = "left"\n[[devices]]\nname = "right"\n'
LONG = "one two three four five six seven eight nine ten " * 390
WINDOW_PAGES = 48 // 16 + 1


def follow(server: Server, question: str, kills: list[str]) -> tuple[list[int], int]:
    """Ask, and kill these stages once prefill is at work, or decode. Returns the answer, and the most pages of windows that were in use
    on all devices."""
    most, ids = 0, list[int]()
    with RunDirectory.attach(server.run_path) as run, closing(ControllerStats.attach(run)) as stats:
        asked = threading.Thread(target=lambda: ids.extend(server.chat(question, max_tokens=300)[1]))
        asked.start()
        while asked.is_alive():
            now = stats.read()
            used = sum(pool.used for name, pool in now.pools.items() if kind_of_pool(name) == "window")
            most = max(most, used)
            if kills and used and (now.running if kills[0] == "decode" else now.preparing):
                server.kill(kills.pop(0))
            asked.join(0.02)
    assert not kills
    return ids, most


@pytest.fixture(scope="module")
def apart(launch: Callable[..., Server]) -> Server:
    return launch("gemma3", settings=DEVICES)


@pytest.fixture(scope="module")
def oracle(apart: Server) -> TextOracle:
    return TextOracle(apart.checkpoint)


@pytest.mark.parametrize(
    "kills",
    [[], ["prefill", "decode"], pytest.param(["controller", "prefill", "controller", "decode"], marks=pytest.mark.slow)],
    ids="+".join,
)
def test_the_windows_at_a_prompt_s_end_move_with_it(apart: Server, oracle: TextOracle, kills: list[str]) -> None:
    question = f"{'+'.join(kills)} {LONG}"
    prompt = oracle.ids_of(question)
    ids, most = follow(apart, question, list(kills))
    assert len(prompt) > 3000
    chunk = 512 // 16  # of prefill, the longest
    assert 0 < most <= (WINDOW_PAGES + 2 * chunk) + (WINDOW_PAGES + 20), f"{most} pages of windows of {len(prompt) // 16}"
    oracle.check_greedy(prompt, ids)
    apart.wait_until_empty()
    assert apart.wait(lambda status: bool(status["ready"]), "ready")


def test_a_prompt_outlives_the_run_with_the_window_at_its_end(
    launch: Callable[..., Server], oracle: TextOracle, tmp_path: Path
) -> None:
    """It is found in files, as far as they have the window. Without that file nothing is, and no token differs."""
    server = launch("gemma3", settings=f'[memory]\nkv_tokens = 8192\n[cache]\ndir = "{tmp_path / "pages"}"\n')
    question = "Tell me, in as many words as you like, how the weather was on the coast last week. " * 24
    prompt, first = oracle.ids_of(question), Answer(server, question)
    assert first.num_cached == 0 and len(prompt) > 8 * 48
    oracle.check_greedy(prompt, first.ids)
    server.down()
    server.up()
    again = Answer(server, question)
    assert again.ids == first.ids and again.num_cached == (len(prompt) - 1) // 16 * 16
    with RunDirectory.attach(server.run_path) as run, closing(ControllerStats.attach(run)) as stats:
        assert stats.read().pools["window"].cached < again.num_cached // 16, "the last pages alone were loaded"
    server.down()
    (file,) = (tmp_path / "pages").glob("*-window.pages")
    file.unlink()
    server.up()
    anew = Answer(server, question)
    assert anew.ids == first.ids and anew.num_cached == 0
    server.down()


def test_a_conversation_goes_on_where_it_was(apart: Server, oracle: TextOracle) -> None:
    """Prefill finds what it has computed, and fetches nothing of windows that it lacks."""
    before: list[dict[str, str]] = []
    for turn in range(3):
        before.append({"role": "user", "content": f"Tell me all about it, and then of turn {turn}. " * 8})
        text, ids = apart.chat(before, max_tokens=40)
        prompt = oracle.tokenizer.apply_chat_template(before, add_generation_prompt=True, tokenize=False)
        oracle.check_greedy(list(oracle.tokenizer(prompt, add_special_tokens=False)["input_ids"]), ids)
        before.append({"role": "assistant", "content": text})
    apart.wait_until_empty()
