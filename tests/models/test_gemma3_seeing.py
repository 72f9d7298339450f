"""Gemma 3's pictures beside transformers: pixels, whole prompts, tower, logits in cuts that hold a picture whole, names, refusals."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mmrt.actors.gateway.reading.content import Conversation, MediaPart, Message
from mmrt.actors.gateway.reading.media import Medium
from mmrt.actors.gateway.reading.prompt import PromptBuilder
from mmrt.actors.gateway.reading.template_fields import TemplateUse
from mmrt.models.architecture import ModelConfig
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError, UnsupportedMediaError
from mmrt.models.families.gemma3 import seeing
from mmrt.models.families.item_check import fault_of
from mmrt.models.lm.warm_up import warm_up_towers
from mmrt.models.text.chat_template import ChatTemplate
from mmrt.models.text.tokenizer import PromptGuard, Tokenizer
from mmrt.schema.media import MediaOptions, MediaSpan
from mmrt.tests.models.conftest import Loaded, Prompt
from mmrt.tests.models.whole_prompts import check_greedy_tokens, check_logits_in_cuts, forced_logits, noise, opened
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")
SIDE, PATCH, MERGE = 96, 6, 2
PICTURES = ((1, 1), (7, 400), (96, 96), (95, 97), (192, 192), (33, 21), (640, 480), (29, 290))


@pytest.fixture(scope="module")
def loaded(models: Callable[[str], Loaded]) -> Loaded:
    return models("gemma3_seeing")


@pytest.fixture(scope="module")
def config(loaded: Loaded) -> ModelConfig:
    return loaded.config


def bilinear(image: np.ndarray, size: Any, resample: int, **_: object) -> np.ndarray:
    """As torchvision does it for uint8 [3, height, width], in place of Pillow's."""
    assert image.dtype == np.uint8 and resample == 2
    height, width = (size["height"], size["width"]) if isinstance(size, dict) else size
    found = torch.nn.functional.interpolate(torch.from_numpy(image.copy())[None], (height, width), mode="bilinear", antialias=True)
    resized: np.ndarray = found[0].numpy()
    return resized if image.shape[1:] != (height, width) else image


