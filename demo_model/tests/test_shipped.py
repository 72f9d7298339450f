"""The exam of the model that comes with mmrt, on a run of it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from mmrt.runtime.process.run import DEFAULT_MODEL
from mmrt.tests.end_to_end.conftest import Server
from mmrt_demo_model.exam.command import main as quality
from mmrt_demo_model.exam.report import QualityBench, changes
from mmrt_demo_model.training.recipe import load_recipe
from mmrt_demo_model.training.skeleton import write_skeleton


@pytest.fixture(scope="module")
def demo(launch: Callable[..., Server]) -> Iterator[Server]:
    server = launch(None, '[model]\ndtype = "float32"\n')
    yield server
    server.down()


@pytest.fixture(scope="module")
def held_out(demo: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few questions of each task and the answers, beside transformers', as the exam writes them."""
    out = tmp_path_factory.mktemp("quality") / "out.json"
    assert quality(["--url", demo.url, "--samples", "2", "--json", str(out)]) == 0
    return out


@pytest.mark.slow
def test_its_answers_to_held_out_questions(held_out: Path) -> None:
    check_answers(held_out)


def test_its_answers_to_a_few_held_out_questions(demo: Server, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert quality(["--url", demo.url, "--tasks", "digits,direction,beeps,talk", "--samples", "2", "--json", str(out)]) == 0
    check_answers(out)


def check_answers(file: Path) -> None:
    """Nearly all are right, all are what transformers says."""
    found = msgspec.json.decode(file.read_bytes(), type=QualityBench)
    assert [(said.question, said.reply, said.reference) for said in found.answers if not said.is_equal] == []
    assert sum(said.is_right for said in found.answers) >= 0.9 * len(found.answers)


@pytest.mark.slow
def test_a_shared_process_and_restarts_change_none_of_its_answers(held_out: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run = ["--layout", "EPD", "--restart", "prefill,video,detokenizer", "--samples", "2", "--no-transformers"]
    assert quality([*run, "--json", str(out)]) == 0
    before, now = (msgspec.json.decode(file.read_bytes(), type=QualityBench) for file in (held_out, out))
    rows, kept = changes(now, before)
    assert rows == [] and kept.num_right == kept.num == len(before.answers)
    assert now.setting.restarts >= 1


@pytest.mark.slow
def test_its_files_are_those_of_the_recipe(tmp_path: Path) -> None:
    """The recipe at hand makes the same network, tokenizer, template and processors."""
    write_skeleton(tmp_path, load_recipe())
    made = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert made == {name: (DEFAULT_MODEL / name).read_text() for name in made} and len(made) == 7
