"""The rule for fields, by the table: what is used is what readers take, and what clients send beside it is taken or refused by name."""

import json
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from mmrt.actors.gateway.apis.anthropic import messages as anthropic
from mmrt.actors.gateway.apis.decisions import read_decisions
from mmrt.actors.gateway.apis.ollama import requests as ollama
from mmrt.actors.gateway.apis.openai.embeddings import read_embeddings
from mmrt.actors.gateway.apis.openai.responses import Exchange
from mmrt.actors.gateway.apis.openai.stored import StoredResponses
from mmrt.actors.gateway.keeping.kept_answers import KeptAnswers
from mmrt.actors.gateway.openapi.operations import OPERATIONS
from mmrt.actors.gateway.openapi.request_schema import example_of
from mmrt.actors.gateway.reading.field_rules import Place
from mmrt.actors.gateway.reading.fields import Example
from mmrt.actors.gateway.reading.ignored import HEADER, Ignored, collecting
from mmrt.actors.gateway.reading.prompt import PromptBuilder
from mmrt.actors.gateway.reading.validation import ChatRequest, Limits, TextRequest, read_chat, read_text
from mmrt.models.media_config import VisionRules
from mmrt.runtime.errors import RequestError
from mmrt.shm.kept_records import KeptRecords
from mmrt.tests.actors.gateway.description import check_described
from mmrt.tests.actors.gateway.field_table_markdown import with_table

LIMITS = Limits(model_name="tiny", kinds=("image", "video", "audio"), max_context=2048, vision_rules=VisionRules(), hidden_size=8)
USER, TAIL = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def read(path: str, body: dict[str, Any]) -> tuple[ChatRequest, Ignored]:
    readers: dict[str, Callable[[bytes, Limits], ChatRequest]] = {
        "/v1/chat/completions": read_chat,
        "/v1/responses": Exchange(StoredResponses(KeptAnswers(KeptRecords.own()))).read,
        "/v1/messages": anthropic.read_message,
        "/api/chat": ollama.read_chat,
        "/api/generate": ollama.read_generate,
    }
    data = json.dumps(body).encode()
    with collecting() as found:
        asked = readers[path](data, LIMITS)
    check_described(path, data, LIMITS)
    return asked, found


chat = partial(read, "/v1/chat/completions")
responses = partial(read, "/v1/responses")
messages = partial(read, "/v1/messages")


def said(asked: ChatRequest) -> list[tuple[str, Any]]:
    return [(message.role, message.content) for message in asked.conversation.messages]


def refusal(path: str, body: dict[str, Any]) -> str:
    with pytest.raises(RequestError) as caught:
        read(path, body)
    assert caught.value.status == 400 and caught.value.param is not None
    return caught.value.message


def test_the_table_has_what_readers_take() -> None:
    taken: dict[str, tuple[Place, set[str]]] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, list):
            for entry in value:
                visit(entry, path)
        elif isinstance(value, Example):
            if value.taken.keys() - {"type"}:  # others are passed over
                assert isinstance(value.place, Place), f"{path} has no entry"
                taken.setdefault(value.place.name, (value.place, set()))[1].update(value.taken)
            for name, entry in value.items():
                visit(entry, f"{path}.{name}")

    for operation in OPERATIONS:
        for body in operation.body.examples(LIMITS.kinds) if operation.body else ():
            example = example_of(body)
            assert operation.body is not None
            operation.body.read(example, LIMITS)
            visit(example, operation.path)
    assert {name: {*place.used, *place.rules} for name, (place, _) in taken.items()} == {
        name: names for name, (_, names) in taken.items()
    }


THOUGHTS: list[dict[str, Any]] = [
    {"reasoning_content": ["thought"]},
    {"reasoning_details": [{"type": "reasoning.text", "text": "t"}]},
    {"thinking_blocks": [{"type": "thinking", "thinking": "t", "signature": "s"}]},
]


