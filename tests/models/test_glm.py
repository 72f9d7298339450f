"""GLM's families that see beside transformers, and what their decoders need of a checkpoint's files: rows of queries and keys in
another order, a fused matrix, layers that are left out. What they share with other families is in test_oracle and test_seeing_families.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from mmrt.models.architecture import ModelConfig, WeightFormat
from mmrt.models.checkpoint.files import adapted_directory
from mmrt.models.checkpoint.weights import check_weights, read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import UnsupportedMediaError
from mmrt.models.families.glm.families import GLM4V
from mmrt.models.families.glm.families import GLM_OCR as glm_ocr
from mmrt.models.families.item_check import fault_of
from mmrt.models.families.qwen2_5.vision_geometry import geometry
from mmrt.models.families.registry import family_of
from mmrt.models.make import tokenizer as make_tokenizer
from mmrt.models.make.tokenizer import write_tokenizer
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.models.text.tokenizer_trial import QWEN_SPLIT
from mmrt.runtime.controller.rows.expansion import expand
from mmrt.schema.media import ItemShape, MediaSpan
from mmrt.tests.models.glm_reference import text_of_glm_clip
from mmrt.tests.models.kept import exact, keep
from mmrt.tests.models.quantized_checkpoint import CONFIGS, quantize_checkpoint
from mmrt.tests.models.test_fp8 import FORMS, write
from mmrt.tests.models.test_items import function_of_transformers
from mmrt.tests.models.test_oracle import reference_logits

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 64, 128  # of the tiny checkpoint
BOUNDS = (112 * 112, 28 * 28 * 12288)  # of its processor
PUBLISHED = {
    "text_config": {
        "model_type": "glm_ocr_text",
        "pad_token_id": 59246,
        "vocab_size": 59392,
        "eos_token_id": [59246, 59253],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "intermediate_size": 4608,
        "max_position_embeddings": 131072,
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "num_nextn_predict_layers": 1,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "partial_rotary_factor": 1.0, "rope_theta": 10000},
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "model_type": "glm_ocr_vision",
        "hidden_size": 1024,
        "depth": 24,
        "num_heads": 16,
        "attention_bias": True,
        "intermediate_size": 4096,
        "hidden_act": "silu",
        "image_size": 336,
        "in_channels": 3,
        "patch_size": 14,
        "out_hidden_size": 1536,
        "rms_norm_eps": 1e-05,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


@pytest.fixture(scope="module")
def path(checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints("glm_ocr")


@pytest.fixture(scope="module")
def config(path: Path) -> ModelConfig:
    return load_model_config(path)


@given(height=st.integers(1, 90) | st.integers(1, 6000), width=st.integers(1, 90) | st.integers(1, 6000))
def test_sizes_of_pictures_are_transformers(config: ModelConfig, height: int, width: int) -> None:
    try:
        expected = function_of_transformers("image_processing_glm46v", "smart_resize")(2, height, width, 2, 28, *BOUNDS)
    except ValueError:
        with pytest.raises(UnsupportedMediaError, match="above the limit of 200"):
            glm_ocr.image_item(config, height, width)
        return
    item = glm_ocr.image_item(config, height, width)
    assert (item.grid[1] * 14, item.grid[2] * 14) == expected and item.num_tokens == expected[0] * expected[1] // 28**2
    assert 2 * expected[0] * expected[1] <= BOUNDS[1] or min(expected) == 28


def test_what_it_does_not_take_is_refused(config: ModelConfig) -> None:
    for refuse, what in (
        (lambda: glm_ocr.image_item(config, 0, 9), "picture of 9x0 pixels is empty"),
        (lambda: glm_ocr.sample_frames(config, 0, 10.0), "video has no frames"),
        (lambda: GLM4V.sample_frames(config, 30, float("nan")), "frame rate of nan"),
        (lambda: glm_ocr.video_item(config, 0, 60, 60, 2.0), "video has no frames"),
        (lambda: glm_ocr.video_item(config, 4, 60, 0, 2.0), "picture of 0x60 pixels is empty"),
        (lambda: glm_ocr.video_item(config, 4, 6000, 6, 2.0), "above the limit of 200"),
        (lambda: glm_ocr.audio_item(config, 300), "this model takes no audio"),
    ):
        with pytest.raises(UnsupportedMediaError, match=what):
            refuse()


def test_the_published_shape(sized: Callable[[str, str], int], path: Path, tmp_path: Path) -> None:
    """Its file has 1,325,258,240 values: a layer for the token after the next with two vocabularies of its own is not ours."""
    next_token = 1536 * (2 * 1536 + 4096 + 2048 + 3 * 4608) + 3 * 1536 + 4 * 1536
    assert sized("glm_ocr", "0.9b") == 1_325_258_240 - next_token - 2 * 59392 * 1536
    made = tmp_path / "0.9b"
    ids = {name: number for name, number in json.loads((made / "config.json").read_text()).items() if name.endswith("_id")}
    published = tmp_path / "published"
    shutil.copytree(made, published)
    for name in ("processor_config.json", "generation_config.json"):
        (published / name).unlink(missing_ok=True)
    (published / "config.json").write_text(json.dumps({"model_type": "glm_ocr", **ids, **PUBLISHED}))
    found, expected = (load_model_config(folder) for folder in (published, made))
    assert found.eos_token_ids == (59246, 59253)
    for field in ("language", "vision", "vision_rules", "dtype", "max_context"):
        assert getattr(found, field) == getattr(expected, field)
    (published / "config.json").write_text(json.dumps({"model_type": "glm_ocr", **PUBLISHED}))
    assert (load_model_config(published).image_token_id, found.media_kinds) == (59280, ("image", "video"))


NAMES = {"glm4v": "glm4v", "glm46v": "glm46v", "glm_ocr": "glm46v"}  # of the modules of processors


def test_the_processor_says_how_videos_are_seen(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """GLM-4.6V-Flash's files call it glm4v, and name GLM-4.6V's processor."""
    published = Path(shutil.copytree(checkpoints("glm46v"), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))
    expected, config = load_model_config(published), json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps({**config, "model_type": "glm4v"}))
    assert load_model_config(published) == expected
    (published / "video_preprocessor_config.json").unlink()
    assert load_model_config(published).family == "glm4v"


def with_rules(config: ModelConfig, **rules: float) -> ModelConfig:
    assert config.vision_rules is not None
    return replace(config, vision_rules=replace(config.vision_rules, **rules))


@given(
    total=st.integers(1, 40) | st.integers(1, 200_000),
    rate=st.sampled_from([0.3, 1, 5.3, 12, 23.976, 24, 29.97, 30, 60, 90.0]),
    family=st.sampled_from(["glm4v", "glm46v"]),
    fps=st.sampled_from([2.0, 0.5, 3.0]),
)
@example(total=30, rate=30.0, family="glm46v", fps=2.0)
@example(total=900, rate=30.0, family="glm46v", fps=2.0)
@example(total=9001, rate=30.0, family="glm4v", fps=2.0)
def test_frames_are_transformers(checkpoints: Callable[[str], Path], total: int, rate: float, family: str, fps: float) -> None:
    config, shown = load_model_config(checkpoints(family)), SimpleNamespace(total_num_frames=total, fps=rate, duration=total / rate)
    if family == "glm4v":
        config = with_rules(config, fps=fps, max_frames=10_000)
    processor = SimpleNamespace(fps=fps, max_duration=300, temporal_patch_size=2)
    expected = function_of_transformers(f"video_processing_{family}", "sample_frames")(processor, shown)
    found = family_of(config).sample_frames(config, total, rate)
    assert found.tolist() == (expected.tolist() or [0, 0])  # transformers takes none of a clip of a sixth of a second


@pytest.mark.parametrize("family", NAMES)
def test_bounds_of_a_run_or_a_request(checkpoints: Callable[[str], Path], family: str) -> None:
    config = load_model_config(checkpoints(family))
    taken = family_of(config).sample_frames(with_rules(config, max_frames=10), 900, 30.0)
    assert taken.tolist() == [0, 100, 200, 300, 400, 499, 599, 699, 799, 899]
    assert len(family_of(config).sample_frames(with_rules(config, fps=1.0), 900, 30.0)) == 30
    assert len(family_of(config).sample_frames(with_rules(config, fps=0.1, min_frames=9), 900, 30.0)) == 10


@given(
    family=st.sampled_from(list(NAMES)),
    num_frames=st.integers(2, 700),
    height=st.integers(1, 90) | st.integers(1, 3000),
    width=st.integers(1, 900),
)
def test_sizes_of_clips_are_transformers(
    checkpoints: Callable[[str], Path], family: str, num_frames: int, height: int, width: int
) -> None:
    config = load_model_config(checkpoints(family))
    resize = function_of_transformers(f"video_processing_{NAMES[family]}", "smart_resize")
    try:
        expected = resize(num_frames, height, width, 2, 28, 112 * 112, 28 * 28 * 60000)
    except ValueError:
        with pytest.raises(UnsupportedMediaError, match="above the limit of 200"):
            family_of(config).video_item(config, num_frames, height, width, 2.0)
        return
    item = family_of(config).video_item(config, num_frames, height, width, 2.0)
    assert item.grid == (-(-num_frames // 2), expected[0] // 14, expected[1] // 14)
    assert fault_of(config, "video", item) == ""


@pytest.mark.parametrize("are_grouped", [False, True])
@pytest.mark.parametrize("family", NAMES)
def test_a_video_s_prompt(
    checkpoints: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, are_grouped: bool
) -> None:
    """Of a tokenizer that takes single digits, and of one that takes up to three, as published ones do, and merges some."""
    path = Path(shutil.copytree(checkpoints(family), tmp_path / "model"))
    if are_grouped:
        monkeypatch.setattr(make_tokenizer, "QWEN_SPLIT", QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|"))
        write_tokenizer(path, family_of(load_model_config(path)).recipes()["tiny"], ["12 seconds 120 7.5 seconds 100 20"] * 40)
    config, tokenizer = load_model_config(path), Tokenizer.load(path)
    assert config.times is not None and len(config.times.digits) == (3 if are_grouped else 1)
    times = [0.0, 0.25, 7.5, 9.0, 12.04, 13.0, 120.96, 121.0, 1000.3, 1001.0, 2399.5, 2400.0]
    item = family_of(config).video_item(config, len(times), 60, 90, 2.0, times)
    expected = tokenizer.encode(text_of_glm_clip(family, list(item.grid), SimpleNamespace(fps=1, timestamps=times)))
    assert expand_item(config, item) == expected and item.num_tokens == len(expected)
    if are_grouped:
        assert sum(len(ids) == 1 for ids in config.times.digits[1] + config.times.digits[2]) >= 4


PUBLISHED_4V = {
    "text_config": {
        "model_type": "glm4v_text",
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338, 151348],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "max_position_embeddings": 65536,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "vocab_size": 151552,
    },
    "vision_config": {
        "attention_bias": False,
        "depth": 24,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "image_size": 336,
        "in_channels": 3,
        "intermediate_size": 13696,
        "num_heads": 12,
        "out_hidden_size": 4096,
        "patch_size": 14,
        "rms_norm_eps": 1e-05,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


@pytest.mark.parametrize("family", ["glm4v", "glm46v"])
def test_the_published_shape_of_glm4v(sized: Callable[[str, str], int], tmp_path: Path, family: str) -> None:
    """Its configuration as transformers 4 wrote it, and as many values as transformers' model of it."""
    import transformers

    num_values = sized(family, "9b")
    published = Path(shutil.copytree(tmp_path / "9b", tmp_path / "published"))
    (published / "config.json").write_text(json.dumps({"model_type": family, **PUBLISHED_4V}))
    found, expected = (load_model_config(tmp_path / name) for name in ("published", "9b"))
    for field in ("language", "vision", "vision_rules", "dtype", "max_context"):
        assert getattr(found, field) == getattr(expected, field)
    assert (found.image_token_id, found.video_token_id) == (151343, 151344)
    with torch.device("meta"):
        reference = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.from_pretrained(published))
    assert num_values == sum(parameter.numel() for parameter in reference.parameters())


