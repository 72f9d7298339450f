"""OpenAI's Responses API as its own client sees it: bodies, answers, events, conversations that go on, errors."""

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import openai
import pytest

from mmrt.actors.gateway.apis.openai.input_items import Page, item_of, with_ids
from mmrt.actors.gateway.apis.openai.responses import Exchange
from mmrt.actors.gateway.apis.openai.stored import StoredResponses
from mmrt.actors.gateway.keeping.kept_answers import KeptAnswers
from mmrt.actors.gateway.reading.content import Conversation, MediaPart, Message
from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.actors.gateway.reading.validation import ChatRequest, Limits
from mmrt.models.grammar.source import JSON_OBJECT, source_of_schema
from mmrt.runtime.errors import RequestError
from mmrt.shm.kept_records import KeptRecords
from mmrt.tests.actors.gateway.description import check_described

TEXT = "Hello, größer 😀 world"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(30)
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
IMAGE = {"type": "input_image", "image_url": URL, "detail": "auto"}


def read(limits: Limits, **fields: Any) -> ChatRequest:
    body = json.dumps({"model": "tiny", "input": "hi", **fields}).encode()
    asked = Exchange(StoredResponses(KeptAnswers(KeptRecords.own()))).read(body, limits)
    check_described("/v1/responses", body, limits)
    return asked


def turn(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"input": [{"role": role, "content": list(parts)}]}


def test_a_response(stage: Any) -> None:
    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.prepare(num_prompt_tokens=20, num_cached_tokens=16)
            play.text("Hello", "stop")

        scene.controller.script = script
        answer = await scene.client.responses.create(
            model="tiny", input="hi", instructions="Be brief.", max_output_tokens=32_000, temperature=0.5, metadata={"a": "b"}
        )
        assert (answer.output_text, answer.status, answer.incomplete_details, answer.error) == ("Hello", "completed", None, None)
        (message,) = answer.output
        assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
        assert (answer.instructions, answer.max_output_tokens, answer.temperature) == ("Be brief.", 32_000, 0.5)
        assert (answer.metadata, answer.model, answer.store, answer.tools) == ({"a": "b"}, "tiny", True, [])
        usage = answer.usage
        assert (usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens, usage.total_tokens) == (
            20,
            16,
            1,
            21,
        )
        spec = scene.controller.play.spec
        assert spec.generation.request_id == answer.id and answer.id.startswith("resp_")
        assert (spec.max_new_tokens, spec.clamp_max_new_tokens, spec.generation.sampling.temperature) == (32_000, True, 0.5)

    stage.run(test)


