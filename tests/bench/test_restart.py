"""The restart bench: silence out of records, and arguments that are refused."""

import asyncio
import json
import socket
import struct
from typing import Any

import pytest

from mmrt.bench.restart import _Trials, main, silence_of_others
from mmrt.bench.serve.client import open_session
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.record import Chunk, Record
from mmrt.bench.serve.steady_streams import SteadyStreams, longest_silence


def record(*times_s: float) -> Record:
    return Record(index=0, group="", scheduled_s=0.0, chunks=[Chunk(time_s, 1) for time_s in times_s])


def test_silence_is_the_longest_gap_that_overlaps() -> None:
    records = [record(0.0, 5.0, 5.1, 5.4, 9.0), record(5.2, 5.3)]
    assert longest_silence(records, 5.05, 5.3) == pytest.approx(0.3)
    assert longest_silence(records, 5.05, 6.0) == pytest.approx(3.6), "it lasts beyond the window"
    assert longest_silence(records, 4.0, 4.5) == pytest.approx(5.0), "it covers the window"
    assert longest_silence(records, 10.0, 11.0) == 0.0
    assert longest_silence([], 0.0, 1.0) == 0.0


def test_silence_of_each_stream() -> None:
    streams = SteadyStreams(None, "", "", 2)  # type: ignore[arg-type]
    again = Record(index=1, group="", scheduled_s=0.0, chunks=[Chunk(8.0, 1), Chunk(8.5, 1)])
    streams._ended = [Record(index=1, group="", scheduled_s=0.0, chunks=[Chunk(5.0, 1), Chunk(7.0, 1)])]
    streams._current = [record(5.0, 5.5), again]
    assert streams.silences(5.0, 9.0) == [0.5, 2.0]


def test_streams_have_no_ends_whose_lack_of_text_looks_like_silence() -> None:
    body = json.loads(SteadyStreams(None, "", "", 1)._body(0))  # type: ignore[arg-type]
    assert body["min_tokens"] == body["max_tokens"] and "ignore_eos" not in body


def test_the_streams_of_a_killed_decode_are_left_out_however_many_it_had() -> None:
    silences = [0.9, 0.02, 0.8, 0.7]
    assert silence_of_others(silences, 3) == 0.02 and silence_of_others(silences, 0) == 0.9
    assert silence_of_others(silences, 4) is None


def test_streams_that_keep_failing_are_reported() -> None:
    async def run() -> None:
        async with open_session(5.0) as session:
            streams = SteadyStreams(session, "http://127.0.0.1:1", "model", 2)
            async with streams.running():
                await streams.flow()

    with pytest.raises(BenchError, match="a stream failed 3 times in a row"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--count", "0"], "0 must be at least 1"),
        (["--streams", "-1"], "-1 must be at least 1"),
        (["--reloads", "-1"], "-1 must be at least 0"),
        (["--drains", "-1"], "-1 must be at least 0"),
        (["--count", "many"], "invalid int value: 'many'"),
        (["--actors", "decoed"], "invalid choice: 'decoed'"),
        (["--kinds", "nudge"], "invalid choice: 'nudge'"),
    ],
)
def test_bad_arguments(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and complaint in capsys.readouterr().err


def test_a_model_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "/nowhere", "--count", "1"]) == 1
    assert "model.path = '/nowhere'" in capsys.readouterr().err


def test_connections_that_a_dying_gateway_resets_are_tried_again() -> None:
    num_accepted = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_accepted
        num_accepted += 1
        if num_accepted < 3:
            at_once = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            writer.transport.abort()
            return
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def answered() -> float:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        nobody: Any = None
        async with server, open_session(5.0) as session:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await _Trials(nobody, nobody, nobody, nobody, session, url, nobody)._answer_after(lambda: asyncio.sleep(0.2))

    assert 0 < asyncio.run(answered()) < 5
    assert num_accepted > 2
