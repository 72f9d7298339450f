"""``mmrt cache``: what it shows of the controller's counts, and when nobody answers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrt.cli import cache
from mmrt.cli.main import run
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.process.memory_layout import plan_layout, write_layout
from mmrt.schema.model_facts import ModelFacts
from mmrt.shm.controller_stats import ControllerStats, PoolUse, StatsSnapshot
from mmrt.shm.run_directory import RunDirectory

Captured = pytest.CaptureFixture[str]
FACTS = ModelFacts(kv_page_bytes=512, embedding_row_bytes=128, max_context=1000, patch_row_bytes=1176)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    monkeypatch.setenv("MMRT_RUN_DIR", str(tmp_path / "run"))
    with RunDirectory.create(tmp_path / "run", {}) as directory:
        yield directory
        directory.destroy()


def test_show(directory: RunDirectory, capsys: Captured) -> None:
    assert run(["cache", "show"]) == 1 and "only just starting" in capsys.readouterr().err
    write_layout(directory.path, plan_layout(RuntimeConfig(), FACTS, "float32"))
    stats = ControllerStats.create(directory)
    assert run(["cache", "show"]) == 0 and "-" in capsys.readouterr().out, "before the first request"
    pools = {"kv": PoolUse(4096, 40, 30, 20), "embedding": PoolUse(512, 0, 9, 9)}
    stats.publish(
        StatsSnapshot(pools=pools, looked_up_tokens_total=640, cached_tokens_total=160, media_queries_total=3, media_hits_total=2)
    )
    assert run(["cache", "show"]) == 0
    heading, prefix, media = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heading[:7] == ["CACHE", "POOL", "PAGES", "USED", "CACHED", "EVICTABLE", "TOKENS"]
    assert prefix == ["prefix", "kv", "4096", "40", "30", "20", "480", "640", "160", "25.0%"]
    assert media == ["media", "embedding", "512", "0", "9", "9", "288", "3", "2", "66.7%"]
    assert run(["cache", "show", "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [(report["name"], report["evictable_pages"], report["hits"]) for report in reports] == [("prefix", 20, 160), ("media", 9, 2)]
    stats.publish(StatsSnapshot(pools={**pools, "window": PoolUse(99, 9, 8, 7), "window.1": PoolUse(99), "state": PoolUse(6, 2, 3, 1)}))
    assert run(["cache", "show"]) == 0
    _, _, windows, states, _ = (line.split() for line in capsys.readouterr().out.splitlines())
    assert windows == ["windows", "window", "198", "9", "8", "7", "128", "0", "0", "-"]
    assert states == ["states", "state", "6", "2", "3", "1", "-", "0", "0", "-"]


def test_clear_without_a_controller(directory: RunDirectory, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_TIMEOUT_S", 0.3)
    assert run(["cache", "clear"]) == 1
    assert "did not answer within 0.3 s (mmrt status)" in capsys.readouterr().err
