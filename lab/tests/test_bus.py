"""The bus bench with small numbers: every link moves everything, figures come out, and nothing stays behind."""

import json
from pathlib import Path
from typing import Any

import pytest

from mmrt.bench.serve.report import Distribution
from mmrt.shm.run_directory import RunDirectory
from mmrt_lab.micro.bus import SIZES, BulkResult, LatencyResult, judge, main, make_payloads
from mmrt_lab.micro.links import LINKS, PageLink, PeerError, bus_link, ring_link


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where run directories are made."""
    monkeypatch.setenv("MMRT_RUN_DIR", str(tmp_path / "run"))
    return tmp_path


def test_all_links(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--rounds", "2", "--pings", "5", "--megabytes", "1", "--json", "-"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    report: dict[str, Any] = json.loads(captured.out)
    assert len(report["latency"]) == len(LINKS) == 4
    assert all(result["hot"]["count"] == 10 and result["hot"]["min"] > 0 for result in report["latency"])
    assert len(report["bulk"]) == len(SIZES) * (len(LINKS) + 1)
    assert all(result["bytes_per_s"] > 0 and result["ratio"] > 0 for result in report["bulk"])
    assert {result["ratio"] for result in report["bulk"] if result["name"] == "memcpy"} == {1.0}
    assert "of memcpy" in captured.err
    assert list(runs.iterdir()) == []


@pytest.mark.parametrize("make", [bus_link, ring_link])
def test_a_dead_peer_is_noticed(runs: Path, make: Any) -> None:
    with RunDirectory.create(runs / "run", {}) as run:
        link: PageLink = make(run)
        link._peer._process.kill()
        with pytest.raises(PeerError, match="died"):
            link.move(make_payloads(8 << 20), 100)
        link.close()


def test_payloads_differ_and_are_larger_than_the_caches() -> None:
    payloads = make_payloads(1 << 20)
    assert len(payloads) == 32 and len(make_payloads(48 << 20)) == 2
    assert payloads[0] != payloads[1] and len(payloads[1]) == 1 << 20


def spread(p50: float) -> Distribution:
    return Distribution(count=1, mean=p50, min=p50, p50=p50, p90=p50, p95=p50, p99=p50, max=p50)


def test_targets_are_ours_alone() -> None:
    latency = [
        LatencyResult(name=name, hot=spread(p50), after_gap=spread(p50))
        for name, p50 in (("mmrt bus", 50e-6), ("mmrt ring", 150e-6), ("ZeroMQ", 9.0))
    ]
    bulk = [
        BulkResult(name=name, num_bytes=1 << 20, bytes_per_s=1, ratio=ratio)
        for name, ratio in (("mmrt bus", 0.95), ("mmrt ring", 0.1), ("memcpy", 1.0))
    ]
    assert list(judge(latency, bulk).values()) == [True, False, True, False]


@pytest.mark.parametrize("option", ["--rounds", "--pings", "--megabytes"])
def test_bad_command_lines(option: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([option, "0"])
    assert stopped.value.code == 2
