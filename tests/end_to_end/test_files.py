"""GGUF files through all processes: with a LoRA adapter tokens are those of transformers for what peft merges; with the part that sees
those of the checkpoint."""

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.oracle import Media
from mmrt.tests.end_to_end.seeing_oracle import TimedOracle
from mmrt.tests.end_to_end.test_media import image_part, picture, text
from mmrt.tests.end_to_end.test_text_families import TextOracle
from mmrt.tests.models.gguf_files import write_gguf, write_tower
from mmrt.tests.models.test_gguf import Made
from mmrt.tests.settings import ImportedLater

peft: Any = ImportedLater("peft")
SETTINGS = '[model]\ndtype = "float32"\nweights = "float32"\n'
NAME = "qwen2-Q8_0+adapter"
QUESTION = "What is the colour of the sky on a clear day?"


def adapt(base: Path, adapter: Path, merged: Path) -> None:
    """Write an adapter of random numbers, and the checkpoint that it makes of the base."""
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers in a deprecated way
        model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
        model.save_pretrained(adapter)
        shutil.copytree(base, merged)
        model.merge_and_unload().save_pretrained(merged)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("gguf"), "qwen2", "Q8_0")


@pytest.fixture(scope="module")
def served(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, TextOracle]]:
    folder = tmp_path_factory.mktemp("files")
    adapt(made.plain(), folder / "adapter", folder / "merged")
    server = Server(tmp_path_factory.mktemp("run"), made.file, SETTINGS)
    server.up("--adapter", str(folder / "adapter"))
    yield server, TextOracle(folder / "merged")
    server.down()


def answer(server: Server) -> list[int]:
    return server.chat(QUESTION, model=NAME, extra_body={"ignore_eos": True})[1]


def test_tokens_are_those_of_the_merged_checkpoint(served: tuple[Server, TextOracle]) -> None:
    server, oracle = served
    ids = answer(server)
    oracle.check_greedy(oracle.ids_of(QUESTION), ids)
    for actor in ("prefill", "decode"):
        server.kill(actor)
        assert answer(server) == ids, actor


def test_without_the_adapter_tokens_are_others(served: tuple[Server, TextOracle], made: Made) -> None:
    server, oracle = served
    ids = answer(server)
    logits = TextOracle(made.plain()).logits(oracle.ids_of(QUESTION), ids)
    assert logits.argmax(1).tolist() != ids


def test_a_picture_in_two_files(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    """The part that sees lies beside the model."""
    checkpoint, pixels = checkpoints("qwen3_vl"), picture(1, 60, 97)
    write_gguf(checkpoint, tmp_path / "vl-F32.gguf")
    write_tower(checkpoint, tmp_path / "mmproj-F32.gguf")
    server, oracle = Server(tmp_path, tmp_path / "vl-F32.gguf", SETTINGS), TimedOracle(checkpoint)
    server.up()
    try:
        ids = server.chat([image_part(pixels), text("What is it?")], model="vl-F32", temperature=0)[1]
        content = [{"type": "image"}, text("What is it?")]
        oracle.check_greedy(oracle.inputs([{"role": "user", "content": content}], Media(images=[pixels])), ids)
    finally:
        server.down()


def test_the_run_is_called_by_the_file(served: tuple[Server, TextOracle]) -> None:
    server, _ = served
    (model,) = server.client.models.list()
    assert model.id == NAME
