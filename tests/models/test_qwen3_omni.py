"""Qwen3-Omni's thinker beside transformers: items, positions, towers, prompts, logits."""

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file

from mmrt.media.mel import LogMel
from mmrt.models.architecture import ModelConfig
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError, UnsupportedMediaError
from mmrt.models.families import qwen3_omni_moe as family
from mmrt.models.families.item_check import fault_of
from mmrt.models.lm.warm_up import warm_up_towers
from mmrt.models.text.chat_template import ChatTemplate
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.models.towers.interface import TowerInput
from mmrt.schema.media import ItemShape
from mmrt.tests.models.conftest import Loaded, Prompt
from mmrt.tests.models.whole_prompts import check_greedy_tokens, check_logits_in_cuts, check_rounded_logits, edited, noise
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")
omni: Any = ImportedLater("transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe")
LENGTHS = (1, 2, 13, 50, 99, 100, 101, 107, 799, 800, 801, 899, 900, 1700, 2431)  # mel frames


@pytest.fixture(scope="module")
def loaded(models: Callable[[str], Loaded]) -> Loaded:
    return models("qwen3_omni_moe")


@pytest.fixture(scope="module")
def processor(loaded: Loaded) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(loaded.path)
    images = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil.from_pretrained(loaded.path)
    hears = transformers.WhisperFeatureExtractor.from_pretrained(loaded.path)
    with pytest.MonkeyPatch.context() as patch:  # there is no processor of videos without torchvision
        patch.setattr(omni.Qwen3OmniMoeProcessor, "check_argument_for_proper_class", lambda *_: None)
        return omni.Qwen3OmniMoeProcessor(images, None, hears, tokenizer)


def mel(num_frames: int) -> np.ndarray:
    return np.random.default_rng(num_frames).normal(0, 0.5, (num_frames, 128)).astype(np.float32)


def test_sounds_of_any_length(loaded: Loaded) -> None:
    processing = importlib.import_module("transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe")
    lengths = processing._get_feat_extract_output_lengths
    for num_frames in (*range(1, 1700), *LENGTHS, 60_000):
        item = family.audio_item(loaded.config, num_frames)
        assert item.num_tokens == lengths(torch.tensor(num_frames))
        assert item.num_tokens == sum(part.num_tokens for part in item.segments)
        assert len(item.segments) == 1 or item.segments[-1].num_rows >= 100
        assert fault_of(loaded.config, "audio", item) == ""


@pytest.mark.parametrize("num_samples", [400, 1600, 15999, 16000, 33333, 200001])
def test_spectrograms_are_the_feature_extractor_s(loaded: Loaded, processor: Any, num_samples: int) -> None:
    """Of any length: nothing is cut off."""
    sound = np.random.default_rng(0).standard_normal(num_samples).astype(np.float32)
    options = {"sampling_rate": 16000, "padding": True, "truncation": False, "return_attention_mask": True, "return_tensors": "np"}
    expected = processor.feature_extractor(sound, **options)
    found, rules = LogMel(loaded.config.audio_rules)(sound), loaded.config.audio_rules
    assert len(found) == rules.num_frames(num_samples) == expected["attention_mask"].sum()
    np.testing.assert_allclose(found, expected["input_features"][0].T[: len(found)], atol=2e-4)


def test_the_tower_that_hears(loaded: Loaded) -> None:
    """Segment by segment, several clips at once, short ones beside long ones: each as alone in transformers."""
    wide = 1 + loaded.config.num_deep
    with torch.inference_mode():
        parts, expected = list[TowerInput](), list[torch.Tensor]()
        for num_frames in LENGTHS:
            one = mel(num_frames)
            inputs = {
                "input_features": torch.from_numpy(one.T[None]),
                "feature_attention_mask": torch.ones(1, num_frames, dtype=torch.long),
            }
            expected.append(loaded.reference.model.get_audio_features(**inputs).pooler_output)
            lengths = [part.num_rows for part in family.audio_item(loaded.config, num_frames).segments]
            cuts = np.split(one, np.cumsum(lengths)[:-1])
            parts += [TowerInput("audio", rows, (len(rows), 0, 0)) for rows in cuts]
        found = torch.cat(loaded.towers.encode(parts)).unflatten(1, (wide, -1))
        torch.testing.assert_close(found[:, 0], torch.cat(expected), rtol=1e-4, atol=1e-5)
        assert not found[:, 1:].any()


