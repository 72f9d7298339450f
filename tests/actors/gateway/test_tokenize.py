"""``/tokenize`` and ``/detokenize``: the ids that a request would have, and the text of ids."""

from typing import Any

import pytest

from mmrt.models.text.tokenizer import Tokenizer
from mmrt.tests.actors.gateway.conftest import MAX_CONTEXT, MODEL


def test_of_a_text_and_back(stage: Any, tokenizer: Tokenizer) -> None:
    async def test(scene: Any) -> None:
        ids = tokenizer.encode("Hello <|im_end|>")
        answer = await scene.http.post("/tokenize", json={"prompt": "Hello <|im_end|>", "model": MODEL, "add_special_tokens": True})
        assert answer.json() == {"count": len(ids), "max_model_len": MAX_CONTEXT, "tokens": ids}
        back = await scene.http.post("/detokenize", json={"tokens": ids})
        assert back.json() == {"prompt": "Hello <|im_end|>"}
        assert (await scene.http.post("/detokenize/", json={"tokens": []})).json() == {"prompt": ""}

    stage.run(test)


@pytest.mark.parametrize(
    ("route", "body", "status", "message"),
    [
        ("tokenize", {}, 400, "prompt: is required"),
        ("tokenize", {"messages": []}, 400, "messages: "),
        ("tokenize", {"prompt": "x", "return_token_strs": True}, 400, "return_token_strs: is true, only false is supported"),
        ("tokenize", {"prompt": "x", "model": "other"}, 404, "model: "),
        ("tokenize", {"prompt": "x" * 100_000}, 400, "prompt: prompt is too long"),
        ("detokenize", {}, 400, "tokens: is required"),
        ("detokenize", {"tokens": "1 2"}, 400, "tokens: expected an array of token ids, got a string"),
        ("detokenize", {"tokens": [1, True]}, 400, "tokens: expected token ids, got true"),
        ("detokenize", {"tokens": [1, None]}, 400, "tokens: expected token ids, got null"),
        ("detokenize", {"tokens": [1, -1]}, 400, "tokens: has the token id -1, allowed are 0 to "),
        ("detokenize", {"tokens": [1 << 70]}, 400, "tokens: has the token id 1180591620717411303424, allowed are 0 to "),
    ],
)
def test_refusals(stage: Any, route: str, body: dict[str, Any], status: int, message: str) -> None:
    async def test(scene: Any) -> None:
        answer = await scene.http.post(f"/{route}", json=body)
        assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text

    stage.run(test)