@pytest.mark.parametrize("more", THOUGHTS)
def test_thoughts_as_fields(more: dict[str, Any]) -> None:
    asked, found = chat({"messages": [USER, {"role": "assistant", "content": "x", **more}, TAIL]})
    assert said(asked) == [("user", "a"), ("assistant", "x"), ("user", "b")]
    assert list(found.reasons) == [f"messages[].{name}" for name in more]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_as_text_are_kept(name: str) -> None:
    asked, found = chat({"messages": [USER, {"role": "assistant", "content": "x", name: "thought"}, TAIL]})
    assert [message.thoughts for message in asked.conversation.messages] == ["", "thought", ""] and not found.reasons
    _, found = chat({"messages": [{**USER, name: "thought"}]})
    assert list(found.reasons) == [f"messages[].{name}"]


def test_thoughts_as_parts_blocks_and_items() -> None:
    thinking, redacted = {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "redacted_thinking", "data": "d"}
    text = {"type": "text", "text": "x"}
    for ask, thoughts, found_of in (
        (chat, "", ["messages[].content[].thinking", "messages[].content[].redacted_thinking"]),
        (partial(_with_max_tokens, messages), "t", ["messages[].content[].signature", "messages[].content[].redacted_thinking"]),
    ):
        asked, found = ask({"messages": [USER, {"role": "assistant", "content": [thinking, redacted, text]}, TAIL]})
        assert said(asked)[1] == ("assistant", ("x",)) and asked.conversation.messages[1].thoughts == thoughts
        assert list(found.reasons) == found_of
        asked, _ = ask({"messages": [USER, {"role": "assistant", "content": [thinking]}, TAIL]})
        assert said(asked)[1] == ("assistant", "") and asked.conversation.messages[1].thoughts == thoughts
    kept = {"content": [{"type": "reasoning_text", "text": text} for text in ("t", "u")]}
    summary = {"summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "e"}
    for item, thoughts, found_of in (
        ({"summary": []}, "", []),
        (summary, "", ["input[].summary", "input[].encrypted_content"]),
        (kept, "t\nu", []),
    ):
        asked, found = responses({"input": [USER, {"type": "reasoning", **item}, {"role": "assistant", "content": "x"}, TAIL]})
        assert said(asked) == [("user", "a"), ("assistant", "x"), ("user", "b")]
        assert asked.conversation.messages[1].thoughts == thoughts and [*found.reasons] == found_of


def test_thoughts_among_items_of_an_answer() -> None:
    """Before a call, between calls, and where the answer was cut behind them; at the end nothing follows."""
    thoughts = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in "tuvw"]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "r"}
    asked, _ = responses(
        {
            "input": [
                USER, thoughts[0], call, result, {"role": "assistant", "content": "x"}, thoughts[1], {**call, "call_id": "d"},
                {**result, "call_id": "d"}, thoughts[2], TAIL, thoughts[3],
            ]
        }
    )  # fmt: skip
    found = [(message.role, message.content, message.thoughts, len(message.calls)) for message in asked.conversation.messages]
    assert found == [
        ("user", "a", "", 0),
        ("assistant", "", "t", 1),
        ("tool", "r", "", 0),
        ("assistant", "x", "u", 1),
        ("tool", "r", "", 0),
        ("assistant", "", "v", 0),
        ("user", "b", "", 0),
    ]


def test_thoughts_that_a_template_leaves_out_are_named_as_the_client_has_them(prompts: PromptBuilder) -> None:
    block, item = {"type": "thinking", "thinking": "t"}, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}
    answer = {"role": "assistant", "content": "x"}
    for path, body, name in (
        ("/v1/chat/completions", {"messages": [USER, {**answer, "reasoning_content": "t"}, TAIL]}, "messages[].reasoning_content"),
        ("/v1/chat/completions", {"messages": [USER, {**answer, "reasoning": "t"}, TAIL]}, "messages[].reasoning"),
        ("/v1/messages", {"max_tokens": 4, "messages": [USER, {**answer, "content": [block]}, TAIL]}, "messages[].content[].thinking"),
        ("/api/chat", {"messages": [USER, {**answer, "thinking": "t"}, TAIL]}, "messages[].thinking"),
        ("/v1/responses", {"input": [USER, item, answer, TAIL]}, "input[].content"),
    ):
        asked, _ = read(path, body)
        with collecting() as found:
            prompts.build(asked)
        assert list(found.reasons) == [name]


