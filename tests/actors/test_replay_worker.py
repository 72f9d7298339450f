"""Captured plans: done again alone they come out the same, changed ones do not, damaged files are refused by name."""

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_tensors

from mmrt.actors.host.plan_loop import serve_plans
from mmrt.actors.video.worker import VideoWorker
from mmrt.cli.replay_worker import Replay, same_result
from mmrt.models.architecture import KvDType, ModelConfig
from mmrt.models.config import load_model_config
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.runtime.bus.messages import Analysed, Done, ItemError, MediaItem, PageRun, Result, Run
from mmrt.runtime.bus.plans import Analyse, Encode, Plan, Prefill, PrefillChunk, PreprocessSegment
from mmrt.runtime.bus.wire import encode
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import MediaSection, MemorySection, ServerSection
from mmrt.runtime.errors import UserError
from mmrt.runtime.observe import replay_capture
from mmrt.runtime.observe.capture import Capture, captures_in, make_header
from mmrt.runtime.observe.capture_spool import CaptureSpool, empty_spool, is_finished, take_out
from mmrt.runtime.observe.replay_capture import (
    NUM_KEPT,
    CaptureOrder,
    DevicePages,
    PlanCapture,
    capture_live,
    collect,
    is_carried_out,
    is_ordered,
    order_path,
    withdraw_order,
    write_order,
)
from mmrt.runtime.process.run import RunInfo
from mmrt.schema.media import MediaOptions
from mmrt.shm.plan_table import PlanTable
from mmrt.shm.pool import PagePool
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.actors.bench import PAGE_TOKENS, Bench, Weights
from mmrt.tests.actors.host.fake_actor import FakeActor
from mmrt.tests.actors.test_encoder import Encoding

PREFILL = 5  # the actor's index


class Order:
    """Captures plans of one actor as its loop does it."""

    def __init__(self, run: RunDirectory, actor: str, directory: Path, device_pages: DevicePages | None = None) -> None:
        self.run, self.actor, self.directory = run, actor, directory
        self.capture = PlanCapture(run, actor, PAGE_TOKENS, device_pages or {})

    def give(self, count: int = 1) -> None:
        self.given = CaptureOrder(str(self.directory), count)
        write_order(self.run.path, self.actor, self.given)

    def do(self, plan_id: int, plan: Plan, execute: Callable[[Plan], Result]) -> Result:
        captured = self.capture.before(plan_id, plan)
        result = execute(plan)
        self.capture.after(captured, result)
        return result

    def taken(self) -> list[Capture]:
        return [Capture.load(path) for path in captures_in(self.directory, self.actor)]


def prefill_plan(bench: Bench) -> Prefill:
    """A chunk in the middle of a prompt with an image and a companion, behind one that is done."""
    media, rows = bench.image(9, 14, 14)
    row = bench.place(bench.ids(70), bench.ids(21), row=3, spans=[media])
    bench.grant_all(row)
    bench.worker.execute(Prefill([PrefillChunk(3, row.generation, 0, 0, 9, [])]))
    chunks = [PrefillChunk(3, row.generation, 0, 9, 69, [rows]), PrefillChunk(3, row.generation, 1, 0, 20, [])]
    return Prefill(chunks)


@pytest.fixture
def captured(bench: Bench, tmp_path: Path) -> Capture:
    order = Order(bench.run, "prefill", tmp_path / "captures")
    order.give()
    assert order.do(0x100000007, prefill_plan(bench), bench.worker.execute) == Done()
    (capture,) = order.taken()
    return capture


def test_prefill(captured: Capture, checkpoint: Path) -> None:
    assert captured.about == "prefill plan 0x100000007 (prefill, 80 tokens)"
    assert captured.header.elapsed_s > 0
    with Replay.open(captured, checkpoint) as replay:
        outcome = replay.run(repeat=3)
    assert outcome.error is None and same_result(outcome.result, captured.header.result)
    assert len(outcome.seconds) == 3
    assert outcome.differences is not None
    (kv,) = outcome.differences
    assert (kv.pool, kv.num_pages, kv.num_different) == ("kv", 7, 0)


def test_prefill_with_recurrent_states_is_refused(captured: Capture, tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "made", "qwen3_5")
    with pytest.raises(UserError, match="a capture has no states"), Replay.open(captured, tmp_path / "made"):
        pass


