"""Configurations of both families, old and new forms, and what is said about bad ones."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from mmrt.models.architecture import ModelConfig, SamplingDefaults
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.media_config import VisionRules


def read(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.fixture
def directory(checkpoints: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a checkpoint's JSON files with ``change(config)`` applied to config.json."""

    def make(family: str, change: Callable[[dict], object] = lambda config: None) -> Path:
        for file in checkpoints(family).glob("*.json"):
            (tmp_path / file.name).write_text(file.read_text())
        config = read(tmp_path / "config.json")
        changed = change(config)
        (tmp_path / "config.json").write_text(json.dumps(changed if isinstance(changed, dict) else config))
        return tmp_path

    return make


def test_loading_imports_neither_torch_nor_transformers(checkpoints: Callable[[str], Path]) -> None:
    code = "import sys; from mmrt.models.config import load_model_config; load_model_config(sys.argv[1]); "
    code += "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    command = [sys.executable, "-c", code, str(checkpoints("qwen2_5_omni"))]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_values(checkpoints: Callable[[str], Path]) -> None:
    config = load_model_config(checkpoints("qwen2_5_omni"))
    ids = read(checkpoints("qwen2_5_omni") / "config.json")
    assert config.media_kinds == ("image", "video", "audio")
    assert [config.placeholder_id(kind) for kind in config.media_kinds] == [
        ids[f"{kind}_token_index"] for kind in ("image", "video", "audio")
    ]
    assert len(config.language.ropes[0].axes) == config.language.heads.head_dim // 2
    assert config.eos_token_ids == tuple(read(checkpoints("qwen2_5_omni") / "generation_config.json")["eos_token_id"])
    assert config.dtype == "float32" and config.max_context == 32768
    assert config.kv_page_bytes(16) == 4 * 2 * 2 * 16 * 32 * 4
    assert config.audio_rules is not None and config.audio_rules.max_s == 300
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ModelConfig) == config


def test_overrides(checkpoints: Callable[[str], Path]) -> None:
    config = load_model_config(checkpoints("qwen2_5_vl"), dtype="bfloat16", max_context=100)
    assert config.dtype == "bfloat16" and config.max_context == 100 and config.embedding_row_bytes() == 256
    with pytest.raises(CheckpointError, match="max_context of 99999 is above the model's limit of 32768"):
        load_model_config(checkpoints("qwen2_5_vl"), max_context=99999)