@pytest.mark.parametrize(("finish", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_a_stream(stage: Any, finish: Any, status: str) -> None:
    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.prepare()
            play.text("Hello, größer")
            await asyncio.sleep(0.02)
            play.text(" 😀 world", finish)

        scene.controller.script = script
        events = [event async for event in await scene.client.responses.create(model="tiny", input="hi", stream=True)]
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert [event.type.removeprefix("response.") for event in events] == [
            "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * len(deltas),
            "output_text.done", "content_part.done", "output_item.done", status,
        ]  # fmt: skip
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in deltas) == TEXT == events[-4].text == events[-3].part.text
        end = events[-1].response
        assert (end.output_text, end.status, end.usage.output_tokens) == (TEXT, status, 4)
        assert (end.incomplete_details and end.incomplete_details.reason) == ("max_output_tokens" if finish == "length" else None)
        assert events[0].response.id == end.id and events[0].response.status == "in_progress"
        assert {event.item_id for event in deltas} == {end.output[0].id}

    stage.run(test)


def test_the_clients_own_accumulator_takes_the_events(stage: Any) -> None:
    async def test(scene: Any) -> None:
        async with scene.client.responses.stream(model="tiny", input="hi") as stream:
            final = await stream.get_final_response()
        assert final.output_text == TEXT

    stage.run(test)


def test_a_failure_in_mid_stream(stage: Any) -> None:
    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.prepare()
            play.text("Hello")
            await asyncio.sleep(0.05)
            play.fail(500, "a stage died", error_type="internal_error")

        scene.controller.script = script
        kinds = []
        with pytest.raises(openai.APIError, match="a stage died"):
            async for event in await scene.client.responses.create(model="tiny", input="hi", stream=True):
                kinds.append(event.type)
        assert kinds[-1] == "response.failed"

    stage.run(test)


def test_a_failure_before_any_text(stage: Any) -> None:
    """After headers, which go out while the request waits: the client's helper for streams raises the error itself."""
    stage.configure("server", keep_alive_s=0.1)

    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            await asyncio.sleep(0.3)
            play.fail(500, "a stage died", error_type="internal_error")

        scene.controller.script = script
        kinds = []
        with pytest.raises(openai.APIError, match="a stage died"):
            async with scene.client.responses.stream(model="tiny", input="hi") as stream:
                async for event in stream:
                    kinds.append(event.type)
        assert kinds == ["response.created", "response.in_progress", "response.failed"]

    stage.run(test)


def test_a_conversation_goes_on(stage: Any) -> None:
    async def test(scene: Any) -> None:
        media = []

        async def script(play: Any) -> None:
            media.append(await play.grant())
            play.prepare()
            play.text("Red.", "stop")

        scene.controller.script = script
        create = scene.client.responses.create
        content: Any = [{"role": "user", "content": [IMAGE, {"type": "input_text", "text": "What?"}]}]
        first = await create(model="tiny", input=content, instructions="Be brief.")
        stream = await create(model="tiny", input="Why?", previous_response_id=first.id, stream=True)
        second = [event async for event in stream][-1].response
        assert second.previous_response_id == first.id
        await create(model="tiny", input="So?", previous_response_id=second.id, instructions="Be kind.")
        assert media == [[PNG]] * 3, "the picture stays in the conversation"
        tokenized = await scene.http.post(
            "/tokenize",
            json={
                "messages": [
                    {"role": "system", "content": "Be kind."},
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "What?"}]},
                    {"role": "assistant", "content": "Red."},
                    {"role": "user", "content": "Why?"},
                    {"role": "assistant", "content": "Red."},
                    {"role": "user", "content": "So?"},
                ]
            },
        )
        assert list(scene.controller.plays.values())[-1].spec.prompt_ids == tokenized.json()["tokens"]
        unstored = await create(model="tiny", input="hi", store=False)
        for unknown in (unstored.id, "resp_nothing"):
            with pytest.raises(openai.BadRequestError, match="is unknown: the latest 64 MiB of conversations are kept") as caught:
                await create(model="tiny", input="hi", previous_response_id=unknown)
            assert caught.value.param == "previous_response_id"

    stage.run(test)


def test_tokens_of_an_input_are_counted(stage: Any) -> None:
    """As many as the prompt of a response has, whatever of it is kept or follows; nothing is computed."""

    async def test(scene: Any) -> None:
        responses = scene.client.responses
        tool: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
        asked: Any = {"model": "tiny", "input": "hi", "instructions": "Be brief.", "tools": [tool]}
        count = await responses.input_tokens.count(**asked)
        assert (count.object, scene.controller.plays) == ("response.input_tokens", {})
        first = await responses.create(**asked)
        assert count.input_tokens == len(scene.controller.play.spec.prompt_ids)
        longer = await responses.input_tokens.count(**asked, previous_response_id=first.id)
        assert longer.input_tokens > count.input_tokens

    stage.run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_retrieved_and_deleted(stage: Any, stream: bool) -> None:
    """It is the same again, until it is deleted; then no conversation goes on with it either."""

    async def test(scene: Any) -> None:
        responses = scene.client.responses
        made = await responses.create(model="tiny", input="hi", metadata={"a": "b"}, stream=stream)
        response = [event async for event in made][-1].response if stream else made
        assert (await responses.retrieve(response.id)).model_dump() == response.model_dump()
        assert response.usage.output_tokens > 0 and response.output_text == TEXT
        with pytest.raises(openai.BadRequestError, match="stream: is not supported"):
            await responses.retrieve(response.id, stream=True)
        await responses.create(model="tiny", input="And?", previous_response_id=response.id)
        await responses.delete(response.id)
        unstored = await responses.create(model="tiny", input="hi", store=False)
        for ask in (responses.retrieve, responses.delete):
            for unknown in (response.id, unstored.id):
                with pytest.raises(openai.NotFoundError, match="is unknown: the latest 64 MiB") as caught:
                    await ask(unknown)
                assert caught.value.body["type"] == "not_found_error" and caught.value.param == "response_id"
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await responses.create(model="tiny", input="And?", previous_response_id=response.id)

    stage.run(test)


