"""Features of requests, and the nodes that get them."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.cluster.request_features import (
    BLOCK_BYTES,
    DEFAULT_ANSWER_TOKENS,
    MAX_ANSWER_TOKENS,
    MAX_DEPTH,
    MAX_KEYS,
    MAX_MEDIA,
    MAX_VALUES,
    MEDIA_TOKENS,
    Features,
    read_features,
)
from mmrt.cluster.routing import MAX_KNOWN, SLACK_TOKENS, Routed, Router

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CLAUDE_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}


def features(credentials: str = "", **fields: Any) -> Features:
    return read_features(json.dumps(fields, ensure_ascii=False).encode(), credentials)


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def test_sizes() -> None:
    found = features(messages=[user({"type": "text", "text": "x" * 4000}, IMAGE, SOUND)], max_tokens=7)
    assert 1000 <= found.text_tokens < 1020 and found.answer_tokens == 7
    assert found.media_tokens == MEDIA_TOKENS["image"] + MEDIA_TOKENS["audio"] and len(found.media) == 2
    assert features(messages=[user(CLAUDE_IMAGE)]).media_tokens == MEDIA_TOKENS["image"]
    assert features(model="m", prompt="Hello", images=["AAAA"]).text_tokens == 1
    ollama = features(messages=[{"role": "user", "content": "look", "images": ["AAAA", "BBBB"]}])
    assert ollama.media_tokens == 2 * MEDIA_TOKENS["image"]


def test_a_later_turn_begins_like_the_turns_before_it() -> None:
    system, question, answer = {"role": "system", "content": "s" * 3000}, user({"type": "text", "text": "why?"}, IMAGE), "because"
    first = features(messages=[system, question])
    second = features(messages=[system, question, {"role": "assistant", "content": answer}, user({"type": "text", "text": "so?"})])
    assert second.keys[: len(first.keys)] == first.keys and len(second.keys) == len(first.keys) + 2
    assert [tokens for _, tokens in second.keys] == sorted(tokens for _, tokens in second.keys)
    assert first.keys[0][1] == BLOCK_BYTES // 4
    other = features(messages=[system, user({"type": "text", "text": "who?"}, IMAGE)])
    assert other.keys[:2] == first.keys[:2] and other.keys[-1] != first.keys[-1]


def test_tokens_of_a_beginning_are_those_of_its_bytes_in_any_script() -> None:
    found = features(messages=[user("x" * 3000), user("\u5b57" * 3000)])
    counts = [tokens for _, tokens in found.keys]
    assert counts[-1] == found.text_tokens and counts == sorted(counts) and counts[0] == BLOCK_BYTES // 4


def test_nothing_is_shared_between_callers() -> None:
    messages = [user({"type": "text", "text": "secret"})]
    keys = {features(caller, messages=messages, **salt).keys for caller in ("", "Bearer a") for salt in ({}, {"cache_salt": "b"})}
    assert len(keys) == 4


def test_what_is_no_request_has_no_features() -> None:
    for body in (b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'"text"'):
        assert read_features(body, "") == Features()
    deep: Any = "ends"
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert features(messages=[deep]).text_tokens == 1
    assert features(messages=[[deep]]).text_tokens == 0, "nobody looks deeper than that"
    assert len(features(prompt="x" * (2 * MAX_KEYS * BLOCK_BYTES)).keys) == MAX_KEYS
    assert features(max_tokens="7").answer_tokens == DEFAULT_ANSWER_TOKENS
    assert features(max_tokens=-7).answer_tokens == 0
    assert features(max_tokens=10**30).answer_tokens == MAX_ANSWER_TOKENS
    for depth in range(900, 1000):
        read_features(b'{"cache_salt": ' + b"[" * depth + b"]" * depth + b"}", "")


def test_many_media_take_time_by_their_number() -> None:
    began_s = time.process_time()
    found = read_features(b'{"messages": [%s""]}' % (b'"data:", ' * 10_000), "")
    assert time.process_time() - began_s < 0.5
    assert len(found.media) == MAX_MEDIA and found.media_tokens == 10_000 * MEDIA_TOKENS["image"]


def test_ids_of_tokens_count_as_tokens() -> None:
    found = features(prompt=[*range(1000)], max_tokens=7)
    assert found.text_tokens == 1000 and [tokens for _, tokens in found.keys] == [256, 512, 768, 1000]
    assert features(prompt=[[*range(1000)], [7, 8]]).text_tokens == 1002
    assert features(prompt=[*range(999), -1]).keys != found.keys and features(prompt=[*range(1, 1001)]).keys[0] != found.keys[0]
    assert features(prompt=[-1, 2**40, 0.5]).text_tokens == 0


@pytest.mark.parametrize("many", [{"messages": ["a"]}, {"messages": [{}]}, {"prompt": ["a"]}, {"messages": [{"images": [""]}]}])
def test_of_very_many_values_the_rest_counts_by_its_bytes(many: dict[str, list[Any]]) -> None:
    """However many there are, few are looked at."""
    name, values = next(iter(many.items()))
    fields = {name: 300_000 * values} if values != [{"images": [""]}] else {name: [{"images": 300_000 * [""]}]}
    body = json.dumps(fields).encode()
    began_s = time.process_time()
    found = read_features(body, "")
    assert time.process_time() - began_s < 1.0
    assert found.text_tokens > 0.9 * len(body) / 4 and (found.media or found.text_tokens <= len(body) / 4)
    assert found.media_tokens <= MAX_VALUES * MEDIA_TOKENS["image"]


def test_the_longest_known_beginning_counts_in_any_order_of_what_is_known() -> None:
    nodes = router("a", "b")
    for node, key, tokens in (("a", b"1", 100), ("b", b"2", 150), ("a", b"3", 200)):
        nodes._note([key], node)
        assert nodes._known_tokens(Features(keys=((key, tokens),))) == {node: tokens}
    keys = ((b"1", 100), (b"2", 150), (b"3", 200))
    assert nodes._known_tokens(Features(keys=keys)) == {"a": 200, "b": 150}, "one beginning holds the other"
    assert routed(nodes.route(Features(keys=keys))) == "a"
    nodes._note([b"m"], "a")
    assert nodes._known_tokens(Features(keys=((b"2", 150),), media=((b"m", 1000),))) == {"a": 1000}


def test_the_response_that_a_request_goes_on_with() -> None:
    assert features(input="so?", previous_response_id="resp_1").response == "resp_1"
    named = [{"type": "message", "role": "user", "content": "so?"}, {"type": "item_reference", "id": "msg_2_0"}, {"id": "fc_3_1"}]
    assert features(input=named).response == features(input=named[1:2]).response == "resp_2"
    assert features(input=named[2:]).response == "resp_3"
    for strange in ({"previous_response_id": 7}, {"input": [{"id": 7}, 7]}, {"messages": [{"id": "msg_2_0"}]}):
        assert features(**strange).response == ""


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=20)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner))


@given(
    st.dictionaries(
        st.sampled_from(["messages", "input", "prompt", "system", "tools", "max_tokens", "cache_salt", "previous_response_id"]), JSON
    )
)
def test_any_json_is_taken(fields: dict[str, Any]) -> None:
    features(**fields)


def router(*nodes: str) -> Router:
    made = Router()
    made.set_nodes({node: f"http://{node}" for node in nodes})
    return made


def routed(found: Routed | None) -> str:
    assert found is not None
    return found.node


def test_texts_go_where_the_fewest_tokens_wait_and_media_where_the_fewest_media_do() -> None:
    nodes = router("a", "b")
    picture = Features(text_tokens=10, media_tokens=1000, answer_tokens=10)
    long = nodes.route(Features(text_tokens=9000, answer_tokens=10))
    assert long is not None and long.node == "a"
    first = nodes.route(picture._replace(media=((b"p", 1000),)))
    assert first is not None and first.node == "b", "no media wait anywhere, and b has less to do"
    assert routed(nodes.route(picture._replace(media=((b"q", 1000),)))) == "a", "media wait at b, whatever else waits at a"
    assert routed(nodes.route(Features(text_tokens=10))) == "b"
    first.begun()
    long.begun()
    assert routed(nodes.route(Features(text_tokens=1))) == "b", "a has the second picture to do, b answers only"


def test_loads_come_back_to_zero() -> None:
    nodes = router("a")
    found = nodes.route(Features(text_tokens=5, media_tokens=6, answer_tokens=7))
    assert found is not None
    load = nodes._loads["a"]
    assert (load.tokens, load.media_tokens) == (18, 6)
    found.begun()
    found.begun()
    assert (load.tokens, load.media_tokens) == (7, 0)
    found.ended()
    found.ended()
    assert (load.tokens, load.media_tokens) == (0, 0)


def test_a_conversation_stays_unless_its_node_is_much_busier() -> None:
    nodes = router("a", "b")
    turn = Features(text_tokens=100, keys=((b"1", 100),))
    first = nodes.route(turn)
    assert first is not None and first.node == "a"
    assert routed(nodes.route(Features(text_tokens=3000, keys=((b"2", 3000),)))) == "b"
    assert routed(nodes.route(Features(text_tokens=200, keys=((b"1", 100), (b"3", 200))))) == "a"
    nodes.route(Features(text_tokens=int(SLACK_TOKENS) + 4000, keys=((b"1", 100),)))
    assert routed(nodes.route(turn)) == "b", "a has too much to do"


def test_a_request_goes_where_the_response_is_that_it_goes_on_with() -> None:
    nodes = router("a", "b")
    nodes.note_response("resp_1", "b")
    nodes.route(Features(text_tokens=1))
    nodes._loads["b"].tokens += 10 * SLACK_TOKENS
    goes_on = Features(text_tokens=1, response="resp_1")
    assert routed(nodes.route(goes_on)) == "b", "no other has it, however busy it is"
    assert routed(nodes.route(goes_on._replace(response="resp_2"))) == "a"
    assert routed(nodes.route(goes_on, tried=["b"])) == "a"


def test_nodes_come_and_go() -> None:
    nodes = router("a", "b")
    assert routed(nodes.route(Features(), tried=["a"])) == "b"
    assert nodes.route(Features(), tried=["a", "b"]) is None and router().route(Features()) is None
    busy = nodes.route(Features(text_tokens=9, keys=((b"1", 9),)))
    assert busy is not None and busy.node == "a"
    nodes.set_nodes({"b": "http://b", "c": "http://c"})
    busy.ended()
    assert routed(nodes.route(Features(text_tokens=9, keys=((b"1", 9),)))) in "bc", "what it knew is gone"


def test_what_is_known_is_bounded() -> None:
    nodes = router("a")
    for number in range(0, MAX_KNOWN + 1000, 500):
        nodes.route(Features(keys=tuple((b"%d" % key, key) for key in range(number, number + 500))))
    assert len(nodes._known) == MAX_KNOWN


def test_a_node_that_is_still_there_keeps_its_load() -> None:
    """The front asks every second which nodes are there."""
    nodes = router("a", "b")
    assert routed(nodes.route(Features(text_tokens=9))) == "a"
    nodes.set_nodes(nodes.urls)
    assert routed(nodes.route(Features(text_tokens=9))) == "b"


def test_what_was_seen_last_is_remembered() -> None:
    nodes = router("a")
    nodes.route(Features(keys=((b"old", 1),)))
    for number in range(0, MAX_KNOWN, 500):
        nodes.route(Features(keys=((b"old", 1), *((b"%d" % key, key) for key in range(number, number + 500)))))
    assert b"old" in nodes._known
