"""llama.cpp's converter is run for the files of a checkpoint, with a configuration that it knows, and a tokenizer that it does not know
is no reason to end. The converter here is a small one: llama.cpp's source is in no package that tests have."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmrt.models.families.registry import family_named
from mmrt_lab.peers.converter_config import converter_config, converter_name, converter_processor, converter_tokenizer, model_options

BASE = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        if tokenizer == "known":
            return "llama-bpe"
        raise NotImplementedError
    def set_vocab(self):
        raise FileNotFoundError("tokenizer.model")
    def _set_vocab_gpt2(self):
        self.vocab = "bytes"
"""
TENSORS = """
class SafetensorsLocal:
    def __init__(self, file):
        self.tensors = {file.read_text(): 0}
"""
PROGRAM = """
import json, sys
from pathlib import Path
from conversion.base import TextModel
from gguf.utility import SafetensorsLocal
model = TextModel()
model.set_vocab()
kinds = [model.get_vocab_base_pre(name) for name in ("known", "made")]
seen = Path(sys.argv[1])
said = [*kinds, model.vocab, seen.name, *SafetensorsLocal(seen / "model.safetensors").tensors]
said += json.loads((seen / "config.json").read_text())["architectures"]
open(sys.argv[sys.argv.index("--outfile") + 1], "w").write(" ".join([*said, *sys.argv[6:]]))
"""


@pytest.mark.parametrize("tower", ["vision_config", "audio_config", None])
def test_the_files_of_a_model_are_written(tmp_path: Path, tower: str | None) -> None:
    (tmp_path / "source" / "conversion").mkdir(parents=True)
    (tmp_path / "source" / "conversion" / "base.py").write_text(BASE)
    (tmp_path / "source" / "convert_hf_to_gguf.py").write_text(PROGRAM)
    (tmp_path / "source" / "gguf-py" / "gguf").mkdir(parents=True)
    (tmp_path / "source" / "gguf-py" / "gguf" / "utility.py").write_text(TENSORS)
    (tmp_path / "source" / "gguf-py" / "gguf" / "__init__.py").touch()
    (tmp_path / "checkpoint").mkdir()
    config = {
        "model_type": "lighton_ocr",
        "architectures": ["LightOnOcrForConditionalGeneration"],
        "text_config": {"model_type": "qwen3"},
    }
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config | ({tower: {}} if tower else {})))
    (tmp_path / "checkpoint" / "model.safetensors").write_text("weights")
    paths = [str(tmp_path / name) for name in ("source", "checkpoint", "files")]
    subprocess.run([sys.executable, "-m", "mmrt_lab.peers.convert", *paths], check=True, timeout=60)
    said = {file.name: file.read_text() for file in (tmp_path / "files").iterdir()}
    text = "llama-bpe qwen2 bytes checkpoint weights LightOnOCRForConditionalGeneration"
    assert said == {"model.gguf": text} | ({"mmproj.gguf": f"{text} --mmproj"} if tower else {})


def made_config(family: str) -> dict[str, Any]:
    """config.json of a tiny checkpoint."""
    recipe = family_named(family).recipes()["tiny"]
    names = [*recipe.special_tokens, *recipe.plain_tokens]
    return recipe.files({name: number for number, name in enumerate(names)})["config.json"]


@pytest.mark.parametrize(
    ("family", "decoder", "tower"),
    [
        ("smolvlm", "LlamaForCausalLM", None),
        ("internvl", "Qwen2ForCausalLM", "InternVisionModel"),
        ("lighton_ocr", "Qwen3ForCausalLM", None),
        ("paddleocr_vl", None, "PaddleOCRVisionModel"),
        ("qwen2_5_vl", None, None),
    ],
)
def test_the_parts_have_names(family: str, decoder: str | None, tower: str | None) -> None:
    found = converter_config(made_config(family))
    names = [found[part].get("architectures", [None])[0] for part in ("text_config", "vision_config")]
    assert names == [decoder, tower]


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen2_5_omni", "Qwen2_5OmniModel"), ("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration")],
)
def test_a_thinker_is_within_a_model(family: str, name: str) -> None:
    config = made_config(family)
    found = converter_config(config)
    assert found["thinker_config"] == config and found["architectures"] == [name]


def test_an_ear_has_axes_of_positions() -> None:
    config = made_config("qwen3_asr")
    text = converter_config(config)["thinker_config"]["text_config"]
    assert sum(text["rope_parameters"].pop("mrope_section")) == text["head_dim"] // 2 and text == config["text_config"]


def test_tensors_have_published_names() -> None:
    assert converter_name("vision_tower.post_layernorm.bias", "gemma3") == "vision_tower.vision_model.post_layernorm.bias"
    assert converter_name("language_model.model.embed_tokens.weight", "mistral3") == "model.embed_tokens.weight"
    assert converter_name("vision_tower.encoder.layer.0.lambda_1", "internvl") == "model.vision_tower.encoder.layer.0.lambda_1"
    assert converter_name("model.multi_modal_projector.linear_2.bias", "qwen3_asr") == "audio_tower.proj2.bias"
    assert converter_name("vision_tower.post_layernorm.bias", "llava") == "vision_tower.post_layernorm.bias"


def test_a_processor_of_pictures_has_a_mean() -> None:
    image = {"do_normalize": False}
    found = converter_processor({"image_processor": image})["image_processor"]
    assert found == {**image, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    assert converter_processor({"image_processor": found})["image_processor"] == found and converter_processor({}) == {}


@pytest.mark.parametrize(("family", "options"), [("qwen3_5", ("--no-mtp",)), ("minicpmv4_6", ("--no-mtp",)), ("llama", ())])
def test_layers_that_guess_are_not_looked_for(family: str, options: tuple[str, ...]) -> None:
    assert model_options(made_config(family)) == options


def test_smolvlm_has_a_token_of_two_line_ends() -> None:
    tokenizer = {"model": {"vocab": {"a": 0, "Ċ": 1, "Ġnoword": 2}}, "added_tokens": []}
    assert converter_tokenizer(tokenizer, "smolvlm")["model"]["vocab"] == {"a": 0, "Ċ": 1, "ĊĊ": 2}
    assert converter_tokenizer(tokenizer, "qwen2") == tokenizer
    assert converter_tokenizer({"model": {"vocab": {"ĊĊ": 0}}}, "smolvlm")["model"]["vocab"] == {"ĊĊ": 0}