def test_layers_for_later_tokens_are_left_out(path: Path, config: ModelConfig, tmp_path: Path) -> None:
    """They stand behind the last layer by number, also with a vocabulary of their own."""
    made = Path(shutil.copytree(path, tmp_path / "made"))
    tensors = load_file(path / "model.safetensors")
    layer = f"model.language_model.layers.{config.language.num_layers}."
    more = {name.replace("layers.0.", f"layers.{config.language.num_layers}."): torch.ones_like(tensors[name]) for name in tensors}
    more = {name: value for name, value in more.items() if name.startswith(layer)}
    assert len(more) == 10
    more |= {f"{layer}{name}": torch.ones(4, 4) for name in ("eh_proj.weight", "shared_head.head.weight", "embed_tokens.weight")}
    save_file(tensors | more, made / "model.safetensors", {"format": "pt"})
    checked, found, expected = check_weights(made, config), read_weights(made, config), read_weights(path, config)
    assert not checked.problems and sorted(checked.unread) == sorted(more)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def expand_item(config: ModelConfig, item: ItemShape) -> list[int]:
    """Its tokens, as the controller writes them."""
    limits = SimpleNamespace(placeholder_ids={"video": config.video_token_id}, max_context=1 << 20)
    prompt, _ = expand(SimpleNamespace(prompt_ids=[config.video_token_id]), [item], limits)
    return prompt


