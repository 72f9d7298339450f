"""Log-probabilities in OpenAI's and vLLM's shapes: names of tokens, offsets in the text, and pieces that join to the whole."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.actors.gateway.answers.logprobs import ChatLogprobs, LogprobFormat, TextLogprobs, TokenNames, joined, prompt_logprobs
from mmrt.actors.gateway.answers.token_table import Tokens
from mmrt.models.text.tokenizer import IncrementalDecoder, Tokenizer
from mmrt.shm.logprob_file import Logprobs
from mmrt.tests.settings import examples


def tokens(ids: Sequence[int], num: int = 2, *, of_prompt: bool = False) -> Tokens:
    size = len(ids) - of_prompt
    own = -np.arange(1, size + 1, dtype=np.float32)
    others = np.tile(np.arange(num, dtype=np.int32) + 40, (size, 1))
    return Tokens(np.array(ids, np.int32), Logprobs(own, np.full(size, 9, np.int32), others, np.full((size, num), -0.5, np.float32)))


def test_names_of_tokens(tokenizer: Tokenizer) -> None:
    names = TokenNames(tokenizer, "bytes:")
    assert [names.name(id) for id in tokenizer.encode("the fox")] == [tokenizer.decode([id]) for id in tokenizer.encode("the fox")]
    (first,) = [id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes[id] == b"\xf0"]
    assert (names.name(first), names.bytes_of(first)) == ("bytes:\\xf0", b"\xf0")
    assert names.name(tokenizer.control_ids["<|im_end|>"]) == "<|im_end|>"
    assert (names.name(10**6), names.bytes_of(10**6)) == ("token_id:1000000", b"")


def decoded(value: object) -> Any:
    """As a client reads it."""
    return json.loads(msgspec.json.encode(value))


def test_chat(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("fox 😀")
    content = decoded(ChatLogprobs(tokenizer).answer(tokens(ids)))["content"]
    assert [entry["logprob"] for entry in content] == [-1.0 - at for at in range(len(ids))]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "fox 😀"
    assert content[-1]["token"] == "\\x80", "the last byte of the picture is no text"
    assert [other["logprob"] for other in content[0]["top_logprobs"]] == [-0.5, -0.5]
    assert [other["token"] for other in content[0]["top_logprobs"]] == [tokenizer.decode([40]), tokenizer.decode([41])]
    assert ChatLogprobs(tokenizer).answer(None) == {"content": [], "refusal": None}


def test_what_is_impossible_is_a_number(tokenizer: Tokenizer) -> None:
    certain = tokens([40], 0)
    certain = certain._replace(logprobs=certain.logprobs._replace(own=np.full(1, -np.inf, np.float32)))
    assert decoded(ChatLogprobs(tokenizer).answer(certain))["content"][0]["logprob"] == -9999.0


def pieces(format: LogprobFormat, ids: list[int], cuts: list[int]) -> dict[str, list[object]]:
    whole = tokens(ids)
    found: dict[str, list[object]] = {}
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    for first, last in zip(borders[:-1], borders[1:], strict=True):
        piece = format.answer(Tokens(whole.ids[first:last], whole.logprobs.part(first, last, 2)))
        found = joined(found, piece) if found else piece
    return found


@settings(max_examples=examples(50), deadline=None)
@given(text=st.text(min_size=1, max_size=12), cuts=st.lists(st.integers(0, 99), max_size=4))
def test_offsets_are_places_in_the_text(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    """A token begins where the text ends that is whole before it."""
    ids = tokenizer.encode(text)
    found = pieces(TextLogprobs(tokenizer), ids, cuts)
    assert found == TextLogprobs(tokenizer).answer(tokens(ids))
    assert found["text_offset"] == [len(IncrementalDecoder(tokenizer).push(ids[:at])) for at in range(len(ids))]
    assert len(found["top_logprobs"]) == len(ids)


def test_an_echo_comes_before_the_answer(tokenizer: Tokenizer) -> None:
    prompt, answer = tokenizer.encode("<|im_start|>the"), tokenizer.encode("fox")
    format = TextLogprobs(tokenizer)
    found = decoded(joined(format.prompt(tokens(prompt, of_prompt=True)), format.answer(tokens(answer))))
    text = "<|im_start|>thefox"
    assert [text[at:].startswith(name) for at, name in zip(found["text_offset"], found["tokens"], strict=True)] == [True] * len(
        found["tokens"]
    )
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == [-1.0 - at for at in range(len(prompt) - 1)] + [-1.0 - at for at in range(len(answer))]
    assert found["top_logprobs"][1][found["tokens"][1]] == -1.0, "a token is among its alternatives"


def test_an_echo_that_ends_within_a_character(tokenizer: Tokenizer) -> None:
    """The answer does not finish it: both texts have a replacement there."""
    prompt, answer = tokenizer.encode("a😀")[:-1], tokenizer.encode("😀 fox")[1:]
    format = TextLogprobs(tokenizer)
    found = joined(format.prompt(tokens(prompt, of_prompt=True)), format.answer(tokens(answer)))
    text = tokenizer.decode(prompt) + IncrementalDecoder(tokenizer).push(answer)
    assert text[found["text_offset"][-1] :] == tokenizer.decode(answer[-1:])


def test_of_a_prompt_as_vllm(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox")
    found = decoded(prompt_logprobs(tokens(ids, of_prompt=True), tokenizer))
    assert found[0] is None and len(found) == len(ids)
    assert found[1][str(ids[1])] == {"logprob": -1.0, "rank": 9, "decoded_token": tokenizer.decode([ids[1]])}
    assert {found[1][other]["rank"] for other in ("40", "41")} == {1, 2}
