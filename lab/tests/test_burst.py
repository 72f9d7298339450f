"""The bench of bursts: its figures of known records, and a small burst on a run of its own."""

import json
import socketserver
import threading
import time
from pathlib import Path

import pytest

from mmrt.bench.serve.record import Chunk, Record
from mmrt_lab.micro.burst import _costs, _longest, _Used, main, send


def test_the_longest_silence_counts_its_ends() -> None:
    record = Record(index=0, group="", scheduled_s=0.0, chunks=[Chunk(time_s, 1) for time_s in (1.0, 2.0, 2.5, 9.0)])
    assert _longest([record], 1.5, 4.0) == 1.5 and _longest([record], 0.0, 2.1) == 1.0


def test_costs_are_beyond_those_of_the_streams() -> None:
    times = [_Used(time_s, {"gateway": used_s}) for time_s, used_s in ((0.0, 1.0), (2.0, 2.0), (4.0, 5.0))]
    assert _costs(*times, 10) == {"gateway": pytest.approx(0.2)}


def test_a_small_burst(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert main(["--requests", "20", "--streams", "2", "--rounds", "1", "--json", str(file)]) == 0
    (burst,) = json.loads(file.read_text())["bursts"]
    assert burst["num_failed"] == 0 and 0 < burst["ttft_p50_s"] <= burst["ttft_p99_s"] and burst["cost_s"]["gateway"]


def test_requests_at_a_rate_without_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main(["--requests", "20", "--rate", "40", "--streams", "0", "--rounds", "1", "--json", str(file)]) == 0
    bench = json.loads(file.read_text())
    (burst,) = bench["bursts"]
    assert bench["rate"] == 40.0 and burst["num_failed"] == 0 and burst["silent_s"] == 0.0
    assert "20 requests at 40/s beside 0 streams" in " ".join(capsys.readouterr().out.split())


def test_no_request_at_a_rate_is_sent_before_its_time() -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:  # closes each connection
        threading.Thread(target=server.serve_forever, daemon=True).start()
        began_s = time.monotonic()
        records = send(f"http://127.0.0.1:{server.server_address[1]}", b"", 6, 20.0)
        server.shutdown()
    assert all(record.sent_s - began_s >= index / 20.0 - 0.01 for index, record in enumerate(records))


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--requests", "0"])
    assert "--requests" in capsys.readouterr().err
