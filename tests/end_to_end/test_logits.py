"""Biases, words that must not appear and least lengths through the openai client."""

from typing import Any

import openai
import pytest

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.oracle import Oracle

QUESTION = "Say something long."


def test_rules_about_tokens(server: Server, oracle: Oracle) -> None:
    """With a neighbour in the batch that has none: its answer stays as it is."""
    plain, plain_ids = server.chat(QUESTION, max_tokens=60, extra_body={"ignore_eos": True})
    neighbour = server.stream(QUESTION, max_tokens=60, extra_body={"ignore_eos": True})
    first, second = plain_ids[0], plain_ids[1]
    _, biased = server.chat(QUESTION, logit_bias={str(first): -100}, max_tokens=8)
    assert first not in biased
    logits = oracle.logits(oracle.inputs([{"role": "user", "content": QUESTION}]), biased).clone()
    logits[:, first] -= 100
    assert (logits.max(-1).values - logits[range(len(biased)), biased]).max() < 1e-4
    assert server.chat(QUESTION, logit_bias={str(second): 100}, max_tokens=8)[1] == [second] * 8
    words = [(at, oracle.tokenizer.decode([id]).lstrip()) for at, id in enumerate(plain_ids)]
    at, word = next((at, word) for at, word in words if word and oracle.tokenizer(word)["input_ids"] == [plain_ids[at]])
    _, without = server.chat(QUESTION, max_tokens=60, extra_body={"bad_words": [word], "ignore_eos": True})
    assert without[:at] == plain_ids[:at] and plain_ids[at] not in without
    ids = [token for chunk in neighbour for choice in chunk.choices for token in (getattr(choice, "token_ids", None) or [])]
    assert ids == plain_ids


def test_an_answer_has_its_least_length(server: Server) -> None:
    extra: dict[str, Any] = {"min_tokens": 20}
    first = server.chat(QUESTION, extra_body={"ignore_eos": True}, max_tokens=1)[1][0]
    _, ids = server.chat(QUESTION, extra_body={**extra, "stop_token_ids": [first]}, max_tokens=24)
    assert len(ids) >= 20 and first not in ids[:20]
    assert server.chat(QUESTION, extra_body={"stop_token_ids": [first]})[1] == [first]


def test_an_id_outside_the_vocabulary(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="logit_bias: has the token id 9999999, allowed are 0 to"):
        server.chat(QUESTION, logit_bias={"9999999": 1})
