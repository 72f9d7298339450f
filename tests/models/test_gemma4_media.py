"""Gemma 4's pictures, videos and sounds beside transformers: sizes, pixels, spectrograms, prompts, towers, logits."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mmrt.actors.host.media_rules import for_medium
from mmrt.media.mel import spectrogram
from mmrt.models.architecture import ModelConfig, WeightFormat
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError, UnsupportedMediaError
from mmrt.models.families import gemma4
from mmrt.models.families.gemma4.clock import read_clock_tokens
from mmrt.models.families.item_check import fault_of
from mmrt.models.families.registry import family_of
from mmrt.models.lm.language_model import LanguageModel
from mmrt.models.lm.warm_up import warm_up_towers
from mmrt.models.pictures import whole_runs
from mmrt.models.towers.dispatch import Towers
from mmrt.models.towers.interface import TowerInput
from mmrt.schema.media import ItemShape, MediaOptions, MediaSpan
from mmrt.tests.models.conftest import Loaded, Prompt, load_checkpoint
from mmrt.tests.models.kept import exact
from mmrt.tests.models.test_gemma4 import randomise
from mmrt.tests.models.whole_prompts import bicubic, check_greedy_tokens, check_logits_in_cuts, forced_logits, noise, opened
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")
PATCH, SIDE = 4, 12  # of the tiny checkpoint: pixels of a patch, and of a row
PICTURES = (
    *((1, 1), (7, 400), (400, 7), (3, 900), (33, 21), (12, 12), (204, 192), (200, 201), (240, 168), (1, 280), (1, 281)),
    *((300, 41), (97, 203), (150, 31), (640, 480), (61, 999), (17, 23), (29, 290)),
)
SAMPLES = (161, 320, 321, 5_000, 33_333, 479_999, 480_000)


@pytest.fixture(scope="module")
def loaded(models: Callable[[str], Loaded]) -> Loaded:
    return models("gemma4")


@pytest.fixture(scope="module")
def config(loaded: Loaded) -> ModelConfig:
    return loaded.config


@contextmanager
def processor_of(path: Path) -> Iterator[Any]:
    """transformers' processor without that of videos, which needs torchvision; bicubic as torchvision's."""
    from transformers.models.gemma4 import image_processing_pil_gemma4 as module

    fields = json.loads((path / "processor_config.json").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "resize", bicubic)
        images = module.Gemma4ImageProcessorPil(**fields["image_processor"])
        sounds = transformers.Gemma4AudioFeatureExtractor(**fields["feature_extractor"])
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        for check in ("check_argument_for_proper_class", "validate_inputs"):
            patch.setattr(transformers.Gemma4Processor, check, lambda *_, **__: None)
        yield transformers.Gemma4Processor(sounds, images, tokenizer, None)


@pytest.fixture(scope="module")
def processor(loaded: Loaded) -> Iterator[Any]:
    with processor_of(loaded.path) as made:
        yield made


def clip(num_samples: int) -> np.ndarray:
    return np.random.default_rng(num_samples).normal(0, 0.1, num_samples).astype(np.float32)


def heard(config: ModelConfig, sound: np.ndarray) -> tuple[ItemShape, list[np.ndarray]]:
    assert config.audio_rules is not None
    return gemma4.audio_item(config, config.audio_rules.num_frames(len(sound))), [spectrogram(config.audio_rules, sound)]


def prompt_of(loaded: Loaded, processor: Any, content: Sequence[str | np.ndarray]) -> Prompt:
    """Of a message with texts, pictures [h, w, 3] and sounds [n]. Its ids are ours; ``reference_inputs`` are the processor's."""
    config, tokenizer, pictures, sounds, parts, items = loaded.config, processor.tokenizer, [], [], [], []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif part.ndim == 1:
            parts.append({"type": "audio"})
            sounds.append(part)
            items.append(heard(config, part))
        else:
            parts.append({"type": "image"})
            pictures.append(Image.fromarray(part))
            items.append(opened(config, part))
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
    inputs = processor(text=[text], images=pictures or None, audio=sounds or None, return_tensors="pt")
    return Prompt(ids, spans, [rows for _, rows in items], dict(inputs))


