"""The autoscaler follows samples of a run, says why, and never takes the run with it. ``end_to_end/test_scale`` has a real run."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmrt.runtime.autoscale.demand import Demand
from mmrt.runtime.autoscale.observer import idle_seconds
from mmrt.runtime.autoscale.scaler import Sample
from mmrt.runtime.config.runtime_config import RuntimeConfig, parse_config, with_layout
from mmrt.runtime.errors import ConfigError, RunError
from mmrt.runtime.stage_table import InstanceId
from mmrt.runtime.supervisor import autoscaler
from mmrt.runtime.supervisor.autoscaler import Autoscaler

ENCODER = InstanceId("encoder")
SETTINGS = "[autoscale]\nenabled = true\nevery_s = 0.5\ncalm_s = 5.0\nmost = 3\n"


class Run:
    """A run whose encoder is asked for more, or nothing. Time passes by looks, and ``change`` sets what is asked for."""

    def __init__(self, settings: str = SETTINGS, refusal: str = "") -> None:
        self.config: RuntimeConfig = parse_config(settings)
        self.said: list[str] = []
        self.layouts: list[str] = []
        self.refusal = refusal
        self.looks = 0
        self.rows = 0
        self.idle_cores = 1.0
        self.failure: Exception | None = None
        self.can_scale = True

    def say(self, text: str) -> None:
        self.said.append(text)

    def close(self) -> None:
        pass

    def look(self) -> tuple[Sample, Demand]:
        self.looks += 1
        if self.failure is not None:
            raise self.failure
        is_busy = self.looks < 20
        self.rows += 100 if is_busy else 0
        left = 2000 if is_busy else 0
        busy_s, units = {ENCODER: 0.01 * self.rows}, {ENCODER: self.rows}
        return Sample(at_s=float(self.looks), busy_s=busy_s, units=units, rows_left=left, idle_cores=self.idle_cores), Demand()

    async def change(self, layout: str) -> None:
        if self.refusal:
            raise RunError(self.refusal)
        self.layouts.append(layout)
        self.config = with_layout(self.config, layout)


def follow(run: Run, is_done: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the autoscaler work until then, without its pauses."""
    pause = asyncio.sleep

    async def test() -> None:
        monkeypatch.setattr(asyncio, "sleep", lambda _: pause(0))
        task = asyncio.create_task(Autoscaler(run, lambda: run, run.change).scale())
        async with asyncio.timeout(20):
            while not is_done() and not task.done():
                await pause(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(test())


def test_processes_come_with_the_work_and_go_after_a_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    follow(run, lambda: run.looks > 40, monkeypatch)
    assert run.layouts == ["E+P+D+E", "E+P+D+2E", "E+P+D"], "three were the most, and one does without work"
    assert run.said[0].startswith("autoscale has set layout E+P+D+E (E: 1 → 2, ") and "would have done for" in run.said[-1]


def test_a_configured_layout_may_have_more_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler, "read_processors", lambda: SimpleNamespace(num_cores=2))
    layouts = ("E+P+D", "5E+P+D", "2EP+D")
    assert [autoscaler.most_of(parse_config(f'[actors]\nlayout = "{layout}"\n')) for layout in layouts] == [2, 5, 2]


def test_a_dry_run_says_each_layout_once_and_sets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(SETTINGS + "dry_run = true\n")
    follow(run, lambda: run.looks > 15, monkeypatch)
    assert run.config.actors.layout == "E+P+D"
    assert [text.split(" (")[0] for text in run.said] == ["autoscale would set layout E+P+D+E"]


def test_none_come_where_no_core_is_idle_and_those_that_are_too_many_go(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.idle_cores = 0.4
    follow(run, lambda: run.looks > 15, monkeypatch)
    assert run.layouts == [] and len(run.said) == 1
    assert run.said[0].startswith("autoscale keeps the layout (E: 1 → 2, ") and run.said[0].endswith("but 0.4 cores are idle)")
    ready = Run(SETTINGS + "idle_cores = 0\n")
    ready.idle_cores = 0.0
    follow(ready, lambda: ready.looks > 40, monkeypatch)
    assert ready.layouts == ["E+P+D+E", "E+P+D+2E", "E+P+D"]
    full = Run('[actors]\nlayout = "3E+P+D"\n' + SETTINGS)
    full.idle_cores, full.looks = 0.0, 30
    follow(full, lambda: full.looks > 50, monkeypatch)
    assert full.layouts == ["E+P+D"]


def test_idle_time_is_that_of_the_usable_processors(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  9 9 9 900 9 0\ncpu0 1 1 1 100 50 0\ncpu1 1 1 1 300 0 0\nintr 1\n")
    ticks = os.sysconf("SC_CLK_TCK")
    assert idle_seconds(stat, [0]) == 150 / ticks and idle_seconds(stat, [0, 1]) == 450 / ticks
    assert idle_seconds(stat, [0, 2]) is idle_seconds(tmp_path / "none", [0]) is None, "a container may number its own anew"
    before = idle_seconds()
    assert before is not None
    assert 0 <= idle_seconds() - before < 60


def test_a_refusal_is_said_once_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(refusal="encoder.1 needs 300 MiB; 20 MiB are free")
    follow(run, lambda: run.looks > 15, monkeypatch)
    (said,) = run.said
    assert said.endswith("is refused: encoder.1 needs 300 MiB; 20 MiB are free") and run.config.actors.layout == "E+P+D"


def test_its_failure_ends_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.failure = ZeroDivisionError("a bug")
    follow(run, lambda: False, monkeypatch)
    assert run.said == ["autoscale has failed and is off; the layout stays as it is (mmrt layout, mmrt scale)"] and run.looks == 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ('[model]\ndevice = "cuda"\n', "the layout of a run on cuda is set at the start"),
        ('[scheduling]\npreset = "split"\n', "keeps its layout"),
    ],
)
def test_where_it_cannot_be(more: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^autoscale.enabled: .*{says}"):
        parse_config(SETTINGS + more)