@contextmanager
def processor_of(path: Path) -> Iterator[Any]:
    """With bilinear as torchvision's."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.image_processing_backends.np_resize", bilinear)
        length = json.loads((path / "processor_config.json").read_text())["image_seq_length"]
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        yield transformers.Gemma3Processor(Gemma3ImageProcessorPil.from_pretrained(path), tokenizer, image_seq_length=length)


@pytest.fixture(scope="module")
def processor(loaded: Loaded) -> Iterator[Any]:
    with processor_of(loaded.path) as made:
        yield made


def prompt_of(loaded: Loaded, processor: Any, content: Sequence[str | np.ndarray]) -> Prompt:
    """Of a message with texts and pictures; its ids are those that the gateway makes, with placeholders expanded."""
    config, media = loaded.config, tuple(Medium("image", "", b"", MediaOptions(), "") for part in content if not isinstance(part, str))
    builder = PromptBuilder(Tokenizer.load(loaded.path), ChatTemplate.load(loaded.path), config, 8192)
    parts = tuple(part if isinstance(part, str) else MediaPart("image") for part in content)
    ids, spans, rows = list[int](), list[MediaSpan](), list[list[np.ndarray]]()
    pictures = iter([part for part in content if not isinstance(part, str)])
    for id in builder.ids_of(Conversation((Message("user", parts),), media), TemplateUse()):
        if id != config.image_token_id:
            ids.append(id)
            continue
        item, its = opened(config, next(pictures))
        spans.append(MediaSpan(len(ids), item))
        rows.append(its)
        ids += [id] * item.num_tokens
    said = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in content]
    text = processor.tokenizer.apply_chat_template([{"role": "user", "content": said}], tokenize=False, add_generation_prompt=True)
    images = [Image.fromarray(part) for part in content if not isinstance(part, str)] or None
    return Prompt(ids, spans, rows, dict(processor(text=[text], images=images, return_tensors="pt")))


@pytest.mark.parametrize("size", PICTURES)
def test_pictures_become_transformers_pixels(config: ModelConfig, processor: Any, size: tuple[int, int]) -> None:
    pixels = noise(*size)
    found = processor.image_processor(images=[Image.fromarray(pixels)], return_tensors="np")["pixel_values"][0]
    item, (rows,) = opened(config, pixels)
    assert item.num_tokens == 64 and fault_of(config, "image", item) == ""
    n = SIDE // PATCH // MERGE
    theirs = found.reshape(3, n, MERGE, PATCH, n, MERGE, PATCH).transpose(1, 4, 2, 5, 0, 3, 6).reshape(len(rows), -1)
    np.testing.assert_array_equal(rows, np.rint((theirs + 1) * 127.5))


def test_whole_prompts_are_transformers(loaded: Loaded, processor: Any) -> None:
    """Newlines around a picture become tokens with those of the text beside it."""
    contents: list[list[Any]] = [["only text"], [noise(9, 9), "What is it?"], [noise(9, 9), noise(100, 9)]]
    contents += [["One\n", noise(30, 90), "two", noise(90, 300), "\n\nthree."], ["Say <start_of_image> and <end_of_turn>."]]
    for content in contents[:-1]:
        prompt = prompt_of(loaded, processor, content)
        assert prompt.ids == prompt.reference_inputs["input_ids"][0].tolist()
    builder = PromptBuilder(Tokenizer.load(loaded.path), ChatTemplate.load(loaded.path), loaded.config, 8192)
    ids = builder.ids_of(Conversation((Message("user", contents[-1][0]),), ()), TemplateUse())
    assert loaded.config.image_token_id not in ids, "what a user writes is no control token"


def test_the_tower_equals_transformers(loaded: Loaded, processor: Any) -> None:
    prompt = prompt_of(loaded, processor, [noise(75, 131), "and", noise(20, 20)])
    with torch.inference_mode():
        expected = loaded.reference.model.get_image_features(prompt.reference_inputs["pixel_values"]).pooler_output
        ours = torch.stack([rows for found in loaded.encode(prompt) for rows in found])
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_logits_in_any_cuts(loaded: Loaded, processor: Any) -> None:
    """Pictures of 64 tokens see themselves in all layers, within windows of 48 in most."""
    with torch.inference_mode():
        prompt = prompt_of(loaded, processor, ["See", noise(61, 290), "and", noise(58, 58), "Compare."])
        check_logits_in_cuts(loaded, loaded.reference, prompt, (1, 50, 4096))
        whole = forced_logits(loaded.reference, prompt, [5])[-1]
        prompt.reference_inputs.pop("token_type_ids")
        assert (forced_logits(loaded.reference, prompt, [5])[-1] - whole).abs().max() > 0.1, "pictures' sight makes a difference"


def test_greedy_tokens_equal_those_of_generate(loaded: Loaded, processor: Any) -> None:
    with torch.inference_mode():
        check_greedy_tokens(loaded, prompt_of(loaded, processor, [noise(131, 75), "Tell."]))


def test_first_launches(loaded: Loaded) -> None:
    warm_up_towers(loaded.towers, loaded.config)


def test_both_spellings_of_names(loaded: Loaded, config: ModelConfig, tmp_path: Path) -> None:
    """Older files have ``vision_model`` within the tower, newer classes all within ``model``."""
    tensors, expected = load_file(loaded.path / "model.safetensors"), read_weights(loaded.path, config)
    assert all(seeing.checkpoint_name(seeing.canonical_name(name)) == name for name in tensors)
    for spell in (
        lambda name: name.replace("vision_tower.", "vision_tower.vision_model."),
        lambda name: f"model.{re.sub('^language_model.model.', 'language_model.', name)}",
    ):
        save_file({spell(name): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        found = read_weights(tmp_path, config)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_published_files_say_less(loaded: Loaded, tmp_path: Path) -> None:
    """As gemma-3-4b-it's config.json: heads, rope and more as in the class."""
    shutil.copytree(loaded.path, made := tmp_path / "made", ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((made / "config.json").read_text())
    content["text_config"] = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    content.pop("tie_word_embeddings")
    (made / "config.json").write_text(json.dumps(content))
    language = load_model_config(made).language
    heads = language.layers[5].mixer
    assert (heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.window, language.vocab_size) == (8, 4, 256, 0, 262208)  # type: ignore[union-attr]
    assert language.layers[0].mixer.window == 1024 and language.tie_embeddings  # type: ignore[union-attr]
    assert language.ropes[1].stretch[0] == 8.0 and (language.ropes[0].theta, language.ropes[1].theta) == (1e4, 1e6)


def test_a_start_of_a_picture_that_users_write_is_text(loaded: Loaded, tmp_path: Path) -> None:
    """Although the tokenizer does not call it special: else the text for a picture would take its place."""
    shutil.copytree(loaded.path, made := tmp_path / "made", ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((made / "tokenizer.json").read_text())
    content["added_tokens"] = [{**token, "special": False} for token in content["added_tokens"]]
    (made / "tokenizer.json").write_text(json.dumps(content))
    config = load_model_config(made)
    guard = PromptGuard(Tokenizer.load(made, control_ids=config.control_ids))
    ((written, _),) = config.prompt_texts
    assert written == "<start_of_image>" and written not in guard.hide([f"a {written} tag"])[0]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "vocabulary": (
        "config.json",
        {"text_config": {"vocab_size": 1215}, "image_token_index": 1214, "eoi_token_index": 1215},
        "vision_end_token_id is 1215, outside the vocabulary of 1215",
    ),
    "tokens": ("config.json", {"mm_tokens_per_image": 60}, "mm_tokens_per_image is 60, expected a square that divides 16 x 16 patches"),
    "tower": (
        "config.json",
        {"vision_config": {"image_size": 5, "patch_size": 6}},
        "is 64, expected a square that divides 0 x 0 patches",
    ),
    "text": ("config.json", {"boi_token_index": 5}, "added_tokens has no id 5, which stands at pictures"),
    "filter": ("preprocessor_config.json", {"resample": 3}, "resample is 3, expected 2"),
    "pan": ("preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan is true"),
    "size": ("preprocessor_config.json", {"size": {"height": 90, "width": 96}}, "height is 90, but the vision tower sees 96 pixels"),
    "length": ("processor_config.json", {"image_seq_length": 256}, "image_seq_length is 256, but a picture has 64 tokens"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_by_name(loaded: Loaded, tmp_path: Path, what: str) -> None:
    file, changes, said = REFUSED[what]
    shutil.copytree(loaded.path, made := tmp_path / "made", ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((made / file).read_text())
    (made / file).write_text(json.dumps({**content, **changes}))
    with pytest.raises(CheckpointError, match=said):
        load_model_config(made)


def test_media_that_are_refused(config: ModelConfig) -> None:
    assert config.media_kinds == ("image",)
    with pytest.raises(UnsupportedMediaError, match="picture of 9x0 pixels is empty"):
        seeing.image_item(config, 0, 9)
    with pytest.raises(UnsupportedMediaError, match="this model takes no video"):
        seeing.video_item(config, 4, 60, 60, 2.0)