@pytest.mark.parametrize("size", PICTURES)
def test_pictures_become_transformers_pixels_and_tokens(config: ModelConfig, processor: Any, size: tuple[int, int]) -> None:
    pixels = noise(*size)
    found = processor.image_processor(images=[Image.fromarray(pixels)], return_tensors="np")
    item, (rows,) = opened(config, pixels)
    (segment,) = item.segments
    assert [segment.num_tokens] == list(found["num_soft_tokens_per_image"]) and fault_of(config, "image", item) == ""
    _, h, w = segment.grid
    theirs = found["pixel_values"][0].reshape(-1, PATCH, PATCH, 3)[: h * w].reshape(h, w, PATCH, PATCH, 3)
    merged = theirs.reshape(h // 3, 3, w // 3, 3, PATCH, PATCH, 3).transpose(0, 2, 1, 3, 6, 4, 5).reshape(h * w, -1)
    np.testing.assert_array_equal(rows, np.rint(merged * 255))
    assert found["image_position_ids"][0][: h * w].max(0).tolist() == [w - 1, h - 1]


def test_budgets_are_those_that_models_know(config: ModelConfig, processor: Any) -> None:
    for max_pixels, budget in ((10**9, 280), (140 * SIDE**2, 140), (279 * SIDE**2, 140), (70 * SIDE**2, 70), (1, 70)):
        narrowed = for_medium(config, MediaOptions(max_pixels=max_pixels))
        for size in PICTURES[3:9]:
            found = processor.image_processor(images=[Image.fromarray(noise(*size))], max_soft_tokens=budget)
            assert gemma4.image_item(narrowed, *size).segments[0].num_tokens == found["num_soft_tokens_per_image"][0]


def test_whole_prompts_are_transformers(loaded: Loaded, processor: Any) -> None:
    contents: list[list[Any]] = [["only text"], *([noise(*size), "What is it?"] for size in PICTURES[::3])]
    contents += [["One", noise(30, 90), " two ", noise(90, 300), "\n\n", noise(99, 5), " three."], [noise(9, 9), noise(100, 9)]]
    contents += [["Hear", clip(num), "!"] for num in SAMPLES] + [[clip(999), noise(50, 20), clip(20_000), "Both?"]]
    for content in contents:
        prompt = prompt_of(loaded, processor, content)
        assert prompt.ids == prompt.reference_inputs["input_ids"][0].tolist()


def test_spectrograms_are_transformers(config: ModelConfig, processor: Any) -> None:
    rules = config.audio_rules
    assert rules is not None
    for other in (rules, msgspec.structs.replace(rules, num_mel_bins=128)):
        extractor = transformers.Gemma4AudioFeatureExtractor(feature_size=other.num_mel_bins)
        for num in SAMPLES:
            theirs = extractor([clip(num)], return_tensors="np")
            kept = theirs["input_features"][0][theirs["input_features_mask"][0]]
            np.testing.assert_array_equal(spectrogram(other, clip(num)), kept)
            item = gemma4.audio_item(config, len(kept))
            assert fault_of(config, "audio", item) == "" and item.segments[0].num_tokens == (len(kept) + 3) // 4


def test_towers_equal_transformers(loaded: Loaded, processor: Any) -> None:
    content = [noise(75, 131), "and", noise(20, 20), noise(5, 700), *map(clip, SAMPLES[:5])]
    prompt = prompt_of(loaded, processor, content)
    with torch.inference_mode():
        inputs = prompt.reference_inputs
        seen = loaded.reference.model.get_image_features(inputs["pixel_values"], inputs["image_position_ids"]).pooler_output
        sounds = loaded.reference.model.get_audio_features(inputs["input_features"], inputs["input_features_mask"])
        said = [rows[mask] for rows, mask in zip(sounds.pooler_output, sounds.attention_mask, strict=True)]
        alone = [rows for found in loaded.encode(prompt) for rows in found]
        for ours, theirs in zip(alone, [*seen, *said], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
        parts = [
            TowerInput(part.kind, rows[0], part.grid)
            for span, rows in zip(prompt.spans, prompt.rows, strict=True) for part in span.shape.segments
        ]  # fmt: skip
        for ours, theirs in zip(loaded.towers.encode(parts), alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_towers_without_bounds_and_standards(tmp_path: Path, loaded: Loaded, processor: Any) -> None:
    """As some checkpoints have them, in bfloat16 within its rounding."""
    made = Path(shutil.copytree(loaded.path, tmp_path / "made"))
    fields = json.loads((made / "config.json").read_text())
    fields["vision_config"] |= {"standardize": False, "use_clipped_linears": False}
    fields["audio_config"]["use_clipped_linears"] = False
    (made / "config.json").write_text(json.dumps(fields))
    prompt = prompt_of(loaded, processor, [noise(75, 131), clip(20_000)])
    inputs = prompt.reference_inputs
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        reference = transformers.Gemma4ForConditionalGeneration.from_pretrained(made, dtype=torch.float32).eval()
        config = load_model_config(made, dtype=str(dtype).removeprefix("torch."))  # type: ignore[arg-type]
        towers = Towers(config, read_weights(made, config))
        with torch.inference_mode():
            (seen,) = reference.model.get_image_features(inputs["pixel_values"], inputs["image_position_ids"]).pooler_output
            sound = reference.model.get_audio_features(inputs["input_features"], inputs["input_features_mask"]).pooler_output[0]
            parts = [
                TowerInput(span.shape.kind, rows[0], span.shape.grid) for span, rows in zip(prompt.spans, prompt.rows, strict=True)
            ]
            for ours, theirs in zip(towers.encode(parts), (seen, sound), strict=True):
                assert (ours.float() - theirs[: len(ours)]).abs().mean() < bound * theirs.std()


def test_logits_in_any_cuts(loaded: Loaded, processor: Any) -> None:
    """The prompt is longer than the window of 48 tokens, and so is its picture."""
    with torch.inference_mode():
        prompt = prompt_of(loaded, processor, ["See", noise(61, 290), "and", clip(20_000), "then", noise(58, 58), "Compare."])
        check_logits_in_cuts(loaded, loaded.reference, prompt, (7, 50, 4096))


def test_greedy_tokens_equal_those_of_generate(loaded: Loaded, processor: Any) -> None:
    with torch.inference_mode():
        check_greedy_tokens(loaded, prompt_of(loaded, processor, [clip(9_000), noise(13, 75), "Tell."]))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_logits_of_rounded_weights(loaded: Loaded, processor: Any, weights: WeightFormat) -> None:
    """Those of the values that the format has, but for the rounding of activations. Towers are not rounded."""
    config = load_model_config(loaded.path, weights=weights)
    rounded = read_weights(loaded.path, config)
    assert rounded["layers.0.qkv"].dtype != torch.float32 and rounded["audio.projection.weight"].dtype == torch.float32
    exactly = {name: exact(rounded, name).float() if f"{name}.scales" in rounded else value for name, value in rounded.items()}
    kv = torch.zeros(32, config.kv_page_bytes(16), dtype=torch.uint8)
    with torch.inference_mode():
        prompt, logits = prompt_of(loaded, processor, [noise(131, 75), clip(9_000), "Tell."]), list[torch.Tensor]()
        positions = torch.arange(len(prompt.ids)).expand(3, -1)
        for model in (LanguageModel(config, rounded, kv.clone(), 16), LanguageModel(loaded.config, exactly, kv.clone(), 16)):
            for chunk in loaded.prompt_chunks(model, prompt, positions, torch.arange(32), 64):
                model.prefill([chunk])
            length = torch.tensor([len(prompt.ids)])
            logits.append(model.decode(torch.tensor(prompt.ids[-1:]), positions[:, -1:], length, torch.arange(32)[None]))
        assert 0 < (logits[0] - logits[1]).abs().mean() / logits[1].std() < 0.06


def test_frames_are_those_that_transformers_takes(config: ModelConfig) -> None:
    """Its rule for a number of frames (BaseVideoProcessor); it refuses videos that have fewer. A request may ask for fewer."""
    for total in (32, 33, 63, 100, 1001, 54321):
        assert gemma4.sample_frames(config, total, 25.0).tolist() == torch.arange(0, total, total / 32).int().tolist()
    assert gemma4.sample_frames(config, 31, 25.0).tolist() == [*range(31)]
    fewer = for_medium(config, MediaOptions(max_frames=4))
    assert gemma4.sample_frames(fewer, 100, 25.0).tolist() == [0, 25, 50, 75]
    slower = for_medium(config, MediaOptions(fps=1.0, min_frames=2))
    assert gemma4.sample_frames(slower, 100, 25.0).tolist() == [0, 25, 50, 75]


def test_prompts_of_videos_are_transformers(config: ModelConfig, processor: Any) -> None:
    """Times are text before each frame. Frames are pictures of 70 tokens at most."""
    for height, width, times in ((90, 160, [0.0, 59.99, 60.0, 754.3]), (300, 20, [5999.0, 6000.0]), (16, 16, [3.5])):
        item = gemma4.video_item(config, len(times), height, width, 1.0, times)
        assert fault_of(config, "video", item) == ""
        metadata = type("Metadata", (), {"fps": 25.0, "timestamps": times})()
        frames = processor.image_processor(images=[Image.fromarray(noise(height, width))], max_soft_tokens=70)
        inputs = {"num_soft_tokens_per_video": frames["num_soft_tokens_per_image"], "video_metadata": [metadata]}
        expected = processor.tokenizer(processor.replace_video_token(inputs, 0))["input_ids"]
        found = [
            id for segment in item.segments for id in (*segment.lead, *[config.video_token_id] * segment.num_tokens, *segment.trail)
        ]
        assert found == expected and len(found) == item.num_tokens


def test_frames_and_pictures_are_encoded_alike(loaded: Loaded) -> None:
    rows = opened(loaded.config, noise(24, 24))[1][0]
    with torch.inference_mode():
        picture, frame = loaded.towers.encode([TowerInput(kind, rows, (1, 48, 48)) for kind in ("image", "video")])  # type: ignore[arg-type]
    assert torch.equal(picture, frame)


def test_times_of_gemma_s_tokenizer(tmp_path: Path) -> None:
    """Spaces are written as its own sign, and words are not cut before they are merged."""
    words = ["\u2581", "\u2581\u2581", "::", ":", *"0123456789", "a", "b", "ab", "<0x0A>"]
    model = tokenizers.models.BPE({word: at for at, word in enumerate(words)}, [("a", "b"), ("\u2581", "\u2581"), (":", ":")])
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    made.save(str(tmp_path / "tokenizer.json"))
    times = read_clock_tokens(tmp_path)
    for text in ("00:00", "12:34", "100:59"):
        assert [*times.closing, *times.text(text.replace(":", "."))] == made.encode(f" {text} ").ids
    for joined, problem in (("00", "joins the digits of times, as '00'"), ("\u25811", "as '\u25811'")):
        model = tokenizers.models.BPE({word: at for at, word in enumerate([*words, joined])}, [(joined[0], joined[1])])
        tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(CheckpointError, match=problem):
            read_clock_tokens(tmp_path)


def test_both_spellings_of_names(loaded: Loaded, config: ModelConfig, tmp_path: Path) -> None:
    tensors, expected = load_file(loaded.path / "model.safetensors"), read_weights(loaded.path, config)
    assert all(gemma4.checkpoint_name(gemma4.canonical_name(name)) == name for name in tensors)
    other = {
        re.sub(r"^model\.(language_model\.)?", lambda it: "language_model.model." if it[1] else "", name): one
        for name, one in tensors.items()
    }
    assert {name.partition(".")[0] for name in other} == {
        "language_model",
        "vision_tower",
        "embed_vision",
        "audio_tower",
        "embed_audio",
    }
    save_file(other, tmp_path / "model.safetensors")
    found = read_weights(tmp_path, config)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_first_launches(loaded: Loaded) -> None:
    warm_up_towers(loaded.towers, loaded.config)


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "activation": ("config.json", "vision_config", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu', expected"),
    "kv heads": ("config.json", "vision_config", {"num_key_value_heads": 1}, r"num_key_value_heads is 1, expected .*\(3\)"),
    "bias": ("config.json", "vision_config", {"attention_bias": True}, "attention_bias is true"),
    "head": ("config.json", "vision_config", {"head_dim": 46}, "head_dim is 46, expected a multiple of 4"),
    "table": (
        "config.json",
        "vision_config",
        {"position_embedding_size": 839},
        "max_soft_tokens is 280: the tower has places for 279 tokens",
    ),
    "sound": ("config.json", "audio_config", {"hidden_act": "relu"}, "hidden_act is 'relu', expected 'silu'"),
    "channels": ("config.json", "audio_config", {"subsampling_conv_channels": [6, 8]}, r"is \[6, 8\], expected two numbers"),
    "ahead": ("config.json", "audio_config", {"attention_context_right": 1}, "attention_context_right is 1"),
    "context": ("config.json", "audio_config", {"attention_context_left": 5}, r"is 5, expected attention_chunk_size \+ 1 \(7\)"),
    "budget": ("processor_config.json", "image_processor", {"max_soft_tokens": 300}, "is 300, expected one of 70, 140, 280, 560, 1120"),
    "colours": (
        "processor_config.json",
        "video_processor",
        {"do_normalize": True, "image_mean": [0.5, 0.5, 0.5]},
        "expected 0 of each colour",
    ),
    "pool": ("processor_config.json", "image_processor", {"pooling_kernel_size": 2}, "is 2, but the vision tower has 3"),
    "filter": ("processor_config.json", "image_processor", {"resample": 1}, "resample is 1, expected 3"),
    "frames": ("processor_config.json", "video_processor", {"do_sample_frames": False}, "do_sample_frames is false"),
    "bins": ("processor_config.json", "feature_extractor", {"feature_size": 80}, "feature_size is 80, but the audio tower has 16"),
    "dither": ("processor_config.json", "feature_extractor", {"dither": 0.1}, "dither is 0.1, expected 0"),
    "means": ("processor_config.json", "feature_extractor", {"per_bin_mean": [0.0]}, "per_bin_mean is not null"),
    "hop": ("processor_config.json", "feature_extractor", {"hop_length_ms": 30.0}, "windows of 320 samples, 480 apart"),
    "placeholder": ("config.json", "", {"image_token_id": 5000}, "image placeholder id is 5000, outside the vocabulary of 1216"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_by_name(loaded: Loaded, tmp_path: Path, what: str) -> None:
    file, place, changes, said = REFUSED[what]
    shutil.copytree(loaded.path, made := tmp_path / "made", ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((made / file).read_text())
    (content[place] if place else content).update(changes)
    (made / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=said):
        load_model_config(made)


def test_media_that_are_refused(config: ModelConfig) -> None:
    for refuse, said in (
        (lambda: gemma4.image_item(config, 0, 9), "picture of 9x0 pixels is empty"),
        (lambda: gemma4.sample_frames(config, 0, 10.0), "video has no frames"),
        (lambda: gemma4.sample_frames(config, 30, 0.0), "video has a frame rate of 0.0"),
        (lambda: gemma4.video_item(config, 0, 60, 60, 2.0), "video has no frames"),
        (lambda: gemma4.audio_item(config, 0), "audio is too short: at least 161 samples are needed"),
        (lambda: gemma4.audio_item(config, 3000), "audio of 3000 mel frames is longer than the 2999 of 30 s that this model hears"),
    ):
        with pytest.raises(UnsupportedMediaError, match=said):
            refuse()


def test_text_within_a_medium_is_scaled_and_media_are_not(loaded: Loaded) -> None:
    rows, placeholder, word = opened(loaded.config, noise(24, 24))[1][0], loaded.config.image_token_id, 77
    num_tokens = len(rows) // 9
    with torch.inference_mode():
        (alone,) = loaded.towers.encode([TowerInput("image", rows, (1, 48, 48))])
        part = TowerInput("image", rows, (1, 48, 48), ids=((word, 2), (placeholder, num_tokens), (word, 1)))
        (found,) = loaded.towers.encode([part])
        (said,) = loaded.language_model().embed(torch.tensor([word]))
    assert torch.equal(found, torch.cat((said.expand(2, -1), alone, said[None])))


@pytest.fixture(scope="module")
def large(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """As 31B: pictures see themselves where there are windows, values are keys in the other layers, no inputs of layers, no sounds."""
    path = tmp_path_factory.mktemp("large")
    for file in loaded.path.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, path)
    fields = json.loads((path / "config.json").read_text())
    fields |= {"audio_config": None}
    fields["text_config"] |= {
        "use_bidirectional_attention": "vision", "attention_k_eq_v": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": 1,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(fields))
    torch.manual_seed(0)
    reference = transformers.Gemma4ForConditionalGeneration(transformers.AutoConfig.from_pretrained(path)).eval()
    with torch.no_grad():
        randomise(reference)
        for name, values in [*reference.named_parameters(), *reference.named_buffers()]:
            if name.endswith(("_min", "_max")):
                values.fill_(-2.0 if name.endswith("_min") else 2.0)
            elif name.endswith(("std_bias", "std_scale", "position_embedding_table")):
                values.normal_(0.0, 0.3)
            elif name.endswith(("_proj.weight", "linear.weight", "projection.weight")):
                values.normal_(0.0, values.shape[1] ** -0.5)
    reference.save_pretrained(path)
    config, weights = load_checkpoint(path)
    return Loaded(path, config, family_of(config), weights, Towers(config, weights), reference)


def test_pictures_that_a_chunk_must_hold(large: Loaded, processor: Any) -> None:
    """Spans longer and shorter than the window of 48 tokens; chunks of any size, whose ends are moved."""
    assert [layer.mixer.sees_pictures for layer in large.config.language.layers] == [True, True, True, False] * 2  # type: ignore[union-attr]
    assert large.config.media_kinds == ("image", "video") and large.config.language.layers[3].mixer.k_is_v  # type: ignore[union-attr]
    with torch.inference_mode():
        prompt = prompt_of(large, processor, ["See", noise(61, 290), "and", noise(40, 20), "then", noise(5, 300), "Compare."])
        assert whole_runs(large.config.language, prompt.spans)
        check_logits_in_cuts(large, large.reference, prompt, (1, 30, 4096))
        causal = forced_logits(
            large.reference, dataclasses.replace(prompt, reference_inputs={**prompt.reference_inputs, "mm_token_type_ids": None}), [5]
        )
        assert (causal[-1] - forced_logits(large.reference, prompt, [5])[-1]).abs().max() > 0.1, "spans make a difference"


def test_a_chunk_that_begins_within_a_picture(large: Loaded, processor: Any) -> None:
    """As behind pages that a cache has, which were computed with the whole picture."""
    with torch.inference_mode():
        prompt = prompt_of(large, processor, ["See", noise(61, 290), "Well?"])
        (run,), places = whole_runs(large.config.language, prompt.spans), torch.arange(len(prompt.ids)).expand(3, -1)
        table, found = torch.arange(40), list[torch.Tensor]()
        for begin in (0, run[0] + 16 - run[0] % 16, run[1] - run[1] % 16):
            lm = large.language_model()
            chunks = large.prompt_chunks(lm, prompt, places, table, 4096)
            lm.prefill(chunks)
            (whole,) = chunks
            rest = {"embeds": whole.embeds[begin:], "positions": whole.positions[:, begin:], "ids": whole.ids[begin:], "start": begin}  # type: ignore[index]
            lm.prefill([dataclasses.replace(whole, **rest)])
            found.append(lm.decode(torch.tensor(prompt.ids[-1:]), places[:, -1:], torch.tensor([len(prompt.ids)]), table[None]))
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=0, atol=1e-5)
