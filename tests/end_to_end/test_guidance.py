"""CFG for text: guided = u + s (c - u) from the first token on, against two transformers models combined by hand (CF1-CF5)."""

from typing import Any

import pytest

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.oracle import Media, Oracle, check_argmax
from mmrt.tests.end_to_end.test_media import image_part, picture, text

QUESTION = "Describe the weather."


def guided(oracle: Oracle, conditional: Any, unconditional: Any, ids: list[int], scale: float) -> Any:
    c, u = oracle.logits(conditional, ids), oracle.logits(unconditional, ids)
    return u + scale * (c - u)


def companion(oracle: Oracle, negative: str) -> Any:
    """The same template, the user's text replaced; no media, no system prompt."""
    return oracle.inputs([{"role": "user", "content": negative}])


@pytest.mark.parametrize("negative", ["", "Answer rudely."])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1.5, 3.0])
def test_guided_tokens(server: Server, oracle: Oracle, scale: float, negative: str) -> None:
    extra = {"guidance_scale": scale} | ({"negative_prompt": negative} if negative else {})
    _, ids = server.chat(QUESTION, extra_body=extra)
    messages = [{"role": "user", "content": QUESTION}]
    logits = guided(oracle, oracle.inputs(messages), companion(oracle, negative), ids, scale)
    check_argmax(logits, ids)


def test_guided_tokens_with_an_image(server: Server, oracle: Oracle) -> None:
    pixels = picture(4, 98, 126)
    _, ids = server.chat([image_part(pixels), text(QUESTION)], extra_body={"guidance_scale": 2.0})
    plain = [{"role": "user", "content": [{"type": "image"}, text(QUESTION)]}]
    conditional = oracle.inputs(plain, Media(images=[pixels]))
    check_argmax(guided(oracle, conditional, companion(oracle, ""), ids, 2.0), ids)
    server.wait_until_empty()


def test_a_system_prompt_is_not_the_companions(server: Server, oracle: Oracle) -> None:
    messages = [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": QUESTION}]
    _, ids = server.chat(messages, extra_body={"guidance_scale": 1.5})
    check_argmax(guided(oracle, oracle.inputs(messages), companion(oracle, ""), ids, 1.5), ids)
