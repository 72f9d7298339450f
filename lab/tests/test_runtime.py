"""The parts of the benches that start runs: the raw client against a real server, and the figures of known samples."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mmrt.bench.own_run import OwnRun, OwnRunError, _changed, processes_of
from mmrt.bench.processes import memory_of
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.record import Chunk, Record
from mmrt.bench.startup import Measurement
from mmrt.models.config import load_model_config
from mmrt.runtime.config.runtime_config import RuntimeConfig, to_data
from mmrt.runtime.config.sections import MemorySection, ModelSection
from mmrt.runtime.supervisor.run_report import ActorReport, RequestsReport, RunReport
from mmrt_lab.micro.raw_client import RawStream, open_streams
from mmrt_lab.micro.runtime import Sample, evaluate, make_bodies, make_null_checkpoint

Script = Callable[[web.StreamResponse, dict[str, Any]], Awaitable[None]]
ToyServer = Callable[[Script], AbstractAsyncContextManager[str]]


def stream(toy_server: ToyServer, script: Script, bodies: list[bytes]) -> list[Record]:
    async def run() -> list[RawStream]:
        async with toy_server(script) as url:
            streams = await open_streams(url, bodies)
            await asyncio.gather(*(stream.finished for stream in streams))
        return streams

    return [raw.record(index) for index, raw in enumerate(asyncio.run(run()))]


def test_raw_streams_are_understood_afterwards(toy_server: ToyServer, honest: Script) -> None:
    records = stream(toy_server, honest, make_bodies(3, 40))
    assert [record.error for record in records] == [None] * 3
    assert [record.num_tokens for record in records] == [40] * 3
    assert all(sum(chunk.num_tokens for chunk in record.chunks) == 40 for record in records)
    assert all(record.sent_s < record.chunks[0].time_s <= record.end_s for record in records)


def test_raw_streams_see_refusals_and_truncation(toy_server: ToyServer) -> None:
    async def silent(response: web.StreamResponse, body: dict[str, Any]) -> None:
        pass

    refused, truncated = stream(toy_server, silent, [*make_bodies(1, 20_000), *make_bodies(1, 5)])
    assert refused.error is not None and "too large" in refused.error
    assert truncated.error == "the stream ended without [DONE]"


def test_raw_streams_to_nobody() -> None:
    with pytest.raises(BenchError, match="no server answers"):
        asyncio.run(open_streams("http://127.0.0.1:1", [b"{}"]))


def test_the_window_is_where_all_streams_run() -> None:
    def record(start_s: float, tokens: int) -> Record:
        chunks = [Chunk(start_s + 0.1 * index, 2) for index in range(tokens)]
        return Record(index=0, group="stream", scheduled_s=0.0, sent_s=0.1, chunks=chunks, end_s=chunks[-1].time_s)

    records = [record(1.0, 41), record(2.0, 41)]  # until 5 and until 6
    samples = [Sample(t / 4, 25 * t, 0.004 * 25 * t, {"decode": 0.05 * t, "client": 0.1 * t}) for t in range(0, 32)]
    result = evaluate(records, samples, step_ms=3.0)
    assert (result.window_s, result.num_failed) == (3.0, 0)  # samples at 2 to 5
    assert result.tokens_per_s == pytest.approx(2 * 2 * 30 / 3, rel=0.05)
    assert result.tokens_per_chunk == 2.0 and result.steps_per_s == pytest.approx(100)
    assert result.host_s == pytest.approx(0.001) and result.loop_s == pytest.approx(0.007) and result.cpu_s == pytest.approx(0.002)
    assert result.cpu_share == pytest.approx({"decode": 0.2, "client": 0.4})
    failed = Record(index=1, group="stream", scheduled_s=0.0, error="gone")
    assert evaluate([*records, failed], samples, 3.0).num_failed == 1
    with pytest.raises(BenchError, match="gone"):
        evaluate([failed], samples, 3.0)
    with pytest.raises(BenchError, match="more tokens"):
        evaluate([record(1.0, 2), record(5.0, 2)], samples, 3.0)


def test_the_null_checkpoint_has_the_step_time(tmp_path: Path) -> None:
    config = load_model_config(make_null_checkpoint(tmp_path / "null", 12.5))
    assert config.null is not None and config.null.step_ms == 12.5
    assert json.loads(make_bodies(1, 7)[0])["ignore_eos"] is True


def test_a_failing_command_tells_what_it_printed(tmp_path: Path) -> None:
    run = OwnRun(tmp_path, tmp_path / "run")
    with pytest.raises(OwnRunError, match=r"mmrt status --json ended with status 1: .*error"):
        run.report()


def test_a_run_is_told_only_what_is_not_usual() -> None:
    """Another version of mmrt may not have the other keys."""
    usual = to_data(RuntimeConfig())
    config = RuntimeConfig(model=ModelSection(path="there"), memory=MemorySection(kv_tokens=64))
    assert _changed(to_data(config), usual) == {"model": {"path": "there"}, "memory": {"kv_tokens": 64}}
    assert _changed(usual, usual) == {}


def test_processes_and_their_memory() -> None:
    actors = [ActorReport(name="decode", state="active", pid=1 << 30), ActorReport(name="video", state="absent")]
    report = RunReport(
        ready=True, state="ready", path="", run_id="", endpoint="", model="", supervisor_pid=os.getpid(), uptime_s=0.0,
        actors=actors, pools={}, requests=RequestsReport(),
    )  # fmt: skip
    found = processes_of(report)
    assert found[os.getpid()] == "supervisor" and found[1 << 30] == "decode"
    pss, dirty = memory_of(os.getpid())
    assert 0 < dirty <= pss
    assert memory_of(1 << 30) == (0, 0)


def test_a_measurement_without_a_target_is_neither_reached_nor_missed() -> None:
    reached = [Measurement(name="", value=2.0, unit="s", target=target).is_reached for target in (None, 2.0, 1.9)]
    assert reached == [None, True, False]
