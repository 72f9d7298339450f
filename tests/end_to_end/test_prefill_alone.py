"""Decisions and embeddings on a real run, against transformers; transcriptions, against the chat that they are."""

import base64
import secrets
import signal
import threading
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.oracle import Media, Oracle
from mmrt.tests.end_to_end.test_media import image_part, picture, sound, text

PIXELS = picture(7, 98, 126)
CONTEXT = [{"role": "user", "content": [image_part(PIXELS), text("Look at it. " * 20)]}]
QUESTIONS: list[dict[str, Any]] = [
    {"name": "what", "question": "What is it?", "type": "choice", "options": ["a red circle", "a circle", "nothing at all"]},
    {"name": "moves", "question": "Does it move?", "type": "boolean"},
    {"name": "number", "question": "How many are there?", "type": "integer", "minimum": 8, "maximum": 11},
]


def decide(server: Server, questions: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"messages": CONTEXT, "questions": questions, "cache_salt": secrets.token_hex(8), **more}
    reply = httpx2.post(f"{server.url}/v1/decisions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def logprob(oracle: Oracle, question: str, option: str) -> float:
    """The log-probability of an answer that is this option and ends there."""
    content = [{"type": "image"}, text("Look at it. " * 20), text(f"\n{question}")]
    inputs = oracle.inputs([{"role": "user", "content": content}], Media(images=[PIXELS]))
    ids = oracle.tokenizer(option)["input_ids"] + [oracle.tokenizer.convert_tokens_to_ids("<|im_end|>")]
    return float(oracle.logits(inputs, ids).log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)].sum())


def test_decisions_are_transformers(server: Server, oracle: Oracle) -> None:
    """decode does not run meanwhile. The questions share what stands before them."""
    server.kill("decode", signal.SIGSTOP)
    try:
        found = decide(server, QUESTIONS)
    finally:
        server.kill("decode", signal.SIGCONT)
    for question, answer in zip(QUESTIONS, found["answers"], strict=True):
        expected = torch.tensor([logprob(oracle, question["question"], option["text"]) for option in answer["options"]]).double()
        assert [option["logprob"] for option in answer["options"]] == pytest.approx(expected.tolist(), abs=3e-4)
        assert [option["probability"] for option in answer["options"]] == pytest.approx(expected.softmax(0).tolist(), abs=1e-4)
        assert answer["value"] == answer["options"][int(expected.argmax())]["value"]
        assert answer["probability"] == max(option["probability"] for option in answer["options"])
    usage = found["usage"]
    alone = decide(server, QUESTIONS[:1])["usage"]
    assert alone["prompt_tokens_details"]["cached_tokens"] == 0
    shared = alone["prompt_tokens"] - sum(option["num_tokens"] for option in found["answers"][0]["options"]) - 32
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 2 * (shared // 16) * 16 > 0
    assert usage["completion_tokens"] == 0
    server.wait_until_empty()


@pytest.mark.parametrize("victim", ["prefill", "controller"])
def test_decisions_outlive_a_kill(server: Server, victim: str) -> None:
    many = [{**QUESTIONS[2], "name": str(at), "question": f"How many of kind {at}?", "maximum": 18} for at in range(6)]
    expected = decide(server, many)
    found: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: found.append(decide(server, many)))
    asking.start()
    server.kill(victim)
    asking.join()
    for one, other in zip(found[0]["answers"], expected["answers"], strict=True):
        assert [option["logprob"] for option in one["options"]] == pytest.approx(
            [option["logprob"] for option in other["options"]], abs=3e-4
        )
    server.wait(lambda status: status["state"] == "ready", "everything runs again")
    server.wait_until_empty()


def hidden(oracle: Oracle, inputs: dict[str, Any]) -> torch.Tensor:
    """The last hidden states, after the last norm."""
    with torch.inference_mode():
        oracle.model.rope_deltas = None
        given = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
        states = oracle.model(**given, use_cache=False, output_hidden_states=True)
        last = states.hidden_states[-1][0]
        assert torch.allclose(oracle.model.lm_head(last), states.logits[0], atol=1e-4), "after the norm"
    found: torch.Tensor = last.double()
    return found


def expected(oracle: Oracle, inputs: dict[str, Any], pooling: str) -> np.ndarray[Any, Any]:
    states = hidden(oracle, inputs)
    vector = states[-1] if pooling == "last" else states.mean(0)
    found: np.ndarray[Any, Any] = (vector / vector.norm()).numpy()
    return found


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_transformers(server: Server, oracle: Oracle, pooling: str) -> None:
    """Of texts, of which one is long, and once more when the cache has them."""
    texts = ["The quick brown fox.", "a", "Once upon a time there was a fox that lived behind the old mill. " * 30]
    extra = {"pooling": pooling, "cache_salt": secrets.token_hex(8)}
    for is_cached in (False, True):
        found = server.client.embeddings.create(model=server.checkpoint.name, input=texts, extra_body=extra)
        for one, given in zip(found.data, texts, strict=True):
            ids = oracle.tokenizer(given)["input_ids"]
            wanted = expected(oracle, {"input_ids": torch.tensor([ids])}, pooling)
            np.testing.assert_allclose(one.embedding, wanted, atol=1e-4 * np.abs(wanted).max())
        details: Any = found.usage.model_extra
        assert (details["prompt_tokens_details"]["cached_tokens"] > 0) == (is_cached and pooling == "last")
    server.wait_until_empty()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_embedding_of_a_picture(server: Server, oracle: Oracle, pooling: str) -> None:
    messages = [{"role": "user", "content": [image_part(PIXELS), text("What is it?")]}]
    plain = [{"role": "user", "content": [{"type": "image"}, text("What is it?")]}]
    body = {"messages": messages, "pooling": pooling, "add_generation_prompt": True, "encoding_format": "float"}
    found = httpx2.post(f"{server.url}/v1/embeddings", json=body, timeout=60).json()["data"][0]["embedding"]
    wanted = expected(oracle, oracle.inputs(plain, Media(images=[PIXELS])), pooling)
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())
    other = httpx2.post(f"{server.url}/v1/embeddings", json={**body, "add_generation_prompt": False}, timeout=60).json()
    assert other["data"][0]["embedding"] != found and len(found) == len(wanted)


def test_a_transcription_is_a_chat(server: Server) -> None:
    part, _ = sound(1.5, 440)
    data = base64.b64decode(part["input_audio"]["data"])
    instruction = 'Transcribe the audio into text. Its language has the ISO 639-1 code "de".'
    system = {"role": "system", "content": "You are a speech recognition model."}
    chat, _ = server.chat([system, {"role": "user", "content": [part, text(instruction)]}], max_tokens=20)
    asked: dict[str, Any] = {"model": server.checkpoint.name, "file": ("sound.wav", data), "language": "de"}
    extra = {"max_completion_tokens": 20}
    whole = server.client.audio.transcriptions.create(**asked, extra_body=extra)
    events: Any = list(server.client.audio.transcriptions.create(**asked, stream=True, extra_body=extra))
    assert whole.text == chat and len(chat) > 0
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == chat
    assert events[-1].usage.output_tokens == whole.usage.output_tokens == 20
    server.wait_until_empty()