def prompt_with(loaded: Loaded, *parts: int | ItemShape) -> Prompt:
    return loaded.build_prompt(list(parts))


def media(loaded: Loaded) -> dict[str, ItemShape]:
    config = loaded.config
    return {
        "picture": family.image_item(config, 70, 130),
        "video": family.video_item(config, 6, 64, 96, 2.0),
        "sound": family.audio_item(config, 1010),
        "clip": family.audio_item(config, 150),
    }


@pytest.mark.parametrize("names", [("picture",), ("video", "sound"), ("sound", "picture", "video", "clip"), ("clip",)])
def test_logits_and_positions(loaded: Loaded, names: tuple[str, ...]) -> None:
    """In any cuts, with what later layers get of pictures and videos."""
    kinds = media(loaded)
    parts = [part for name in names for part in (7, kinds[name])]
    with torch.inference_mode():
        prompt = prompt_with(loaded, *parts, 9)
        given = prompt.reference_inputs
        heard = given.get("feature_attention_mask")
        expected, delta = loaded.reference.model.get_rope_index(
            given["input_ids"],
            given.get("image_grid_thw"),
            given.get("video_grid_thw"),
            given["attention_mask"],
            audio_seqlens=None if heard is None else heard.sum(1),
            second_per_grids=given.get("video_second_per_grid"),
        )
        found, ours = family.positions(loaded.config, len(prompt.ids), prompt.spans)
        assert found.tolist() == expected[:, 0].int().tolist() and ours == int(delta[0])
        check_logits_in_cuts(loaded, loaded.reference, prompt, (7, 50, 4096) if len(names) > 2 else (4096,))


def test_greedy_tokens_equal_those_of_generate(loaded: Loaded) -> None:
    kinds = media(loaded)
    with torch.inference_mode():
        check_greedy_tokens(loaded, prompt_with(loaded, 9, kinds["picture"], 5, kinds["clip"], 8))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_logits_of_rounded_weights(loaded: Loaded, weights: Any) -> None:
    kinds = media(loaded)
    check_rounded_logits(loaded, prompt_with(loaded, 9, kinds["picture"], 5, kinds["clip"], 8), weights)


def test_whole_prompts_are_the_processor_s(loaded: Loaded, processor: Any) -> None:
    """Pictures and sounds between words; videos as Qwen2.5-Omni's, whose processor counts them alike."""
    pixels, sound = noise(70, 200), np.random.default_rng(0).standard_normal(33_333).astype(np.float32)
    content = [{"type": "text", "text": "Look:"}, {"type": "image"}, {"type": "audio"}, {"type": "text", "text": "What?"}]
    rendered = ChatTemplate.load(loaded.path).render([{"role": "user", "content": content}])
    expected = processor(text=[rendered], images=[Image.fromarray(pixels)], audio=[sound], return_tensors="pt")
    items = {
        loaded.config.image_token_id: family.image_item(loaded.config, *pixels.shape[:2]),
        loaded.config.audio_token_id: family.audio_item(loaded.config, loaded.config.audio_rules.num_frames(len(sound))),
    }
    ids = Tokenizer.load(loaded.path).encode(rendered)
    ours = [id for id in ids for _ in range(items[id].num_tokens if id in items else 1)]
    assert ours == expected["input_ids"][0].tolist()
    assert items[loaded.config.image_token_id].grid == tuple(expected["image_grid_thw"][0].tolist())


