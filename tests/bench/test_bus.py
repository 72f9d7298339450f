"""The bus bench with small sizes: every transport moves everything, figures come out, and nothing stays behind."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrt.bench.micro.bus import LatencyResult, ThroughputResult, judge, main, show_size
from mmrt.bench.micro.bus_latency import LATENCIES, PeerError
from mmrt.bench.micro.bus_throughput import BULKS, RATES, Payloads, PoolOverBus, PoolOverRing
from mmrt.bench.serve.report import Distribution
from mmrt.shm.run_directory import RunDirectory


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where run directories are made."""
    monkeypatch.setenv("MMRT_RUN_DIR", str(tmp_path / "run"))
    return tmp_path


def test_all_transports(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(
        ["--sizes", "100K", "--rounds", "2", "--pings", "5", "--gap-ms", "1", "--messages", "20", "--megabytes", "1", "--json", "-"]
    )
    captured = capsys.readouterr()
    assert status == 0, captured.err
    report: dict[str, Any] = json.loads(captured.out)
    assert len(report["latency"]) == len(LATENCIES) == 5
    assert all(result["hot"]["count"] == 10 and result["hot"]["min"] > 0 for result in report["latency"])
    assert len(report["rate"]) == len(RATES) and len(report["bulk"]) == len(BULKS)
    assert all(result["bytes_per_s"] > 0 for result in report["rate"] + report["bulk"])
    ratios = {result["name"]: result["ratio"] for result in report["bulk"]}
    assert ratios["memcpy"] == 1.0 and all(ratio > 0 for ratio in ratios.values())
    assert "of memcpy" in captured.err
    assert list(runs.iterdir()) == []


@pytest.mark.parametrize("transport", [PoolOverBus, PoolOverRing])
def test_a_dead_peer_is_noticed(runs: Path, transport: Any) -> None:
    payloads = Payloads(1 << 16)
    with RunDirectory.create(runs / "run", {}) as run:
        bulk = transport(run, payloads)
        peer = (bulk._bus if transport is PoolOverBus else bulk._peer)._peer
        peer._process.kill()
        with pytest.raises(PeerError, match="died"):
            bulk.transfer(payloads, 3 * payloads.num_slots)
        bulk.close()


def test_payloads_differ_and_come_again() -> None:
    payloads = Payloads(1 << 20)
    assert payloads.num_slots == 32 and Payloads(48 << 20).num_slots == 2
    assert not np.array_equal(payloads[0], payloads[1])
    assert np.array_equal(payloads[0], payloads[32])


def spread(p50: float) -> Distribution:
    return Distribution(count=1, mean=p50, min=p50, p50=p50, p90=p50, p95=p50, p99=p50, max=p50)


def test_targets_are_ours_alone_and_from_one_mebibyte_on() -> None:
    latency = [
        LatencyResult(name=name, wakes_loop=True, hot=spread(p50), after_gap=spread(p50))
        for name, p50 in (("mmrt bus", 50e-6), ("mmrt ring", 150e-6), ("ZeroMQ", 9.0))
    ]
    bulk = [
        ThroughputResult(name=name, num_bytes=num_bytes, messages_per_s=1, bytes_per_s=1, ratio=ratio, best_ratio=1.0)
        for name, num_bytes, ratio in (("mmrt pool", 1 << 20, 0.95), ("mmrt pool", 1 << 16, 0.1), ("memcpy", 1 << 20, 1.0))
    ]
    assert list(judge(latency, bulk).values()) == [True, False, True]


def test_sizes() -> None:
    assert [show_size(size) for size in (64, 1 << 10, 3 << 19)] == ["64 B", "1 KiB", "1.5 MiB"]


@pytest.mark.parametrize("arguments", [["--sizes", "1G"], ["--sizes", "0"], ["--rounds", "0"]])
def test_bad_command_lines(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
