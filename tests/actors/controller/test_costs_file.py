"""What plans cost outlives the run, and no file makes a start fail or late."""

import logging
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrt.actors.controller.costs_file import MAX_BYTES, MAX_SETUPS, MIN_UNITS, CostsFile, setup_of
from mmrt.runtime.config.runtime_config import parse_config
from mmrt.runtime.controller.scheduling.facts import Cost
from mmrt.runtime.process.memory_layout import MemoryLayout
from mmrt.runtime.process.run import DEFAULT_MODEL
from mmrt.tests.settings import examples

COSTS = {"prefill": Cost(0.0125, 0.0004, 2048), "encoder": Cost(0.0, 1e-5, 4096)}
SETUP = "tiny; cpu"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "mmrt" / "costs.json"


def test_what_is_saved_is_loaded_for_the_same_setup_alone(path: Path) -> None:
    assert CostsFile(path, SETUP).load() == {}
    CostsFile(path, SETUP).save(COSTS)
    CostsFile(path, "other").save({"prefill": Cost(1.0, 1.0, MIN_UNITS), "encoder": Cost()})
    assert CostsFile(path, SETUP).load() == COSTS
    assert CostsFile(path, "other").load() == {"prefill": Cost(1.0, 1.0, MIN_UNITS)}, "what was never measured is not kept"
    assert CostsFile(path, "third").load() == {}
    assert [entry.name for entry in path.parent.iterdir()] == ["costs.json"]


def test_a_step_of_decode_is_kept_whatever_its_size(path: Path) -> None:
    step = {"decode": Cost(0.007, 0.0, 1)}
    CostsFile(path, SETUP).save({**step, "encoder": Cost(0.1, 0.1, MIN_UNITS - 1)})
    assert CostsFile(path, SETUP).load() == step


def test_nothing_learned_is_nothing_written(path: Path) -> None:
    CostsFile(path, SETUP).save({"prefill": Cost(), "encoder": Cost(0.1, 0.1, MIN_UNITS - 1)})
    assert not path.exists()


def test_the_oldest_setups_go_first(path: Path) -> None:
    for number in range(MAX_SETUPS + 3):
        CostsFile(path, str(number)).save(COSTS)
    kept = msgspec.json.decode(path.read_bytes())
    assert list(kept) == [str(number) for number in range(3, MAX_SETUPS + 3)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "truncated"),
        (b'{"tiny; cpu": {"saved_s": 1.0, "stages": {"prefill"', "truncated"),
        (b"\xff\xfe\x00", "invalid"),
        (b"[1, 2]", "expected `object`"),
        (b'{"tiny; cpu": {"saved_s": 1, "stages": {"prefill": {"base_s": -1, "unit_s": 0, "largest": 5}}}}', ">= 0"),
        (b'{"tiny; cpu": {"saved_s": 1, "stages": {"prefill": {"base_s": 1e300, "unit_s": 0, "largest": 5}}}}', "<= 1000000"),
        (b'{"tiny; cpu": {"saved_s": 1, "stages": {"prefill": {"base_s": 0, "unit_s": 0, "largest": 0}}}}', ">= 1"),
        (b'{"tiny; cpu": {"saved_s": 1, "stages": {"prefill": {"base_s": 0}}}}', "missing required"),
        (b'{"a": {"saved_s": 1, "stages": {}, "x": ' + b"[" * 100_000, "recursion"),
        (b" " * (MAX_BYTES + 1), f"more than {MAX_BYTES} bytes"),
    ],
    ids=["empty", "torn", "bytes", "array", "negative", "huge", "no plan", "half", "deep", "long"],
)
def test_a_foreign_or_torn_file_is_ignored_and_replaced(
    path: Path, content: bytes, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert CostsFile(path, SETUP).load() == {}
    (record,) = caplog.records
    assert f"{path} is ignored" in record.message and problem.lower() in record.message.lower()
    CostsFile(path, SETUP).save(COSTS)
    assert CostsFile(path, SETUP).load() == COSTS


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(50))
@given(st.binary(max_size=200), st.integers(0, 400))
def test_no_bytes_whatsoever_make_a_start_fail(path: Path, noise: bytes, at: int) -> None:
    CostsFile(path, SETUP).save(COSTS)
    data = path.read_bytes()
    path.write_bytes(data[:at] + noise + data[at:])
    for cost in CostsFile(path, SETUP).load().values():
        assert cost.seconds(4096) >= 0 and cost.largest >= 1
    path.unlink()


def test_a_directory_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no directory")
    costs = CostsFile(tmp_path / "file" / "costs.json", SETUP)
    with caplog.at_level(logging.WARNING):
        costs.save(COSTS)
        costs.save(COSTS)
        assert costs.load() == {}
    assert caplog.text.count("is not written") == 1 and "is ignored" in caplog.text


def test_a_crash_between_write_and_rename_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CostsFile(path, SETUP).save(COSTS)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        CostsFile(path, SETUP).save({"prefill": Cost(9.0, 9.0, 900)})
    assert CostsFile(path, SETUP).load() == COSTS and len(list(path.parent.iterdir())) == 1


def test_a_setup_is_all_that_determines_costs() -> None:
    layout = MemoryLayout(4, 64, 4, 16, {}, "float32", "float32", "cpu")

    def name(text: str = "", layout: MemoryLayout = layout) -> str:
        return setup_of(parse_config(text), layout, DEFAULT_MODEL)

    assert name() == name()
    others = [
        name("[actors.prefill]\nthreads = 3"),
        name("[actors.decode]\nthreads = 3"),
        name('[actors]\nlayout = "EPD"'),
        name('[actors]\nlayout = "E+2P+D"'),
        name('[actors]\nlayout = "E+2P+D"\n[scheduling]\nprefill_pipeline = true'),
        name("[media]\ngpu_decoding = true"),
        name(layout=msgspec.structs.replace(layout, dtype="bfloat16")),
        name(layout=msgspec.structs.replace(layout, kv_dtype="int8")),
        name(layout=msgspec.structs.replace(layout, device="cuda")),
    ]
    assert len({name(), *others}) == 1 + len(others)