def test_each_spelling_of_names(loaded: Loaded, tmp_path: Path) -> None:
    """Those of the bare thinker, and of the whole model's files, whose experts are apart."""
    tensors, expected = load_file(loaded.path / "model.safetensors"), read_weights(loaded.path, loaded.config)
    assert all(family.checkpoint_name(family.canonical_name(name)) == name for name in tensors)
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix("model.").replace("language_model.", "model.")
        if "experts." not in name:
            whole[f"thinker.{bare}"] = tensor.clone()
            continue
        stem = bare[: bare.index("experts.") + 8]
        for number, one in enumerate(tensor):
            halves = {"gate_proj": one.chunk(2)[0], "up_proj": one.chunk(2)[1]} if "gate_up" in name else {"down_proj": one}
            whole |= {f"thinker.{stem}{number}.{part}.weight": half.clone() for part, half in halves.items()}
    whole["talker.model.norm.weight"] = torch.zeros(3)
    save_file(whole, tmp_path / "model.safetensors")
    found = read_weights(tmp_path, loaded.config)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_the_whole_model_s_configuration(loaded: Loaded, tmp_path: Path) -> None:
    shutil.copytree(loaded.path, made := tmp_path / "made", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((made / "config.json").read_text())
    whole = {"model_type": "qwen3_omni_moe", "thinker_config": config, "dtype": "float32", "enable_audio_output": True}
    (made / "config.json").write_text(json.dumps(whole))
    assert load_model_config(made) == loaded.config
    (made / "preprocessor_config.json").write_text("{}")
    rules, theirs = load_model_config(made).vision_rules, omni.Qwen3OmniMoeProcessor.videos_kwargs["size"]
    assert (rules.video_min_pixels, rules.video_max_pixels) == (theirs["shortest_edge"], theirs["longest_edge"])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deepstack": ({"vision_config": {"deepstack_visual_indexes": [3, 2]}}, r"deepstack_visual_indexes is \[3, 2\], expected ascending"),
    "sections": ({"text_config": {"rope_parameters": {"mrope_section": [1, 2, 3]}}}, r"mrope_section is \[1, 2, 3\], expected three"),
    "router": ({"text_config": {"scoring_func": "sigmoid"}}, "scoring_func is 'sigmoid', expected 'softmax'"),
    "width": ({"audio_config": {"output_dim": 64}}, r"output_dim is 64, expected the decoder's hidden_size \(128\)"),
    "windows": ({"audio_config": {"n_window_infer": 750}}, r"n_window_infer is 750, expected a multiple of 2 x n_window \(100\)"),
    "table": ({"vision_config": {"num_position_embeddings": 145}}, "num_position_embeddings is 145, expected the square"),
    "end of a sound": ({"audio_end_token_id": None}, "audio_end_token_id is missing"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_by_name(loaded: Loaded, tmp_path: Path, what: str) -> None:
    changes, said = REFUSED[what]
    with pytest.raises(CheckpointError, match=said):
        load_model_config(edited(loaded.path, tmp_path / "made", "config.json", changes))


def test_other_media_and_lies(loaded: Loaded) -> None:
    config = loaded.config
    video, sound = family.video_item(config, 6, 64, 96, 2.0), family.audio_item(config, 300)
    for refuse, said in (
        (lambda: family.audio_item(config, 0), "audio of 0 mel frames is too short"),
        (lambda: family.video_item(config, 0, 64, 96, 2.0), "video has no frames"),
    ):
        with pytest.raises(UnsupportedMediaError, match=said):
            refuse()
    assert fault_of(config, "video", video) == ""
    (segment,) = sound.segments
    for lie in ({"num_tokens": segment.num_tokens + 1}, {"num_rows": 299}, {"grid": (300, 1, 1)}):
        told = msgspec.structs.replace(segment, **lie)
        assert fault_of(config, "audio", msgspec.structs.replace(sound, segments=[told], num_tokens=told.num_tokens)), lie


def sounded(config: ModelConfig, num_frames: int, mel_frames: int, fps: float = 2.0) -> ItemShape:
    assert config.vision_rules is not None
    config = msgspec.structs.replace(config, vision_rules=msgspec.structs.replace(config.vision_rules, fps=fps))
    return family.video_with_sound(config, family.video_item(config, num_frames, 64, 96, fps), family.audio_item(config, mel_frames))


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 4000), st.sampled_from([0.3, 1, 1.3, 2, 3, 6, 24]))
def test_a_sound_track_takes_turns_as_in_transformers(loaded: Loaded, frames: int, mel_frames: int, fps: float) -> None:
    item = sounded(loaded.config, frames, mel_frames, fps)
    names = {"video_token": "V", "audio_token": "A", "audio_bos_token": "", "audio_eos_token": ""}
    processor = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2), **names)
    videos = {"video_grid_thw": np.array([item.grid]), "video_second_per_grid": [2 / fps]}
    sounds = {"num_audio_tokens": [family.audio_item(loaded.config, mel_frames).num_tokens]}
    replace = omni.Qwen3OmniMoeProcessor.replace_video_with_audio_token
    expected = replace(processor, videos, 0, sounds, 0, position_id_per_seconds=loaded.config.positions_per_second)
    assert "".join(part.num_tokens * part.kind[0].upper() for part in item.segments) == expected
    assert item.num_tokens == len(expected) and fault_of(loaded.config, "video", item) == ""


