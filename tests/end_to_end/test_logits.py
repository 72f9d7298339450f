"""Biases, bad words, least lengths, log-probabilities and several choices through the openai client, against transformers."""

import json
from typing import Any

import httpx2
import openai
import pytest
import torch

from mmrt.tests.end_to_end.conftest import Server, also_slow
from mmrt.tests.end_to_end.oracle import Media, Oracle
from mmrt.tests.end_to_end.test_guidance import companion, guided
from mmrt.tests.end_to_end.test_instances import steps
from mmrt.tests.end_to_end.test_media import image_part, picture, text
from mmrt.tests.end_to_end.test_structured_output import schema_format

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


def check_answer(content: Any, ids: list[int], logits: torch.Tensor) -> None:
    """Every log-probability and alternative is that of these logits."""
    expected = logits.log_softmax(-1)
    assert len(content) == len(ids)
    for entry, id, row in zip(content, ids, expected, strict=True):
        assert abs(entry.logprob - float(row[id])) < 1e-4
        best = row.topk(len(entry.top_logprobs)).values.tolist()
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(best, abs=1e-4)


def streamed(server: Server, content: Any, **options: Any) -> tuple[str, list[int], list[Any]]:
    text, ids, entries = "", [], []
    for chunk in server.stream(content, logprobs=True, **options):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            ids += getattr(choice, "token_ids", None) or []
            entries += choice.logprobs.content if choice.logprobs else []
    return text, ids, entries


def test_log_probabilities_are_transformers(server: Server, oracle: Oracle) -> None:
    """Before temperature, biases and penalties."""
    options: dict[str, Any] = {"temperature": 1.3, "top_logprobs": 20, "frequency_penalty": 1.0, "logit_bias": {"5": 50}}
    text, ids, entries = streamed(server, QUESTION, max_tokens=40, extra_body={"ignore_eos": True}, **options)
    inputs = oracle.inputs([{"role": "user", "content": QUESTION}])
    check_answer(entries, ids, oracle.logits(inputs, ids))
    assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == text
    assert ids.count(5) > 5


def test_log_probabilities_about_a_picture_with_guidance(server: Server, oracle: Oracle) -> None:
    pixels = picture(4, 98, 126)
    parts = [image_part(pixels), text(QUESTION)]
    _, ids, entries = streamed(server, parts, top_logprobs=3, extra_body={"guidance_scale": 2.0})
    inputs = oracle.inputs([{"role": "user", "content": [{"type": "image"}, text(QUESTION)]}], Media(images=[pixels]))
    check_answer(entries, ids, guided(oracle, inputs, companion(oracle, ""), ids, 2.0))


def test_log_probabilities_of_an_answer_that_follows_a_schema(server: Server, oracle: Oracle) -> None:
    """They are those before the mask, so a token that the schema demands can be far from the likeliest."""
    schema = {"type": "object", "properties": {"kind": {"enum": ["circle", "square"]}}, "required": ["kind"]}
    form = schema_format({**schema, "additionalProperties": False})
    answer, ids, entries = streamed(server, QUESTION, max_tokens=60, top_logprobs=4, response_format=form)
    assert json.loads(answer)["kind"] in ("circle", "square")
    check_answer(entries, ids, oracle.logits(oracle.inputs([{"role": "user", "content": QUESTION}]), ids))
    assert any(entry.logprob < entry.top_logprobs[-1].logprob for entry in entries), "the schema has overruled the model"


def test_log_probabilities_outlive_decode_and_detokenizer(server: Server, oracle: Oracle) -> None:
    entries: list[Any] = []
    ids: list[int] = []
    victims = ["decode", "detokenizer"]
    options = {"max_tokens": 150, "logprobs": True, "top_logprobs": 2, "extra_body": {"ignore_eos": True}}
    for chunk in server.stream(QUESTION, **options):
        for choice in chunk.choices:
            entries += choice.logprobs.content if choice.logprobs else []
            ids += getattr(choice, "token_ids", None) or []
        if victims and len(ids) > 60 - 20 * len(victims):
            server.kill(victims.pop())
    assert not victims and len(ids) == 150
    check_answer(entries, ids, oracle.logits(oracle.inputs([{"role": "user", "content": QUESTION}]), ids))


