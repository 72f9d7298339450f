"""The model that comes with mmrt, as a newcomer meets it: no model configured, the files of examples/, true answers."""

import base64
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

import mmrt
from mmrt.cpu_kernels.kernel import vector_width
from mmrt.runtime.process.processors import read_processors
from mmrt.runtime.process.run import DEFAULT_MODEL
from mmrt.shm.robust_mutex import RobustMutex
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.segment import PAGE_BYTES, Field
from mmrt.shm.status import ActorTable
from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.oracle import Media, Oracle

EXAMPLES = Path(mmrt.__file__).parent / "examples"
UNKNOWN = "I do not know that. Ask me about shapes, numbers, motion or beeps."


@pytest.fixture(scope="module")
def demo(launch: Callable[..., Server]) -> Iterator[Server]:
    server = launch(None, '[model]\ndtype = "float32"\n')
    yield server
    server.down()


def test_the_example_that_kills_decode_and_draws_it(demo: Server, tmp_path: Path) -> None:
    before = demo.pid("decode")
    command = [sys.executable, str(EXAMPLES / "survive_a_kill.py"), "--svg", str(tmp_path / "kill.svg")]
    done = subprocess.run(command, env=demo.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "A red circle, a green square, a blue triangle and a yellow star.\n"
    assert f"[kill -9 {before}]" in done.stderr
    assert demo.pid("decode") != before
    drawing = ElementTree.parse(tmp_path / "kill.svg")
    assert "".join(drawing.getroot().itertext()).count(f"kill -9 {before}") == 1


def part(name: str) -> dict[str, Any]:
    """An example file as a content part."""
    mime = {"png": "image/png", "mp4": "video/mp4", "wav": "audio/wav"}[name.rpartition(".")[2]]
    kind = {"image": "image_url", "video": "video_url", "audio": "audio_url"}[mime.partition("/")[0]]
    data = base64.b64encode((EXAMPLES / name).read_bytes()).decode()
    return {"type": kind, kind: {"url": f"data:{mime};base64,{data}"}}


def answer(server: Server, question: str, *names: str) -> str:
    said, _ = server.chat([*map(part, names), {"type": "text", "text": question}], max_tokens=64)
    return said


@contextlib.contextmanager
def busy(server: Server, actor: str) -> Iterator[None]:
    """Say for an idle actor that it computes."""
    run = RunDirectory.attach(server.run_path)
    table = ActorTable.attach(run)
    page = table._segment.part_to_write(Field(8 * table._row(actor), (PAGE_BYTES,), np.dtype(np.uint8)))
    mutex = RobustMutex(page[128:192])
    assert mutex.try_acquire() and table.lookout([actor])() == 1
    yield
    mutex.release()
    table.close()
    run.close()


def helped_ns(server: Server) -> int:
    """The processor time of decode's helpers, once they rest."""
    found, before = _helped_ns(server), -1
    while found != before:
        time.sleep(0.05)
        found, before = _helped_ns(server), found
    return found


def _helped_ns(server: Server) -> int:
    helpers = [
        task for task in Path(f"/proc/{server.pid('decode')}/task").iterdir() if (task / "comm").read_text().startswith("helper")
    ]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in helpers)


@pytest.mark.skipif(vector_width() is None, reason="this processor has no kernels")
@pytest.mark.skipif(read_processors().num_local not in (2, 3), reason="a busy stage leaves others idle cores, or none ever is idle")
def test_idle_cores_help_and_change_no_token(demo: Server) -> None:
    before = helped_ns(demo)
    alone = {str(demo.chat("Tell me a story.")[1]) for _ in range(3)}
    helped = helped_ns(demo)
    assert helped > before
    with contextlib.ExitStack() as stack:
        for actor in ("encoder", "video"):
            stack.enter_context(busy(demo, actor))
        beside = {str(demo.chat("Tell me a story.")[1]) for _ in range(3)}
        assert helped_ns(demo) == helped
    assert beside == alone and len(alone) == 1


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What colour is the circle?", "Red."),
        ("Is there a blue triangle?", "Yes."),
        ("What shape is yellow?", "A star."),
        ("Where is the star?", "Bottom right."),
        ("Where is the red circle?", "Top left."),
        ("Is there a green square?", "Yes."),
        ("Is there a pink heart?", "No."),
    ],
)
def test_the_picture(demo: Server, question: str, expected: str) -> None:
    assert answer(demo, question, "shapes.png") == expected


@pytest.mark.parametrize(
    ("question", "expected"),
    [("What moves?", "An orange square."), ("Which way does it move?", "Right.")],
)
def test_the_video(demo: Server, question: str, expected: str) -> None:
    assert answer(demo, question, "moving.mp4") == expected


@pytest.mark.parametrize(("question", "expected"), [("How many beeps are there?", "Three."), ("Is it a tone or noise?", "A tone.")])
def test_the_sound(demo: Server, question: str, expected: str) -> None:
    assert answer(demo, question, "beeps.wav") == expected


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is in this picture?", "I see no image."),
        ("What moves in the video?", "I see no video."),
        ("How many beeps do you hear?", "I hear no sound."),
        ("What is the capital of France?", UNKNOWN),
    ],
)
def test_what_it_cannot_know_it_does_not_invent(demo: Server, question: str, expected: str) -> None:
    assert answer(demo, question) == expected


def test_what_is_none_of_its_pictures_it_does_not_name(demo: Server) -> None:
    """A photograph, as it comes with matplotlib; by ``mmrt ask``, whose help says in one line what the model knows."""
    for question in ("What is in this picture?", "What do you see?", "Describe this image."):
        done = demo.mmrt("ask", question, "--image", f"{matplotlib.get_data_path()}/sample_data/grace_hopper.jpg")
        assert (done.returncode, done.stdout) == (0, "I only know pictures of simple shapes and numbers, not this.\n"), done.stderr
    assert "knows simple shapes, numbers, motion and beeps, nothing else" in " ".join(demo.mmrt("ask", "--help").stdout.split())


def test_the_readme_s_first_question(demo: Server) -> None:
    """By ``mmrt ask``, as it stands there."""
    readme = (EXAMPLES.parent / "README.md").read_text()
    command = next(line for line in readme.splitlines() if "mmrt ask" in line and "shapes.png" in line)
    question = command.split('"')[1]
    done = demo.mmrt("ask", question, "--image", str(EXAMPLES / "shapes.png"))
    assert done.returncode == 0, done.stderr
    said = done.stdout.strip().splitlines()[0]
    assert said in readme and said == answer(demo, question, "shapes.png")


def test_its_tokens_are_those_of_transformers(demo: Server) -> None:
    picture = np.array(Image.open(EXAMPLES / "shapes.png").convert("RGB"))
    content = [part("shapes.png"), {"type": "text", "text": "What is in this picture?"}]
    _, ids = demo.chat(content, max_tokens=64)
    oracle = Oracle(DEFAULT_MODEL)
    messages = [{"role": "user", "content": [{"type": "image"}, content[1]]}]
    oracle.check_greedy(oracle.inputs(messages, Media(images=[picture])), ids)


def test_what_ships() -> None:
    """A checkpoint directory of 12 MB or less with its card; weights are bfloat16."""
    files = {file.name: file.stat().st_size for file in DEFAULT_MODEL.iterdir()}
    assert files.keys() == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "loss.png",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
    }
    assert sum(files.values()) <= 12_000_000
    with safe_open(DEFAULT_MODEL / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}
    assert json.loads((DEFAULT_MODEL / "config.json").read_bytes())["model_type"] == "qwen2_5_omni_thinker"
