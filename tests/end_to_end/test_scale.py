"""``mmrt scale`` and ``mmrt layout`` on a live run: processes come and go under load, and no token changes."""

import itertools
import json
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from mmrt.runtime.stage_table import ProcessSpec, format_layout
from mmrt.shm.plan_table import PlanTable
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.status import ActorTable
from mmrt.tests.end_to_end.conftest import Server, also_slow
from mmrt.tests.end_to_end.oracle import Media, Oracle
from mmrt.tests.end_to_end.test_decodes import STORY, check, handed_over, owners, under_way
from mmrt.tests.end_to_end.test_instances import at_once, steps
from mmrt.tests.end_to_end.test_media import check as check_media
from mmrt.tests.end_to_end.test_media import image_part, picture, text, video
from mmrt.tests.end_to_end.test_restart import LONG, PROMPT, Streams, processes, undisturbed


@pytest.fixture(scope="module")
def live(breakable: Server) -> Server:
    return breakable


@pytest.fixture(scope="module")
def source(breakable_source: Path) -> Path:
    return breakable_source


def scale(server: Server, *orders: str) -> str:
    done = server.mmrt("scale", *orders)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(server: Server, *arguments: str) -> str:
    before = processes(server), server.mmrt("layout", "show").stdout
    done = server.mmrt(*arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert (processes(server), server.mmrt("layout", "show").stdout) == before, "nothing has changed"
    return done.stderr


def has_plan(server: Server, actor: str) -> bool:
    with RunDirectory.attach(server.run_path) as run, closing(PlanTable.attach(run, writable=False)) as table:
        with closing(ActorTable.attach(run)) as actors:
            return any(actors.actors[plan.actor] == actor for plan in table.live())


def set_layout(server: Server, layout: str) -> None:
    done = server.mmrt("layout", "set", layout, timeout_s=120)
    assert done.returncode == 0 and done.stdout.endswith(f"layout {layout}\n"), done.stdout + done.stderr


@contextmanager
def always_asked(server: Server) -> Iterator[None]:
    """Texts and pictures are asked for all the time, and each answer is as it was before."""
    over = threading.Event()

    def ask(question: Callable[[], object], expected: object) -> int:
        for number in itertools.count():
            if over.is_set():
                return number
            assert question() == expected
        raise AssertionError

    def text() -> list[int]:
        return server.chat(PROMPT, **LONG)[1]

    def pictures() -> list[list[int]]:
        return at_once(server, 3)

    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(ask, question, question()) for question in (text, text, text, text, pictures)]
        try:
            yield
        finally:
            over.set()
        assert all(request.result() for request in asking)


def test_a_decode_comes_and_leaves_under_load(live: Server) -> None:
    expected, before = undisturbed(live), handed_over(live)
    with Streams(live, 2) as streams:
        assert scale(live, "decode=2") == "decode.1: in the run, and serving\nlayout E+P+2D\n"
    assert streams.errors == [] and streams.ids == [expected] * 2
    stories = under_way(live, 4)
    with ThreadPoolExecutor() as pool:
        leaving = pool.submit(scale, live, "decode=1")
        live.wait(lambda _: "decode.1" not in owners(live), "its rows are taken from it")
        assert "decode.1: leaves the run when its work is done" in live.mmrt("status").stdout
        live.kill("decode.1", signal.SIGCONT)
        assert leaving.result() == "decode.1: left the run, without work\nlayout E+P+D\n"
    check(stories, expected[: STORY["max_tokens"]])
    assert handed_over(live) == before + 2 and "decode.1" not in processes(live)
    live.wait_until_empty()


def test_a_second_video_comes_is_killed_in_its_plan_and_leaves(live: Server, oracle: Oracle) -> None:
    """FC1 over processes: the answers of one and of two are the reference's, also of media whose process dies or leaves."""
    pixels, (part, frames) = picture(3, 56, 56), video(8, 56, 84, 2)
    contents = [[part, image_part(picture(seed, 28, 84)), text("And?")] for seed in range(5)]
    contents.append([image_part(pixels), part, text("What is it?")])
    media = Media(images=[pixels], videos=[(frames, 2.0)])
    salts = itertools.count()

    def ask(content: list[dict[str, Any]]) -> list[int]:
        return live.chat(content, extra_body={"cache_salt": f"{next(salts)}"})[1]

    alone = [ask(content) for content in contents]
    assert scale(live, "video=2") == "video.1: in the run, and serving\nlayout E+P+D+2V\n"
    check_media(live, oracle, contents[-1], media)
    before = steps(live)
    with ThreadPoolExecutor(6) as pool:
        assert [*pool.map(ask, contents)] == alone
    after = steps(live)
    assert all(after[name] > before[name] for name in ("video", "video.1")), "both work"
    with ThreadPoolExecutor(6) as pool:
        live.kill("video.1", signal.SIGSTOP)
        asked = [pool.submit(ask, content) for content in contents]
        live.wait(lambda _: has_plan(live, "video.1"), "a plan that it has")
        live.kill("video.1")
        assert [answer.result() for answer in asked] == alone
        live.wait(lambda status: bool(status["ready"]), "ready")
        asked = [pool.submit(ask, content) for content in contents]
        assert scale(live, "video=1") == "video.1: left the run, without work\nlayout E+P+D\n"
        assert [answer.result() for answer in asked] == alone
    assert "video.1" not in processes(live)
    live.wait_until_empty()