def prompt_expected(oracle: Oracle, inputs: dict[str, Any], ids: list[int]) -> list[float]:
    """What the model says of each token of a prompt, the first excepted."""
    with torch.inference_mode():
        oracle.model.rope_deltas = None
        given = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
        logits = oracle.model(**given, use_cache=False).logits[0].float()
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()


def test_an_echoed_prompt(server: Server, oracle: Oracle) -> None:
    """Also when the cache has its pages."""
    prompt = "The quick brown fox jumps over the lazy dog, again and again, and every time it thinks of something better to do."
    ids = oracle.tokenizer(prompt)["input_ids"]
    expected = prompt_expected(oracle, {"input_ids": torch.tensor([ids])}, ids)
    for asked in (prompt, ids, prompt):
        answer = server.client.completions.create(
            model=server.checkpoint.name, prompt=asked, echo=True, logprobs=2, max_tokens=2, temperature=0
        )
        (choice,) = answer.choices
        found = choice.logprobs
        assert choice.text.startswith(prompt) and len(found.tokens) == len(ids) + 2
        assert found.token_logprobs[0] is None and found.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        assert "".join(found.tokens[: len(ids)]) == prompt
        for name, offset in zip(found.tokens[: len(ids)], found.text_offset, strict=False):
            assert prompt[offset:].startswith(name)
        assert all(max(best.values()) >= own for best, own in zip(found.top_logprobs[1:], found.token_logprobs[1:], strict=True))
        assert answer.usage.prompt_tokens_details.cached_tokens == 0, "cached pages have no logits"
    server.wait_until_empty()
    before = steps(server)
    options: dict[str, Any] = {"echo": True, "logprobs": 0, "max_tokens": 0, "n": 2}
    alone = server.client.completions.create(model=server.checkpoint.name, prompt=ids, **options)
    streamed = [chunk for chunk in server.client.completions.create(model=server.checkpoint.name, prompt=ids, stream=True, **options)]
    assert alone.usage.completion_tokens == 0
    for choice in alone.choices + [chunk.choices[0] for chunk in streamed if chunk.choices[0].text]:
        assert choice.text == prompt and choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert [chunk.choices[0].finish_reason for chunk in streamed] == [None, "length"] * 2
    assert steps(server)["prefill"] > before["prefill"] and steps(server)["decode"] == before["decode"], "prefill alone computes"


def test_prompt_log_probabilities_about_a_picture(server: Server, oracle: Oracle) -> None:
    pixels = picture(5, 98, 126)
    inputs = oracle.inputs([{"role": "user", "content": [{"type": "image"}, text(QUESTION)]}], Media(images=[pixels]))
    ids = inputs["input_ids"][0].tolist()
    expected = prompt_expected(oracle, inputs, ids)
    for salt in ("one", "one"):
        answer = server.client.chat.completions.create(
            model=server.checkpoint.name,
            messages=[{"role": "user", "content": [image_part(pixels), text(QUESTION)]}],
            max_tokens=1,
            extra_body={"prompt_logprobs": 1, "cache_salt": salt},
        )
        found = answer.prompt_logprobs
        assert found[0] is None and len(found) == len(ids)
        own = [entry[str(id)]["logprob"] for entry, id in zip(found[1:], ids[1:], strict=True)]
        assert own == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_prefill_their_prompt_once(server: Server, stream: bool) -> None:
    """They are those of their seeds, each alone."""
    content = "Tell me a story about a fox and a dog, and what became of both in the long winter. " * 4
    before = hits(server)
    salt = f"choices {stream}"
    options: dict[str, Any] = {
        "model": server.checkpoint.name,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 12,
        "temperature": 1,
        "seed": 3,
        "n": 6,
        "extra_body": {"cache_salt": salt, "return_token_ids": True, "ignore_eos": True},
    }
    found: dict[int, list[int]] = {index: [] for index in range(6)}
    as_stream = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = server.client.chat.completions.create(**options, **as_stream)
    num_prompt = 0
    for one in answer if stream else [answer]:
        num_prompt = one.usage.prompt_tokens if one.usage else 0
        for choice in one.choices:
            found[choice.index] += choice.token_ids or []
    assert {len(ids) for ids in found.values()} == {12} and len({tuple(ids) for ids in found.values()}) > 3
    server.wait(lambda _: hits(server)[0] - before[0] >= 6 * num_prompt, "all of them are counted")
    cached = hits(server)[1] - before[1]
    assert cached >= 5 * (num_prompt - 2 * 16 - 1), "all but the last page"
    again = server.client.chat.completions.create(**options)
    assert [choice.token_ids for choice in again.choices] == [found[index] for index in range(6)]
    server.wait_until_empty()


