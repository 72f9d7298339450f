"""``mmrt serve``: real runs of two tiny models behind one endpoint, and a front that dies and comes back."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mmrt.cli.main import run as run_command
from mmrt.cli.status import read_any_report, read_report
from mmrt.runtime.errors import RunError
from mmrt.runtime.supervisor.run_report import FrontReport, ModelReport
from mmrt.shm.errors import ShmError
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.end_to_end.conftest import MMRT

QUESTION = [{"role": "user", "content": "What is there to see?"}]
ANSWER = {"max_tokens": 8, "temperature": 0}
SWITCHES = int(os.environ.get("MMRT_TEST_SWITCHES", "50"))
# In turn; the model whose start is killed is not tried again for a minute.
KILLS = ("run", "actor", "front", "actor", "run", "front", "actor", "start", "run", "front")
_LOOK_S = 0.05


class Several:
    """A front of models, and what is left of it."""

    def __init__(self, folder: Path, models: dict[str, Path], memory: str, turn_s: float = 0.5) -> None:
        self.path = Path(f"/dev/shm/mmrt-test-{os.getpid()}-{folder.name}"[:50])
        self.environment = {**os.environ, "COLUMNS": "200", "MMRT_RUN_DIR": str(self.path), "XDG_STATE_HOME": str(folder / "state")}
        self.file = folder / "models.toml"
        tables = "".join(f'[[model]]\nname = "{name}"\npath = "{path}"\n' for name, path in models.items())
        self.file.write_text(f'[server]\nport = {free_port()}\n[front]\nmemory = "{memory}"\nturn_s = {turn_s}\n{tables}')

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

    def switches(self) -> int:
        """How often another model was served than before, by the log."""
        log = (Path(self.environment["XDG_STATE_HOME"]) / "mmrt" / self.path.name / "front.log").read_text()
        served = re.findall(r" (\S+): (?:ready after|found its run)", log)
        return sum(before != after for before, after in pairwise(served))

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


def free_port() -> int:
    """A port that nobody listens on: the next front has it again."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come"
        time.sleep(_LOOK_S)