def _with_max_tokens(ask: Callable[[dict[str, Any]], Any], body: dict[str, Any]) -> Any:
    return ask({"max_tokens": 4, **body})


def test_what_clients_add() -> None:
    asked, found = chat(
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}], "id": "m1"},
                USER,
                {"role": "assistant", "content": None, "refusal": "No.", "annotations": [{}], "audio": None, "id": "m2"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]},
                {"role": "assistant", "content": None, "tool_calls": CALLS},
                {"role": "tool", "tool_call_id": "c", "name": "f", "content": "r"},
            ],
            "prediction": {"type": "content", "content": "x"},
            "no_such_field": 1,
        }
    )
    assert [content for _, content in said(asked)] == [("s",), "a", "No.", ("Never.",), "", "r"]
    assert set(found.reasons) == {
        "messages[].content[].cache_control", "messages[].id", "messages[].annotations", "prediction", "no_such_field",
    }  # fmt: skip
    cached = {"type": "ephemeral"}
    asked, found = messages(
        {
            "max_tokens": 4,
            "system": [],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": cached}], "id": "m"}],
            "tools": [
                {"name": "f", "input_schema": {"type": "object"}, "defer_loading": True, "cache_control": cached},
                {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
            ],
        }
    )
    assert said(asked) == [("user", ("a",))] and asked.tools is not None and asked.tools.names == {"f"}
    assert {"tools[].defer_loading", "tools[].tool_search_tool_regex_20251119", "messages[].id"} < set(found.reasons)
    asked, found = responses({"input": "hi", "truncation": "auto", "tools": [{"type": "web_search"}, {"type": "tool_search"}]})
    assert set(found.reasons) == {"truncation", "tools[].web_search", "tools[].tool_search"}


@pytest.mark.parametrize("empty", [None, "", [], ...])
def test_empty_contents(empty: Any) -> None:
    def message(role: str, **more: Any) -> dict[str, Any]:
        return {"role": role, **more} if empty is ... else {"role": role, "content": empty, **more}

    turns = [message("system"), message("user"), message("assistant", tool_calls=CALLS), message("tool", tool_call_id="c")]
    asked, _ = chat({"messages": [*turns, message("assistant"), TAIL]})
    assert said(asked) == [(role, "") for role in ("system", "user", "assistant", "tool", "assistant")] + [("user", "b")]
    asked, _ = messages(
        {"max_tokens": 4, "messages": [USER, message("assistant"), TAIL], **({} if empty is ... else {"system": empty})}
    )
    assert said(asked) == [("user", "a"), ("assistant", ""), ("user", "b")]
    result = {"type": "function_call_output", "call_id": "c", **({} if empty is ... else {"output": empty})}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    asked, _ = responses({"input": [message("user"), call, result, message("assistant"), TAIL]})
    assert [content for _, content in said(asked)] == ["", "", "", "", "b"]
    if empty != []:
        asked, _ = read("/api/chat", {"messages": [message("user"), message("assistant"), message("tool", name="f"), TAIL]})
        assert said(asked) == [("user", ""), ("assistant", ""), ("tool", ""), ("user", "b")]


def test_numbers_as_clients_write_them() -> None:
    def generation(**fields: Any) -> Any:
        return chat({"messages": [USER], **fields})[0].generation

    one = generation(max_tokens=5.0, seed=1.0, top_k=40.0, n=1.0, top_logprobs=0.0)
    assert (one.max_new_tokens, one.sampling.seed, one.sampling.top_k) == (5, 1, 40) and type(one.max_new_tokens) is int
    assert generation(top_p=0, temperature=1.5).sampling.temperature == 0, "the likeliest token alone"
    assert generation(seed=-1).sampling.seed != generation(seed=-1).sampling.seed
    for name in ("max_tokens", "max_completion_tokens"):
        assert generation(**{name: -1}).max_new_tokens is None
    assert messages({"max_tokens": -1, "messages": [USER]})[0].generation.max_new_tokens is None
    assert responses({"max_output_tokens": -1.0, "input": "hi"})[0].generation.max_new_tokens is None
    text = read_text(b'{"prompt": "a", "max_tokens": -1}', LIMITS)
    assert isinstance(text, TextRequest) and text.generation.max_new_tokens is None and text.generation.clamp_max_tokens
    asked, found = chat({"messages": [USER], "stop": ["", "x"]})
    assert asked.generation.stop == ["x"] and list(found.reasons) == ["stop[]"]
    for fields in ({"max_tokens": 5.5}, {"max_tokens": 1e300}, {"max_tokens": True}, {"max_tokens": -2}, {"top_p": -0.1}):
        assert refusal("/v1/chat/completions", {"messages": [USER], **fields})


# The example of Ollama's documents with all options, but for the sampler that is not there.
OLLAMAS_OPTIONS: dict[str, Any] = {
    "num_keep": 5, "seed": 42, "num_predict": 100, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "typical_p": 1.0, "repeat_last_n": 64,
    "temperature": 0.8, "repeat_penalty": 1.1, "presence_penalty": 1.5, "frequency_penalty": 1.0, "penalize_newline": True,
    "stop": ["\n", "user:"], "numa": False, "num_ctx": 1024, "num_batch": 2, "num_gpu": 1, "main_gpu": 0, "use_mmap": True,
    "num_thread": 8, "tfs_z": 1, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
}  # fmt: skip


def test_ollamas_options() -> None:
    def ask(**options: Any) -> tuple[ChatRequest, Ignored]:
        return read("/api/generate", {"prompt": "hi", "think": False, "keep_alive": -1, "options": options})

    asked, found = ask(**OLLAMAS_OPTIONS)
    assert asked.generation.sampling.repetition_penalty == 1.1 and asked.generation.max_new_tokens == 100
    assert "options.repeat_last_n" in found.reasons and "options.typical_p" not in found.reasons
    assert not ask(repeat_last_n=0, repeat_penalty=1.5, presence_penalty=1)[0].generation.sampling.has_penalties
    assert ask(repeat_last_n=33, repeat_penalty=1.0) and ask(repeat_last_n=4096, repeat_penalty=1.5)
    for options, says in (
        ({"repeat_last_n": 33, "repeat_penalty": 1.5}, "penalties count all tokens: allowed are -1, 0 (no penalties) and 64"),
        ({"penalize_newline": False, "repeat_penalty": 1.5}, "only true is supported"),
        ({"mirostat": 2}, "only 0 is supported"),
        ({"typical_p": 0.7}, "only 1 is supported"),
    ):
        assert says in refusal("/api/generate", {"prompt": "hi", "options": options})
    turns = [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
    asked, _ = read("/api/chat", {"messages": [*turns, {"role": "tool", "content": "r", "name": "f"}]})
    assert asked.conversation.messages[-1].name == "f"


def test_what_would_change_the_answer_is_refused_with_the_next_step() -> None:
    for path, body, says in (
        ("/v1/chat/completions", {"messages": [USER], "web_search_options": {}}, "offer a function that does, in tools"),
        ("/v1/chat/completions", {"messages": [USER], "n_predict": 5}, "give max_tokens"),
        ("/v1/chat/completions", {"messages": [USER], "functions": [{}]}, "give tools"),
        ("/v1/chat/completions", {"messages": [{"role": "function", "content": "a"}]}, "a message of role tool"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "as a part of type text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "allowed are text"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "file_search"}]}, "this server runs no tools"),
        ("/v1/responses", {"input": [USER, {"type": "compaction", "encrypted_content": "e"}]}, "a summary as a message"),
        ("/v1/messages", {"max_tokens": 1, "messages": [USER], "tools": [{"type": "bash_20250124", "name": "b"}]}, "input_schema"),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "document"}]}]}, "a block of type text"),
        ("/api/generate", {"prompt": "a", "raw": True}, "POST /v1/completions"),
    ):
        assert says in refusal(path, body)


