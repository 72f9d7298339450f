"""The description of the endpoint: valid, complete, and true of what the gateway takes and answers."""

import json
import re
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from mmrt import __version__
from mmrt.actors.gateway import guide
from mmrt.actors.gateway.openapi.document import make_document
from mmrt.actors.gateway.openapi.operations import OPERATIONS, JsonBody
from mmrt.actors.gateway.openapi.request_schema import schema_of
from mmrt.actors.gateway.reading.field_rules import Place, refused, settle_first
from mmrt.actors.gateway.reading.fields import Example, Fields
from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.actors.gateway.reading.json_body import Body, decode_body
from mmrt.actors.gateway.reading.validation import Limits
from mmrt.models.media_config import VisionRules
from mmrt.tests.actors.gateway.conftest import MODEL

LIMITS = Limits(model_name=MODEL, kinds=("image", "video", "audio"), max_context=2048, vision_rules=VisionRules())
TEXT_ONLY = msgspec.structs.replace(LIMITS, kinds=(), vision_rules=None)


@pytest.mark.parametrize(("limits", "needs_key"), [(LIMITS, False), (TEXT_ONLY, True)])
def test_it_is_openapi(limits: Limits, needs_key: bool) -> None:
    from openapi_spec_validator import validate

    document = make_document(limits, needs_key)
    validate(document)
    assert document["openapi"] == "3.1.0" and document["info"]["version"] == __version__
    assert document["security"] == ([{"bearer": []}, {"x_api_key": []}] if needs_key else [])
    assert document["paths"]["/health"]["get"]["security"] == []
    ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids)) == len(OPERATIONS)
    links = document["paths"]["/v1/responses"]["post"]["responses"]["200"]["links"]
    assert set(links) == {
        *(f"{verb}_v1_responses_by_id" for verb in ("get", "delete")),
        "get_v1_responses_by_id_input_items",
        "post_v1_responses_by_id_cancel",
    }
    limit = document["paths"]["/v1/responses/{id}/input_items"]["get"]["parameters"][1]
    assert (limit["in"], limit["name"], limit["schema"]["maximum"]) == ("query", "limit", 100)


def schema_of_requests(path: str, limits: Limits = LIMITS) -> Any:
    body = make_document(limits, False)["paths"][path]["post"]["requestBody"]
    return body["content"]["application/json"]["schema"]


def test_limits_are_those_that_are_checked() -> None:
    few = schema_of_requests("/v1/chat/completions", msgspec.structs.replace(LIMITS, max_choices=3, max_context=100))["properties"]
    assert few["n"] == {"type": ["integer", "null"], "minimum": 1, "maximum": 3}
    assert few["min_tokens"] == {"type": ["integer", "null"], "minimum": 0, "maximum": 100}
    most = {"type": "integer", "minimum": 1, "maximum": (1 << 31) - 1}
    assert few["max_tokens"] == {"anyOf": [most, {"const": -1}, {"type": "null"}]}
    assert few["top_p"] == {"type": ["number", "null"], "minimum": 0, "maximum": 1}
    assert few["model"] == {"enum": [MODEL, None]} and few["messages"]["minItems"] == 1 and "maxItems" not in few["tools"]
    assert few["web_search_options"] == {"type": "null"} and few["metadata"] == {} and "additionalProperties" not in few
    assert few["use_beam_search"] == {"enum": [False, None]}
    messages = schema_of_requests("/v1/messages")
    assert sorted(messages["required"]) == ["max_tokens", "messages"] and messages["properties"]["max_tokens"]["anyOf"][1] == {
        "const": -1
    }
    assert messages["properties"]["return_token_ids"] == {"enum": [False, None]}


def parts(limits: Limits) -> dict[str, Any]:
    entry = schema_of_requests("/v1/chat/completions", limits)["properties"]["messages"]["items"]["anyOf"][0]
    items = next(one["items"] for one in entry["properties"]["content"]["anyOf"] if one["type"] == "array")
    return {one["properties"]["type"]["const"]: one["properties"] for one in items["anyOf"]}


def test_media_are_those_that_the_model_takes() -> None:
    taken = parts(LIMITS)
    assert set(taken) == {
        "text", "input_text", "output_text", "refusal", "image_url", "video_url", "audio_url", "input_audio", "input_video",
        "image", "video", "audio", "thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text",
    }  # fmt: skip
    of_a_file, of_frames = ({"type": "number", "minimum": 0.01, "maximum": most} for most in (2.0, 1000))
    assert taken["video_url"]["fps"] == {"anyOf": [of_a_file, of_frames, {"type": "null"}]}
    media = ("input_audio", "input_video", "image", "video", "audio")
    assert not [name for name in parts(TEXT_ONLY) if name.endswith("_url") or name in media]


