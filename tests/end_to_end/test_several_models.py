"""``mmrt serve``: real runs of two tiny models behind one endpoint, and a front that dies and comes back."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from mmrt.cli.status import read_any_report
from mmrt.runtime.errors import RunError
from mmrt.runtime.supervisor.run_report import FrontReport, ModelReport
from mmrt.tests.end_to_end.conftest import MMRT

QUESTION = [{"role": "user", "content": "What is there to see?"}]
ANSWER = {"max_tokens": 8, "temperature": 0}
_LOOK_S = 0.05


class Several:
    """A front of models, and what is left of it."""

    def __init__(self, folder: Path, models: dict[str, Path], memory: str, turn_s: float = 0.5) -> None:
        self.path = Path(f"/dev/shm/mmrt-test-{os.getpid()}-{folder.name}"[:50])
        self.environment = {**os.environ, "MMRT_RUN_DIR": str(self.path), "XDG_STATE_HOME": str(folder / "state")}
        self.file = folder / "models.toml"
        tables = "".join(f'[[model]]\nname = "{name}"\npath = "{path}"\n' for name, path in models.items())
        self.file.write_text(f'[server]\nport = 0\n[front]\nmemory = "{memory}"\nturn_s = {turn_s}\n{tables}')

    def mmrt(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*MMRT, *arguments], env=self.environment, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL
        )

    def begin(self) -> None:
        done = self.mmrt("serve", str(self.file), "-d")
        assert done.returncode == 0, done.stdout + done.stderr
        self.url = self.report().endpoint

    def report(self) -> FrontReport:
        report = read_any_report(self.path)
        assert isinstance(report, FrontReport)
        return report

    def model(self, name: str) -> ModelReport:
        return next(model for model in self.report().models if model.name == name)

    def ask(self, name: str, **more: Any) -> httpx2.Response:
        body = {"model": name, "messages": QUESTION, **ANSWER, **more}
        return httpx2.post(f"{self.url}/v1/chat/completions", json=body, timeout=180)

    def kill_front(self) -> None:
        pid = self.report().pid
        os.kill(pid, signal.SIGKILL)
        wait(lambda: not Path(f"/proc/{pid}").exists(), "the front's end")

    def left(self) -> list[str]:
        """Processes and files of the front and its runs."""
        found = [str(path) for path in self.path.parent.glob(f"{self.path.name}*")]
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"MMRT_RUN_DIR={self.path}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().decode())
            except OSError:
                continue
        return found


def wait(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come"
        time.sleep(_LOOK_S)


def text_of(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.fixture
def two(tmp_path: Path, checkpoints: Callable[[str], Path]) -> Iterator[Several]:
    """A front of two models with memory for one."""
    front = Several(tmp_path, {"seeing": checkpoints("qwen2_5_vl"), "Org/text": checkpoints("qwen3")}, "1.7 GiB")
    front.begin()
    yield front
    front.mmrt("down", "--drain", "0")


def test_a_model_is_loaded_when_it_is_asked_for_and_outlives_its_front(two: Several) -> None:
    listed = httpx2.get(f"{two.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["seeing", "Org/text"]
    assert {model["status"]["value"] for model in listed} == {"unloaded"}, "nobody has asked"
    answer = text_of(two.ask("seeing"))
    run = two.model("seeing")
    assert (run.state, run.run, two.model("Org/text").state) == ("ready", f"{two.path.name}.seeing", "absent")
    assert [model["name"] for model in httpx2.get(f"{two.url}/api/ps").json()["models"]] == ["seeing"]
    shown = two.mmrt("status").stdout
    assert "seeing    ready" in shown and run.run in shown and f"{two.path.name}.Org-text" in shown
    assert f"seeing    ready   text, image, video  {run.model}" in two.mmrt("list").stdout

    two.kill_front()
    with pytest.raises(RunError, match=f"its front is gone, and runs go on: {run.run} "):
        two.report()
    two.begin()
    wait(lambda: two.model("seeing").state == "ready", "the run")
    assert text_of(two.ask("seeing")) == answer and two.model("seeing").pid == run.pid, "it was not loaded anew"
    lines = [line for line in two.ask("seeing", stream=True).text.split("\n\n") if line.startswith("data: {")]
    assert "".join(json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in lines) == answer
    assert "found its run" in two.mmrt("logs", "front").stdout
    told = two.mmrt("restart", "decode").stderr
    assert f"is the front of several models: name the run of one of them, --run {run.run}" in told

    two.kill_front()
    assert f"{run.run}: its front is gone\nthe run is down\n" in two.mmrt("down").stdout
    wait(lambda: two.left() == [], "an end of everything")  # of a check of a checkpoint, too


@pytest.mark.slow  # starts of runs take most of it
def test_models_take_turns_in_the_memory_of_one(two: Several) -> None:
    msgspec.to_builtins(two.report())