# For each field: a value that would change the answer, one that changes nothing, and the next step.
FIELDS: dict[str, tuple[Any, Any, str]] = {
    "do_sample": (False, True, "give temperature 0"),
    "random_seed": (1, None, "give seed"),
    "min_new_tokens": (4, 0, "give min_tokens"),
    "stop_strings": (["x"], [], "give stop"),
    "stop_regex": ("x+", "", "only texts and tokens end an answer"),
    "stop_token": (5, None, "give stop_token_ids"),
    "samplers": (["top_k"], [], "their order is fixed"),
    "lora_path": ("a", "", "this server has no adapters"),
    "adapter_id": ("a", None, "this server has no adapters"),
    "prompt_embeds": ("AAAA", None, "give text"),
    "return_tokens_as_token_ids": (True, False, "give return_token_ids"),
    "n_probs": (5, 0, "give logprobs"),
    "num_predict": (5, -1, "give max_"),
    "max_tokens_to_sample": (5, -1, "give max_"),
    "format": ("json", "", "give response_format"),
    "options": ({"seed": 1}, {}, "put them into the body itself"),
    "response_schema": ({"type": "object"}, {}, "give response_format"),
}
OWN_FIELDS: dict[str, dict[str, tuple[Any, Any, str]]] = {
    "/v1/responses": {
        "system": ("s", "", "give instructions"),
        "stop_sequences": (["x"], [], "give stop"),
        "functions": ([{}], [], "give tools"),
        "prompt_logprobs": (1, None, "chat completions have them"),
        "return_token_ids": (True, False, "chat completions have them"),
    },
    "/v1/messages": {
        "instructions": ("s", "", "give system"),
        "functions": ([{}], [], "give tools"),
        "function_call": ({"name": "f"}, "auto", "give tool_choice"),
        "input": ("a", None, "give messages"),
        "echo": (True, False, "POST /v1/completions has it"),
        "stop_strings": (["x"], [], "give stop_sequences"),
        "stream_options": ({"include_usage": True}, {}, "the last event has the usage"),
        "return_token_ids": (True, False, "chat completions have them"),
    },
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"max_tokens": 4, "messages": [USER]},
}


