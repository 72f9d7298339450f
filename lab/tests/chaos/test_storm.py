"""Storms over real runs. The short one is part of every run of the tests; the long ones are the slow lane:

``pytest -m slow lab/tests/chaos``: 1,000 kills in a row (about an hour), every kind of fault in every phase, and the soak (30 min).
"""

import base64
import io
import os
import signal
import subprocess
import sys
import tempfile
import wave
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mmrt.runtime.stage_table import DEFAULT_LAYOUT
from mmrt.tests.end_to_end.oracle import Media, Oracle, check_argmax
from mmrt.tests.end_to_end.test_media import sample
from mmrt_lab.chaos.faults import KINDS, PHASES, Cell, cells, targets_of
from mmrt_lab.chaos.requests import ChaosRequest, catalogue

Storm = Callable[..., dict[str, Any]]
SEED = 52


@pytest.mark.timeout(400)
def test_a_short_storm_and_its_references(storm: Storm, oracle: Oracle) -> None:
    """Five faults and one in the drain; what every answer of the storm was held against is confirmed by transformers."""
    report = storm("--seed", str(SEED), "--faults", "5", "--quiet-every", "3", "--max-tokens", "80", timeout_s=380)
    assert len(report["hits"]) == 6 and report["hits"][-1]["seen"] == "drain"
    assert report["num_quiet_points"] == 2 and report["num_polls"] > 100 and report["problems"] == []
    assert report["ends"]["complete"] > 20
    confirmed = 0
    for request in catalogue(80):
        confirmed += confirm(request, report["references"][request.name]["ids"], oracle)
    assert confirmed == 9  # the others draw at random: they must only be the same every time


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_one_fault_again(storm: Storm) -> None:
    only = ("--kinds", "kill", "--actors", "detokenizer", "--phases", "mid-stream")
    report = storm(*only, "--replay", "1:3", "--faults", "2", "--max-tokens", "40", "--concurrency", "2", timeout_s=110)
    assert [hit["name"] for hit in report["hits"]] == ["1:3", "1:3"]


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["EPD", "E+PD"])
def test_stages_that_share_a_process(storm: Storm, layout: str) -> None:
    report = storm("--layout", layout, "--faults", "60", "--actors", "encoder,prefill,decode,controller", timeout_s=880)
    assert len(report["hits"]) == 61 and report["problems"] == []


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_stages_that_take_turns(storm: Storm) -> None:
    report = storm("--turns", "layers", "--faults", "60", "--actors", "encoder,prefill,decode,controller", timeout_s=880)
    assert len(report["hits"]) == 61 and report["problems"] == []


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize("formats", [("--dtype", "bfloat16"), ("--weights", "float16"), ("--weights", "int8"), ("--weights", "int4")])
def test_formats_of_numbers(storm: Storm, formats: tuple[str, str]) -> None:
    report = storm(*formats, "--kinds", "kill", "--faults", "40", timeout_s=880)
    assert len(report["hits"]) == 41 and report["problems"] == []


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_a_layout_that_changes(storm: Storm) -> None:
    stages = "encoder,prefill,decode,controller,zygote"
    report = storm("--kinds", "kill,scale,layout", "--actors", stages, "--pairs", "0.6", "--faults", "40", timeout_s=880)
    assert len(report["hits"]) == 41 and report["problems"] == []


def test_answers_of_which_the_end_depends_on_their_contents() -> None:
    """Where a text may change, only the others are asked for: they have a number of tokens that must not."""
    assert [request.name for request in catalogue() if not request.has_fixed_length] == ["json", "stop"]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Sockets have short names, pytest's directories long ones."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_signal_ends_it_in_order(checkpoints: Callable[[str], Path], short_path: Path) -> None:
    """It says what there was until then, and leaves neither its run nor its place behind."""
    model = checkpoints("qwen2_5_omni")
    command = [
        sys.executable,
        "-u",
        "-m",
        "mmrt.cli.main",
        "chaos",
        "--model",
        str(model),
        "--kinds",
        "late",
        "--max-tokens",
        "16",
    ]
    environment = {**os.environ, "TMPDIR": str(short_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert "1:0" in first, first
        process.send_signal(signal.SIGTERM)
        printed = process.stdout.read()
        assert process.wait(60) == 0, printed
    assert "a signal has ended the storm early" in printed and "every promise was kept" in printed
    assert list(short_path.iterdir()) == []
    assert not [entry for entry in Path("/proc").glob("[0-9]*/environ") if str(short_path).encode() in content(entry)]


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_a_thousand_kills(storm: Storm) -> None:
    report = storm("--seed", "1000", "--kinds", "kill", "--faults", "1000", "--quiet-every", "25", timeout_s=3 * 3600)
    assert len(report["hits"]) == 1001 and report["problems"] == []


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_every_cell_of_the_matrix(storm: Storm) -> None:
    drains = cells(KINDS, targets_of(DEFAULT_LAYOUT), ["drain"])
    others = cells(KINDS, targets_of(DEFAULT_LAYOUT), [phase for phase in PHASES if phase != "drain"])
    num_faults, num_drains = num_for_all(others), num_for_all(drains)
    report = storm("--seed", "2", "--faults", str(num_faults), "--drains", str(num_drains), timeout_s=3 * 3600)
    assert len(report["hits"]) == num_faults + num_drains and report["problems"] == []


def num_for_all(choice: list[Cell]) -> int:
    """Faults until all cells have come: kinds come in turn."""
    by_kind = Counter(cell.kind for cell in choice)
    return len(by_kind) * max(by_kind.values())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_soak(storm: Storm) -> None:
    """30 minutes, a kill every 10 s, 1 % cancelled: nothing grows."""
    report = storm("--soak", timeout_s=3500)
    assert len(report["hits"]) > 150 and report["num_quiet_points"] > 15 and report["problems"] == []


# ------------------------------------------------------------------------------------------------- what transformers says


def confirm(request: ChaosRequest, ids: list[int], oracle: Oracle) -> bool:
    """Whether the request is greedy; if so, every id must be the argmax given those before it, guided or not."""
    body = request.body
    if body["temperature"] > 0:
        return False
    assert len(ids) == body["max_tokens"]
    content = body["messages"][0]["content"]
    media, plain = Media(), content
    if isinstance(content, list):
        plain = [decoded(part, media) for part in content]
    inputs = oracle.inputs([{"role": "user", "content": plain}], media)
    logits = oracle.logits(inputs, ids)
    if scale := body.get("guidance_scale"):
        without = oracle.logits(oracle.inputs([{"role": "user", "content": body["negative_prompt"]}]), ids)
        logits = without + scale * (logits - without)
    check_argmax(logits, ids)
    return True


def decoded(part: dict[str, Any], media: Media) -> dict[str, Any]:
    """The part as the oracle wants it; what is in it goes to ``media``, decoded by PIL, PyAV and the standard library."""
    if part["type"] == "text":
        return part
    if part["type"] == "input_audio":
        with wave.open(io.BytesIO(base64.b64decode(part["input_audio"]["data"]))) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        media.audios.append(samples.astype(np.float32) / 32768)
        return {"type": "audio"}
    data = base64.b64decode(part[part["type"]]["url"].partition(",")[2])
    if part["type"] == "image_url":
        media.images.append(np.array(Image.open(io.BytesIO(data)).convert("RGB")))
        return {"type": "image"}
    with av.open(io.BytesIO(data)) as container:
        fps = int(container.streams.video[0].average_rate or 0)
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    media.videos.append((frames[sample(len(frames), fps)], 2.0))
    return {"type": "video"}
