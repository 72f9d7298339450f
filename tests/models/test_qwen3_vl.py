"""Qwen3-VL, and what Qwen3.5 shares with it, beside transformers: sampled frames, sizes of clips, the text of times, checkpoints that
transformers wrote, refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mmrt.models.architecture import MlpConfig, ModelConfig, MoeConfig, WeightFormat
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError, UnsupportedMediaError
from mmrt.models.families.qwen3 import clips
from mmrt.models.families.qwen3.clips import frames_of
from mmrt.models.families.qwen3.times import read_time_tokens
from mmrt.models.families.qwen3_vl import QWEN3_VL
from mmrt.models.families.registry import family_of
from mmrt.models.make.tokenizer import write_tokenizer
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.models.towers.dispatch import Towers
from mmrt.schema.media import ItemShape, MediaSpan
from mmrt.tests.end_to_end.seeing_oracle import text_of_clip
from mmrt.tests.models.conftest import Loaded, load_checkpoint
from mmrt.tests.models.test_items import function_of_transformers
from mmrt.tests.models.test_oracle import check, reference_logits, reference_positions, rows_of
from mmrt.tests.settings import examples

VIDEO_BOUNDS = (4096, 25165824)  # of the made checkpoint


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def path(request: pytest.FixtureRequest, checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints(request.param)


@pytest.fixture(scope="module")
def deep_path(checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints("qwen3_vl")


@pytest.fixture(scope="module")
def config(path: Path) -> ModelConfig:
    return load_model_config(path)


def with_rules(config: ModelConfig, **rules: Any) -> ModelConfig:
    return msgspec.structs.replace(config, vision_rules=msgspec.structs.replace(config.vision_rules, **rules))


def clip(config: ModelConfig, times: list[float], height: int = 96, width: int = 64) -> ItemShape:
    return clips.video_item(config, len(times), height, width, 2.0, times)


def text_of(item: ItemShape, placeholder: int) -> list[int]:
    return [id for part in item.segments for id in (*part.lead, *[placeholder] * part.num_tokens, *part.trail)]


@settings(max_examples=examples(60))
@given(
    total=st.integers(1, 30_000),
    rate=st.sampled_from([0.3, 1, 5.3, 12, 23.976, 29.97, 60]),
    fps=st.sampled_from([0.5, 2.0, 7.0]),
    most=st.sampled_from([4, 7, 768]),
)
def test_frames_are_transformers(config: ModelConfig, total: int, rate: float, fps: float, most: int) -> None:
    reference = function_of_transformers("video_processing_qwen3_vl", "sample_frames")
    processor = SimpleNamespace(num_frames=None, fps=fps, min_frames=4, max_frames=most)
    expected = reference(processor, SimpleNamespace(total_num_frames=total, fps=rate))
    found = clips.sample_frames(with_rules(config, fps=fps, max_frames=most), total, rate)
    np.testing.assert_array_equal(found, expected)


def test_no_frames_without_a_video(config: ModelConfig) -> None:
    for total, rate in ((0, 30.0), (5, 0.0), (5, float("nan"))):
        with pytest.raises(UnsupportedMediaError, match=f"no frames|frame rate of {rate}"):
            clips.sample_frames(config, total, rate)
    with pytest.raises(UnsupportedMediaError, match="no frames"):
        clips.video_item(config, 0, 50, 50, 2.0)
    with pytest.raises(UnsupportedMediaError, match="picture of 5x0 pixels is empty"):
        clips.video_item(config, 2, 0, 5, 2.0)


@pytest.mark.parametrize("is_ascii", [False, True])
@pytest.mark.parametrize("as_pairs", [False, True])
def test_times_of_a_trained_vocabulary(tmp_path: Path, is_ascii: bool, as_pairs: bool) -> None:
    """It has `` seconds`` as one token, as published ones have; and one whose merges stop within the word."""
    recipe = QWEN3_VL.recipes()["tiny"]
    for lines in (["12 seconds <3.4> seconds"] * 50, ["second con on ds seco <3.4>"] * 50):
        write_tokenizer(tmp_path, recipe, lines)
        file = tmp_path / "tokenizer.json"
        found = json.loads(file.read_text())
        merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in found["model"]["merges"]]
        found["model"]["merges"] = [merge.split(" ") for merge in merges] if as_pairs else merges
        file.write_text(json.dumps(found, ensure_ascii=is_ascii))
        tokenizer, times = Tokenizer.load(tmp_path), read_time_tokens(tmp_path)
        assert [*times.text("3.0")] == tokenizer.encode("<3.0 seconds>")
        assert len(times.closing) == 2 if "12" in lines[0] else 2 < len(times.closing) < 9


def test_memory_of_rows_of_several_parts(deep_path: Path) -> None:
    config = load_model_config(deep_path)
    plain = msgspec.structs.replace(config, vision=msgspec.structs.replace(config.vision, deepstack_blocks=()))
    assert (plain.embedding_row_bytes(), config.embedding_row_bytes()) == (128 * 4, 4 * 128 * 4)
    assert config.prefill_token_bytes() - plain.prefill_token_bytes() == 4 * 128 * 4


def without_file(path: Path) -> None:
    (path / "tokenizer.json").unlink()


def tokenizer_with(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        found = json.loads((path / "tokenizer.json").read_text())
        change(found)
        (path / "tokenizer.json").write_text(json.dumps(found))

    return spoil


def with_colours(path: Path) -> None:
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_std": [0.5, 0.5, 0.4]}))


REFUSED: dict[str, Callable[[Path], None]] = {
    "tokenizer.json: No such file or directory; times of videos are text": without_file,
    "tokenizer.json: no byte-level BPE tokenizer: .*vocab": tokenizer_with(lambda found: found["model"].pop("vocab")),
    "takes more than 3 digits at once": tokenizer_with(
        lambda found: found["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\p{N}{1,4}| ?[^\s\p{L}\p{N}]+")
    ),
    "than 3 digits at once, which is not supported": tokenizer_with(
        lambda found: found["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r" ?\p{N}+| ?[^\s\p{L}\p{N}]+")
    ),
    "model.vocab has no '7', of which times of videos are made": tokenizer_with(lambda found: found["model"]["vocab"].pop("7")),
    r"image_std is \[0.5, 0.5, 0.5\], but that of pictures is \[0.5, 0.5, 0.4\]": with_colours,
}


@pytest.mark.parametrize("message", REFUSED)
def test_files_that_do_not_fit_are_refused(path: Path, tmp_path: Path, message: str) -> None:
    for file in path.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    assert load_model_config(tmp_path) == load_model_config(path)
    REFUSED[message](tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path)


def test_a_configuration_as_it_is_published(deep_path: Path, tmp_path: Path) -> None:
    """``rope_scaling`` and ``rope_theta`` as transformers 4 wrote them."""
    for file in deep_path.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    config = json.loads((deep_path / "config.json").read_text())
    rope = config["text_config"].pop("rope_parameters")
    config["text_config"] |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "dtype": config.pop("dtype")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_config(tmp_path) == load_model_config(deep_path)
    rope["mrope_interleaved"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="text_config.rope_scaling.mrope_interleaved is false"):
        load_model_config(tmp_path)


SIZES = st.integers(1, 80) | st.integers(1, 4000)


@settings(max_examples=examples(300))
@given(num_frames=st.integers(2, 60), height=SIZES, width=SIZES, least=st.integers(1, 400_000), room=st.integers(1, 4_000_000))
def test_sizes_of_clips_are_transformers(config: ModelConfig, num_frames: int, height: int, width: int, least: int, room: int) -> None:
    reference = function_of_transformers("video_processing_qwen3_vl", "smart_resize")
    narrowed = with_rules(config, video_min_pixels=least, video_max_pixels=least + room)
    try:
        expected = reference(num_frames, height, width, 2, 32, least, least + room)
    except ValueError:
        with pytest.raises(UnsupportedMediaError, match="above the limit of 200"):
            clips.video_item(narrowed, num_frames, height, width, 2.0)
        return
    item = clips.video_item(narrowed, num_frames, height, width, 2.0)
    t, h, w = item.grid
    assert (16 * h, 16 * w) == expected and t == -(-num_frames // 2) == len(item.segments)
    assert all(part.grid == (1, h, w) and part.num_tokens == h * w // 4 and part.num_rows == h * w for part in item.segments)
    assert item.num_tokens == sum(part.num_prompt_tokens for part in item.segments)


@pytest.mark.parametrize(("num_frames", "height", "width"), [(4, 1000, 1000), (40, 1000, 700), (700, 300, 900), (6, 3000, 20)])
def test_a_bound_on_each_frame(path: Path, tmp_path: Path, num_frames: int, height: int, width: int) -> None:
    """``cap_pixels_per_frame``: transformers' resize says with which bounds it calls."""
    for file in path.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    file = tmp_path / "video_preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "cap_pixels_per_frame": True, "max_video_tokens": 500}))
    resize = function_of_transformers("video_processing_qwen3_vl", "smart_resize")
    most = num_frames * max(min(500 * 32 * 32, VIDEO_BOUNDS[1] // num_frames), int(VIDEO_BOUNDS[0] * 1.05))
    _, h, w = clips.video_item(load_model_config(tmp_path), num_frames, height, width, 2.0).grid
    assert (16 * h, 16 * w) == resize(num_frames, height, width, 2, 32, VIDEO_BOUNDS[0], most)
    assert h * w <= 4 * 500 or height > 100 * width


def test_one_frame_is_as_large_as_two(config: ModelConfig) -> None:
    """transformers refuses it."""
    one, two = clip(config, [0.0]), clip(config, [0.0, 0.0])
    assert one == two and one.grid[0] == 1


@settings(max_examples=examples(60))
@given(
    indices=st.lists(st.integers(0, 100_000), min_size=2, max_size=9, unique=True).map(sorted),
    rate=st.sampled_from([0.3, 2, 23.976, 25, 29.97, 60]),
)
def test_the_text_of_a_clip_is_the_processors(path: Path, config: ModelConfig, indices: list[int], rate: float) -> None:
    item = clip(config, [index / rate for index in indices])
    expected = text_of_clip(list(item.grid), SimpleNamespace(fps=rate, frames_indices=indices))
    assert text_of(item, config.video_token_id) == Tokenizer.load(path).encode(expected)


def test_positions_are_those_of_a_picture_for_each_frame(config: ModelConfig) -> None:
    item = clip(config, [0.0, 0.5, 1.0])
    spans = list(frames_of(MediaSpan(7, item)))
    lead = len(item.segments[0].lead)
    assert [span.start for span in spans] == [7 + lead, 7 + lead + spans[0].shape.num_tokens + 1 + len(item.segments[1].lead)]
    assert all(span.shape.num_tokens == span.shape.segments[0].num_tokens for span in spans)


def save(path: Path, made: Path, text: dict[str, Any], vision: dict[str, Any]) -> Any:
    """Write a random checkpoint of transformers with the tokenizer and the processors of one that ``make`` wrote; its model."""
    import transformers

    torch.manual_seed(0)
    small = {"vocab_size": 1216, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = json.loads((made / "config.json").read_text())
    config = transformers.AutoConfig.for_model(
        "qwen3_vl_moe" if "num_experts" in text else "qwen3_vl",
        text_config={**small, "head_dim": 32, "initializer_range": 0.06, "eos_token_id": 7, **text},
        vision_config={
            "intermediate_size": 80,
            "out_hidden_size": 64,
            "num_position_embeddings": 49,
            "initializer_range": 0.1,
            **vision,
        },
        **{name: value for name, value in ids.items() if name.endswith("_token_id")},
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(0.2 * torch.randn_like(weight))
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        (path / name).write_text((made / name).read_text())
    return model


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
CHECKPOINTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "heads of 72": (
        {"num_hidden_layers": 3, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default", "mrope_section": [8, 4, 4]}},
        {"depth": 2, "hidden_size": 144, "num_heads": 2, "deepstack_visual_indexes": [1]},
    ),
    "more deep parts than layers": (
        {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [6, 5, 5]}},
        {"depth": 4, "hidden_size": 32, "num_heads": 2, "deepstack_visual_indexes": [0, 1, 3]},
    ),
    "experts": (
        {"num_hidden_layers": 4, **EXPERTS, "rope_parameters": {"rope_type": "default", "mrope_section": [6, 5, 5]}},
        {"depth": 3, "hidden_size": 32, "num_heads": 2, "deepstack_visual_indexes": [0, 2]},
    ),
    "no deep parts": (
        {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 7, 7]}},
        {"depth": 2, "hidden_size": 32, "num_heads": 1, "deepstack_visual_indexes": [], "spatial_merge_size": 2},
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_that_transformers_wrote(deep_path: Path, tmp_path: Path, name: str) -> None:
    model = save(tmp_path, deep_path, *CHECKPOINTS[name])
    config, weights = load_checkpoint(tmp_path)
    loaded = Loaded(tmp_path, config, family_of(config), weights, Towers(config, weights), model)
    with torch.inference_mode():
        parts = [3, QWEN3_VL.image_item(config, 75, 331), 4, clip(config, [0.0, 0.5, 1.0], 60, 90), 2]
        prompt = loaded.build_prompt(parts, seed=1)
        inputs = prompt.reference_inputs
        features = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        torch.testing.assert_close(loaded.encode(prompt)[0][0], rows_of(features), rtol=1e-4, atol=1e-4)
        positions, _ = QWEN3_VL.positions(config, len(prompt.ids), prompt.spans)
        np.testing.assert_array_equal(positions, reference_positions(loaded, prompt)[0].numpy())
        expected = reference_logits(loaded, prompt, [5])
        lm, table = loaded.language_model(), torch.arange(64)
        for chunk in loaded.prompt_chunks(lm, prompt, torch.from_numpy(positions), table, 9):
            lm.prefill([chunk])
        place = torch.from_numpy(positions[:, -1:])
        logits = lm.decode(torch.tensor(prompt.ids[-1:]), place, torch.tensor([len(prompt.ids)]), table[None])
        check(logits[0], expected[len(prompt.ids) - 1])


def test_text_beside_pictures_is_the_same_in_one_plan(models: Callable[[str], Any]) -> None:
    """What a picture adds to the residual stream stays with its tokens."""
    loaded = models("qwen3_vl")
    with torch.inference_mode():
        lm = loaded.language_model()
        prompts = [loaded.build_prompt([20]), loaded.build_prompt([3, loaded.family.image_item(loaded.config, 64, 96), 2], seed=1)]
        chunks = []
        for number, prompt in enumerate(prompts):
            positions, _ = loaded.family.positions(loaded.config, len(prompt.ids), prompt.spans)
            (chunk,) = loaded.prompt_chunks(lm, prompt, torch.from_numpy(positions), torch.arange(8) + 8 * number, 4096)
            chunks.append(chunk)
        assert chunks[0].deep is None and chunks[1].deep is not None
        together = lm.prefill(chunks, wanted=[0, 1])
        for chunk, found in zip(chunks, together, strict=True):
            (alone,) = lm.prefill([chunk], wanted=[0])
            torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)
        without = lm.prefill([replace(chunks[1], deep=None)], wanted=[0])[0]
        assert not torch.allclose(without, together[1], atol=1e-2)


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_experts_in_tensors_of_both_forms(deep_path: Path, tmp_path: Path, weights: WeightFormat) -> None:
    """Published checkpoints have them transposed; transformers reads both."""
    import transformers

    model = save(tmp_path, deep_path, *CHECKPOINTS["experts"])
    config = load_model_config(tmp_path, weights=weights)
    assert config.language.layers[0].feed_forward == MoeConfig(num_experts=6, top_k=2, expert_size=24)
    assert config.language.layers[1].feed_forward == MlpConfig(intermediate_size=96)
    expected, file = read_weights(tmp_path, config), tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.language_model.layers.2.mlp.experts.gate_up_proj"
    assert tensors[name].shape == (6, 48, 64)
    turned = {name: value.transpose(1, 2).contiguous() if ".experts." in name else value for name, value in tensors.items()}
    save_file(turned, file, metadata={"format": "pt"})
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path).model.language_model.layers[2].mlp.experts
    assert torch.equal(theirs.gate_up_proj, model.model.language_model.layers[2].mlp.experts.gate_up_proj)
    assert torch.equal(theirs.down_proj, model.model.language_model.layers[2].mlp.experts.down_proj)
    found = read_weights(tmp_path, config)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    save_file({**tensors, name: tensors[name][:, 1:].contiguous()}, file)
    with pytest.raises(CheckpointError, match=r"experts.gate_up_proj' has shape \[6, 47, 64\], expected \[6, 48, 64\]"):
        read_weights(tmp_path, config)


@pytest.mark.parametrize(("field", "said"), [("num_experts_per_tok", "is 7, expected"), ("scoring_func", "is 7, expected 'softmax'")])
def test_experts_that_are_refused(path: Path, tmp_path: Path, field: str, said: str) -> None:
    save(tmp_path, path, *CHECKPOINTS["experts"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"][field] = 7
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{field} {said}"):
        load_model_config(tmp_path)
