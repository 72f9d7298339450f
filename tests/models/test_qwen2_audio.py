"""Qwen2-Audio beside transformers: tokens, tower, prompts, logits in any cuts, names, and what is refused. Spectrograms are in
tests/media/test_mel."""

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

from mmrt.media.mel import LogMel
from mmrt.models.architecture import ModelConfig
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError, UnsupportedMediaError
from mmrt.models.families import qwen2_audio
from mmrt.models.families.item_check import fault_of
from mmrt.models.text.chat_template import ChatTemplate
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.models.towers.interface import TowerInput

SAMPLES = (5_000, 33_333, 479_840, 480_000)


@pytest.fixture(scope="module")
def path(checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints("qwen2_audio")


@pytest.fixture(scope="module")
def config(path: Path) -> ModelConfig:
    return load_model_config(path)


@pytest.fixture(scope="module")
def inputs(path: Path) -> dict[str, Any]:
    """What transformers' processor makes of sounds in a conversation."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(path, local_files_only=True)
    text = processor.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    return dict(processor(text=text, audio=[clip(num) for num in SAMPLES], sampling_rate=16000, return_tensors="pt"))


SOUND = {"type": "audio"}
MESSAGES = [
    {"role": "user", "content": [SOUND, {"type": "text", "text": "Which bird?"}]},
    {"role": "assistant", "content": "A wren."},
    {"role": "user", "content": [SOUND, SOUND, SOUND, {"type": "text", "text": "And these?"}]},
]


def clip(num_samples: int) -> np.ndarray:
    return np.random.default_rng(num_samples).normal(0, 0.1, num_samples).astype(np.float32)


def expanded(config: ModelConfig, ids: Sequence[int]) -> list[int]:
    assert config.audio_rules is not None
    counts = iter([qwen2_audio.audio_item(config, config.audio_rules.num_frames(num)).num_tokens for num in SAMPLES])
    return [id for id in ids for _ in range(next(counts) if id == config.audio_token_id else 1)]


def encoded(loaded: Any) -> list[torch.Tensor]:
    rules, parts = loaded.config.audio_rules, list[TowerInput]()
    for num in SAMPLES:
        (segment,) = qwen2_audio.audio_item(loaded.config, rules.num_frames(num)).segments
        mel = LogMel(rules)(clip(num))
        assert len(mel) == segment.num_rows
        parts.append(TowerInput("audio", mel, segment.grid))
    return loaded.towers.encode(parts)


def test_items_of_any_length(config: ModelConfig) -> None:
    for num_frames in range(3, 3001):
        item = qwen2_audio.audio_item(config, num_frames)
        assert item.num_tokens == (((num_frames - 1) // 2 + 1) - 2) // 2 + 1
        assert fault_of(config, "audio", item) == ""
    for num_frames, problem in (
        (2, "audio of 2 mel frames is too short, at least 3 are needed"),
        (3001, "audio of 30.01 s is longer than the 30 s that this model hears at once"),
    ):
        with pytest.raises(UnsupportedMediaError, match=problem):
            qwen2_audio.audio_item(config, num_frames)


def test_whole_prompts_are_the_processor_s(path: Path, config: ModelConfig, inputs: dict[str, Any]) -> None:
    rendered = ChatTemplate.load(path).render(MESSAGES)
    assert expanded(config, Tokenizer.load(path).encode(rendered)) == inputs["input_ids"][0].tolist()


def test_tower_and_logits_in_any_cuts(models: Callable[[str], Any], inputs: dict[str, Any]) -> None:
    loaded = models("qwen2_audio")
    with torch.inference_mode():
        ids, following = inputs["input_ids"][0].tolist(), [5, 900, 17]
        forced = torch.tensor([[*ids, *following]])
        asked = {**inputs, "input_ids": forced, "attention_mask": torch.ones_like(forced)}
        projected: list[torch.Tensor] = []
        hook = loaded.reference.model.multi_modal_projector.register_forward_hook(lambda *call: projected.append(call[-1]))
        expected = loaded.reference(**asked, use_cache=False).logits[0]
        hook.remove()
        found = encoded(loaded)
        for rows, one in zip(found, projected[0], strict=True):
            torch.testing.assert_close(rows, one[: len(rows)], rtol=1e-4, atol=1e-5)
        for step in (7, 104, 4096):
            lm, table = loaded.language_model(), torch.randperm(150, generator=torch.Generator().manual_seed(step))
            embeds = lm.embed(torch.tensor(ids))
            embeds[torch.tensor(ids) == loaded.config.audio_token_id] = torch.cat(found)
            places, _ = qwen2_audio.positions(loaded.config, len(ids), [])
            for chunk in loaded.chunks(embeds, torch.from_numpy(places.copy()), table, step):
                lm.prefill([chunk])
            token = ids[-1]
            for number, after in enumerate(following):
                length = len(ids) + number
                (logits,) = lm.decode(torch.tensor([token]), torch.full((3, 1), length - 1), torch.tensor([length]), table[None])
                assert (logits - expected[length - 1]).abs().max() < 1e-5 * expected.abs().max()
                token = after


def test_both_spellings_of_names(path: Path, config: ModelConfig, tmp_path: Path) -> None:
    """save_pretrained writes the published one; the other is that of the classes."""
    made = Path(shutil.copytree(path, tmp_path / "made"))
    tensors = load_file(path / "model.safetensors")
    assert {name.partition(".")[0] for name in tensors} == {"language_model", "audio_tower", "multi_modal_projector"}
    spelled = {re.sub(r"^language_model\.model\.", "language_model.", f"{name}"): value for name, value in tensors.items()}
    spelled = {f"model.{name}" if "lm_head" not in name else "lm_head.weight": value for name, value in spelled.items()}
    save_file(spelled, made / "model.safetensors", {"format": "pt"})
    found, expected = read_weights(made, config), read_weights(path, config)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_published_shape(sized: Callable[[str, str], int], tmp_path: Path) -> None:
    """Its file leaves out what is as in Qwen2Config."""
    import transformers

    num_values, made = sized("qwen2_audio", "7b"), tmp_path / "7b"
    expected = load_model_config(made)
    config = json.loads((made / "config.json").read_text())
    config["text_config"] = {
        "eos_token_id": config["text_config"]["eos_token_id"],
        "intermediate_size": 11008,
        "max_position_embeddings": 8192,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "sliding_window": 32768,
        "use_mrope": False,
        "vocab_size": 156032,
    }
    (made / "config.json").write_text(json.dumps(config))
    assert load_model_config(made) == expected
    with torch.device("meta"):
        theirs = transformers.Qwen2AudioForConditionalGeneration(transformers.AutoConfig.from_pretrained(made))
    assert sum(one.numel() for one in theirs.parameters()) == num_values


@pytest.mark.parametrize(
    ("file", "place", "change", "problem"),
    [
        ("preprocessor_config.json", "", {"chunk_length": 20}, "chunk_length is 20, which gives 2000 mel frames; the tower hears 3000"),
        ("config.json", "text_config", {"use_sliding_window": True}, "text_config.use_sliding_window is true"),
    ],
)
def test_files_that_it_refuses(path: Path, tmp_path: Path, file: str, place: str, change: dict[str, Any], problem: str) -> None:
    made = Path(shutil.copytree(path, tmp_path / "made"))
    config = json.loads((made / file).read_text())
    (config[place] if place else config).update(change)
    (made / file).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=problem):
        load_model_config(made)