def test_prefill_beside_pages_of_windows_is_refused(captured: Capture, tmp_path: Path) -> None:
    path, formats = tmp_path / "made", captured.config.model
    make_checkpoint("tiny", path, "gemma3")
    model = load_model_config(path, formats.dtype, formats.max_context)
    rest = model.kv_page_bytes(PAGE_TOKENS) - model.window_page_bytes(PAGE_TOKENS)
    header = msgspec.structs.replace(captured.header, page_bytes=captured.header.page_bytes | {"kv": rest})
    with (
        pytest.raises(UserError, match="a capture has none; memory.kv_transfer_dtype keeps pages whole"),
        Replay.open(Capture(header, captured.tensors), path),
    ):
        pass


def test_the_largest_difference_is_that_of_any_layer(captured: Capture, checkpoint: Path) -> None:
    """One number of the first layer of one page."""
    pages = captured.tensors["after.kv"].view(np.float32)
    pages[2, 5] += 0.25
    with Replay.open(captured, checkpoint) as replay:
        (kv,) = replay.run().differences or []
    assert (kv.num_different, kv.largest) == (1, pytest.approx(0.25, abs=1e-5))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_prefill_into_a_quantized_cache(tmp_path: Path, tiny: tuple[ModelConfig, Weights], checkpoint: Path, kv_dtype: KvDType) -> None:
    config = msgspec.to_builtins(RuntimeConfig(memory=MemorySection(kv_dtype=kv_dtype)))
    with RunDirectory.create(tmp_path / "run", {"config": config}) as run:
        bench = Bench(run, msgspec.structs.replace(tiny[0], kv_dtype=kv_dtype), tiny[1])
        order = Order(run, "prefill", tmp_path / "captures")
        order.give()
        order.do(9, prefill_plan(bench), bench.worker.execute)
        (capture,) = order.taken()
    with Replay.open(capture, checkpoint) as replay:
        (kv,) = replay.run().differences or []
    assert (kv.num_pages, kv.num_different) == (7, 0)
    capture.tensors["prompt.3.0"][60] += 1
    with Replay.open(capture, checkpoint) as replay:
        (kv,) = replay.run().differences or []
    assert kv.num_different == 2 and kv.largest is not None and 1e-3 < kv.largest < 100


def test_a_capture_does_not_hand_on_the_api_key(captured: Capture) -> None:
    header = captured.header
    secret = RunInfo(config=RuntimeConfig(server=ServerSection(api_key="a-key-of-the-test")))
    made = make_header(
        actor=header.actor, plan_id=header.plan_id, plan=header.plan, run_id=header.run_id, info=secret, page_bytes={},
        pages=({}, {}), rows=[], max_context=8, captured_s=0.0,
    )  # fmt: skip
    assert b"a-key-of-the-test" not in msgspec.json.encode(made)
    assert made.config["server"]["port"] == secret.config.server.port and secret.config.server.api_key


def test_other_inputs_come_out_differently(captured: Capture, checkpoint: Path) -> None:
    captured.tensors["prompt.3.0"][60] += 1
    with Replay.open(captured, checkpoint) as replay:
        outcome = replay.run()
    assert outcome.differences is not None
    (kv,) = outcome.differences
    assert kv.num_different == 2 and kv.num_bytes > 0 and kv.largest is not None and kv.largest > 1e-3


def test_encoder(run: RunDirectory, tiny: tuple[ModelConfig, Weights], checkpoint: Path, tmp_path: Path) -> None:
    encoding = Encoding(run, *tiny)
    parts = [encoding.part(*what)[0] for what in (("image", (1, 12, 12)), ("audio", (120, 0, 0)))]
    order = Order(run, "encoder", tmp_path)
    order.give()
    order.do(9, Encode(parts), encoding.worker.execute)
    (capture,) = order.taken()
    with Replay.open(capture, checkpoint) as replay:
        outcome = replay.run()
    assert outcome.result == Done()
    assert outcome.differences is not None and [found.num_different for found in outcome.differences] == [0]