def turned(values: torch.Tensor, head_dim: int = HEAD_DIM, turning: int = HEAD_DIM) -> torch.Tensor:
    """Of rows in pairs, each head's first ones and then its second ones; what does not turn is behind them."""
    heads = values.view(-1, head_dim, *values.shape[1:])
    return torch.cat((heads[:, 0:turning:2], heads[:, 1:turning:2], heads[:, turning:]), 1).flatten(0, 1)


@pytest.mark.parametrize(("family", "head_dim", "turning"), [("glm_ocr", 64, 64), ("glm4v", 32, 16)])
@pytest.mark.parametrize("form", ["auto", "bfloat16", "int8", "int8g", "int4"])
def test_rows_of_queries_and_keys_in_each_format(
    checkpoints: Callable[[str], Path], family: str, head_dim: int, turning: int, form: WeightFormat
) -> None:
    path = checkpoints(family)
    weights, tensors = read_weights(path, load_model_config(path, weights=form)), load_file(path / "model.safetensors")
    for layer in range(2):
        q, k, v = (tensors[f"model.language_model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv")
        assert q.shape == (HEADS * head_dim, HIDDEN) and k.shape == (KV_HEADS * head_dim, HIDDEN)
        stacked = torch.cat((turned(q, head_dim, turning), turned(k, head_dim, turning), v))
        kept = keep(stacked, "float32" if form == "auto" else form, name := f"layers.{layer}.qkv")
        assert all(torch.equal(weights[part], kept[part]) for part in kept) and name in kept
        if family == "glm4v":
            q, k, v = (tensors[f"model.language_model.layers.{layer}.self_attn.{part}_proj.bias"] for part in "qkv")
            assert torch.equal(weights[f"{name}_bias"], torch.cat((turned(q, head_dim, turning), turned(k, head_dim, turning), v)))


@pytest.mark.parametrize("name", ["awq", "gptq", "packed", "packed8", "int8"])
def test_rows_of_integers(path: Path, tmp_path: Path, name: str) -> None:
    """In floats, and in the format that holds the integers as they are, whose scales are rounded to bfloat16."""
    quantized, plain = quantize_checkpoint(path, tmp_path, CONFIGS[name])
    expected = read_weights(plain, load_model_config(plain))
    found = read_weights(quantized, load_model_config(quantized))
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    known = load_model_config(quantized).quantization
    assert known is not None
    held = read_weights(quantized, load_model_config(quantized, weights=known.form))
    for layer in range(2):
        key = f"layers.{layer}.qkv"
        torch.testing.assert_close(exact(held, key), expected[key].double(), rtol=0.01, atol=0.02)


@pytest.mark.parametrize("form", ["blocks", "edges"])
def test_rows_of_fp8_in_blocks(path: Path, tmp_path: Path, form: str) -> None:
    fp8, plain = write(path, tmp_path, FORMS[form])
    found, expected = (read_weights(folder, load_model_config(folder)) for folder in (fp8, plain))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_an_adapter_s_sum_is_in_order(path: Path, tmp_path: Path, is_quantized: bool) -> None:
    base, plain = quantize_checkpoint(path, tmp_path, CONFIGS["awq"]) if is_quantized else (path, path)
    adapter, merged = tmp_path / "adapter", Path(shutil.copytree(plain, tmp_path / "merged"))
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "gate_up_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    tensors, parts, random = load_file(merged / "model.safetensors"), dict[str, Any](), torch.Generator().manual_seed(0)
    for module in ("model.language_model.layers.1.self_attn.q_proj", "model.language_model.layers.1.mlp.gate_up_proj"):
        weight = tensors[f"{module}.weight"]
        a, b = torch.randn(2, weight.shape[1], generator=random), torch.randn(weight.shape[0], 2, generator=random)
        parts |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        tensors[f"{module}.weight"] = weight + 2 * b @ a
    save_file(parts, adapter / "adapter_model.safetensors")
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    both = adapted_directory(base, adapter, tmp_path / "home")
    found, expected = (read_weights(folder, load_model_config(folder)) for folder in (both, merged))
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=1e-5)