@pytest.mark.parametrize("path", BODIES)
def test_fields_of_other_servers_have_no_silent_effect(path: str) -> None:
    for name, (wrong, harmless, says) in {**FIELDS, **OWN_FIELDS.get(path, {})}.items():
        message = refusal(path, {**BODIES[path], name: wrong})
        assert message.startswith(f"{name}: ") and says in message
        assert read(path, {**BODIES[path], name: harmless})[1].reasons == {}


def test_fields_of_other_servers_in_messages_options_and_prefills() -> None:
    for name, wrong, harmless in (
        ("images", ["AAAA"], []), ("prefix", True, False), ("files", ["f"], []), ("attachments", [{}], []),
    ):  # fmt: skip
        assert refusal("/v1/chat/completions", {"messages": [{**USER, name: wrong}]}).startswith(f"messages[0].{name}: ")
        assert chat({"messages": [{**USER, name: harmless}]})[1].reasons == {}
    for name, wrong, harmless in (
        ("size", {"height": 8}, {}), ("do_resize", False, True), ("videos_kwargs", {"fps": 1}, {}), ("images_kwargs", {"a": 1}, {}),
    ):  # fmt: skip
        body = {"messages": [USER], "mm_processor_kwargs": {name: wrong}}
        assert refusal("/v1/chat/completions", body).startswith(f"mm_processor_kwargs.{name}: ")
        assert chat({"messages": [USER], "mm_processor_kwargs": {name: harmless}})[1].reasons == {}
    question = {"question": "a?", "type": "yes_no"}
    for name in ("system", "instructions", "chat_template"):
        for read_one, body in (
            (read_embeddings, {"input": "a"}),
            (read_decisions, {"messages": [USER], "questions": [question]}),
        ):
            with pytest.raises(RequestError, match=f"^{name}: is not supported"):
                read_one(json.dumps({**body, name: "x"}).encode(), LIMITS)


