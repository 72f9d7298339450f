"""The tokenizers and templates that ``mmrt model make`` writes, in the shape of Qwen's: equal to transformers' AutoTokenizer."""

import base64
import json
from pathlib import Path
from typing import Any, cast

import pytest

from mmrt.actors.gateway.reading.validation import read_chat
from mmrt.actors.gateway.text_stack import load_text_stack
from mmrt.actors.host.actor import Actor
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.families.registry import FAMILIES
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.models.text.chat_template import ChatTemplate
from mmrt.models.text.tokenizer import IncrementalDecoder, PromptGuard, Tokenizer
from mmrt.models.text.vocabulary_check import check_vocabulary
from mmrt.runtime.config.runtime_config import RuntimeConfig

TEXTS = [
    "Hello, world!  It's  12345 o'clock\r\n\n\tand so on…",
    "Zwölf Boxkämpfer e\u0301 \u212b — 日本語のテキスト 😀👩\u200d👩\u200d👧 ещё раз",
    "<|im_start|>user\n<|im_end|><|endoftext|> <tool_call>{}</tool_call>",
    "def f(x):\n    return x['a'] == \"b\"  # \x00\x7f\ufffd",
    " ",
]
PARTS = [{"type": "image"}, {"type": "text", "text": "What?"}, {"type": "video"}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "Why?"},
]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(str(request.param)) / "model"
    make_checkpoint("tiny", path, family=request.param)
    return path


def test_equal_to_transformers(checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    ours = Tokenizer.load(checkpoint)
    template = ChatTemplate.load(checkpoint, ours.special_tokens)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert PromptGuard(ours).encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        decoder = IncrementalDecoder(ours)
        assert "".join(decoder.push([id]) for id in ids) + decoder.flush() == ours.decode(ids)
    parts = [part for part in PARTS if part["type"] in ("text", *load_model_config(checkpoint).media_kinds)]
    messages = [{"role": "user", "content": parts}, *MESSAGES]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert template.render(messages) == rendered
    assert ours.encode(rendered) == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_the_gateway_s_text_stack(checkpoint: Path) -> None:
    """Placeholders come out in order for every kind of media that the model takes, and a user's stay text."""

    class StandIn:
        config = RuntimeConfig()
        model_path = checkpoint

        def wait_for_layout(self) -> Any:
            return type("Layout", (), {"max_context": 4096, "num_rows": 4})

    stack = load_text_stack(cast(Actor, StandIn()))
    url = base64.b64encode(b"data").decode()
    tokenizer = Tokenizer.load(checkpoint)
    forged = "".join(tokenizer.control_ids)
    parts: list[Any] = [{"type": "text", "text": forged}]
    for kind in ("video", "image", "audio"):
        if kind in stack.limits.kinds:
            parts.append({"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{kind}/x;base64,{url}"}})
    body = {"model": "model", "messages": [{"role": "user", "content": parts}], "guidance_scale": 2.0}
    prompt = stack.prompts.build(read_chat(json.dumps(body).encode(), stack.limits))
    assert forged in tokenizer.decode(prompt.ids)
    assert prompt.companion_ids is not None and len(prompt.companion_ids) < len(prompt.ids)


def in_two_files(path: Path, out: Path) -> Path:
    """The checkpoint's text files as Qwen3-ASR's repositories have them, without tokenizer.json."""
    out.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (out / name).write_text((path / name).read_text())
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    (out / "vocab.json").write_text(json.dumps(model["vocab"]))
    lines = ["#version: 0.2", *(merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]), ""]
    (out / "merges.txt").write_text("\n".join(lines))
    return out


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speech") / "model"
    make_checkpoint("tiny", path, family="qwen3_asr")
    return path


def test_a_vocabulary_and_merges(speech: Path, tmp_path: Path) -> None:
    """The ids are those of tokenizer.json, and transformers' for the same files."""
    from transformers import AutoTokenizer

    path = in_two_files(speech, tmp_path / "two")
    ours, whole, theirs = Tokenizer.load(path), Tokenizer.load(speech), AutoTokenizer.from_pretrained(path, local_files_only=True)
    assert ours.control_ids == whole.control_ids and ours.token_bytes == whole.token_bytes
    for text in (*TEXTS, "language English<asr_text>über<|im_end|>"):
        assert ours.encode(text) == whole.encode(text) == theirs.encode(text, add_special_tokens=False)
    config = load_model_config(speech)
    assert check_vocabulary(path, config) == check_vocabulary(speech, config)


@pytest.mark.parametrize(
    ("file", "contents", "problem"),
    [
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "GPT2Tokenizer"}',
            "alone, and tokenizer_class is 'GPT2Tokenizer'",
        ),
        ("merges.txt", "#version: 0.2\nnobody knows\n", "merges.txt: does not fit vocab.json"),
        ("vocab.json", '{"a": "b"}', "vocab.json is no vocabulary: Expected `int`"),
        ("merges.txt", None, "tokenizer.json is missing"),
    ],
)
def test_a_bad_vocabulary(speech: Path, tmp_path: Path, file: str, contents: str | None, problem: str) -> None:
    path = in_two_files(speech, tmp_path / "two")
    (path / file).unlink()
    if contents is not None:
        (path / file).write_text(contents)
    with pytest.raises(CheckpointError, match=problem):
        Tokenizer.load(path)
