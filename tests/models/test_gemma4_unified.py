"""Gemma 4 without towers beside transformers: rows of pixels and samples, prompts, logits in cuts that hold a picture whole."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrt.media.mel import spectrogram
from mmrt.models.architecture import ModelConfig
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.families.gemma4 import unified
from mmrt.models.families.item_check import fault_of
from mmrt.models.lm.warm_up import warm_up_towers
from mmrt.schema.media import ItemShape, MediaSpan
from mmrt.tests.models.conftest import Loaded, Prompt
from mmrt.tests.models.test_items import function_of_transformers
from mmrt.tests.models.whole_prompts import check_greedy_tokens, check_logits_in_cuts, noise, opened
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")
PATCH, SIDE = 4, 12  # of the tiny checkpoint
SAMPLES = (1, 79, 80, 81, 5_000, 60_001)


@pytest.fixture(scope="module")
def loaded(models: Callable[[str], Loaded]) -> Loaded:
    return models("gemma4_unified")


@pytest.fixture(scope="module")
def config(loaded: Loaded) -> ModelConfig:
    return loaded.config


def clip(num_samples: int) -> np.ndarray:
    return np.random.default_rng(num_samples).normal(0, 0.1, num_samples).astype(np.float32)


def heard(config: ModelConfig, sound: np.ndarray) -> tuple[ItemShape, list[np.ndarray]]:
    assert config.audio_rules is not None
    item, rows = unified.audio_item(config, config.audio_rules.num_frames(len(sound))), spectrogram(config.audio_rules, sound)
    ends = np.cumsum([segment.num_rows for segment in item.segments])
    return item, np.split(rows, ends[:-1])


def processed(pixels: np.ndarray, rows: np.ndarray, grid: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' rows and places of a picture that has our size: its processor wants torchvision, this part of it does not."""
    _, h, w = grid
    planes = torch.from_numpy(rows).view(h, w, 3, SIDE, SIDE).permute(2, 0, 3, 1, 4).reshape(3, h * SIDE, w * SIDE)
    patches = function_of_transformers("image_processing_gemma4_unified", "convert_image_to_patches")(planes / 255, PATCH)
    across, down = (torch.arange(length * SIDE // PATCH) for length in (w, h))
    places = torch.stack(torch.meshgrid(across, down, indexing="xy"), -1).reshape(len(patches), 2)
    merged, at = function_of_transformers("image_processing_gemma4_unified", "patches_merge")(patches[None], places[None], h * w)
    return merged[0], at[0]


def prompt_of(loaded: Loaded, content: Sequence[str | np.ndarray]) -> Prompt:
    """Of a message with texts, pictures [h, w, 3] and sounds [n]; the text is what transformers' processor writes."""
    config, tokenizer = loaded.config, transformers.AutoTokenizer.from_pretrained(loaded.path)
    extractor = transformers.Gemma4UnifiedAudioFeatureExtractor(feature_size=80, audio_samples_per_token=80)
    parts = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "audio" if part.ndim == 1 else "image"}
        for part in content
    ]
    media = [part for part in content if not isinstance(part, str)]
    items = [heard(config, part) if part.ndim == 1 else opened(config, part) for part in media]
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True)
    ids, spans, left = list[int](), list[MediaSpan](), iter(items)
    for id in tokenizer(text)["input_ids"]:
        if id not in (config.image_token_id, config.audio_token_id):
            ids.append(id)
            continue
        item, _ = next(left)
        spans.append(MediaSpan(len(ids), item))
        for segment in item.segments:
            ids += [*segment.lead, *[id] * segment.num_tokens, *segment.trail]
    inputs: dict[str, Any] = {}
    pictures = [processed(part, its[0], item.grid) for part, (item, its) in zip(media, items, strict=True) if part.ndim == 3]
    if pictures:
        most = max(len(rows) for rows, _ in pictures)
        pads = [torch.nn.functional.pad for _ in pictures]
        inputs["pixel_values"] = torch.stack(
            [pad(rows, (0, 0, 0, most - len(rows))) for pad, (rows, _) in zip(pads, pictures, strict=True)]
        )
        inputs["image_position_ids"] = torch.stack(
            [pad(at, (0, 0, 0, most - len(at)), value=-1) for pad, (_, at) in zip(pads, pictures, strict=True)]
        )
        counts = iter([len(rows) for rows, _ in pictures])
        text = re.sub(r"<\|image\|>", lambda _: f"<|image>{'<|image|>' * next(counts)}<image|>", text)
    if sounds := [part for part in media if part.ndim == 1]:
        inputs |= extractor(sounds, return_tensors="pt")
        lengths = iter(inputs["input_features_mask"].sum(1).tolist())
        text = re.sub(r"<\|audio\|>", lambda _: f"<|audio>{'<|audio|>' * next(lengths)}<audio|>", text)
    inputs["input_ids"] = tokenizer(text, return_tensors="pt")["input_ids"]
    kinds = {config.image_token_id: 1, config.audio_token_id: 3}
    inputs["mm_token_type_ids"] = torch.tensor([[kinds.get(id, 0) for id in inputs["input_ids"][0].tolist()]])
    return Prompt(ids, spans, [rows for _, rows in items], inputs)


