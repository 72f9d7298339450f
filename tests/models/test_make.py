"""Made checkpoints: transformers loads them without a complaint, their text side works, and they say various things."""

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from mmrt.models.config import load_model_config
from mmrt.models.lm.decoder import Chunk
from mmrt.models.lm.language_model import build_language_model
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.models.text.chat_template import ChatTemplate
from mmrt.models.text.tokenizer import Tokenizer

FAMILIES = (
    "qwen2_5_vl",
    "qwen2_5_omni",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_5",
    "glm_ocr",
    "glm4v",
    "qwen2_audio",
    "qwen3_asr",
    "smolvlm",
    *("internvl", "lighton_ocr", "mistral3", "qwen3_omni_moe", "llava_onevision", "paddleocr_vl", "pixtral"),
    *("minicpmv4_6", "minicpmv4_7"),
)

SENTENCE = "What can you see in this picture? It's 42 über-café 日本語 🙂\n\n  def f(x):\treturn x"


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_5_moe", "qwen3_vl_moe", "llava", "llava_next"])
def test_transformers_loads_it_whole(checkpoints: Callable[[str], Path], family: str) -> None:
    import transformers

    hears = family in ("qwen2_5_omni", "qwen2_audio", "qwen3_asr", "qwen3_omni_moe")
    auto = transformers.AutoModelForMultimodalLM if hears else transformers.AutoModelForImageTextToText
    _, info = auto.from_pretrained(checkpoints(family), output_loading_info=True)
    unused = (
        {"model.audio_tower.audio_bos_eos_token.weight"} if family == "qwen2_5_omni" else set()
    )  # by nobody: of the talker's prompts
    unread = ("vision_tower.encoder.layers.3.", "vision_tower.post_layernorm.") if "llava" in family else ("nothing",)
    missing = {name for name in info["missing_keys"] if not name.removeprefix("model.").startswith(unread)}
    assert missing == unused and not info["unexpected_keys"] and not info["mismatched_keys"]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizer_is_transformers_too(checkpoints: Callable[[str], Path], family: str) -> None:
    import transformers

    path = checkpoints(family)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(path), Tokenizer.load(path)
    messages = [{"role": "user", "content": SENTENCE}]
    rendered = ChatTemplate.load(path).render(messages)
    assert rendered == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.encode(rendered) == theirs(rendered)["input_ids"]
    assert ours.decode(ours.encode(SENTENCE)) == SENTENCE
    assert ours.vocab_size == load_model_config(path).language.vocab_size
    assert theirs.eos_token_id in load_model_config(path).eos_token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_template_has_one_placeholder_per_medium(checkpoints: Callable[[str], Path], family: str) -> None:
    path = checkpoints(family)
    config, tokenizer = load_model_config(path), Tokenizer.load(path)
    content = [{"type": kind} for kind in config.media_kinds] + [{"type": "text", "text": "and?"}]
    ids = tokenizer.encode(ChatTemplate.load(path).render([{"role": "user", "content": content}]))
    placeholders = [config.placeholder_id(kind) for kind in config.media_kinds]
    assert [token for token in ids if token in placeholders] == placeholders


def test_same_seed_same_files(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    make_checkpoint("tiny", tmp_path / "again", progress=lambda *progress: done.append(progress))
    assert done[-1][0] == done[-1][1]
    for file in checkpoints("qwen2_5_omni").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
    make_checkpoint("tiny", tmp_path / "other", seed=1)
    assert (tmp_path / "other/model.safetensors").read_bytes() != (tmp_path / "again/model.safetensors").read_bytes()
    with pytest.raises(FileExistsError):
        make_checkpoint("tiny", tmp_path / "again")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_have_the_mode_that_the_umask_says(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        make_checkpoint("tiny", tmp_path / "made")
    finally:
        os.umask(before)
    files = [*(tmp_path / "made").iterdir()]
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in files} == dict.fromkeys((file.name for file in files), mode)


def test_a_large_checkpoint_repeats_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix has two equal rows, tensors are as wide as drawn ones, and the seed decides."""
    from mmrt.models.make import checkpoint

    make_checkpoint("tiny", tmp_path / "drawn")
    monkeypatch.setattr(checkpoint, "_REPEATED_FROM", 1000)
    monkeypatch.setattr(checkpoint, "_BLOCK", 16381)
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        make_checkpoint("tiny", tmp_path / name, seed=seed)
    one, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "same", "other"))
    assert one == same and one != other
    drawn = load_file(tmp_path / "drawn/model.safetensors")
    repeated = load_file(tmp_path / "one/model.safetensors")
    assert drawn.keys() == repeated.keys()
    embeddings = repeated["model.embed_tokens.weight"]
    assert embeddings.numel() > 16381 and len(embeddings.unique(dim=0)) == len(embeddings)
    for name, tensor in repeated.items():
        assert tensor.shape == drawn[name].shape
        if tensor.numel() > 1000:
            torch.testing.assert_close(tensor.std(), drawn[name].std(), rtol=0.1, atol=0)


def test_greedy_text_has_variety(loaded: Any) -> None:
    """A random model must not fall into one token, nor say the same whatever it is asked."""
    lm = loaded.language_model()
    texts = []
    for start in (3, 500):
        ids, table = [start], torch.arange(8)
        for length in range(1, 101):
            place = torch.full((3, 1), length - 1)
            ids.append(int(lm.decode(torch.tensor(ids[-1:]), place, torch.tensor([length]), table[None]).argmax()))
        texts.append(ids[1:])
    assert all(len(set(ids)) > 40 for ids in texts)
    assert len(set(texts[0]) & set(texts[1])) < 80


@pytest.mark.parametrize(
    ("shape", "low", "high"),
    [("tiny", 0.3e6, 2.5e6), ("small", 260e6, 400e6), ("3b", 3e9, 5e9), ("7b", 7e9, 9.5e9)],
)
def test_sizes(sized: Callable[..., float], shape: str, low: float, high: float) -> None:
    assert low < sized("qwen2_5_omni", shape) < high


def test_null_model(tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "null", "null")
    config = load_model_config(tmp_path / "null")
    assert config.null is not None and config.media_kinds == ()
    config = msgspec.structs.replace(config, null=msgspec.structs.replace(config.null, step_ms=20.0))
    lm = build_language_model(config, {}, torch.zeros(4, config.kv_page_bytes(16), dtype=torch.uint8), 16)
    lm.prefill([Chunk(lm.embed(torch.arange(5)), torch.zeros(3, 5, dtype=torch.int64), 0, torch.arange(1))])
    ids, lengths = torch.tensor([4, 9]), torch.tensor([6, 7])
    start = time.perf_counter()
    tokens = lm.decode(ids, torch.zeros(3, 2), lengths, torch.zeros(2, 1)).argmax(1)
    assert time.perf_counter() - start >= 0.02
    assert torch.equal(tokens, lm.decode(ids, torch.zeros(3, 2), lengths, torch.zeros(2, 1)).argmax(1))
    assert not set(tokens.tolist()) & set(config.eos_token_ids)
    assert Tokenizer.load(tmp_path / "null").decode(tokens.tolist()) != ""
