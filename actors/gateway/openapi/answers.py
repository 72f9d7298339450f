"""JSON schemas of the answers of all routes that are not streamed. Pure.

Tests and the fuzzing of the endpoint hold real answers to them.
"""

from typing import Any

from ..reading.fields import BOOLEAN, OBJECT, STRING, Schema

INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
SHARE: Schema = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
NUMBER: Schema = {"type": "number"}
OBJECT_OR_NULL: Schema = {"type": ["object", "null"]}
STRING_OR_NULL: Schema = {"type": ["string", "null"]}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def constant(value: Any) -> Schema:
    return {"const": value}


def object_of(_optional: dict[str, Schema] | None = None, /, **required: Schema) -> Schema:
    """Return the schema of an object with these fields. It may have others."""
    return {"type": "object", "properties": {**required, **(_optional or {})}, "required": list(required)}


STATUS = object_of(status=STRING)
READY = object_of({"degraded": array(STRING)}, status=STRING)
VERSION = object_of(version=STRING)
OLLAMA_VERSION = object_of(version=STRING, mmrt=STRING)

MODEL = object_of(
    id=STRING,
    object=constant("model"),
    created=INTEGER,
    owned_by=STRING,
    root=STRING,
    parent=constant(None),
    max_model_len=COUNT,
    context_length=COUNT,
    context_window=COUNT,
    max_context_length=COUNT,
    max_input_tokens=COUNT,
    meta=object_of(n_ctx=COUNT, n_ctx_train=COUNT, n_embd=COUNT, size=COUNT),
    architecture=object_of(modality=STRING, input_modalities=array(STRING), output_modalities=array(STRING)),
    top_provider=object_of(context_length=COUNT, max_completion_tokens=constant(None), is_moderated=constant(False)),
    supported_parameters=array(STRING),
)
MODELS = object_of(object=constant("list"), data=array(MODEL))
TOKENS = object_of(count=COUNT, max_model_len=COUNT, tokens=array(COUNT))
PROMPT = object_of(prompt=STRING)

_IDS = {"token_ids": array(COUNT)}
_PROMPT_LOGPROBS = {"prompt_logprobs": array(OBJECT_OR_NULL)}
_USAGE = object_of(
    {"completion_tokens_details": object_of(reasoning_tokens=COUNT)},
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=object_of({"media_share": SHARE}, cached_tokens=COUNT),
)
_CALL = object_of(id=STRING, type=constant("function"), function=object_of(name=STRING, arguments=STRING))
_OF_MESSAGE = {"reasoning_content": STRING, "tool_calls": array(_CALL)}
_MESSAGE = object_of(_OF_MESSAGE, role=constant("assistant"), content=STRING_OR_NULL, refusal={"type": "null"})
_ENDS: Schema = {"enum": ["stop", "length", "tool_calls"]}


def _completion(kind: str, choice: Schema, more: dict[str, Schema]) -> Schema:
    return object_of(
        more,
        id=STRING,
        object=constant(kind),
        created=INTEGER,
        model=STRING,
        system_fingerprint=STRING,
        choices=array(choice),
        usage=_USAGE,
    )


CHAT = _completion(
    "chat.completion",
    object_of(_IDS, index=COUNT, message=_MESSAGE, logprobs=OBJECT_OR_NULL, finish_reason=_ENDS),
    _PROMPT_LOGPROBS,
)
TEXT = _completion(
    "text_completion",
    object_of({**_IDS, **_PROMPT_LOGPROBS}, index=COUNT, text=STRING, logprobs=OBJECT_OR_NULL, finish_reason=_ENDS),
    {},
)

_NUMBERS: Schema = {"anyOf": [array(NUMBER), STRING]}
EMBEDDINGS = object_of(
    object=constant("list"),
    data=array(object_of(object=constant("embedding"), index=COUNT, embedding=_NUMBERS)),
    model=STRING,
    usage=_USAGE,
)
_VALUE: Schema = {"type": ["string", "boolean", "integer"]}
_OPTION = object_of(value=_VALUE, text=STRING, probability=NUMBER, logprob=NUMBER, num_tokens=COUNT)
_DECIDED = object_of(
    {"mean": NUMBER},
    name=STRING_OR_NULL,
    type={"enum": ["choice", "boolean", "integer"]},
    value=_VALUE,
    probability=NUMBER,
    options=array(_OPTION),
)
DECISIONS = object_of(id=STRING, object=constant("decisions"), created=INTEGER, model=STRING, answers=array(_DECIDED), usage=_USAGE)
_TOKENS = object_of(type=constant("tokens"), input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT)
TRANSCRIPTION = object_of(
    {"task": {"enum": ["transcribe", "translate"]}, "language": STRING, "duration": NUMBER},
    text=STRING,
    usage={"anyOf": [_TOKENS, object_of(type=constant("duration"), seconds=NUMBER)]},
)