def test_the_decoder_is_read(config: ModelConfig) -> None:
    """What the file leaves out is as in the class: pictures see themselves, no inputs of layers."""
    mixers = [layer.mixer for layer in config.language.layers]
    assert [mixer.sees_pictures for mixer in mixers] == [True, True, False] * 2 and config.language.per_layer is None  # type: ignore[union-attr]
    assert [mixer.k_is_v for mixer in mixers] == [False, False, True] * 2  # type: ignore[union-attr]


def test_whole_prompts_and_rows_are_transformers(loaded: Loaded) -> None:
    contents: list[list[Any]] = [["only text"], *([noise(*size), "What is it?"] for size in ((9, 9), (1, 300), (640, 480)))]
    contents += [["One", noise(30, 90), " two ", clip(999), "\n\n", noise(99, 5), clip(60_001)]]
    for content in contents:
        prompt = prompt_of(loaded, content)
        assert prompt.ids == prompt.reference_inputs["input_ids"][0].tolist()
    assert loaded.config.audio_rules is not None
    for num in SAMPLES:
        theirs = transformers.Gemma4UnifiedAudioFeatureExtractor(feature_size=80, audio_samples_per_token=80)(
            clip(num), return_tensors="np"
        )
        np.testing.assert_array_equal(spectrogram(loaded.config.audio_rules, clip(num)), theirs["input_features"][0])
        item, rows = heard(loaded.config, clip(num))
        assert fault_of(loaded.config, "audio", item) == "" and len(rows) == -(-num // 60_000)


def test_rows_equal_transformers(loaded: Loaded) -> None:
    with torch.inference_mode():
        prompt = prompt_of(loaded, [noise(75, 131), noise(5, 700), clip(60_001), clip(100)])
        inputs, model = prompt.reference_inputs, loaded.reference.model
        seen = model.get_image_features(inputs["pixel_values"], inputs["image_position_ids"], return_dict=True).pooler_output
        said = model.get_audio_features(inputs["input_features"], inputs["input_features_mask"], return_dict=True).pooler_output
        ours = [torch.cat(rows) for rows in loaded.encode(prompt)]
        for found, expected in zip(ours, [*seen, *said], strict=True):
            torch.testing.assert_close(found, expected[: len(found)], rtol=1e-4, atol=1e-5)


def with_masks(reference: Any) -> Callable[..., Any]:
    """The model with the masks that its class makes to generate with a static cache, as ``gemma4`` has them always: pictures see
    themselves within windows alone. Its plain forward in 5.24 lets them in all layers, beyond windows, too."""

    def call(**inputs: Any) -> Any:
        length = inputs["input_ids"].shape[1]
        masks = reference.create_masks_for_generate(
            config=reference.config,
            inputs_embeds=torch.zeros(1, length, 1),
            attention_mask=inputs["attention_mask"],
            cache=None,
            position_ids=torch.arange(length)[None],
            mm_token_type_ids=inputs["mm_token_type_ids"],
        )
        return reference(**{**inputs, "attention_mask": masks})

    return call


def test_logits_in_any_cuts(loaded: Loaded) -> None:
    with torch.inference_mode():
        prompt = prompt_of(loaded, ["See", noise(61, 290), "and", clip(5_000), "then", noise(40, 20), "Compare."])
        check_logits_in_cuts(loaded, with_masks(loaded.reference), prompt, (1, 50, 4096))


def test_greedy_tokens_equal_those_of_generate(loaded: Loaded) -> None:
    with torch.inference_mode():
        check_greedy_tokens(loaded, prompt_of(loaded, [clip(9_000), "Tell."]))


def test_first_launches(loaded: Loaded) -> None:
    warm_up_towers(loaded.towers, loaded.config)


def test_spellings_of_names(loaded: Loaded, config: ModelConfig, tmp_path: Path) -> None:
    tensors, expected = load_file(loaded.path / "model.safetensors"), read_weights(loaded.path, config)
    assert all(unified.checkpoint_name(unified.canonical_name(name)) == name for name in tensors)
    spelled = {name.replace("embed_vision.", "vision_embedder.multimodal_embedder."): one for name, one in tensors.items()}
    save_file(spelled, tmp_path / "model.safetensors")
    found = read_weights(tmp_path, config)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "table": ("config.json", "vision_config", {"mm_posemb_size": 279}, "max_soft_tokens is 280: the tower has places for 279 tokens"),
    "width": ("config.json", "vision_config", {"output_proj_dims": 8}, r"output_proj_dims is 8, expected mm_embed_dim \(96\)"),
    "samples": ("processor_config.json", "feature_extractor", {"audio_samples_per_token": 640}, "is 640, but the model takes 80"),
    "all": ("config.json", "text_config", {"use_bidirectional_attention": "all"}, "is 'all', expected 'vision'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_by_name(loaded: Loaded, tmp_path: Path, what: str) -> None:
    file, place, changes, said = REFUSED[what]
    shutil.copytree(loaded.path, made := tmp_path / "made", ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((made / file).read_text())
    content[place].update(changes)
    (made / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=said):
        load_model_config(made)
