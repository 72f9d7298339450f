"""InternVL beside transformers: pictures in tiles, frames of videos, prompts, tower, logits."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from mmrt.actors.host.media_rules import for_medium
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError, UnsupportedMediaError
from mmrt.models.families import internvl
from mmrt.models.families.item_check import fault_of
from mmrt.models.text.tokenizer import PromptGuard, Tokenizer
from mmrt.models.towers.dispatch import Towers
from mmrt.schema.media import MediaOptions, MediaSpan
from mmrt.tests.models.conftest import Loaded, Prompt
from mmrt.tests.models.picture_families import internvl as internvl_processor
from mmrt.tests.models.whole_prompts import (
    bicubic,
    check_logits_in_cuts,
    edited,
    noise,
    prompt_of,
)
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")
TILE, PATCH, SIDE = 56, 14, 4  # of the tiny checkpoint


@pytest.fixture(scope="module")
def loaded(models: Callable[[str], Loaded]) -> Loaded:
    return models("internvl")


@pytest.fixture(scope="module")
def processor(loaded: Loaded) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.image_processing_backends.np_resize", bicubic)
        yield internvl_processor(loaded.path)


def in_order(tile: np.ndarray) -> np.ndarray:
    """float [3, TILE, TILE] as rows of patches, four of a token together."""
    half = SIDE // 2
    return tile.reshape(3, half, 2, PATCH, half, 2, PATCH).transpose(1, 4, 2, 5, 0, 3, 6).reshape(SIDE**2, -1)


def video_prompt(loaded: Loaded, processor: Any, num_frames: int) -> Prompt:
    """Of text and a clip. transformers' processor of videos wants torchvision; its pixels are those of frames in a tile's size."""
    item = internvl.video_item(loaded.config, num_frames, 90, 70, 2.0)
    assert fault_of(loaded.config, "video", item) == ""
    replace = type(processor).replace_video_token
    text = replace(processor, {"pixel_values_videos": [np.zeros((num_frames, 1))]}, 0)
    message = [{"role": "user", "content": [{"type": "text", "text": "A\n"}, {"type": "video"}, {"type": "text", "text": "Tell."}]}]
    whole = processor.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    ids = processor.tokenizer(whole)["input_ids"]
    place, ours = ids.index(loaded.config.video_token_id), list[int]()
    for segment in item.segments:
        ours += [*segment.lead, *(id for id, count in segment.ids for _ in range(count)), *segment.trail]
    expected = processor.tokenizer(whole.replace("<video>", text))["input_ids"]
    ours = [*ids[:place], *ours, *ids[place + 1 :]]
    assert ours == expected
    rng, rules = np.random.default_rng(num_frames), loaded.config.vision_rules
    frames = rng.integers(0, 256, (num_frames, 3, TILE, TILE), dtype=np.uint8)
    pixels = (frames / 255 - np.array(rules.image_mean)[:, None, None]) / np.array(rules.image_std)[:, None, None]
    inputs = {"input_ids": torch.tensor([expected]), "pixel_values": torch.from_numpy(pixels.astype(np.float32))}
    return Prompt(ours, [MediaSpan(place, item)], [[in_order(frame) for frame in frames]], inputs)


@pytest.mark.parametrize("num_frames", [1, 4, 12])
def test_videos(loaded: Loaded, processor: Any, num_frames: int) -> None:
    with torch.inference_mode():
        check_logits_in_cuts(loaded, loaded.reference, video_prompt(loaded, processor, num_frames), (7, 4096))


def test_frames_are_transformers(loaded: Loaded) -> None:
    """Its rule is a method of a class that wants torchvision: here is its formula."""
    for total, fps in ((1, 25.0), (10, 30.0), (300, 30.0), (301, 29.97), (47, 24.0), (7, 0.5), (3000, 30.0)):
        found = internvl.sample_frames(loaded.config, total, fps)
        wanted = min(max(int(total / fps * 2.0), 1), 64)
        if wanted <= total:
            expected = torch.arange(total / wanted / 2, total, total / wanted).int()
            assert found.tolist() == expected.tolist()
        else:
            assert found.tolist() == list(range(total))
    told = msgspec.structs.replace(loaded.config.vision_rules, min_frames=8, max_frames=8)
    config = msgspec.structs.replace(loaded.config, vision_rules=told)
    assert internvl.sample_frames(config, 100, 25.0).tolist() == [6, 18, 31, 43, 56, 68, 81, 93]


@pytest.mark.parametrize("decoder", ["llama", "qwen3", "qwen3_moe"])
def test_each_decoder_behind_the_large_tower(loaded: Loaded, processor: Any, tmp_path: Path, decoder: str) -> None:
    """InternViT-6B has RMSNorms and norms of queries and keys; its files have no biases there."""
    config = json.loads((loaded.path / "config.json").read_text())
    config["vision_config"] |= {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}
    config["text_config"] |= {"model_type": decoder, "head_dim": 16} | (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64} if decoder == "qwen3_moe" else {}
    )
    made = transformers.InternVLForConditionalGeneration(transformers.InternVLConfig.from_dict(config)).eval()
    with torch.no_grad():
        for name, value in made.named_parameters():
            value.normal_(1.0 if "norm" in name or "lambda" in name else 0.0, 0.2 if value.ndim == 1 else 0.5 / value.shape[-1] ** 0.5)
    shutil.copytree(loaded.path, tmp_path / "made", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    made.save_pretrained(tmp_path / "made")
    found = load_model_config(tmp_path / "made")
    weights = read_weights(tmp_path / "made", found)
    other = Loaded(tmp_path / "made", found, internvl, weights, Towers(found, weights), made)  # type: ignore[arg-type]
    with torch.inference_mode():
        check_logits_in_cuts(other, made, prompt_of(other, processor, [noise(60, 111), "Tell."]), (4096,))


def test_bounds_on_pixels_are_bounds_on_tiles(loaded: Loaded) -> None:
    config = loaded.config
    whole = internvl.image_item(config, 90, 120)
    for max_pixels in (11 * TILE**2, 4 * TILE**2, TILE**2, 1):
        item = internvl.image_item(for_medium(config, MediaOptions(max_pixels=max_pixels)), 90, 120)
        assert len(item.segments) == 1 or (len(item.segments) - 1) * TILE**2 <= max_pixels
        assert fault_of(config, "image", item) == ""
    assert len(item.segments) == 1 and internvl.image_item(for_medium(config, MediaOptions(max_pixels=10**9)), 90, 120) == whole
    assert len(internvl.image_item(for_medium(config, MediaOptions(min_pixels=12 * TILE**2)), 90, 120).segments) == 13


def test_a_token_for_videos_may_lie_behind_the_vocabulary(loaded: Loaded, tmp_path: Path) -> None:
    """As in InternVL3: it stands in no prompt that the model sees. A tokenizer without one: there are no videos."""
    video = loaded.config.video_token_id
    found = load_model_config(edited(loaded.path, tmp_path / "made", "config.json", {"text_config": {"vocab_size": video}}))
    assert found.media_kinds == ("image", "video") and found.language.vocab_size == found.video_token_id == video
    tokenizer = json.loads((tmp_path / "made/tokenizer.json").read_text())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] != video]
    (tmp_path / "made/tokenizer.json").write_text(json.dumps(tokenizer))
    found = load_model_config(tmp_path / "made")
    assert found.media_kinds == ("image",) and fault_of(found, "image", internvl.image_item(found, 90, 170)) == ""
    with pytest.raises(UnsupportedMediaError, match="this model takes no video"):
        internvl.video_item(found, 4, 60, 60, 2.0)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "decoder": ("config.json", {"text_config": {"model_type": "gpt_oss"}}, "text_config.model_type is 'gpt_oss', expected 'qwen2' or"),
    "window": (
        "config.json",
        {"text_config": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}},
        "is 9; windows",
    ),
    "activation": ("config.json", {"vision_config": {"hidden_act": "silu"}}, "vision_config.hidden_act is 'silu', expected 'gelu'"),
    "norm": ("config.json", {"vision_config": {"norm_type": "group"}}, "vision_config.norm_type is 'group', expected 'layer_norm' or"),
    "positions": (
        "config.json",
        {"vision_config": {"use_absolute_position_embeddings": False}},
        "use_absolute_position_embeddings is False, expected True",
    ),
    "layer": ("config.json", {"vision_feature_layer": -2}, "vision_feature_layer is -2, expected -1"),
    "ratio": ("config.json", {"downsample_ratio": 0.4}, "downsample_ratio is 0.4, expected 0.5"),
    "square": ("config.json", {"vision_config": {"image_size": [56, 84]}}, r"image_size is \[56, 84\], expected a square"),
    "tile": ("config.json", {"vision_config": {"image_size": 60}}, "image_size is 60, expected a multiple of 2 patches of 14"),
    "filter": ("preprocessor_config.json", {"resample": 1}, "resample is 1, expected 3"),
    "size": ("preprocessor_config.json", {"size": {"height": 448}}, "size.height is 448, but the vision tower's image_size is 56"),
    "tiles": ("preprocessor_config.json", {"max_patches": 1000}, "max_patches is 1000, expected an integer from 1 to 64"),
    "video": ("video_preprocessor_config.json", {"size": {"width": 384}}, "size.width is 384, but the vision tower's"),
    "colours": ("video_preprocessor_config.json", {"image_mean": [0.5, 0.5, 0.5]}, r"image_mean is \[0.5, 0.5, 0.5\], but that of pic"),
    "shift": ("video_preprocessor_config.json", {"initial_shift": False}, "initial_shift is false; only frames from the middle"),
    "tokens": ("processor_config.json", {"image_seq_length": 5}, "image_seq_length is 5, but a tile has 4 tokens"),
    "opening": ("tokenizer_config.json", {"start_image_token": "<pic>"}, "tokenizer.json: has no '<pic>'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_by_name(loaded: Loaded, tmp_path: Path, what: str) -> None:
    file, changes, said = REFUSED[what]
    with pytest.raises(CheckpointError, match=said):
        load_model_config(edited(loaded.path, tmp_path / "made", file, changes))


def test_a_tokenizer_that_is_missing_or_another_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    shutil.copytree(loaded.path, made := tmp_path / "made", ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((made / "tokenizer.json").read_text())
    content["model"] = {"type": "Unigram", "vocab": [["a", 0.0]]}
    (made / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="tokenizer.json: no byte-level BPE tokenizer"):
        load_model_config(made)
    content = json.loads((loaded.path / "tokenizer.json").read_text())
    content["model"]["vocab"]["lacking"] = content["model"]["vocab"].pop("\u010a")
    (made / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="tokenizer.json: model.vocab has no line end of byte-level tokenizers"):
        load_model_config(made)
    (made / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer.json: No such file or directory; tiles of pictures have text"):
        load_model_config(made)


def test_other_media_are_refused(loaded: Loaded) -> None:
    config = loaded.config
    for refuse, said in (
        (lambda: internvl.image_item(config, 0, 9), "picture of 9x0 pixels is empty"),
        (lambda: internvl.video_item(config, 0, 60, 60, 2.0), "video has no frames"),
        (lambda: internvl.sample_frames(config, 0, 2.0), "video has no frames"),
        (lambda: internvl.sample_frames(config, 9, 0.0), "video has a frame rate of 0"),
        (lambda: internvl.audio_item(config, 300), "this model takes no audio"),
    ):
        with pytest.raises(UnsupportedMediaError, match=said):
            refuse()


@pytest.mark.parametrize(("shape", "billions"), [("1b", 0.938), ("8b", 7.944), ("3.5-1b", 1.06)])
def test_published_shapes_have_their_published_size(sized: Callable[..., float], shape: str, billions: float) -> None:
    assert sized("internvl", shape) / 1e9 == pytest.approx(billions, rel=0.003)


def test_a_tag_that_users_write_is_text(loaded: Loaded, tmp_path: Path) -> None:
    """Although the tokenizer does not call it special."""
    file = edited(loaded.path, tmp_path / "made", "tokenizer_config.json", {}) / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"] = [
        {**token, "special": token["special"] and token["content"] != "<img>"} for token in content["added_tokens"]
    ]
    file.write_text(json.dumps(content))
    config = load_model_config(file.parent)
    tokenizer = Tokenizer.load(file.parent, control_ids=config.control_ids)
    assert tokenizer.control_ids["<img>"] == config.vision_start_token_id
    guard = PromptGuard(tokenizer)
    assert config.vision_start_token_id not in guard.encode(guard.hide(["an <img> tag"])[0], begins=False)
    assert config.vision_start_token_id in Tokenizer.load(file.parent).encode("an <img> tag")