_PART = object_of(type=constant("output_text"), text=STRING, annotations=array(OBJECT), logprobs=array(OBJECT))
_ITEM_STATUS: Schema = {"enum": ["completed", "incomplete"]}
_SAID = object_of(type=constant("message"), id=STRING, status=_ITEM_STATUS, role=constant("assistant"), content=array(_PART))
_THOUGHT = object_of(type=constant("reasoning_text"), text=STRING)
_THOUGHTS = object_of(type=constant("reasoning"), id=STRING, status=_ITEM_STATUS, summary=array(OBJECT), content=array(_THOUGHT))
_CALLED = object_of(type=constant("function_call"), id=STRING, status=_ITEM_STATUS, call_id=STRING, name=STRING, arguments=STRING)
_USAGE_OF_RESPONSE = object_of(
    input_tokens=COUNT,
    input_tokens_details=object_of({"media_share": SHARE}, cached_tokens=COUNT, cache_write_tokens=COUNT),
    output_tokens=COUNT,
    output_tokens_details=object_of(reasoning_tokens=COUNT),
    total_tokens=COUNT,
)
RESPONSE = object_of(
    id=STRING,
    object=constant("response"),
    created_at=INTEGER,
    model=STRING,
    status={"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
    error=OBJECT_OR_NULL,
    incomplete_details=OBJECT_OR_NULL,
    output=array({"anyOf": [_SAID, _THOUGHTS, _CALLED]}),
    usage={"anyOf": [_USAGE_OF_RESPONSE, {"type": "null"}]},
    truncation=constant("disabled"),
    instructions=STRING_OR_NULL,
    max_output_tokens={"type": ["integer", "null"]},
    previous_response_id=STRING_OR_NULL,
    text=OBJECT,
    tool_choice={"type": ["string", "object"]},
    metadata=OBJECT,
    tools=array(OBJECT),
    store=BOOLEAN,
    background=BOOLEAN,
    temperature=NUMBER,
    top_p=NUMBER,
    parallel_tool_calls=BOOLEAN,
)

_SENT: dict[str, Schema] = {"id": STRING, "status": STRING}
_GIVEN = object_of({"phase": STRING}, type=constant("message"), **_SENT, role=STRING, content=array(OBJECT))
_GIVEN_CALL = object_of({"namespace": STRING}, type=constant("function_call"), **_SENT, call_id=STRING, name=STRING, arguments=STRING)
_RESULT = object_of(type=constant("function_call_output"), **_SENT, call_id=STRING, output={"type": ["string", "array"]})
ITEMS = object_of(
    object=constant("list"),
    data=array({"anyOf": [_GIVEN, _GIVEN_CALL, _RESULT]}),
    first_id=STRING_OR_NULL,
    last_id=STRING_OR_NULL,
    has_more=BOOLEAN,
)
COUNTED = object_of(object=constant("response.input_tokens"), input_tokens=COUNT)
DELETED = object_of(id=STRING, object={"enum": ["response", "stream"]}, deleted=constant(True))

_THINKING = object_of(type=constant("thinking"), thinking=STRING, signature=STRING)
_USE = object_of(type=constant("tool_use"), id=STRING, name=STRING, input=OBJECT)
MESSAGE = object_of(
    id=STRING,
    type=constant("message"),
    role=constant("assistant"),
    model=STRING,
    content=array({"anyOf": [object_of(type=constant("text"), text=STRING), _THINKING, _USE]}),
    stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]},
    stop_sequence=STRING_OR_NULL,
    usage=object_of(
        {"media_share": SHARE},
        input_tokens=COUNT,
        cache_creation_input_tokens=COUNT,
        cache_read_input_tokens=COUNT,
        output_tokens=COUNT,
    ),
)
INPUT_TOKENS = object_of(input_tokens=COUNT)


def _ollama(_optional: dict[str, Schema] | None = None, /, **content: Schema) -> Schema:
    head = {"model": STRING, "created_at": STRING, **content, "done": constant(True)}
    loaded = object_of(**head, done_reason=constant("load"))
    answered = object_of(
        {"logprobs": array(OBJECT), "media_share": SHARE, **(_optional or {})},
        **head,
        done_reason={"enum": ["stop", "length"]},
        total_duration=COUNT,
        load_duration=COUNT,
        prompt_eval_count=COUNT,
        prompt_eval_duration=COUNT,
        eval_count=COUNT,
        eval_duration=COUNT,
    )
    return {"anyOf": [answered, loaded]}


_OLLAMA_CALL = object_of(id=STRING, function=object_of(index=COUNT, name=STRING, arguments=OBJECT))
OLLAMA_CHAT = _ollama(
    message=object_of({"thinking": STRING, "tool_calls": array(_OLLAMA_CALL)}, role=constant("assistant"), content=STRING),
)
OLLAMA_GENERATE = _ollama({"thinking": STRING}, response=STRING)
_DETAILS = object_of(format=STRING, family=STRING, families=array(STRING))
_ENTRY = {"name": STRING, "model": STRING, "modified_at": STRING, "size": COUNT, "digest": STRING, "details": _DETAILS}
OLLAMA_TAGS = object_of(models=array(object_of(**_ENTRY)))
OLLAMA_RUNNING = object_of(models=array(object_of(**_ENTRY, expires_at=STRING, context_length=COUNT)))
OLLAMA_EMBED = object_of(
    model=STRING, embeddings=array(array(NUMBER)), total_duration=COUNT, load_duration=COUNT, prompt_eval_count=COUNT
)
OLLAMA_EMBEDDING = object_of(embedding=array(NUMBER))
OLLAMA_MODEL = object_of(modified_at=STRING, details=_DETAILS, model_info=OBJECT, capabilities=array(STRING))

ERROR = object_of(error=object_of(message=STRING, type=STRING, param=STRING_OR_NULL, code={"type": ["integer", "string"]}))
ANTHROPIC_ERROR = object_of(type=constant("error"), error=object_of(type=STRING, message=STRING))
OLLAMA_ERROR = object_of(error=STRING)
