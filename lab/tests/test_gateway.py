"""The bench of the gateway pairs requests with its flight records, takes processor time, and refuses bad options."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from mmrt.runtime.observe.flight import Kind, pack_id
from mmrt.shm.flight_recorder import FlightRecorder
from mmrt.shm.run_directory import RunDirectory
from mmrt_lab.micro.gateway import _added, _processor_s, main
from mmrt_lab.micro.raw_client import RawStream


def test_requests_are_paired_with_what_is_recorded_of_them(tmp_path: Path) -> None:
    async def make(number: int, *pieces: tuple[float, bytes]) -> RawStream:
        stream = RawStream(b"")
        stream.sent_s, stream.pieces = 10.0 + number, list(pieces)
        return stream

    id = f"chatcmpl-{7:024x}"
    headers, text = (12.0, b"HTTP/1.1 200 OK\r\n"), (12.5, b'data: {"id":"' + id.encode() + b'","choices":[]}\n\n')
    streams = [asyncio.run(make(number, *pieces)) for number, pieces in enumerate(((headers, text), (headers,)))]
    with RunDirectory.create(tmp_path / "run", {}) as run:
        writer = FlightRecorder.create(run, "gateway").writer(1)
        writer.record(Kind.RECEIVED, 10_250_000_000, 0, 3, *pack_id(id), 0)
        writer.record(Kind.FIRST_TEXT, 12_375_000_000, 0, 3)
        (found,) = _added(run.path, streams)
    assert (found.before_s, found.behind_s) == (0.25, 0.125)


def test_processor_time_of_a_process() -> None:
    before_s, began_s = _processor_s(os.getpid()), time.process_time()
    while time.process_time() - began_s < 0.02:
        pass
    assert 0.02 <= _processor_s(os.getpid()) - before_s < 1


@pytest.mark.parametrize("option", ["--rate", "--seconds", "--replies"])
def test_bad_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([option, "0"])
    assert caught.value.code == 2 and option in capsys.readouterr().err
