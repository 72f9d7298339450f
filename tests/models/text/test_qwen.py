"""The tokenizers and templates that ``mmrt model make`` writes, in the shape of Qwen's: equal to transformers' AutoTokenizer."""

import base64
import json
from pathlib import Path
from typing import Any, cast

import pytest

from mmrt.actors.gateway.reading.validation import read_chat
from mmrt.actors.gateway.serve import load_text_stack
from mmrt.actors.host.actor import Actor
from mmrt.models.config import load_model_config
from mmrt.models.families.registry import FAMILIES
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.models.text.chat_template import ChatTemplate
from mmrt.models.text.tokenizer import IncrementalDecoder, PromptGuard, Tokenizer
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