def text_of(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def streamed(answer: httpx2.Response) -> str:
    """The text of a stream."""
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def kill(pid: int | None) -> None:
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def two(tmp_path: Path, checkpoints: Callable[[str], Path]) -> Iterator[Several]:
    """A front of two models with memory for one."""
    front = Several(tmp_path, {"seeing": checkpoints("qwen2_5_vl"), "Org/text": checkpoints("qwen3")}, "1.2 GiB")
    front.begin()
    yield front
    front.mmrt("down", "--drain", "0")


def test_a_model_is_loaded_when_it_is_asked_for_and_outlives_its_front(
    two: Several, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in two.environment.items():
        monkeypatch.setenv(name, value)

    def mmrt(*arguments: str) -> "tuple[int, str, str]":  # without another process: imports take most of their time
        capsys.readouterr()
        return run_command(arguments), *capsys.readouterr()

    listed = httpx2.get(f"{two.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["seeing", "Org/text"]
    assert {model["status"]["value"] for model in listed} == {"unloaded"}, "nobody has asked"
    answer = text_of(two.ask("seeing"))
    run = two.model("seeing")
    assert (run.state, run.run, two.model("Org/text").state) == ("ready", f"{two.path.name}.seeing", "absent")
    assert [model["name"] for model in httpx2.get(f"{two.url}/api/ps").json()["models"]] == ["seeing"]
    shown = mmrt("status")[1]
    assert "seeing    ready" in shown and run.run in shown and f"{two.path.name}.Org-text" in shown
    assert f"seeing    ready   text, image, video  {run.model}" in mmrt("show")[1]

    two.kill_front()
    with pytest.raises(RunError, match=f"its front is gone, and runs go on: {run.run} "):
        two.report()
    two.begin()
    wait(lambda: two.model("seeing").state == "ready", "the run")
    assert text_of(two.ask("seeing")) == answer and two.model("seeing").pid == run.pid, "it was not loaded anew"
    assert streamed(two.ask("seeing", stream=True)) == answer
    assert "found its run" in mmrt("logs", "front")[1]
    for command in (["restart", "decode"], ["trace"]):
        status, _, told = mmrt(*command)
        assert status == 1 and f"is the front of several models: name the run of one, --run {run.run}" in told

    two.kill_front()
    assert f"{run.run}: its front is gone\nthe run is down\n" in mmrt("down")[1]
    wait(lambda: two.left() == [], "an end of everything")  # of a check of a checkpoint, too


class Clients:
    """Clients of both models, until they are told to end. An answer that is whole must be the model's own."""

    def __init__(self, front: Several, answers: dict[str, str]) -> None:
        self._front = front
        self._answers = answers
        self._ended = threading.Event()
        self.wrong: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._ask_always, args=(random.Random(seed),)) for seed in range(4)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(200)

    def _ask_always(self, chance: random.Random) -> None:
        while not self._ended.is_set():
            name, is_stream = chance.choice(sorted(self._answers)), chance.random() < 0.5
            try:
                outcome = self._ask(name, is_stream)
            except httpx2.HTTPError as error:  # the front, or a run within an answer, was killed
                outcome = type(error).__name__
            self.outcomes[outcome] += 1
            time.sleep(chance.random() / (10 if outcome == "right" else 2))

    def _ask(self, name: str, is_stream: bool) -> str:
        answer = self._front.ask(name, stream=is_stream)
        if answer.status_code != 200:
            return f"{answer.status_code}: {answer.json()['error']['message'][:80]}"
        if is_stream and '"error"' in answer.text:
            return "a stream ends with an error"
        text = streamed(answer) if is_stream else text_of(answer)
        if text != self._answers[name]:
            self.wrong.append(f"{name}: {answer.text}")
        return "right"


class Killer:
    """Kills processes of a front and of its runs, at any moment of what they do."""

    def __init__(self, front: Several) -> None:
        self._front = front
        self._chance = random.Random(1)
        self.kills: Counter[str] = Counter()

    def strike(self, what: str) -> None:
        """Kill the front, which is started again; the supervisor or an actor of a run that serves; or a process of one that starts."""
        if what == "front":
            time.sleep(self._chance.uniform(0, 8))
            self._front.kill_front()
            self._front.begin()
        elif model := self._find("loading" if what == "start" else "ready"):
            time.sleep(self._chance.uniform(0, 5 if what == "start" else 0.5))
            self._kill_one_of(model, what)
        else:
            what = "nobody"
        self.kills[what] += 1

    def _find(self, state: str) -> ModelReport | None:
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            if found := next((model for model in self._front.report().models if model.state == state), None):
                return found
            time.sleep(_LOOK_S)
        return None

    def _kill_one_of(self, model: ModelReport, what: str) -> None:
        path = Path(model.run_path)
        with contextlib.suppress(RunError, ShmError):  # it ends, or has not begun
            if what == "run":
                kill(model.pid)
            elif what == "actor":
                kill(self._chance.choice(read_report(path).actors).pid)
            else:
                with RunDirectory.attach(path, 0.0) as run:
                    kill(self._chance.choice([pid for pid in run.pids() if pid != os.getpid()]))


@pytest.mark.slow  # starts of runs take most of it
@pytest.mark.timeout(7200)  # an hour on a machine that is shared by many
def test_models_take_turns_under_kills_of_runs_and_of_the_front(two: Several) -> None:
    """50 switches. Nobody gets a wrong answer, and nothing is left."""
    answers = {name: text_of(two.ask(name)) for name in ("seeing", "Org/text")}
    assert answers["seeing"] != answers["Org/text"], "an answer of the other one would be seen"
    killer = Killer(two)
    with Clients(two, answers) as clients:
        while (num_switches := two.switches()) < SWITCHES:
            killer.strike(KILLS[killer.kills.total() % len(KILLS)])
            wait(lambda before=num_switches: two.switches() > before, "another switch", 300)  # type: ignore[misc]
            assert not clients.wrong
    print(num_switches, dict(killer.kills), dict(clients.outcomes))
    assert not clients.wrong and clients.outcomes["right"] > num_switches
    assert {name: text_of(two.ask(name)) for name in answers} == answers
    assert two.mmrt("down").stdout.endswith("the front and its runs are down\n")
    wait(lambda: two.left() == [], "an end of everything")