# sound ends first, pictures do, a rest that stays with the window before, patches closer than tokens of sound
@pytest.mark.parametrize(
    ("frames", "mel_frames", "fps"), [(12, 130, 2.0), (5, 1010, 2.0), (4, 870, 2.0), (9, 150, 6.5), (6, 400, 26.0)]
)
def test_logits_and_positions_of_a_video_with_its_sound_track(loaded: Loaded, frames: int, mel_frames: int, fps: float) -> None:
    """Where temporal positions are whole numbers, as transformers'."""
    prompt = prompt_with(loaded, 7, sounded(loaded.config, frames, mel_frames, fps), 5, media(loaded)["picture"], 9)
    given = prompt.reference_inputs
    with torch.inference_mode():
        expected, delta = loaded.reference.model.get_rope_index(
            given["input_ids"],
            given["image_grid_thw"],
            given["video_grid_thw"],
            given["attention_mask"],
            use_audio_in_video=True,
            audio_seqlens=given["feature_attention_mask"].sum(1),
            second_per_grids=given["video_second_per_grid"],
        )
        found, ours = family.positions(loaded.config, len(prompt.ids), prompt.spans)
        assert found.tolist() == expected[:, 0].int().tolist() and ours == int(delta[0])
        check_logits_in_cuts(loaded, loaded.reference, prompt, (50, 4096))


def test_lies_about_runs_of_sound(loaded: Loaded) -> None:
    config, item = loaded.config, sounded(loaded.config, 6, 400)
    at = [number for number, part in enumerate(item.segments) if part.kind == "audio"]
    first, start, end = item.segments[at[1]].details
    for details in ((first, start - 1, end - 1), (800, start, end), (first, start), (1 << 30, start, end), ()):
        segments = [*item.segments]
        segments[at[1]] = msgspec.structs.replace(segments[at[1]], details=details)
        assert fault_of(config, "video", msgspec.structs.replace(item, segments=segments)), details
    last = msgspec.structs.replace(item.segments[at[-1]], details=(1 << 30, 0, 13))
    assert fault_of(config, "video", msgspec.structs.replace(item, segments=[*item.segments[:-1], last]))


def test_a_lie_about_the_length_of_a_video_with_sound_costs_nothing(loaded: Loaded) -> None:
    """Of the sizes that it names no item is made."""
    config, item = loaded.config, sounded(loaded.config, 6, 400)
    (window,) = family.audio_item(config, 40).segments
    sound = msgspec.structs.replace(window, details=(0, 0, window.num_tokens))
    picture = next(part for part in item.segments if part.kind == "video")
    assert config.vision_rules is not None
    merged, grid = config.vision_rules.merge_size, (1 << 29, *picture.grid[1:])
    num_rows = grid[0] * grid[1] * grid[2]
    huge = msgspec.structs.replace(picture, grid=grid, num_rows=num_rows, num_tokens=num_rows // merged**2)
    tokens = huge.num_tokens + sound.num_tokens
    lie = msgspec.structs.replace(item, grid=grid, segments=[sound, huge], num_tokens=tokens, second_per_grid_s=0.0)
    assert fault_of(config, "video", lie) == "runs of sound that no such video has"


def test_the_first_launches(loaded: Loaded) -> None:
    warm_up_towers(loaded.towers, loaded.config)


def test_the_published_shape_has_its_published_size(sized: Callable[..., float]) -> None:
    assert sized("qwen3_omni_moe", "30b-a3b") / 1e9 == pytest.approx(31.72, rel=0.005)