def read(body: Body, limits: Limits) -> None:
    fields = Fields(decode_body(body, limits.body))
    size = fields.take_int("size", 1, 9)
    kind = fields.take("kind")
    for part in fields.take_required("parts"):
        inner = Fields(part, "parts[]")
        if inner.take_choice("type", ("a", "b")) == "a":
            inner.take_required_str("text")
        inner.leave()
    settle_first(fields, Place("an object", (), {"stream": refused("wait")}), "stream")
    fields.take_bool("stream")
    assert size is None or kind


def test_a_reader_describes_itself() -> None:
    shown = {"kind": "k", "parts": [{"type": "a", "text": "t"}, {"type": "b"}]}
    null = {"type": "null"}
    assert "additionalProperties" not in schema_of(read, [shown], LIMITS)
    with collecting(is_strict=True):
        described = schema_of(read, [shown], LIMITS)
    assert described == {
        "type": "object",
        "properties": {
            "size": {"type": ["integer", "null"], "minimum": 1, "maximum": 9},
            "kind": {"type": ["string", "null"]},
            "parts": {
                "type": "array",
                "items": {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {"type": {"const": "a"}, "text": {"type": "string"}},
                            "required": ["type", "text"],
                            "additionalProperties": null,
                        },
                        {"type": "object", "properties": {"type": {"const": "b"}}, "required": ["type"], "additionalProperties": null},
                    ]
                },
            },
            "stream": null,
        },
        "required": ["parts"],
    }
    with pytest.raises(ValueError, match=r"\.kind: no example shows it"):
        schema_of(read, [{**shown, "kind": None}], LIMITS)
    with pytest.raises(ValueError, match=r"\.parts\[\]: no example is of type b"):
        schema_of(read, [{**shown, "parts": shown["parts"][:1]}], LIMITS)
    assert Example({"a": 1}) == {"a": 1}


def closed(schema: Any) -> Any:
    """The schema, with objects that have no more than the fields that are described."""
    if isinstance(schema, dict):
        inner = {name: closed(value) for name, value in schema.items()}
        return {**inner, "additionalProperties": False} if schema.get("type") == "object" and "properties" in schema else inner
    return [closed(value) for value in schema] if isinstance(schema, list) else schema


def test_routes_and_answers_are_as_described(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[tuple[str, str]] = []
    monkeypatch.setattr(guide, "hint", lambda path, routes: str(known.extend(routes)))

    async def test(scene: Any) -> None:
        document = (await scene.http.get("/openapi.json")).json()
        shapes = document["components"]["schemas"]
        assert (await scene.http.get("/nothing")).status_code == 404
        routes = {f"{method} {path}" for method, path in known if not re.fullmatch(r"/(page/.*)?", path)}
        described = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
        assert {re.sub(r":[^}]*", "", route) for route in routes} == described

        ids: dict[str, str] = {"{model}": MODEL}  # of what is asked for by its id, which an answer before has

        async def ask(method: str, path: str, operation: Any, body: Any, file: Any = None) -> int:
            how = {"json": body} if file is None else {"data": body, "files": {"file": file}}
            answer = await scene.http.request(method.upper(), re.sub(r"\{\w+\}", lambda name: ids[name[0]], path), **how)
            response = operation["responses"][str(answer.status_code)]
            kind = answer.headers["Content-Type"].partition(";")[0]
            described = response["content"][kind]
            if kind == "application/json":
                schema = described["schema"]
                schema = closed(shapes[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema)
                Draft202012Validator(schema).validate(answer.json())
                if "id" in answer.json():
                    ids["{id}"] = answer.json()["id"]
            return answer.status_code

        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                body = file = None
                if path.startswith("/v1/stream/"):
                    ids["{id}"] = "chat"
                    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
                    await scene.http.post("/v1/chat/completions", json=body, headers={"X-Conversation-Id": "chat"})
                elif "/cancel" in path:
                    for is_background, status in ((False, 400), (True, 200)):
                        made = await scene.http.post("/v1/responses", json={"input": "hi", "background": is_background})
                        ids["{id}"] = made.json()["id"]
                        assert await ask(method, path, operation, None) == status
                elif method == "post":
                    content = operation["requestBody"]["content"]
                    body = content.get("application/json", {}).get("example", {})
                    file = ("a.wav", b"RIFF") if "multipart/form-data" in content else None
                    assert await ask(method, path, operation, {**body, "model": "none"}, file) == 404
                    if file is None:
                        assert await ask(method, path, operation, {**body, "model": 5}, file) == 400
                    if any(kind != "application/json" for kind in operation["responses"]["200"]["content"]):
                        stream = True if file is None else "true"
                        assert await ask(method, path, operation, {**body, "stream": stream}, file) == 200
                assert await ask(method, path, operation, body, file) == 200

    stage.run(test)


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if isinstance(one.body, JsonBody)], ids=lambda one: one.path)
def test_examples_are_valid_by_the_schema(operation: Any) -> None:
    for limits in (LIMITS, TEXT_ONLY):
        bodies = operation.body.examples(limits.kinds)
        check = Draft202012Validator(schema_of(operation.body.read, bodies, limits))
        for body in bodies:
            check.validate(json.loads(json.dumps(body)))
