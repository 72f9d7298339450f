"""Answers that follow a grammar, through the openai client: schemas, other grammars, kills in mid-answer, and hostile schemas."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx2
import openai
import pytest
from pydantic import BaseModel, Field

from mmrt.models.config import load_model_config
from mmrt.models.grammar.matcher import Matchers
from mmrt.models.grammar.source import source_of_schema
from mmrt.models.grammar.text import grammar_text
from mmrt.models.grammar.vocabulary import load_vocabulary
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.models.grammar.random_schemas import check_answer, random_schema

QUESTION = "Describe the picture."
NUM_SCHEMAS = 500


class Shape(BaseModel):
    kind: Literal["circle", "square"]
    size: int = Field(ge=1, le=99)


class Scene(BaseModel):
    title: str = Field(pattern="^[a-z]{3,12}$")
    shapes: list[Shape] = Field(min_length=2, max_length=3)
    above: Shape | None


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_parse_fills_a_class(server: Server) -> None:
    done = server.client.chat.completions.parse(
        model=server.checkpoint.name, messages=[{"role": "user", "content": QUESTION}], response_format=Scene, max_tokens=200, seed=2
    )
    choice = done.choices[0]
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Scene)
    assert 2 <= len(choice.message.parsed.shapes) <= 3


@pytest.mark.parametrize(
    ("extra", "allowed"),
    [
        ({"guided_choice": ["yes", "no", "perhaps not"]}, {"yes", "no", "perhaps not"}),
        ({"guided_grammar": 'start: "ja" | "nein"'}, {"ja", "nein"}),
        ({"structured_outputs": {"regex": "(red|green){2}"}}, {a + b for a in ("red", "green") for b in ("red", "green")}),
        ({"guided_json": {"enum": [1, "a"]}}, {"1", '"a"'}),
    ],
)
def test_other_grammars(server: Server, extra: dict[str, Any], allowed: set[str]) -> None:
    text, ids = server.chat(QUESTION, extra_body=extra, temperature=1, max_tokens=40)
    assert text in allowed and ids


def test_an_answer_may_be_cut(server: Server) -> None:
    done = server.client.chat.completions.create(
        model=server.checkpoint.name,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=2,
        response_format={"type": "json_object"},
    )
    assert done.choices[0].finish_reason == "length" and (done.choices[0].message.content or "").startswith("{")


def test_decode_is_killed_in_mid_answer(server: Server) -> None:
    """With guidance, a penalty and a stop string that is part of the answer: it goes on where it was and stays valid."""
    schema = {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{20}$"}, "minItems": 12, "maxItems": 12}
    options = {"max_tokens": 900, "temperature": 0.7, "seed": 4, "frequency_penalty": 0.3, "stop": ["]", "0"]}
    extra = {"guidance_scale": 2.0, "negative_prompt": "numbers", "include_stop_str_in_output": True}
    text, num_kills = "", 0
    for chunk in server.stream(QUESTION, response_format=schema_format(schema), extra_body=extra, **options):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if len(text) > 60 * (num_kills + 1) and num_kills < 2:
                server.kill("decode")
                num_kills += 1
            if choice.finish_reason is not None:
                assert choice.finish_reason == "stop"
    assert num_kills == 2
    check_answer(schema, text)
    server.wait_until_empty()


def test_a_schema_that_cannot_be_compiled(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "strin"}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        server.chat(QUESTION, response_format=schema_format(schema))
    assert caught.value.param == "response_format.json_schema.schema"
    assert "cannot be compiled at /properties/a/items: Invalid type: strin" in caught.value.message


def test_hostile_schemas_disturb_nobody(server: Server) -> None:
    """They are refused, or their own answers end with an error; a stream beside them says what it says alone."""
    bomb = "(((((a{10}){10}){10}){10}){10}){10}"
    hostile: list[dict[str, Any]] = [
        {"type": "string", "pattern": f"^{bomb}$"},
        {"type": "object", "properties": {"x": {"type": "string", "pattern": f"^{bomb}$"}}, "required": ["x"]},
        {"enum": [f"value {i}" for i in range(2500)]},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(900)}},
        {"$ref": "#"},
        {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {"type": "integer"}}} for j in range(4)]} for i in range(12)]},
        {"type": "string", "pattern": "^" + "(" * 500 + ")" * 500 + "$"},
    ]
    alone = server.chat(QUESTION, max_tokens=60, extra_body={"ignore_eos": True})
    beside = server.stream(QUESTION, max_tokens=60, extra_body={"ignore_eos": True})
    told: list[object] = []

    def ask(schema: dict[str, Any]) -> None:
        try:
            told.append(server.chat(QUESTION, response_format=schema_format(schema), max_tokens=8))
        except (openai.BadRequestError, openai.APIError) as error:
            told.append(error)

    threads = [threading.Thread(target=ask, args=(schema,)) for schema in hostile]
    pid = server.pid("decode")
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert httpx2.get(f"{server.url}/health", timeout=5).status_code == 200
    for thread in threads:
        thread.join()
    text = "".join(choice.delta.content or "" for chunk in beside for choice in chunk.choices)
    assert text == alone[0] and server.pid("decode") == pid
    assert len(told) == len(hostile) and sum(isinstance(one, openai.BadRequestError) for one in told) >= 4


@pytest.mark.slow
def test_no_answer_is_invalid(server: Server) -> None:
    """Whole answers are checked by jsonschema. One that ``max_tokens`` has cut must be the beginning of an answer: a new matcher takes
    its ids."""
    tokenizer = Tokenizer.load(server.checkpoint)
    matchers = Matchers(load_vocabulary(server.checkpoint, load_model_config(server.checkpoint)))
    ends = [id for text in ('"', "}", "]", ",", '",', "}}", '"}') for id in tokenizer.encode(text)[:1]]
    options = {"temperature": 1, "logit_bias": {str(id): 3 for id in ends}}

    def ask(seed: int) -> Any:
        schema = random_schema(seed)
        extra = {"guidance_scale": 1.5} if seed % 5 == 0 else {"repetition_penalty": 1.1} if seed % 3 == 0 else {}
        try:
            done = server.client.chat.completions.create(
                model=server.checkpoint.name,
                messages=[{"role": "user", "content": f"Question {seed}"}],
                response_format=schema_format(schema),  # type: ignore[arg-type]
                seed=seed,
                max_tokens=8 if seed % 7 == 0 else 300,
                extra_body={**extra, "return_token_ids": True},
                **options,  # type: ignore[arg-type]
            )
        except openai.BadRequestError as error:
            assert "cannot be compiled" in error.message
            return schema, None
        return schema, done.choices[0]

    counts = {"stop": 0, "length": 0, "refused": 0}
    with ThreadPoolExecutor(8) as threads:
        for schema, choice in threads.map(ask, range(NUM_SCHEMAS)):
            counts["refused" if choice is None else choice.finish_reason] += 1
            if choice is not None and choice.finish_reason == "stop":
                check_answer(schema, choice.message.content)
            elif choice is not None:
                matcher = matchers.begin(grammar_text(source_of_schema(schema)))
                assert all(map(matcher.take, choice.token_ids)) and not matcher.is_complete
                assert choice.message.content == tokenizer.decode(choice.token_ids)
    assert counts["stop"] > 0.6 * NUM_SCHEMAS and counts["length"] > 0 and counts["refused"] < 0.1 * NUM_SCHEMAS, counts
    print(json.dumps(counts))