@given(height=st.integers(1, 40), width=st.integers(1, 90))
def test_positions_are_those_that_grid_sample_finds(checkpoints: Callable[[str], Path], height: int, width: int) -> None:
    config = load_model_config(checkpoints("glm4v")).vision
    assert config is not None and config.position_side == 24
    table = torch.randn(24 * 24, 5, generator=torch.Generator().manual_seed(height))
    places = geometry([(1, 2 * height, 2 * width)], config, torch.device("cpu"))
    middles = (places.positions.float() + 0.5) / torch.tensor([2 * height, 2 * width]) * 2 - 1
    maps = table.view(24, 24, 5).permute(2, 0, 1)[None]
    sampled = torch.nn.functional.grid_sample(maps, middles.flip(1)[None, :, None], "bicubic", "border", align_corners=False)
    torch.testing.assert_close(places.interpolated(table), sampled[0, :, :, 0].T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["glm_ocr", "glm4v"])
def test_logits_in_any_cuts(models: Callable[[str], Any], family: str) -> None:
    """Two odd pictures between words, a picture's tokens cut anywhere: within 1e-5 of the largest of transformers' logits."""
    loaded = models(family)
    with torch.inference_mode():
        parts = [3, glm_ocr.image_item(loaded.config, 1, 1), 2, glm_ocr.image_item(loaded.config, 61, 290), 9]
        prompt = loaded.build_prompt(parts, seed=2)
        following = [5, 900, 17]
        expected = reference_logits(loaded, prompt, following)
        positions, delta = glm_ocr.positions(loaded.config, len(prompt.ids), prompt.spans)
        for step in (1, 7, 50, 4096):
            lm, table = loaded.language_model(), torch.randperm(20, generator=torch.Generator().manual_seed(step))
            for chunk in loaded.prompt_chunks(lm, prompt, torch.from_numpy(positions), table, step):
                lm.prefill([chunk])
            token, place = prompt.ids[-1], torch.from_numpy(positions[:, -1:])
            for number, forced in enumerate(following):
                length = len(prompt.ids) + number
                (found,) = lm.decode(torch.tensor([token]), place, torch.tensor([length]), table[None])
                assert (found - expected[length - 1]).abs().max() < 1e-5 * expected.abs().max()
                token, place = forced, torch.full((3, 1), length + delta)


