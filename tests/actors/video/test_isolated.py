"""A decoder for each item (media.isolation = "process"): the same outcomes, nothing of others, and what ends when one is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrt.actors.video import isolated, worker
from mmrt.actors.video.sandbox import MAX_THREADS
from mmrt.runtime.config.runtime_config import convert_config
from mmrt.runtime.errors import ConfigError
from mmrt.tests.actors.video.isolated import ATTEMPTS, DEADLY, FORGED, FORGED_ROWS

SCRIPT = Path(__file__).with_name("isolated.py")


@pytest.fixture(scope="module")
def outcome() -> Iterator[dict[str, Any]]:
    """What came of it; the template is killed at its end."""
    command = [sys.executable, SCRIPT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        below = descendants(process.pid)
        process.stdin.close()
        said = process.stderr.read()
        assert line, said
        until_s = time.monotonic() + 10
        while any(map(lives, below)) and time.monotonic() < until_s:
            time.sleep(0.01)
        yield json.loads(line) | {
            "status": process.wait(10),
            "below": len(below),
            "alive": [pid for pid in below if lives(pid)],
            "said": said,
        }


def lives(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    found = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return [*found, *(below for child in found for below in descendants(child))]


def test_results_and_rows_are_those_of_one_process_for_all(outcome: dict[str, Any]) -> None:
    same = outcome["same"]
    assert {is_same for is_same, *_ in same.values()} == {True}
    assert {name for name, (_, result, _) in same.items() if result.startswith("Analysed")} == {"PNG", "JPEG", "video"}
    assert same["video"][2] > 1, "segments, in several plans"


def test_a_decoder_killed_at_its_work_is_followed_by_another(outcome: dict[str, Any]) -> None:
    assert outcome["same with kills"] == outcome["same"] and outcome["kills"] > 2 and outcome["again"]


def test_no_decoder_sees_what_another_has_left(outcome: dict[str, Any]) -> None:
    """Of another request, nor of another item of its own; one item has one decoder for all its plans."""
    assert outcome["seen by another"] == [[], []]
    assert outcome["seen by the same"] == ["10.1.0"]


def test_a_decoder_has_nothing_of_the_run(outcome: dict[str, Any]) -> None:
    facts = outcome["facts"]
    assert facts["of the run"] == []
    assert facts["descriptors"].count("socket") == 1 and set(facts["descriptors"]) <= {"socket", "pipe", "/dev/null"}
    assert facts["capabilities"]


def test_a_decoder_is_in_all_walls_and_can_begin_no_process(outcome: dict[str, Any]) -> None:
    if "media are decoded with more rights than needed" in outcome["said"]:
        pytest.skip(outcome["said"])
    assert set(outcome["attempts"]) == set(ATTEMPTS)
    files = {"list", "processes", "a file", "code", "own memory"}
    assert {outcome["attempts"][name] for name in files} <= {"EACCES", "ENOENT"}
    assert {outcome["attempts"][name] for name in set(ATTEMPTS) - files} == {"EPERM"}
    assert outcome["deaths"] == dict.fromkeys(DEADLY, "Died")
    assert outcome["said"].count("was ended by SIGSYS") == len(DEADLY)
    assert outcome["facts"]["filters"] >= 2  # its template's and its own
    if "have no namespaces of their own" not in outcome["said"]:
        assert outcome["facts"]["namespaces"] == ["net", "ipc", "uts", "mnt", "pid"] and len(outcome["facts"]["numbers"]) == 2
    assert os.getuid() or outcome["facts"]["uid"] != 0


def test_one_that_crashes_hangs_or_lies_ends_its_plan_alone(outcome: dict[str, Any]) -> None:
    assert (outcome["exit"], outcome["hang"]) == ("Died", "Died")
    assert outcome["forged"] == dict.fromkeys((*(f"forge:{name}" for name in FORGED), "leave late"), "Died")
    assert outcome["forged rows"] == dict.fromkeys(FORGED_ROWS, "Died"), "pages that it leaves out hold rows of earlier requests"
    assert outcome["raised"] == "RuntimeError: a fault of ours"
    assert outcome["left"] == outcome["left after forgery"] == 1  # the one that was forked ahead
    for text in ("hang was ended by SIGKILL: it hangs, and is ended", "exit ended with status 3", "rows that are not its plan's"):
        assert text in outcome["said"]


def test_a_plan_has_its_time_whatever_its_decoders_do(outcome: dict[str, Any]) -> None:
    """Of one second: also where the decoder never pauses, or ends and is followed by another."""
    for name in ("forge:a drop at a time", "forge:drops without a pause", "leave late"):
        assert 0.99 <= outcome["seconds"][name] < 10, name


def test_a_plan_that_fails_leaves_nothing_to_the_next_of_its_item(outcome: dict[str, Any]) -> None:
    assert outcome["after too few pages"] == "Done"


def test_decoders_that_end_in_quick_succession_are_waited_for(outcome: dict[str, Any]) -> None:
    assert outcome["children"] < 30, "of 60"
    assert outcome["children after a slow end"] == 1, "the one that was forked ahead"


def test_few_decoders_are_kept_and_none_that_is_not_wanted(outcome: dict[str, Any]) -> None:
    assert (outcome["many"], outcome["wanted"]) == (isolated.MAX_KEPT, 3)


def test_whoever_kills_the_template_kills_its_process_and_all_decoders(outcome: dict[str, Any]) -> None:
    assert outcome["status"] == -signal.SIGKILL and "the template of decoders has ended" in outcome["said"]
    assert outcome["below"] >= 3 and outcome["alive"] == []


@pytest.mark.parametrize(("num_threads", "kept"), [(4, 8), (20, 8), (80, 3), (160, 1), (500, 1)])
def test_all_decoders_together_have_the_threads_that_a_user_may_have(num_threads: int, kept: int) -> None:
    """Two workers, each with one at work."""
    assert worker._max_kept(num_threads) == kept
    assert num_threads > 160 or 2 * (kept + 1) * num_threads <= MAX_THREADS


class DebuggedActor:
    session = object()
    config = convert_config({"media": {"isolation": "process"}})


def test_a_debugger_has_the_decoder_in_its_own_process(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert worker._begin_template(DebuggedActor(), 1 << 30) is None  # type: ignore[arg-type]
    assert "media are decoded in this process, which is being debugged" in caplog.text


def test_a_gpu_decodes_in_one_process() -> None:
    settings = {"model": {"device": "cuda"}, "media": {"isolation": "process", "gpu_jpegs": True}}
    with pytest.raises(ConfigError, match="media.isolation = 'process': a GPU decodes in one process"):
        convert_config(settings)
