"""Several encoders and prefills in one run: the same answers, each with its own log, status, metrics, restart and kill."""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest

from mmrt.shm.plan_table import PlanTable
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.end_to_end.conftest import Server, also_slow
from mmrt.tests.end_to_end.oracle import Media, Oracle
from mmrt.tests.end_to_end.test_media import check, image_part, picture, text
from mmrt.tests.end_to_end.test_restart import Streams, check_an_edit_of_decode, processes, undisturbed

SETTINGS = '[actors]\nlayout = "2E+2P+D"\n[supervisor]\nrestart_limit = 20\n'
ACTORS = (
    "memory", "controller", "gateway", "video", "encoder", "encoder.1", "prefill", "prefill.1", "decode", "detokenizer",
)  # fmt: skip


@pytest.fixture(scope="module")
def several(launch: Callable[..., Server], source: Path) -> Server:
    return launch("qwen2_5_omni", SETTINGS, "--reload", source=source)


def at_once(server: Server, count: int) -> list[list[int]]:
    """The answers to as many pictures at the same time."""
    with ThreadPoolExecutor(count) as pool:
        contents = [[image_part(picture(seed, 56, 56)), text("What is it?")] for seed in range(count)]
        return [answer[1] for answer in pool.map(server.chat, contents)]


def test_each_is_a_process_and_works(several: Server, oracle: Oracle) -> None:
    found = processes(several)
    assert tuple(found) == ACTORS and len({pid for pid, _ in found.values()}) == len(ACTORS)
    pixels = picture(3, 56, 56)
    check(several, oracle, [image_part(pixels), text("What is it?")], Media(images=[pixels]))
    answers = at_once(several, 12)
    assert answers == at_once(several, 12)
    several.wait_until_empty()


@pytest.mark.parametrize("stage", [*also_slow("encoder"), "prefill"])
def test_work_goes_to_the_other_while_one_does_not_get_on(several: Server, stage: str) -> None:
    content = [image_part(picture(7, 56, 56)), text("What is it?")]
    expected, before = several.chat(content), steps(several)
    several.kill(stage, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor() as pool:
            first = pool.submit(several.chat, content)
            several.wait(lambda _: live_plans(several, stage) == 1, "a plan at the actor that does not get on")
            assert several.chat(content) == expected and not first.done()
            several.kill(stage, signal.SIGCONT)
            assert first.result() == expected
    finally:
        several.kill(stage, signal.SIGCONT)
    after = steps(several)
    assert after[f"{stage}.1"] > before[f"{stage}.1"]


def test_an_edit_restarts_who_imports_it(several: Server, source: Path) -> None:
    check_an_edit_of_decode(several, source)


def steps(server: Server) -> dict[str, int]:
    return {actor["name"]: int(actor["steps"]) for actor in server.status()["actors"]}


def live_plans(server: Server, actor: str) -> int:
    with RunDirectory.attach(server.run_path) as run, closing(PlanTable.attach(run, writable=False)) as table:
        return sum(ACTORS[plan.actor] == actor for plan in table.live())


@pytest.mark.slow
def test_one_is_restarted_and_killed_while_the_other_serves(several: Server) -> None:
    expected, pictures = undisturbed(several), at_once(several, 6)
    before = processes(several)
    with Streams(several, 3) as streams:
        done = several.mmrt("restart", "encoder.1", "prefill")
        several.kill("prefill.1")
        assert at_once(several, 6) == pictures
    assert done.returncode == 0 and "encoder.1: generation 2 serves after " in done.stdout, done.stdout + done.stderr
    assert streams.errors == [] and streams.ids == [expected] * 3
    several.wait(lambda status: bool(status["ready"]), "ready")
    after = processes(several)
    assert {name for name in after if after[name] != before[name]} == {"encoder.1", "prefill", "prefill.1"}


@pytest.mark.slow
def test_each_has_its_name_wherever_it_is_seen(several: Server) -> None:
    assert "prefill.1" in several.mmrt("logs", "supervisor").stdout
    assert several.mmrt("logs", "encoder.1").returncode == 0
    metrics = urlopen(f"{several.url}/metrics").read().decode()
    assert 'mmrt_actor_broken{actor="encoder.1"} 0.0' in metrics
    unknown = several.mmrt("restart", "encoder.2")
    assert unknown.returncode == 1 and "encoder.2" in unknown.stderr
    assert several.mmrt("restart", "encodr.1").returncode == 2
    assert '"encoder.1"' in several.mmrt("trace", "-o", "-").stdout


@pytest.mark.slow
def test_processes_of_two_actors_each(launch: Callable[..., Server], oracle: Oracle) -> None:
    server = launch(settings=SETTINGS.replace("2E+2P+D", "2EP+D"))
    found = processes(server)
    assert {*found} == {*ACTORS}
    assert all(found[f"encoder{number}"][0] == found[f"prefill{number}"][0] for number in ("", ".1"))
    assert (
        "no actor 'encoder.2'; there are memory, controller, gateway, video, encoder, pr" in server.mmrt("restart", "encoder.2").stderr
    )
    pixels = picture(3, 56, 56)
    check(server, oracle, [image_part(pixels), text("What is it?")], Media(images=[pixels]))
    expected, pictures = undisturbed(server), at_once(server, 6)
    with Streams(server, 3) as streams:
        done = server.mmrt("restart", "encoder.1")
        server.kill("prefill")
        assert at_once(server, 6) == pictures
    assert done.returncode == 0 and "prefill.1: generation 2 serves after " in done.stdout, done.stdout + done.stderr
    assert streams.errors == [] and streams.ids == [expected] * 3
    server.wait(lambda status: bool(status["ready"]), "ready")
    after = processes(server)
    assert {name for name in after if after[name] != found[name]} == {"encoder", "prefill", "encoder.1", "prefill.1"}
    server.wait_until_empty()
