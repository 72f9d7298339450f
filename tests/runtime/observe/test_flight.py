"""Flight records and recordings: numbers survive their packing, files their saving, and damaged files are refused by name."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.runtime.bus.plan_base import PlanKind
from mmrt.runtime.errors import UserError
from mmrt.runtime.observe import dumps
from mmrt.runtime.observe.dumps import BlackBox, Recording, salvage, save_crash, saved_recordings
from mmrt.runtime.observe.flight import Kind, merge, pack_id, pack_plan, signed, unpack_id, unpack_pair, unpack_plan, unsigned
from mmrt.runtime.stage_table import ACTORS, SUPERVISOR
from mmrt.shm.flight_recorder import FlightRecorder
from mmrt.shm.run_directory import RunDirectory


@pytest.fixture
def place() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mmrt-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def run(place: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create(place / "run", {"model_path": "/models/x"}) as directory:
        yield directory


@given(st.sampled_from(["chatcmpl-", "cmpl-"]), st.integers(1, 2**96 - 1))
def test_ids(prefix: str, value: int) -> None:
    request_id = f"{prefix}{value:024x}"
    assert unpack_id(*pack_id(request_id)) == request_id


@pytest.mark.parametrize("request_id", ["", "chatcmpl-12", "req-" + "0" * 24, "chatcmpl-" + "g" * 24])
def test_other_ids_are_no_numbers(request_id: str) -> None:
    assert pack_id(request_id) == (0, 0)


@given(st.sampled_from(PlanKind), st.integers(0, 599), st.integers(0, 1000), st.integers(-(2**63), 2**63 - 1))
def test_numbers(kind: PlanKind, status: int, num_queued: int, number: int) -> None:
    assert unpack_plan(pack_plan(kind, status, num_queued)) == (kind, status, num_queued)
    assert signed(unsigned(number)) == number
    assert unpack_pair(3 << 32 | 4) == (3, 4)


def test_records_of_all_actors_in_order_of_time(run: RunDirectory) -> None:
    for name, times in (("decode", (10, 30)), ("video", (20, 40))):
        writer = FlightRecorder.create(run, name).writer(2)
        for time_ns in times:
            writer.record(Kind.STEP, time_ns, 5, time_ns)
        writer.record(4242, 15)
    recorders = Recording.take(run).recorders
    found = merge(recorders)
    assert [(record.actor, record.key, record.generation) for record in found] == [
        ("decode", 10, 2),
        ("video", 20, 2),
        ("decode", 30, 2),
        ("video", 40, 2),
    ]
    assert merge({**recorders, "an actor of a later version": recorders["video"]}) == found
    assert [record.key for record in merge(recorders, since_ns=26)] == [30, 40]
    assert [record.key for record in merge(recorders, since_ns=25)] == [20, 30, 40]


def test_saved_and_loaded(run: RunDirectory, tmp_path: Path) -> None:
    FlightRecorder.create(run, "decode").writer(1).event(Kind.STEP, 7)
    FlightRecorder.create(run, "video")
    path = save_crash(run, tmp_path / "state", "decode", "decode ended with SIGKILL")
    assert path is not None and saved_recordings(tmp_path / "state") == [path]
    assert path.stat().st_mode & 0o777 == 0o600
    loaded = Recording.load(path)
    assert (loaded.facts.run_id, loaded.facts.model_path) == (run.run_id, "/models/x")
    assert loaded.facts.reason == "decode ended with SIGKILL"
    assert {name: records["key"].tolist() for name, records in loaded.recorders.items()} == {"decode": [7], "video": []}
    assert abs(loaded.facts.taken_s - time.time()) < 60


def test_nothing_recorded_nothing_saved(run: RunDirectory, tmp_path: Path) -> None:
    assert save_crash(run, tmp_path, "decode", "x") is None
    FlightRecorder.create(run, "decode")
    assert save_crash(run, tmp_path, "decode", "x") is None
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_go(run: RunDirectory, tmp_path: Path) -> None:
    FlightRecorder.create(run, "decode").writer(1).event(Kind.STEP, 7)
    saved = [save_crash(run, tmp_path, "decode", str(number)) for number in range(dumps.NUM_KEPT + 3)]
    assert saved_recordings(tmp_path) == saved[3:]


def test_as_much_as_is_worth_saving(run: RunDirectory, tmp_path: Path) -> None:
    writer = FlightRecorder.create(run, "decode").writer(1)
    for number in range(dumps.SAVED_RECORDS + 10):
        writer.event(Kind.STEP, number)
    path = save_crash(run, tmp_path, "decode", "x")
    assert path is not None
    assert Recording.load(path).recorders["decode"]["key"].tolist() == list(range(10, dumps.SAVED_RECORDS + 10))


def damaged(name: str, data: bytes) -> bytes:
    header_at = 12
    length = int.from_bytes(data[8:12], "little")
    return {
        "empty": b"",
        "other": b"PK\x03\x04" + data,
        "short": data[:-1],
        "long": data + b"x",
        "header only": data[: header_at + length],
        "no header": data[:header_at],
        "bad header": data[:header_at] + b"{" * length + data[header_at + length :],
        "huge header": data[:8] + b"\xff\xff\xff\xff" + data[12:],
        "negative": data[:header_at]
        + data[header_at : header_at + length].replace(b'"decode":1', b'"decode":-')
        + data[header_at + length :],
    }[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "no flight recording"),
        ("other", "no flight recording"),
        ("short", r"has \d+ bytes, its header asks for \d+"),
        ("long", r"has \d+ bytes, its header asks for \d+"),
        ("header only", r"its header asks for"),
        ("no header", r"too few for its header"),
        ("bad header", "its header cannot be read"),
        ("huge header", r"too few for its header of 4294967295"),
        ("negative", "header cannot be read"),
    ],
)
def test_damaged_files_are_refused(run: RunDirectory, tmp_path: Path, name: str, message: str) -> None:
    FlightRecorder.create(run, "decode").writer(1).event(Kind.STEP, 7)
    path = save_crash(run, tmp_path, "decode", "x")
    assert path is not None
    path.write_bytes(damaged(name, path.read_bytes()))
    with pytest.raises(UserError, match=message) as caught:
        Recording.load(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read .*nowhere.*No such file"):
        Recording.load(tmp_path / "nowhere")


def test_salvage_of_a_run_that_was_killed(place: Path, tmp_path: Path) -> None:
    with RunDirectory.create(place / "run", {}) as run:
        FlightRecorder.create(run, "decode").writer(1).event(Kind.STEP, 7)
        assert salvage(place / "run", tmp_path) is None  # it is alive
    saved = salvage(place / "run", tmp_path)
    assert saved is not None and Recording.load(saved).recorders["decode"]["key"].tolist() == [7]
    assert salvage(place / "nothing", tmp_path) is None
    (place / "other").mkdir()
    assert salvage(place / "other", tmp_path) is None


def test_the_last_one_out_speaks_before_the_directory_goes(place: Path) -> None:
    first = RunDirectory.create(place / "run", {})
    second = RunDirectory.attach(place / "run")
    said: list[bool] = []
    assert not first.leave(lambda: said.append(True))
    assert second.leave(lambda: said.append((place / "run").exists()))
    assert said == [True] and not (place / "run").exists()


def test_the_black_box(run: RunDirectory, tmp_path: Path) -> None:
    all_saved: list[Path] = []
    errors: list[OSError] = []
    file = tmp_path / "file"
    file.touch()

    async def deaths() -> None:
        box = BlackBox(run, tmp_path, all_saved.append, errors.append)
        box.ended("decode", {"decode": 1}, 10, 1, "it failed")  # before memory has made the recorders
        for name in (*ACTORS, SUPERVISOR):
            FlightRecorder.create(run, name)
        box.ended("decode", {"decode": 1}, 10, 0, "")
        box.ended("prefill", {"prefill": 2, "encoder": 3}, 11, -9, "prefill ended with SIGKILL")
        assert not all_saved, "the successor does not wait for it"
        await box.close()
        box = BlackBox(run, file, all_saved.append, errors.append)
        box.ended("prefill", {"prefill": 3}, 12, -9, "prefill ended with SIGKILL")
        await box.close()

    asyncio.run(deaths())
    (saved,) = all_saved
    assert saved.stem.endswith("-prefill") and [type(error) for error in errors] == [FileExistsError]
    exits = [record for record in merge(Recording.load(saved).recorders) if record.kind is Kind.EXIT]
    assert [(record.key, record.a, record.b, signed(record.c)) for record in exits] == [
        (10, 6, 1, 0),
        (11, 5, 2, -9),
        (11, 4, 3, -9),
    ]
    assert np.all([record.actor == "supervisor" for record in exits])