def flat(config: dict) -> dict:
    """As transformers 4 wrote Qwen2.5-VL: text fields at the top, rope_scaling, torch_dtype."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    text["torch_dtype"] = config.pop("dtype")
    return {**text, **config}


def test_flat_configuration_reads_the_same(directory: Callable[..., Path], checkpoints: Callable[[str], Path]) -> None:
    assert load_model_config(directory("qwen2_5_vl", flat)) == load_model_config(checkpoints("qwen2_5_vl"))


def test_whole_omni_configuration_reads_as_its_thinker(directory: Callable[..., Path], checkpoints: Callable[[str], Path]) -> None:
    path = directory("qwen2_5_omni", lambda config: {"model_type": "qwen2_5_omni", "thinker_config": config})
    assert load_model_config(path) == load_model_config(checkpoints("qwen2_5_omni"))


def test_processor_files(directory: Callable[..., Path]) -> None:
    def rules(family: str) -> VisionRules:
        found = load_model_config(path).vision_rules
        assert found is not None
        return found

    path = directory("qwen2_5_vl")
    assert (rules("qwen2_5_vl").video_min_pixels, rules("qwen2_5_vl").video_max_pixels) == (3136, 28 * 28 * 1280)
    video = {"size": {"shortest_edge": 1000, "longest_edge": 200000}, "fps": 1.0, "min_frames": 2, "max_frames": 8}
    (path / "video_preprocessor_config.json").write_text(json.dumps(video))
    assert (rules("v").video_min_pixels, rules("v").video_max_pixels) == (1000, 200000)
    assert (rules("v").fps, rules("v").min_frames, rules("v").max_frames, rules("v").min_pixels) == (1.0, 2, 8, 3136)
    nested = {"image_processor": {"min_pixels": 784, "max_pixels": 7840}, "video_processor": {"cap_pixels_per_frame": True}}
    (path / "processor_config.json").write_text(json.dumps(nested))
    assert (rules("v").min_pixels, rules("v").max_pixels, rules("v").video_min_pixels) == (784, 7840, 128 * 784)
    assert rules("v").video_total_pixels == int(128000 * 784 * 0.9)


def test_sampling_as_the_checkpoint_recommends(directory: Callable[..., Path]) -> None:
    path = directory("qwen2_5_vl")
    (path / "generation_config.json").unlink(missing_ok=True)
    assert load_model_config(path).sampling == SamplingDefaults()
    (path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1}')
    assert load_model_config(path).sampling == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1)
    (path / "generation_config.json").write_text('{"do_sample": false, "top_k": 50, "repetition_penalty": 1.05}')
    assert load_model_config(path).sampling == SamplingDefaults(temperature=0.0, repetition_penalty=1.05)
    (path / "generation_config.json").write_text('{"repetition_penalty": 0}')
    with pytest.raises(CheckpointError, match="repetition_penalty is 0, expected a number of at least 0.01, at most 10"):
        load_model_config(path)
    (path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(CheckpointError, match="json: temperature is 'hot', expected a number of at least 0, at most 2"):
        load_model_config(path)


def test_what_ends_an_answer(directory: Callable[..., Path]) -> None:
    """generation_config.json first, then config.json from the inside out, then the tokenizer's own."""

    def without(config: dict) -> dict:
        for place in (config, config["text_config"]):
            place.pop("eos_token_id", None)
        return {"model_type": "qwen2_5_omni", "thinker_config": config}

    path = directory("qwen2_5_omni", without)
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load_model_config(path).eos_token_ids == (5, 6)
    (path / "generation_config.json").write_text('{"eos_token_id": []}')
    tokenizer = {"eos_token": {"content": "<end>"}, "added_tokens_decoder": {"7": {"content": "<end>"}, "8": {"content": "<pad>"}}}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert load_model_config(path).eos_token_ids == (7,)
    (path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')  # as transformers 5 saves it
    (path / "tokenizer.json").write_text('{"added_tokens": [{"id": 8, "content": "<pad>"}, {"id": 6, "content": "<end>"}]}')
    assert load_model_config(path).eos_token_ids == (6,)
    (path / "config.json").write_text(json.dumps({**read(path / "config.json"), "eos_token_id": 9}))
    assert load_model_config(path).eos_token_ids == (9,)
    (path / "config.json").write_text(json.dumps({**read(path / "config.json"), "eos_token_id": None}))
    (path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no eos_token_id in generation_config.json or config.json"):
        load_model_config(path)


@pytest.mark.parametrize("inner", [False, True])
def test_quantized_checkpoints_of_other_methods_are_refused_by_name(directory: Callable[..., Path], inner: bool) -> None:
    def quantized(config: dict) -> dict:
        config["quantization_config"] = {"quant_method": "quip"}
        return {"model_type": "qwen2_5_omni", "thinker_config": config} if inner else config

    with pytest.raises(CheckpointError, match="config.json: .*quantization_config is of method 'quip': 'awq', 'gptq', 'fp8'"):
        load_model_config(directory("qwen2_5_omni", quantized))


def test_omni_videos_have_limits_of_their_own(directory: Callable[..., Path]) -> None:
    """Also where transformers 5 has saved a size beside the others, which its own processor then overrides."""
    path = directory("qwen2_5_omni")
    for _ in range(2):
        rules = load_model_config(path).vision_rules
        assert rules is not None and (rules.video_min_pixels, rules.video_max_pixels) == (128 * 784, 768 * 784)
        saved = {"video_processor": {"size": {"shortest_edge": 3136, "longest_edge": 12845056}}}
        (path / "processor_config.json").write_text(json.dumps(saved))


def test_what_opens_sound_is_a_token(directory: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match="audio_start_token_id is 151647, outside the vocabulary of 1216"):
        load_model_config(directory("qwen2_5_omni", lambda config: config.pop("audio_start_token_id") and config))


def set_in(*where: str, value: object) -> Callable[[dict], None]:
    def change(config: dict) -> None:
        for key in where[:-1]:
            config = config[key]
        config[where[-1]] = value

    return change


BAD = {
    "model_type is 'mixtral', expected one of qwen2_5_omni, .*, qwen2_5_vl, .*, glm46v": set_in("model_type", value="mixtral"),
    "text_config.hidden_size is 'big', expected an integer": set_in("text_config", "hidden_size", value="big"),
    "text_config.vocab_size is missing": set_in("text_config", "vocab_size", value=None),
    "text_config.num_hidden_layers is -1": set_in("text_config", "num_hidden_layers", value=-1),
    "num_key_value_heads is 3, which does not divide": set_in("text_config", "num_key_value_heads", value=3),
    "text_config.rms_norm_eps is nan": set_in("text_config", "rms_norm_eps", value=float("nan")),
    "hidden_act is 'relu', expected 'silu'": set_in("text_config", "hidden_act", value="relu"),
    "use_sliding_window is true": set_in("text_config", "use_sliding_window", value=True),
    "rope_parameters.mrope_section is .*sum to the 16 pairs": set_in(
        "text_config", "rope_parameters", value={"mrope_section": [1, 2, 3]}
    ),
    "rope_parameters.rope_type is 'longrope'": set_in("text_config", "rope_parameters", "rope_type", value="longrope"),
    "vision_config.out_hidden_size is 64, expected the decoder's": set_in("vision_config", "out_hidden_size", value=64),
    "vision_config is 3, expected an object": set_in("vision_config", value=3),
    "vision_config.hidden_act is 'gelu', expected 'silu'": set_in("vision_config", "hidden_act", value="gelu"),
    "vision_config.in_channels is 1, expected an integer from 3 to 3": set_in("vision_config", "in_channels", value=1),
    "vision_config.num_heads is true|vision_config.num_heads is True": set_in("vision_config", "num_heads", value=True),
    "image placeholder id is 5000, outside the vocabulary of 1216": set_in("image_token_id", value=5000),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_values_are_named(directory: Callable[..., Path], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        load_model_config(directory("qwen2_5_vl", BAD[message]))
    assert "config.json" in str(error.value)


BAD_SOUND = {
    "activation_function is 'relu', expected 'gelu'": {"activation_function": "relu"},
    "d_model is 33, expected an even number of at least 4": {"d_model": 33, "encoder_attention_heads": 3},
    "d_model is 2, expected an even number of at least 4": {"d_model": 2, "encoder_attention_heads": 1},
}


@pytest.mark.parametrize("message", BAD_SOUND)
def test_bad_values_of_the_audio_tower_are_named(directory: Callable[..., Path], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model_config(directory("qwen2_5_omni", lambda config: config["audio_config"].update(BAD_SOUND[message])))


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such model directory"):
        load_model_config(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="must contain config.json"):
        load_model_config(tmp_path)
    for content, message in (("{", "not valid JSON"), ("[1]", "expected a JSON object, found list"), ("\xff", "not valid JSON")):
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
        with pytest.raises(CheckpointError, match=message):
            load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_model_config(tmp_path)