def test_kept_responses_outlive_the_gateway(stage: Any) -> None:
    """Another one goes on with the conversation, picture included, and has each response as it was, byte for byte."""
    stage.answers_fd = KeptRecords.create()
    content: Any = [{"role": "user", "content": [IMAGE, {"type": "input_text", "text": "What?"}]}]
    known: list[Any] = []

    async def before(scene: Any) -> None:
        made = await scene.client.responses.create(model="tiny", input=content)
        known.extend([made.id, (await scene.http.get(f"/v1/responses/{made.id}")).content])
        known.append((await scene.http.get(f"/v1/responses/{made.id}/input_items")).content)
        removed = await scene.client.responses.create(model="tiny", input="hi")
        await scene.client.responses.delete(removed.id)
        known.append(removed.id)

    async def after(scene: Any) -> None:
        id, body, items, removed = known
        assert (await scene.http.get(f"/v1/responses/{id}")).content == body
        assert (await scene.http.get(f"/v1/responses/{id}/input_items")).content == items
        assert (await scene.http.get(f"/v1/responses/{removed}")).status_code == 404
        again = await scene.client.responses.create(model="tiny", input="Why?", previous_response_id=id)
        assert again.output_text == TEXT
        assert [item.num_bytes for item in scene.controller.play.spec.items] == [len(PNG)]

    stage.run(before)
    stage.run(after)
    os.close(stage.answers_fd)


