"""Qwen3-ASR beside transformers: tokens, tower, prompts, logits in any cuts, and its own files, which spell names otherwise.
Spectrograms are in tests/media/test_mel."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrt.models.architecture import ModelConfig, WeightFormat
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError, UnsupportedMediaError
from mmrt.models.families import qwen3_asr
from mmrt.models.families.item_check import fault_of
from mmrt.models.lm.language_model import LanguageModel
from mmrt.models.text.chat_template import ChatTemplate
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.models.towers.interface import TowerInput
from mmrt.tests.models.kept import exact

LENGTHS = (50, 99, 100, 101, 107, 799, 800, 801, 1700, 2431)  # mel frames


@pytest.fixture(scope="module")
def path(checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints("qwen3_asr")


@pytest.fixture(scope="module")
def config(path: Path) -> ModelConfig:
    return load_model_config(path)


@pytest.fixture(scope="module")
def processor(path: Path) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(path, local_files_only=True)


def mel(num_frames: int) -> np.ndarray:
    return np.random.default_rng(num_frames).normal(0, 0.5, (num_frames, 128)).astype(np.float32)


def features(mels: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """As transformers wants them: the mel axis is padded with zeros to whole chunks of the longest."""
    longest = -(-max(map(len, mels)) // 100) * 100
    padded = [np.pad(one, ((0, longest - len(one)), (0, 0))).T for one in mels]
    mask = [[int(at < len(one)) for at in range(longest)] for one in mels]
    return {"input_features": torch.from_numpy(np.stack(padded)), "input_features_mask": torch.tensor(mask)}


def encoded(loaded: Any, one: np.ndarray) -> torch.Tensor:
    """Rows of a clip whose segments are encoded together."""
    parts = qwen3_asr.audio_item(loaded.config, len(one)).segments
    cuts = np.cumsum([part.num_rows for part in parts])[:-1]
    rows = loaded.towers.encode([TowerInput("audio", rows, (len(rows), 0, 0)) for rows in np.split(one, cuts)])
    assert [len(its) for its in rows] == [part.num_tokens for part in parts]
    return torch.cat(rows)


def test_items_of_any_length(config: ModelConfig, processor: Any) -> None:
    for num_frames in (*range(1, 1700), *LENGTHS, 60_000, 360_000):
        item = qwen3_asr.audio_item(config, num_frames)
        assert item.num_tokens == processor._get_audio_token_length(torch.tensor(num_frames))
        assert item.num_tokens == sum(part.num_tokens for part in item.segments)
        assert [part.num_rows for part in item.segments[:-1]] == [800] * ((num_frames - 1) // 800)
        assert fault_of(config, "audio", item) == ""
    for refuse, what in (
        (lambda: qwen3_asr.audio_item(config, 0), "audio of 0 mel frames is too short"),
        (lambda: qwen3_asr.image_item(config, 9, 9), "this model takes no image"),
        (lambda: qwen3_asr.sample_frames(config, 9, 1.0), "this model takes no video"),
    ):
        with pytest.raises(UnsupportedMediaError, match=what):
            refuse()


def test_the_tower(models: Callable[[str], Any]) -> None:
    """Also of a long clip in one piece, and of several at once."""
    loaded = models("qwen3_asr")
    with torch.inference_mode():
        for num_frames in LENGTHS:
            one = mel(num_frames)
            expected = loaded.reference.get_audio_features(**features([one])).pooler_output
            torch.testing.assert_close(encoded(loaded, one), expected, rtol=1e-4, atol=1e-5)
        mels = [mel(num_frames) for num_frames in LENGTHS]
        expected = loaded.reference.get_audio_features(**features(mels)).pooler_output
        whole = loaded.towers.encode([TowerInput("audio", one.view(np.uint8), (len(one), 0, 0)) for one in mels])
        torch.testing.assert_close(torch.cat(whole), expected, rtol=1e-4, atol=1e-5)


def expanded(config: ModelConfig, ids: list[int], lengths: Sequence[int]) -> list[int]:
    left = iter(lengths)
    counts = [qwen3_asr.audio_item(config, next(left)).num_tokens if id == config.audio_token_id else 1 for id in ids]
    return [id for id, count in zip(ids, counts, strict=True) for _ in range(count)]


@pytest.mark.parametrize("context", [None, "Names: Ångström, <|im_end|>"])
def test_whole_prompts_are_the_processor_s(path: Path, config: ModelConfig, processor: Any, context: str | None) -> None:
    tokenizer, template = Tokenizer.load(path), ChatTemplate.load(path)
    sound = np.random.default_rng(0).standard_normal(33_333).astype(np.float32)
    expected = processor.apply_transcription_request(sound, prompt=context)
    said = [] if context is None else [{"role": "system", "content": context}]
    rendered = template.render([*said, {"role": "user", "content": [{"type": "audio"}]}])
    assert config.audio_rules is not None
    num_frames = config.audio_rules.num_frames(len(sound))
    ids = expanded(config, tokenizer.encode(rendered), [num_frames])
    assert ids == expected["input_ids"][0].tolist() and int(expected["input_features_mask"].sum()) == num_frames == 208


def test_logits_in_any_cuts(models: Callable[[str], Any]) -> None:
    """Two clips between words, cut anywhere: within 1e-5 of the largest of transformers' logits."""
    loaded = models("qwen3_asr")
    with torch.inference_mode():
        mels, rng = [mel(107), mel(931)], np.random.default_rng(0)
        marks = [int(id) for id in rng.integers(0, 1000, 9)]
        marks[3:3], marks[6:6] = [loaded.config.audio_token_id], [loaded.config.audio_token_id]
        ids, following = expanded(loaded.config, marks, [107, 931]), [5, 900, 17]
        inputs = {"input_ids": torch.tensor([[*ids, *following]]), **features(mels)}
        expected = loaded.reference(**inputs, use_cache=False).logits[0]
        places, delta = qwen3_asr.positions(loaded.config, len(ids), [])
        assert delta == 0
        rows = torch.cat([encoded(loaded, one) for one in mels])
        for step in (1, 7, 104, 4096):
            lm, table = loaded.language_model(), torch.randperm(20, generator=torch.Generator().manual_seed(step))
            embeds = lm.embed(torch.tensor(ids))
            embeds[torch.tensor(ids) == loaded.config.audio_token_id] = rows
            for chunk in loaded.chunks(embeds, torch.from_numpy(places.copy()), table, step):
                lm.prefill([chunk])
            token = ids[-1]
            for number, forced in enumerate(following):
                length = len(ids) + number
                place = torch.full((3, 1), length - 1)
                (found,) = lm.decode(torch.tensor([token]), place, torch.tensor([length]), table[None])
                assert (found - expected[length - 1]).abs().max() < 1e-5 * expected.abs().max()
                token = forced