@pytest.mark.slow
def test_encoders_and_prefills_come_and_leave_under_load(live: Server) -> None:
    expected, pictures = undisturbed(live), at_once(live, 6)
    with Streams(live, 2) as streams:
        assert scale(live, "encoder=2", "prefill=2").endswith("layout 2E+2P+D\n")
        assert at_once(live, 6) == pictures
        assert {"encoder.1", "prefill.1"} < {*processes(live)}
        live.kill("prefill.1")
        assert live.mmrt("layout", "set", "E+P+D").stdout.startswith("encoder.1, prefill.1: left the run")
        assert at_once(live, 6) == pictures
    assert streams.errors == [] and streams.ids == [expected] * 2
    assert json.loads(urlopen(f"{live.url}/ready").read()) == {"status": "ready"}
    live.wait_until_empty()


@pytest.mark.slow
def test_those_that_came_are_known_everywhere(live: Server) -> None:
    scale(live, "decode=2")
    assert live.mmrt("layout", "show").stdout.splitlines() == ["E+P+2D", "  encoder", "  prefill", "  decode", "  decode.1"]
    assert 'mmrt_actor_broken{actor="decode.1"} 0.0' in urlopen(f"{live.url}/metrics").read().decode()
    done = live.mmrt("restart", "decode.1")
    assert done.returncode == 0 and "decode.1: generation" in done.stdout
    live.kill("decode.1")
    live.wait(lambda status: bool(status["ready"]) and len(status["actors"]) == 9, "ready")
    assert '"decode.1"' in live.mmrt("trace", "-o", "-").stdout and live.mmrt("logs", "decode.1").returncode == 0
    scale(live, "decode=1")
    assert "decode.1" not in urlopen(f"{live.url}/metrics").read().decode()
    assert "no actor 'decode.1'" in live.mmrt("restart", "decode.1").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scale", "prefill=9"), "prefill=9: a run has 1 to 8 of prefill"),
        (("layout", "set", "EP+D"), "in 'EP+D' the process prefill is encoder and prefill, now it is prefill"),
        *also_slow(
            (("scale", "decode=0"), "decode=0: a run has 1 to 8 of decode"),
            (("scale", "memory=2"), "no stage 'memory' to scale, there are video, encoder, prefill, decode"),
            (("layout", "set", "E+P"), "'E+P' has no decode (D)"),
            (("layout", "set", "E+P+X"), "'X': no stage 'X'"),
        ),
    ],
)
def test_what_is_impossible_is_refused_before_anything_changes(live: Server, arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(live, *arguments)


@pytest.mark.slow
def test_one_that_does_not_come_up_changes_nothing(live: Server, source: Path) -> None:
    file = source / "actors" / "decode" / "loop.py"
    before = file.read_text()
    file.write_text("raise RuntimeError('edited badly')\n")
    try:
        error = refused(live, "scale", "decode=2")
    finally:
        file.write_text(before)
    assert "decode.1 does not come up, and nothing has changed" in error and "edited badly" in error
    assert live.chat("Hello")[1]
    scale(live, "decode=2")
    scale(live, "decode=1")
    live.wait_until_empty()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_layouts_in_turn_change_no_token(live: Server) -> None:
    dice = random.Random(1)
    with always_asked(live):
        for _ in range(20):
            set_layout(live, format_layout(ProcessSpec((stage,), dice.randint(1, 3)) for stage in ("encoder", "prefill", "decode")))
    assert handed_over(live) > 3
    assert live.mmrt("layout", "set", "E+P+D").returncode == 0
    live.wait_until_empty()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_layout_follows_the_load(launch: Callable[..., Server]) -> None:
    """Autoscale: a second prefill comes while texts wait, is killed, goes when none have come for a while, and no answer changes."""
    settings = "[autoscale]\nenabled = true\nevery_s = 0.5\ncalm_s = 4.0\nmost = 2\nidle_cores = 0\n[slo.text]\nttft_ms = 100.0"
    server = launch("qwen2_5_omni", settings)
    texts = [[{"role": "user", "content": f"{number} " * 300}] for number in range(8)]
    alone = [server.chat(text, max_tokens=3)[1] for text in texts]
    over = threading.Event()

    def ask(number: int) -> None:
        while not over.is_set():
            assert server.chat(texts[number], max_tokens=3, extra_body={"cache_salt": str(random.random())})[1] == alone[number]

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, number) for number in range(8)]
        try:
            server.wait(lambda status: status["layout"] == "E+P+D+P", "a second prefill", 120)
            server.wait(lambda status: status["ready"], "ready", 60)
            server.kill("prefill.1")
        finally:
            over.set()
        assert [answer.result() for answer in asked] == [None] * 8
    server.wait(lambda status: status["layout"] == "E+P+D", "one prefill", 120)
    said = [line.partition("autoscale has set ")[2] for line in server.mmrt("logs").stdout.splitlines() if "autoscale" in line]
    assert any("P: 1 → 2, " in line for line in said) and any("P: 2 → 1, " in line for line in said), said
    server.wait_until_empty()