def test_what_a_body_becomes(limits: Limits) -> None:
    items = [
        {"role": "developer", "content": "S"},
        {"type": "message", "role": "user", "content": [IMAGE, {"type": "input_text", "text": "a"}]},
        {
            "type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]},
    ]  # fmt: skip
    asked = read(limits, input=items, instructions="I", seed=5, include=["reasoning.encrypted_content"])
    assert asked.conversation.messages == (
        Message("system", "I"),
        Message("system", "S"),
        Message("user", (MediaPart("image"), "a")),
        Message("assistant", ("b",)),
        Message("user", (MediaPart("audio"),)),
    )
    paths = [medium.path for medium in asked.conversation.media]
    assert paths == ["input[1].content[0].image_url", "input[3].content[0].input_audio.data"]
    assert asked.generation.sampling.seed == 5


def test_the_form_of_the_answer(limits: Limits) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    forms = ({"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "name": "n", "schema": schema, "strict": True})
    grammars = [read(limits, text={"format": form, "verbosity": "low"}).generation.grammar for form in forms]
    assert [grammar and grammar.source for grammar in grammars] == [None, JSON_OBJECT, source_of_schema(schema, is_strict=True)]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": None}, "input", "is required"),
        ({"input": ""}, "input", "is empty"),
        ({"input": []}, "input", "is empty, at least one message is needed"),
        ({"input": 5}, "input", "expected an array, got an integer"),
        ({"input": [{"role": "user", "content": "a"}] * 2049}, "input", "prompt is too long: 2049 tokens > 2047 maximum"),
        (
            {"input": [{"type": "web_search_call"}]},
            "input[0].type",
            'is "web_search_call", allowed are message, reasoning, function_call, function_call_output, item_reference',
        ),
        ({"input": [{"type": "reasoning"}]}, "input", "has no message"),
        ({"input": [{"type": "reasoning", "content": "a"}]}, "input[0].content", "expected an array of parts, got a string"),
        ({"input": [{"type": "reasoning", "content": [{"type": "text"}]}]}, "input[0].content[0].type", 'is "text"'),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", 'is "tool", allowed are system, developer, user, assistant'),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "expected a string or an array of parts, got an integer"),
        (turn({"type": "input_file"}), "input[0].content[0].type", 'is "input_file", allowed are input_text'),
        (turn({"type": "input_text"}), "input[0].content[0].text", "is required"),
        (turn({"type": "input_image", "file_id": "x"}), "input[0].content[0].image_url", "is required"),
        (turn({"type": "input_image", "image_url": "https://a/b"}), "input[0].content[0].image_url", "remote media is off"),
        (turn({**IMAGE, "detail": "huge"}), "input[0].content[0].detail", 'is "huge", allowed are auto, high, original, low'),
        (turn(IMAGE, role="system"), "input[0].content[0]", "only messages of the user and results of calls can hold media"),
        ({"max_output_tokens": 0}, "max_output_tokens", "is 0, allowed are 1 to 2147483647"),
        ({"max_tokens": 5}, "max_tokens", "is not supported"),
        ({"n": 2}, "n", "is 2, only 1 is supported"),
        ({"return_token_ids": True}, "return_token_ids", "only false is supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage", "is not supported"),
        ({"store": 1}, "store", "expected true or false, got 1"),
        ({"metadata": 1}, "metadata", "expected an object, got an integer"),
        ({"include": ["message.output_text.logprobs"]}, "include", "only an array of reasoning.encrypted_content,"),
        ({"include": 5}, "include", "is 5, only"),
        ({"background": True, "store": False}, "background", "is true, which needs store: the answer is fetched later"),
        ({"truncation": "auto"}, "truncation", 'is "auto", only "disabled" is supported'),
        ({"conversation": "x"}, "conversation", "is not supported"),
        ({"previous_response_id": "x" * 65}, "previous_response_id", "has 65 characters, the limit is 64"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", 'is "xml", allowed are text, json_object, json_schema'),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "is required"),
    ],
)
def test_what_is_refused(limits: Limits, fields: dict[str, Any], param: str, says: str) -> None:
    with collecting(is_strict=True), pytest.raises(RequestError) as caught:
        read(limits, **fields)
    assert (caught.value.param, caught.value.status) == (param, 400) and says in caught.value.message


def test_media_of_earlier_turns_count(limits: Limits) -> None:
    stored, most = StoredResponses(KeptAnswers(KeptRecords.own())), limits.media.max_items
    exchange = Exchange(stored, b"a")
    body = json.dumps({"input": [{"role": "user", "content": [IMAGE] * most}]}).encode()
    stored.put(b"a", "resp_1", exchange.read(body, limits).conversation)
    body = json.dumps({"previous_response_id": "resp_1", "input": [{"role": "user", "content": [IMAGE]}]}).encode()
    with pytest.raises(RequestError, match=rf"input\[0\].content\[0\]: more than {most} media in one request"):
        exchange.read(body, limits)


def test_a_tenant_goes_on_with_its_own_conversations(limits: Limits) -> None:
    stored = StoredResponses(KeptAnswers(KeptRecords.own()))
    stored.put(b"a", "resp_1", Conversation((Message("user", "x"),), ()))
    body = json.dumps({"previous_response_id": "resp_1", "input": "y"}).encode()
    assert len(Exchange(stored, b"a").read(body, limits).conversation.messages) == 2
    with pytest.raises(RequestError, match='"resp_1" is unknown'):
        Exchange(stored, b"b").read(body, limits)


def test_a_key_retrieves_and_deletes_its_own_responses(stage: Any, tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text(
        '[[key]]\nname = "a"\nkey = "sk-0123456789-key-a"\n[[key]]\nname = "b"\nkey = "sk-0123456789-key-b"\n'
    )
    file.chmod(0o600)
    stage.configure("server", api_keys_file=str(file))

    async def test(scene: Any) -> None:
        first, second = [{"Authorization": f"Bearer sk-0123456789-key-{name}"} for name in "ab"]
        made = (await scene.http.post("/v1/responses", json={"input": "hi"}, headers=first)).json()
        path = f"/v1/responses/{made['id']}"
        assert (await scene.http.get(path, headers=second)).status_code == 404
        assert (await scene.http.delete(path, headers=second)).status_code == 404
        assert (await scene.http.get(f"{path}/", headers=first)).json() == made
        assert (await scene.http.delete(path, headers=first)).json() == {"id": made["id"], "object": "response", "deleted": True}
        assert (await scene.http.get(path, headers=first)).status_code == 404

    stage.run(test)


def test_the_items_of_an_input_are_listed(stage: Any) -> None:
    """Those of earlier responses too, in the order and the pages asked for, each by an id of its own; media as they came."""

    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            if play.spec.items:
                await play.grant()
            play.prepare()
            play.text("Red.", "stop")

        scene.controller.script = script
        responses = scene.client.responses
        call = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "call_1", "output": [IMAGE]}
        sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
        given: Any = [
            {"role": "developer", "content": "S"},
            {"role": "user", "content": [IMAGE, {"type": "input_text", "text": "What?"}, sound]},
            {"role": "assistant", "id": "msg_mine", "content": "Hm."},
            call,
            {**result, "id": "msg_mine"},
        ]
        first = await responses.create(model="tiny", input=given, instructions="Be brief.")
        asked = [message async for message in responses.input_items.list(first.id, order="asc")]
        shown = [item.model_dump(exclude_none=True, warnings=False) for item in asked]  # the client knows no sounds in them
        text = {"type": "output_text", "text": "Hm.", "annotations": []}
        contents = [[{"type": "input_text", "text": "S"}], given[1]["content"], [text]]
        assert [item["content"] for item in shown[:3]] == contents and {item["status"] for item in shown} == {"completed"}
        assert [item["role"] for item in shown[:3]] == ["developer", "user", "assistant"]
        assert [{name: item[name] for name in one} for item, one in zip(shown[3:], (call, result), strict=True)] == [call, result]
        ids = [item.id for item in asked]
        assert len(set(ids)) == 5 and ids[2] == "msg_mine"

        second = await responses.create(model="tiny", input="Why?", previous_response_id=first.id)
        for limit in (1, 2, 7, 100):
            pages = [page async for page in (await responses.input_items.list(second.id, limit=limit)).iter_pages()]
            found = [item for page in pages for item in page.data]
            assert [item.id for item in found][:0:-1] == [*ids, first.output[0].id] and found[0].content[0].text == "Why?"
            assert [page.has_more for page in pages] == [*[True] * (len(pages) - 1), False] and len(pages) == -(-7 // limit)
        again: Any = [item.model_dump(exclude_none=True, warnings=False) for item in reversed(found)]
        third = await responses.create(model="tiny", input=[*again, {"role": "user", "content": "So?"}])
        assert len(list(scene.controller.plays.values())[-1].spec.items) == 3 and third.output_text == "Red."

    stage.run(test)


def test_a_video_of_frames_is_listed_as_frames(limits: Limits) -> None:
    frames = [base64.b64encode(b"\xff\xd8\xff" + name).decode() for name in (b"one", b"two")]
    for sent in (frames, frames[:1]):
        url = f"data:video/jpeg;base64,{','.join(sent)}"
        message = {"role": "user", "content": [{"type": "input_video", "input_video": {"data": url}, "fps": 4}]}
        first = read(limits, input=[message]).conversation.media
        (shown,) = json.loads(Page(1, True, None).of(with_ids([item_of(message)], "x"), first))["data"]
        assert shown["content"] == [{"type": "input_video", "input_video": {"data": url}, "fps": 4, "sample_fps": 4.0}]
        assert read(limits, input=[shown]).conversation.media[0].data == first[0].data


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("limit=0", 'limit: is "0", allowed are 1 to 100'),
        ("limit=101", 'limit: is "101", allowed are 1 to 100'),
        ("limit=%D9%A5", "limit: is"),
        ("limit=5&limit=6", "limit: is given 2 times"),
        ("order=up", 'order: is "up", allowed are asc, desc'),
        ("after=msg_nothing", 'after: is "msg_nothing", which is the id of no input item'),
        ("after=%FF%ED%A0%80", "after: is"),
        ("include[]=message.output_text.logprobs", 'include: has "message.output_text.logprobs", allowed are'),
        ("include=reasoning", "include: expected an array"),
        ("before=x", "before: is not supported: give order and after"),
    ],
)
def test_what_a_list_of_items_refuses(stage: Any, query: str, says: str) -> None:
    async def test(scene: Any) -> None:
        made = (await scene.http.post("/v1/responses", json={"input": "hi"})).json()
        answer = await scene.http.get(f"/v1/responses/{made['id']}/input_items?{query}")
        assert answer.status_code == 400 and says in answer.json()["error"]["message"]

    stage.run(test)


@pytest.mark.parametrize("id", [5, ["x"], {}, 1.5, True, "x" * 1000])
def test_an_id_that_is_none_is_made_anew(stage: Any, id: Any) -> None:
    async def test(scene: Any) -> None:
        answer = await scene.http.post("/v1/responses", json={"input": [{"role": "user", "content": "hi", "id": id}]})
        assert answer.status_code == 200
        page = (await scene.http.get(f"/v1/responses/{answer.json()['id']}/input_items")).json()
        assert [one["content"][0]["text"] for one in page["data"]] == ["hi"] and page["first_id"].startswith("msg_")

    stage.run(test)


def test_items_of_an_unknown_response(stage: Any) -> None:
    async def test(scene: Any) -> None:
        with pytest.raises(openai.NotFoundError, match="is unknown: the latest 64 MiB"):
            await scene.client.responses.input_items.list("resp_nothing")

    stage.run(test)