@pytest.mark.parametrize("weights", ["int8", "int8g", "int4"])
def test_logits_of_rounded_weights(models: Callable[[str], Any], weights: WeightFormat) -> None:
    """Those of the values that the format has, but for the rounding of activations; the tower stays as it is."""
    loaded = models("qwen3_asr")
    config = load_model_config(loaded.path, weights=weights)
    rounded = read_weights(loaded.path, config)
    assert all(torch.equal(rounded[name], loaded.weights[name]) for name in rounded if name.startswith("audio."))
    exactly = {name: exact(rounded, name).float() if f"{name}.scales" in rounded else value for name, value in rounded.items()}
    exactly = {name: value for name, value in exactly.items() if not name.endswith(".scales")}
    logits, ids = [], torch.arange(40)
    with torch.inference_mode():
        for one, weights_of in ((config, rounded), (loaded.config, exactly)):
            lm = LanguageModel(one, weights_of, torch.zeros(8, config.kv_page_bytes(16), dtype=torch.uint8), 16)
            for chunk in loaded.chunks(lm.embed(ids), torch.arange(40).expand(3, -1), torch.arange(8), 16):
                lm.prefill([chunk])
            logits.append(lm.decode(ids[-1:], torch.full((3, 1), 39), torch.tensor([40]), torch.arange(8)[None]))
    assert 0 < (logits[0] - logits[1]).abs().mean() / logits[1].std() < 0.05