@pytest.mark.parametrize(("family", "weights"), [("glm_ocr", "int8"), ("glm_ocr", "int4"), ("glm4v", "int4")])
def test_logits_of_rounded_weights(models: Callable[[str], Any], family: str, weights: WeightFormat) -> None:
    """Those of the values that the format has, but for the rounding of activations."""
    from mmrt.models.lm.language_model import LanguageModel

    loaded = models(family)
    config = load_model_config(loaded.path, weights=weights)
    kv = torch.zeros(8, config.kv_page_bytes(16), dtype=torch.uint8)
    rounded = read_weights(loaded.path, config)
    exactly = {name: exact(rounded, name).float() if f"{name}.scales" in rounded else value for name, value in rounded.items()}
    with torch.inference_mode():
        prompt = loaded.build_prompt([2, glm_ocr.image_item(loaded.config, 60, 60), 9], seed=2)
        assert prompt.spans == [MediaSpan(3, glm_ocr.image_item(config, 60, 60))]
        positions, _ = glm_ocr.positions(config, len(prompt.ids), prompt.spans)
        logits = []
        for model in (LanguageModel(config, rounded, kv.clone(), 16), LanguageModel(loaded.config, exactly, kv.clone(), 16)):
            for chunk in loaded.prompt_chunks(model, prompt, torch.from_numpy(positions), torch.arange(8), 16):
                model.prefill([chunk])
            length, place = torch.tensor([len(prompt.ids)]), torch.from_numpy(positions[:, -1:])
            logits.append(model.decode(torch.tensor(prompt.ids[-1:]), place, length, torch.arange(8)[None]))
        assert 0 < (logits[0] - logits[1]).abs().mean() / logits[1].std() < 0.05
