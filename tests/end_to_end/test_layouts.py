"""Layouts: encoder, prefill and decode as threads of shared processes. The same answers, restarts and kills as apart from each other.

The package is a copy in which certain pictures end the process that encodes them, each in its own way.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.oracle import Media, Oracle
from mmrt.tests.end_to_end.test_media import check, image_part, picture, text
from mmrt.tests.end_to_end.test_quarantine import Background, starts
from mmrt.tests.end_to_end.test_restart import PROMPT, Streams, edited, processes, undisturbed
from mmrt.tests.end_to_end.test_text import QUESTIONS, ask

SETTINGS = "[actors]\nlayout = {layout!r}\n[supervisor]\nwatchdog_s = 3\nrestart_limit = 20\n"
TOGETHER = ("encoder", "prefill", "decode")
SEGFAULT, RAISE, HANG = 84, 112, 140  # widths of pictures of 84 rows
BEFORE = "        outputs = self._towers"
POISON = f"""        grids = [part.shape.grid for part in plan.parts]
        if (1, 6, {SEGFAULT // 14}) in grids:
            __import__("ctypes").CDLL(None).memset(0, 0, 1)
        if (1, 6, {RAISE // 14}) in grids:
            raise MemoryError
        if (1, 6, {HANG // 14}) in grids:
            __import__("time").sleep(1000)
"""


@pytest.fixture(scope="module")
def together(launch: Callable[..., Server], source: Path) -> Server:
    encoder = source / "actors" / "encoder.py"
    code = encoder.read_text()
    assert code.count(BEFORE) == 1
    encoder.write_text(code.replace(BEFORE, POISON + BEFORE))
    return launch(settings=SETTINGS.format(layout="EPD"), source=source)


def test_one_process_answers_as_three_do(together: Server, oracle: Oracle) -> None:
    found = processes(together)
    assert len({found[name][0] for name in TOGETHER}) == 1 and len({pid for pid, _ in found.values()}) == len(found) - 2
    comm = {path.read_text().strip() for path in Path(f"/proc/{found['decode'][0]}/task").glob("*/comm")}
    assert {"mmrt-encoder", "mmrt-prefill", "mmrt-decode"} <= comm
    for question in QUESTIONS[:3]:
        oracle.check_greedy(oracle.inputs(ask(question)), together.chat(question)[1])
    pixels = picture(3, 56, 56)
    check(together, oracle, [image_part(pixels), text("What is it?")], Media(images=[pixels]))
    together.wait_until_empty()


@pytest.mark.slow
def test_a_restart_is_one_of_all_of_them(together: Server) -> None:
    expected = undisturbed(together)
    before = processes(together)
    with Streams(together, 3) as streams:
        done = together.mmrt("restart", "encoder", "decode", "prefill")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("decode: generation 2 serves after ") and done.stdout.count("\n") == 1
    assert streams.errors == [] and streams.ids == [expected] * 3
    after = processes(together)
    assert {name for name in after if after[name] != before[name]} == set(TOGETHER)
    assert len({after[name] for name in TOGETHER}) == 1


def test_killed_while_it_streams_and_pictures_come(together: Server) -> None:
    content = [image_part(picture(1, 56, 56)), text("What is it?")]
    expected = undisturbed(together), together.chat(content)[1]
    with Streams(together, 3) as streams, ThreadPoolExecutor() as pool:
        answers = [pool.submit(together.chat, content) for _ in range(4)]
        together.kill("prefill")
        assert [answer.result()[1] for answer in answers] == [expected[1]] * 4
    assert streams.errors == [] and streams.ids == [expected[0]] * 3


@pytest.mark.parametrize(
    "width",
    [
        pytest.param(SEGFAULT, id="segmentation fault", marks=pytest.mark.slow),
        pytest.param(RAISE, id="no memory", marks=pytest.mark.slow),
        pytest.param(HANG, id="hang", marks=pytest.mark.slow),
    ],
)
def test_a_picture_that_kills_all_of_them_is_told_from_the_others_work(
    together: Server, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "client", together.client.with_options(timeout=180))
    assert together.chat([image_part(picture(1, 84, 56)), text("And this?")])[0], "how long a step may take has been measured"
    before, blamed = starts(together), blamed_on_encoder(together)
    with (
        Background(together, 3),
        pytest.raises(openai.APIError, match="ended the encoder process 2 times and is given up"),
    ):
        together.chat([image_part(picture(2, 84, width)), text("And this?")])
    together.wait(lambda status: bool(status["ready"]), "ready")
    after = starts(together)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == dict.fromkeys(TOGETHER, 2)
    assert blamed_on_encoder(together) == blamed + 2


def blamed_on_encoder(server: Server) -> int:
    return server.mmrt("logs", "supervisor", "-n", "1000").stdout.count(", in what encoder did")


@pytest.mark.slow
def test_code_of_one_that_is_broken_replaces_none(together: Server, source: Path) -> None:
    before = processes(together)
    with edited(source / "actors" / "encoder.py", "raise RuntimeError('broken on purpose')"):
        done = together.mmrt("restart", "decode", timeout_s=30)
    assert done.returncode == 1 and "RuntimeError: broken on purpose" in done.stderr
    assert processes(together) == before and together.chat(PROMPT)[0]


def test_what_needs_a_process_of_its_own_is_refused(together: Server) -> None:
    done = together.mmrt("debug", "prefill")
    assert done.returncode == 1
    assert done.stderr == (
        "error: prefill cannot be debugged in a process that is encoder, prefill, decode: actors.layout can give it its own\n"
    )
    alone = together.mmrt("actor", "prefill")
    assert alone.returncode == 2 and "prefill lives in the process of decode: actors.layout = 'EPD'" in alone.stderr
    assert together.chat(PROMPT)[0]


@pytest.mark.slow
def test_logs_of_one_are_those_of_its_process_also_after_the_run(together: Server) -> None:
    """The last test of this run."""
    assert together.mmrt("logs", "encoder").stdout == together.mmrt("logs", "decode").stdout != ""
    together.down()
    assert together.mmrt("logs", "encoder").stdout == together.mmrt("logs", "decode").stdout != ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "pairs"), [("EP+D", {"encoder": "prefill"}), ("ED+P", {"encoder": "decode"}), ("E+PD", {"prefill": "decode"})]
)
def test_pairs(launch: Callable[..., Server], oracle: Oracle, layout: str, pairs: dict[str, str]) -> None:
    server = launch(settings=SETTINGS.format(layout=layout))
    found = processes(server)
    assert {name: host for name in found for host in found if name < host and found[name][0] == found[host][0]} == {
        min(pair): max(pair) for pair in pairs.items()
    }
    pixels = picture(3, 56, 56)
    content = [image_part(pixels), text("What is it?")]
    check(server, oracle, content, Media(images=[pixels]))
    for name in pairs.values():
        server.kill(name)
        check(server, oracle, content, Media(images=[pixels]))
    server.down()