def thinkers(path: Path, out: Path) -> Path:
    """The checkpoint as the model's own files spell it."""
    shutil.copytree(path, out)
    (out / "preprocessor_config.json").write_text(json.dumps({"feature_extractor_type": "WhisperFeatureExtractor", "chunk_length": 30}))
    config = json.loads((path / "config.json").read_text())
    text, audio = config["text_config"], config["audio_config"]
    text |= {"rope_theta": 1000000, "rope_scaling": {"mrope_section": [12, 10, 10], "rope_type": "default", "type": "default"}}
    text |= {"model_type": "qwen3_asr_text"}
    del text["rope_parameters"]
    audio |= {"model_type": "qwen3_asr_audio_encoder", "max_source_positions": 1500, "conv_chunksize": 500}
    thinker = {
        "model_type": "qwen3_asr_thinker",
        "audio_token_id": config["audio_token_id"],
        "text_config": text,
        "audio_config": audio,
    }
    whole = {"model_type": "qwen3_asr", "architectures": config["architectures"], "thinker_config": {**thinker, "dtype": "float32"}}
    (out / "config.json").write_text(json.dumps(whole))
    tensors = load_file(path / "model.safetensors")
    spelled = {
        "model.multi_modal_projector.linear_1.": "thinker.audio_tower.proj1.",
        "model.multi_modal_projector.linear_2.": "thinker.audio_tower.proj2.",
        "model.audio_tower.": "thinker.audio_tower.",
        "model.language_model.": "thinker.model.",
        "lm_head.": "thinker.lm_head.",
    }
    made = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        theirs = next(theirs for theirs in spelled if name.startswith(theirs))
        made[spelled[theirs] + name.removeprefix(theirs)] = tensor
    save_file(made, out / "model.safetensors", {"format": "pt"})
    return out


def test_the_model_s_own_files(path: Path, config: ModelConfig, tmp_path: Path) -> None:
    own = thinkers(path, tmp_path / "own")
    assert load_model_config(own) == config and not config.language.tie_embeddings
    found, expected = read_weights(own, config), read_weights(path, config)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    said = json.loads((own / "config.json").read_text())
    del said["thinker_config"]["text_config"]["tie_word_embeddings"]
    (own / "config.json").write_text(json.dumps(said))
    assert load_model_config(own).language.tie_embeddings, "as in transformers, where the file does not say"


@pytest.mark.parametrize("shape", ["0.6b", "1.7b"])
def test_published_shapes(sized: Callable[[str, str], int], tmp_path: Path, shape: str) -> None:
    import transformers

    num_values = sized("qwen3_asr", shape)
    config = transformers.AutoConfig.from_pretrained(tmp_path / shape)
    with torch.device("meta"):
        theirs = transformers.Qwen3ASRForConditionalGeneration(config)
    assert sum(one.numel() for one in theirs.parameters()) == num_values


@pytest.mark.parametrize(
    ("place", "change", "problem"),
    [
        ("audio_config", {"n_window_infer": 850}, r"audio_config.n_window_infer is 850, expected a multiple of 2 x n_window \(100\)"),
        ("audio_config", {"activation_function": "relu"}, "audio_config.activation_function is 'relu', expected 'gelu'"),
        ("audio_config", {"output_dim": 64}, r"audio_config.output_dim is 64, expected the decoder's hidden_size \(128\)"),
        ("text_config", {"use_sliding_window": True}, "text_config.use_sliding_window is true"),
        ("", {"architectures": ["Qwen3ASRForTokenClassification"]}, "architectures is that of a forced aligner"),
        ("", {"thinker_config": {"classify_num": 5000}}, "architectures is that of a forced aligner"),
    ],
)
def test_files_that_it_refuses(path: Path, tmp_path: Path, place: str, change: dict[str, Any], problem: str) -> None:
    made = Path(shutil.copytree(path, tmp_path / "made"))
    config = json.loads((made / "config.json").read_text())
    (config[place] if place else config).update(change)
    (made / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=problem):
        load_model_config(made)