def test_video(run: RunDirectory, tiny: tuple[ModelConfig, Weights], checkpoint: Path, tmp_path: Path) -> None:
    media, patches = PagePool.create(run, "media", 8, 4096), PagePool.create(run, "patch", 8, 256 * 1176)
    worker = VideoWorker(media, patches, tiny[0], MediaSection())
    picture = tmp_path / "picture.png"
    Image.effect_noise((50, 40), 40).convert("RGB").save(picture)
    data = picture.read_bytes()
    source = PageRun([5, 2, 7], [0, 0, 0])
    media.write_bytes(source.pages, data)
    order = Order(run, "video", tmp_path / "captures")
    order.capture.prepare(("media", "patch"))  # from here on it opens no file
    order.give(2)
    item = MediaItem("image", len(data), options=MediaOptions(max_pixels=1600, min_pixels=784))
    found = order.do(1, Analyse(4, 9, 0, item, source), worker.execute)
    assert isinstance(found, Analysed) and found.shape.grid == (1, 2, 4)
    target = PageRun([6, 1], [0, 0])
    order.do(2, PreprocessSegment(4, 9, 0, 0, item, found.shape, source, target), worker.execute)
    assert is_carried_out(run.path, "video", order.given) and order.capture.before(3, Analyse(4, 9, 0, item, source)) is None
    withdraw_order(run.path, "video", order.given)
    assert not is_ordered(run.path, "video") and not order.taken()
    collect(run.path, "video", order.directory)
    assert [capture.header.plan_id for capture in order.taken()] == [1, 2]
    order.give()
    assert not is_carried_out(run.path, "video", order.given)
    for capture in order.taken():
        with Replay.open(capture, checkpoint) as replay:
            outcome = replay.run(repeat=2)
        assert same_result(outcome.result, capture.header.result)
        assert all(not difference.num_different for difference in outcome.differences or ())