def test_thoughts_alone_are_no_turn() -> None:
    thoughts = {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}]}
    asked, _ = messages({"max_tokens": 4, "messages": [USER, thoughts]})
    assert said(asked) == [("user", "a")] and asked.template.opens_answer and not asked.template.continues
    assert "is empty" in refusal("/v1/messages", {"max_tokens": 4, "messages": [USER, {"role": "assistant", "content": ""}]})
    asked, _ = read("/api/chat", {"messages": [USER, {"role": "assistant", "content": "", "thinking": "t"}]})
    assert said(asked) == [("user", "a")] and asked.template.opens_answer
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}
    assert "input: has no message" in refusal("/v1/responses", {"input": [reasoning]})


def test_an_agent_may_have_300_tools() -> None:
    schema = {"type": "object", "properties": {f"argument_{n}": {"type": "string", "description": "d" * 40} for n in range(8)}}
    tools = [
        {"type": "function", "function": {"name": f"tool_{n}", "description": "d" * 200, "parameters": schema}} for n in range(300)
    ]
    asked, _ = chat({"messages": [USER], "tools": tools})
    assert asked.tools is not None and len(asked.tools.names) == 300
    many = list(
        chain.from_iterable(
            [{**tool, "function": {**tool["function"], "name": f"{tool['function']['name']}_{n}"}} for tool in tools] for n in range(4)
        )
    )
    assert "the limit is 1048576 (server.max_tool_schema_kib)" in refusal("/v1/chat/completions", {"messages": [USER], "tools": many})


def test_routes_for_other_clients(stage: Any) -> None:
    async def test(scene: Any) -> None:
        asked = {"Anthropic-Version": "2023-06-01"}
        for method, path, status, kind in (
            ("GET", "/v1/models/none", 404, "not_found_error"),
            ("GET", "/v1/files", 404, "not_found_error"),
            ("POST", "/v1/messages/batches", 404, "not_found_error"),
            ("DELETE", "/v1/models", 405, "invalid_request_error"),
        ):
            answer = await scene.http.request(method, path, headers=asked)
            assert answer.status_code == status and answer.json()["type"] == "error"
            assert answer.json()["error"]["type"] == kind and answer.headers["Request-Id"].startswith("req-")
        answer = await scene.http.get("/v1/models", headers={**asked, "Host": "elsewhere.example"})
        assert answer.status_code == 421 and answer.json()["type"] == "error"
        (model,) = (await scene.http.get("/v1/models")).json()["data"]
        assert {model[name] for name in ("max_model_len", "context_length", "context_window", "max_input_tokens")} == {2048}
        assert model["meta"]["n_ctx_train"] == 2048 and model["architecture"]["input_modalities"][0] == "text"
        answer = await scene.post(scene.chat(no_such_field=1))
        assert answer.status_code == 200 and answer.headers[HEADER] == "no_such_field"

    stage.run(test)


def test_strict_fields(stage: Any) -> None:
    async def test(scene: Any) -> None:
        answer = await scene.post(scene.chat(no_such_field=1))
        assert answer.status_code == 400 and answer.json()["error"]["message"] == "no_such_field: is not supported"
        schema = (await scene.http.get("/openapi.json")).json()["paths"]["/v1/chat/completions"]["post"]["requestBody"]
        assert schema["content"]["application/json"]["schema"]["additionalProperties"] == {"type": "null"}

    stage.configure("server", strict_fields=True)
    stage.run(test)


def test_the_documents_have_the_table() -> None:
    """``python -m mmrt.tests.actors.gateway.field_table_markdown docs/api.md`` writes it."""
    text = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    assert with_table(text) == text