def test_the_best_of_several_end_with_their_client(server: Server) -> None:
    """In the midst of all of them: none runs on, and no page of their prompt stays."""
    body = {"prompt": "once upon a time " * 20, "n": 2, "best_of": 6, "max_tokens": 3000, "temperature": 1, "ignore_eos": True}
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(f"{server.url}/v1/completions", json=body, timeout=1)
    server.wait(lambda status: not any(status["requests"].values()), "no requests left", timeout_s=5)
    server.wait_until_empty()


def hits(server: Server) -> tuple[float, float]:
    text = httpx2.get(f"{server.url}/metrics").text
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return float(samples["mmrt_prefix_cache_queries_total"]), float(samples["mmrt_prefix_cache_hits_total"])


def test_log_probabilities_on_cached_pages(server: Server, oracle: Oracle) -> None:
    content = QUESTION * 12
    inputs = oracle.inputs([{"role": "user", "content": content}])
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "max_tokens": 8, "extra_body": {"cache_salt": "cached logprobs"}}
    asked = {"model": server.checkpoint.name, "messages": [{"role": "user", "content": content}], "temperature": 0}
    for is_cached in (False, True):
        answer = server.client.chat.completions.create(**asked, **options)
        assert (answer.usage.prompt_tokens_details.cached_tokens > 32) == is_cached
        entries = answer.choices[0].logprobs.content
        ids = [oracle.tokenizer.convert_tokens_to_ids(oracle.tokenizer.tokenize(entry.token))[0] for entry in entries]
        best = oracle.logits(inputs, ids).log_softmax(-1).max(-1).values.tolist()
        assert [entry.logprob for entry in entries] == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("victim", ["decode", *also_slow("prefill", "controller")])
def test_choices_outlive_a_kill(server: Server, victim: str) -> None:
    """In the midst of a stream of them; each goes on as the seed says."""
    content = "Once upon a time there was a fox that lived behind the old mill. " * 6
    options: dict[str, Any] = {"n": 4, "seed": 11, "temperature": 1, "max_tokens": 60}
    extra = {"ignore_eos": True, "cache_salt": f"kill {victim}"}
    found: dict[int, list[int]] = {index: [] for index in range(4)}
    is_killed = False
    for chunk in server.stream(content, extra_body=extra, **options):
        for choice in chunk.choices:
            found[choice.index] += getattr(choice, "token_ids", None) or []
        if not is_killed and sum(map(len, found.values())) > 20:
            is_killed = True
            server.kill(victim)
    assert is_killed and {len(ids) for ids in found.values()} == {60}
    server.wait(lambda status: status["state"] == "ready", "everything runs again")
    again = server.stream(content, extra_body={**extra, "cache_salt": "another"}, **options)
    repeated: dict[int, list[int]] = {index: [] for index in range(4)}
    for chunk in again:
        for choice in chunk.choices:
            repeated[choice.index] += getattr(choice, "token_ids", None) or []
    assert repeated == found
    server.wait_until_empty()