def test_a_spool_that_is_half_written_or_lies_gives_what_is_whole_and_its_own(captured: Capture, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    spool, file, taken = CaptureSpool(tmp_path, "prefill"), tmp_path / "notes/captured-prefill", tmp_path / "taken"
    begun = Capture(msgspec.structs.replace(captured.header, result=None), captured.tensors)
    for actor, plan_id in (("prefill", 2), ("../video", 3), ("video", 4)):
        spool.save(Capture(msgspec.structs.replace(captured.header, actor=actor, plan_id=plan_id), captured.tensors))
    spool.save(begun)
    with file.open("r+b") as damaged:
        os.pwrite(damaged.fileno(), b"damage", spool._end + 8)  # without its length
    assert take_out(tmp_path, "prefill", taken) == [taken / "prefill-2.safetensors", taken / captured.file_name]
    assert sorted(path.name for path in taken.iterdir()) == ["prefill-100000007.safetensors", "prefill-2.safetensors"]
    assert Capture.load(taken / captured.file_name).header.result is None
    spool.save(captured)
    assert take_out(tmp_path, "prefill", taken)[-1] == taken / captured.file_name
    assert Capture.load(taken / captured.file_name).header.result == Done()
    size = file.stat().st_size
    empty_spool(tmp_path, "prefill")
    assert take_out(tmp_path, "prefill", taken) == [] and not is_finished(tmp_path, "prefill", 0)
    spool.finish(7)
    assert (is_finished(tmp_path, "prefill", 7), is_finished(tmp_path, "prefill", 8), file.stat().st_size) == (
        True,
        False,
        16,
    ) and size > 16
    file.write_bytes(struct.pack("<Q", 1 << 62) + b"more than there is")
    assert take_out(tmp_path, "prefill", taken) == []


def test_a_spool_that_is_emptied_while_a_record_is_written_takes_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order in the place of another: its end must not be missed behind what is lost."""
    (tmp_path / "notes").mkdir()
    spool, write = CaptureSpool(tmp_path, "prefill"), os.pwrite
    spool.finish(1)

    def emptied(fd: int, data: bytes, at: int) -> int:
        monkeypatch.undo()
        empty_spool(tmp_path, "prefill")
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", emptied)
    spool.finish(2)
    spool.finish(3)
    assert not is_finished(tmp_path, "prefill", 1) and is_finished(tmp_path, "prefill", 3)


def test_what_raised_raises_again(captured: Capture, checkpoint: Path) -> None:
    plan = captured.header.plan
    assert isinstance(plan, Prefill)
    chunk = msgspec.structs.replace(plan.chunks[0], start=60)  # an embedding span before its chunk
    broken = msgspec.structs.replace(captured.header, plan=Prefill([chunk]), result=ItemError(500, "x"))
    with Replay.open(Capture(broken, captured.tensors), checkpoint) as replay:
        outcome = replay.run()
    assert outcome.error is not None and outcome.result is None and outcome.differences is None


def test_the_inputs_are_there_when_the_plan_kills_its_actor(bench: Bench, tmp_path: Path, checkpoint: Path) -> None:
    order = Order(bench.run, "prefill", tmp_path)
    order.give()
    assert order.capture.before(7, prefill_plan(bench)) is not None
    (capture,) = order.taken()
    assert capture.header.result is None
    with Replay.open(capture, checkpoint) as replay:
        outcome = replay.run()
    assert outcome.result == Done() and outcome.differences is None


def test_two_plans_at_once_have_times_of_their_own(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order, plan, clock = Order(bench.run, "prefill", tmp_path), prefill_plan(bench), iter((0.0, 10.0, 11.0, 15.0))
    monkeypatch.setattr(replay_capture, "time", SimpleNamespace(monotonic=lambda: next(clock), time=time.time))
    order.give(2)
    long, short = order.capture.before(7, plan), order.capture.before(8, plan)
    for captured in (short, long):
        order.capture.after(captured, Done())
    assert {capture.header.plan_id: capture.header.elapsed_s for capture in order.taken()} == {7: 15.0, 8: 1.0}


def test_live_plans_from_outside(bench: Bench, tmp_path: Path) -> None:
    plan = prefill_plan(bench)
    table = PlanTable.create(bench.run, 4, 1 << 16)
    table.write(2, 11, PREFILL, encode(plan))
    table.write(3, 12, PREFILL - 1, encode(Encode([])))
    (path,) = capture_live(bench.run, "prefill", PAGE_TOKENS, tmp_path)
    assert Capture.load(path).header.plan == plan


def test_without_an_order_nothing_is_captured(bench: Bench, tmp_path: Path) -> None:
    order = Order(bench.run, "prefill", tmp_path)
    order.do(7, prefill_plan(bench), bench.worker.execute)
    assert order.taken() == []


def test_an_order_is_for_so_many_plans_and_few_files_are_kept(bench: Bench, tmp_path: Path) -> None:
    order = Order(bench.run, "prefill", tmp_path)
    plan = prefill_plan(bench)
    order.give(2)
    for plan_id in (1, 2, 3):
        order.do(plan_id, plan, bench.worker.execute)
    assert [capture.header.plan_id for capture in order.taken()] == [1, 2]
    for plan_id in range(3, NUM_KEPT + 3):
        order.give()
        order.do(plan_id, plan, bench.worker.execute)
    assert sorted(capture.header.plan_id for capture in order.taken()) == list(range(3, NUM_KEPT + 3))


def test_the_loop_captures(bench: Bench, tmp_path: Path) -> None:
    table = PlanTable.create(bench.run, 4, 1 << 16)
    table.write(0, 7, PREFILL, encode(prefill_plan(bench)))
    order = Order(bench.run, "prefill", tmp_path)
    order.give()
    actor = FakeActor(bench.run, "prefill", [[Run(1, 0, 7)], []])
    serve_plans(actor, bench.worker.execute, bench.table)  # type: ignore[arg-type]
    assert [capture.header.result for capture in order.taken()] == [Done()]


@pytest.mark.parametrize("directory", ["/proc/nowhere", "/dev/null/x"])
def test_a_place_that_cannot_be_written_harms_no_plan(bench: Bench, directory: str, caplog: pytest.LogCaptureFixture) -> None:
    order = Order(bench.run, "prefill", Path(directory))
    order.give()
    assert order.do(7, prefill_plan(bench), bench.worker.execute) == Done()
    assert "plan 7 cannot be captured" in caplog.text


def test_an_order_that_is_none_harms_no_plan(bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    order_path(bench.run.path, "prefill").write_bytes(b"{")
    order = Order(bench.run, "prefill", tmp_path)
    assert order.do(7, prefill_plan(bench), bench.worker.execute) == Done()
    assert "plan 7 cannot be captured" in caplog.text


# ------------------------------------------------------------------------------------------------------------ bad files


Damage = Callable[[dict[str, Any], dict[str, Any]], None]


def no_tensor(header: dict[str, Any], tensors: dict[str, Any]) -> None:
    del tensors["before.kv"]


def small_tensor(header: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["after.kv"] = tensors["after.kv"][:-1]


def other_dtype(header: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["ids.3"] = tensors["ids.3"].astype(np.int64)


def other_format(header: dict[str, Any], tensors: dict[str, Any]) -> None:
    header["format"] = "mmrt capture 9"


def a_page_too_few(header: dict[str, Any], tensors: dict[str, Any]) -> None:
    lost = header["inputs"]["embedding"].pop()
    tensors["before.embedding"] = tensors["before.embedding"][:-1]
    assert lost is not None


def no_row(header: dict[str, Any], tensors: dict[str, Any]) -> None:
    header["rows"] = []


def another_block_table(header: dict[str, Any], tensors: dict[str, Any]) -> None:
    header["rows"][0]["block_tables"][0][0] = 999


def another_output(header: dict[str, Any], tensors: dict[str, Any]) -> None:
    header["outputs"]["kv"][0] = 999


def no_plan(header: dict[str, Any], tensors: dict[str, Any]) -> None:
    header["plan"] = ["System", "rm"]


def an_unknown_pool(header: dict[str, Any], tensors: dict[str, Any]) -> None:
    header["inputs"]["heap"] = [1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_tensor, "'before.kv' is missing, expected uint8"),
        (small_tensor, r"'after.kv' is uint8 \[6, \d+\], expected uint8 \[7, \d+\]"),
        (other_dtype, r"'ids.3' is int64 \[0\], expected int32 \[0\]"),
        (other_format, "is a 'mmrt capture 9', this version reads"),
        (a_page_too_few, r"the plan names \d+, which was not captured"),
        (no_row, "the plan names 3, which was not captured"),
        (another_block_table, "the plan names 999, which was not captured"),
        (another_output, "the plan names 999, which was not captured"),
        (no_plan, "description cannot be read"),
        (an_unknown_pool, "'heap', whose page size it does not say"),
    ],
)
def test_damaged_captures_are_refused(captured: Capture, tmp_path: Path, damage: Damage, message: str) -> None:
    path = tmp_path / "damaged.safetensors"
    header = json.loads(msgspec.json.encode(captured.header))
    tensors = dict(captured.tensors)
    damage(header, tensors)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path, {"mmrt": json.dumps(header)})
    with pytest.raises(UserError, match=message) as caught:
        Capture.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"), [(b"", "safetensors"), (b"x" * 100, "safetensors"), (b"\x80\x04cos\nsystem\n", "safetensors")]
)
def test_files_of_another_kind_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message):
        Capture.load(path)


def test_other_safetensors_and_directories_are_refused(tmp_path: Path) -> None:
    save_file({"x": np.zeros(3)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="no captured plan"):
        Capture.load(tmp_path / "x.safetensors")
    for kind in (torch.bfloat16, torch.float8_e4m3fn):
        save_tensors({"x": torch.zeros(3, dtype=kind)}, tmp_path / "x.safetensors")
        with pytest.raises(UserError, match="no captured plan"):
            Capture.load(tmp_path / "x.safetensors")
        save_tensors({"x": torch.zeros(3, dtype=kind)}, tmp_path / "x.safetensors", {"mmrt": "{}"})
        with pytest.raises(UserError, match="cannot be read as safetensors"):
            Capture.load(tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="is a directory"):
        Capture.load(tmp_path)
    with pytest.raises(UserError, match="is not there"):
        Capture.load(tmp_path / "y")


def test_a_capture_is_plain_safetensors(captured: Capture, tmp_path: Path) -> None:
    path = tmp_path / captured.file_name
    captured.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_file(path).keys() == captured.tensors.keys()


def test_another_checkpoint_is_refused(captured: Capture, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"), Replay.open(captured, tmp_path / "nowhere"):
        pass


def test_worker_of_an_actor_without_plans(captured: Capture, checkpoint: Path) -> None:
    other = Capture(msgspec.structs.replace(captured.header, actor="decode"), captured.tensors)
    with pytest.raises(UserError, match="'decode' cannot be done again, those of video, encoder, prefill can"):
        with Replay.open(other, checkpoint):
            pass


def test_nothing_is_left(captured: Capture, checkpoint: Path) -> None:
    before = {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("mmrt-replay-")}
    with Replay.open(captured, checkpoint):
        assert torch.get_num_threads() == 1
    assert {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("mmrt-replay-")} == before
