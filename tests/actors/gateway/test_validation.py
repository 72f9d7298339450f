"""Request bodies: what is taken, what is refused and how, and that no JSON whatsoever is an internal error."""

import base64
import io
import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrt.actors.gateway.reading.field_table.chat import CHAT
from mmrt.actors.gateway.reading.fields import show
from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.actors.gateway.reading.output_fields import Output
from mmrt.actors.gateway.reading.template_fields import TemplateUse
from mmrt.actors.gateway.reading.validation import ChatRequest, Limits, read_chat, read_text
from mmrt.media.frames import pack_frames, read_frames
from mmrt.models.architecture import SamplingDefaults
from mmrt.models.media_config import VisionRules
from mmrt.runtime.config.sections import MediaSection
from mmrt.runtime.errors import RequestError
from mmrt.schema.media import MediaOptions
from mmrt.tests.actors.gateway.description import check_described
from mmrt.tests.settings import examples

VISION_RULES = VisionRules()
LIMITS = Limits(
    model_name="tiny",
    kinds=("image", "video", "audio"),
    max_context=2048,
    media=MediaSection(max_items=2, max_item_mib=1),
    vision_rules=VISION_RULES,
)
PIXEL = base64.b64encode(b"\x89PNG not checked here \xfb\xff\xfe\xff").decode()


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def with_part(part: Any, role: str = "user") -> bytes:
    return body(messages=[{"role": role, "content": [part]}])


def read(data: bytes, limits: Limits = LIMITS) -> ChatRequest:
    asked = read_chat(data, limits)
    check_described("/v1/chat/completions", data, limits)
    return asked


def refusal(data: bytes, limits: Limits = LIMITS) -> RequestError:
    with collecting(is_strict=True), pytest.raises(RequestError) as caught:
        read_chat(data, limits)
    assert len(caught.value.message) < 700
    return caught.value


def test_the_defaults() -> None:
    request = read(body())
    sampling = request.generation.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert sampling.guidance_scale == 1.0 and sampling.seed >= 0
    assert (request.generation.max_new_tokens, request.generation.stop, request.generation.ignore_eos, request.generation.stream) == (
        None,
        [],
        False,
        False,
    )
    assert read(body()).generation.sampling.seed != sampling.seed


def test_penalties() -> None:
    sampling = read(body(presence_penalty=-0.5, frequency_penalty=2, repetition_penalty=1.3)).generation.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-0.5, 2, 1.3)
    assert sampling.has_penalties and not read(body(presence_penalty=0, repetition_penalty=1.0)).generation.sampling.has_penalties
    for name, value, allowed in (
        ("presence_penalty", 2.1, "-2 to 2"),
        ("frequency_penalty", -3, "-2 to 2"),
        ("repetition_penalty", 0, "0.01 to 10"),
        ("repetition_penalty", 11, "0.01 to 10"),
    ):
        assert refusal(body(**{name: value})).message == f"{name}: is {value}, allowed are {allowed}"


def test_priority() -> None:
    for value in (-1_000_000, -3, 0, 7, 1_000_000):
        assert read(body(priority=value)).generation.priority == value
        assert read_text(json.dumps({"prompt": "hi", "priority": value}).encode(), LIMITS).generation.priority == value
    assert read(body()).generation.priority == read(body(priority=None)).generation.priority == 0
    for wrong, problem in (
        (1.5, "expected an integer, got 1.5"),
        ("1", 'expected an integer, got "1"'),
        (True, "expected an integer, got true"),
        (1_000_001, "is 1000001, allowed are -1000000 to 1000000"),
        (-(1 << 70), "is -1180591620717411303424, allowed are -1000000 to 1000000"),
    ):
        error = refusal(body(priority=wrong))
        assert (error.message, error.param, error.status) == (f"priority: {problem}", "priority", 400)


def test_choices_and_log_probabilities() -> None:
    output = read(body(n=3, logprobs=True, top_logprobs=20, prompt_logprobs=0)).generation.output
    assert (output.n, output.best_of, output.logprobs, output.prompt_logprobs) == (3, 3, 20, 0)
    assert read(body(logprobs=True)).generation.output.logprobs == 0
    assert read(body(logprobs=False, top_logprobs=0)).generation.output == Output()
    for fields, problem in (
        ({"n": 0}, "n: is 0, allowed are 1 to 128"),
        ({"n": 129}, "n: is 129, allowed are 1 to 128"),
        ({"n": True}, "n: expected an integer, got true"),
        ({"logprobs": 1}, "logprobs: expected true or false, got 1"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: is 21, allowed are 0 to 20"),
        ({"top_logprobs": 2}, "top_logprobs: is 2, but logprobs is not true"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: is -1, allowed are 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: is not allowed when stream is true"),
        ({"echo": True}, "echo: is true, only false is supported: POST /v1/completions has it"),
    ):
        error = refusal(body(**fields))
        assert (error.message, error.param) == (problem, problem.partition(":")[0])
    few = msgspec.structs.replace(LIMITS, max_choices=4)
    assert refusal(body(n=5), few).message == "n: is 5, allowed are 1 to 4"


def test_a_whole_answer_has_room_for_so_many_log_probabilities() -> None:
    """2^20 of them: 128 choices with 21 a token have 390 tokens each."""
    many = {"n": 128, "logprobs": True, "top_logprobs": 20}
    generation = read(body(**many)).generation
    assert (generation.max_new_tokens, generation.clamp_max_tokens) == (390, True)
    assert read(body(**many, max_tokens=390)).generation.max_new_tokens == 390
    for fields in ({"n": 1}, {"top_logprobs": 0}, {"n": 24}, {"stream": True}):
        assert read(body(**{**many, **fields})).generation.max_new_tokens is None
    assert read(body(**many, stream=True, max_tokens=2048)).generation.max_new_tokens == 2048
    words = "the limit is 390 for 128 choices with 21 log-probabilities a token unless stream is true"
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        assert refusal(body(**many, **{name: 391})).message == f"{name}: is 391, {words}"
    large = msgspec.structs.replace(LIMITS, max_context=1 << 17)
    assert read(body(**{**many, "n": 1}), large).generation.max_new_tokens is None, "one choice may fill the context"
    assert read(body(**{**many, "n": 2}), large).generation.max_new_tokens == 1 << 16


def test_how_the_template_is_used() -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert read(body()).template == TemplateUse() == read(body(add_generation_prompt=True, continue_final_message=False)).template
    assert read(body(add_generation_prompt=False)).template == TemplateUse(opens_answer=False)
    options = {"add_vision_id": True, "reasoning_effort": "high", "n": 3, "nothing": None}
    use = read(body(messages=said, continue_final_message=True, chat_template_kwargs=options)).template
    assert use == TemplateUse(False, True, {"add_vision_id": True, "reasoning_effort": "high", "n": 3})
    long = {str(n): 1 for n in range(17)}
    for fields, problem in (
        ({"add_generation_prompt": 1}, "add_generation_prompt: expected true or false, got 1"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message: is true, and so is add_generation_prompt; give one of them",
        ),
        (
            {"continue_final_message": True, "messages": said[:1]},
            'messages[0].role: is "user", with continue_final_message the last message is of role assistant',
        ),
        (
            {"continue_final_message": True, "messages": [said[0], {"role": "assistant", "content": ""}]},
            "messages[1].content: is empty, with continue_final_message it is continued",
        ),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: expected an object, got an array"),
        ({"chat_template_kwargs": long}, "chat_template_kwargs: has 17 entries, the limit is 16"),
    ):
        error = refusal(body(**fields))
        assert (error.message, error.param) == (problem, problem.partition(":")[0])
    for value in ("<|im_end|>", "a\n", "a" * 65, 1e300, [1], {"a": 1}):
        error = refusal(body(chat_template_kwargs={"x": value}))
        assert error.param == "chat_template_kwargs.x" and "allowed are true, false, numbers" in error.message


def test_rules_about_tokens() -> None:
    generation = read(body(logit_bias={"7": -100, "9": 2.5}, min_tokens=3, bad_words=["ugly", " bad"], max_tokens=3)).generation
    sampling = generation.sampling
    assert (sampling.logit_bias, sampling.min_tokens, generation.bad_words) == ([(7, -100.0), (9, 2.5)], 3, ["ugly", " bad"])
    assert sampling.has_rules and not read(body(logit_bias={}, bad_words=[], min_tokens=0)).generation.sampling.has_rules
    for name, value, problem in (
        ("logit_bias", [1], "expected an object from token ids to numbers, got an array"),
        ("logit_bias", {"x": 1}, 'has the key "x", expected a token id'),
        ("logit_bias", {"-1": 1}, 'has the key "-1", expected a token id'),
        ("logit_bias", {"1": 1, "01": 2}, "has the token id 1 twice"),
        ("logit_bias.7", {"7": 100.5}, "is 100.5, allowed are -100 to 100"),
        ("logit_bias.7", {"7": "a"}, 'expected a number, got "a"'),
        ("logit_bias", {str(id): 1 for id in range(1025)}, "has 1025 entries, the limit is 1024"),
        ("min_tokens", -1, f"is -1, allowed are 0 to {LIMITS.max_context}"),
        ("min_tokens", 1.5, "expected an integer, got 1.5"),
        ("bad_words", "ugly", "expected an array of strings, got a string"),
        ("bad_words[0]", [3], "expected a string, got an integer"),
        ("bad_words[1]", ["a", "  "], 'is "  ", allowed are 1 to 256 characters, not only spaces'),
        ("bad_words", ["a"] * 129, "has 129 entries, the limit is 128"),
    ):
        error = refusal(body(**{name.partition("[")[0].partition(".")[0]: value}))
        assert (error.message, error.param) == (f"{name}: {problem}", name)
    assert refusal(body(min_tokens=5, max_tokens=4)).message == "min_tokens: is 5, but max_tokens is 4"


def test_the_checkpoint_says_what_counts_by_default() -> None:
    defaults = SamplingDefaults(temperature=0.0, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.05)
    limits = msgspec.structs.replace(LIMITS, sampling=defaults)
    sampling = read_chat(body(), limits).generation.sampling
    assert (
        sampling.repetition_penalty == 1.05
        and read_chat(body(repetition_penalty=1), limits).generation.sampling.repetition_penalty == 1
    )
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.8, 20, 0.1)
    assert read_chat(body(temperature=9e-6), limits).generation.sampling.temperature == 0.0, "nothing is left to chance"
    sampling = read_chat(body(temperature=1, top_p=1, top_k=-1, min_p=0), limits).generation.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)


def test_all_fields() -> None:
    request = read(
        body(
            max_tokens=5,
            max_completion_tokens=5,
            temperature=0,
            top_p=0.5,
            top_k=-1,
            min_p=0.1,
            seed=-2,
            stop=["a", "b"],
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            ignore_eos=True,
            user="somebody",
            guidance_scale=0,
            negative_prompt="bad",
            n=1,
        )
    )
    assert request.generation.max_new_tokens == 5
    assert (request.generation.sampling.temperature, request.generation.sampling.top_k, request.generation.sampling.seed) == (
        0.0,
        0,
        2**63 - 2,
    )
    assert request.generation.sampling.guidance_scale == 0.0 and request.generation.negative_prompt == "bad"
    assert request.generation.stop == ["a", "b"] and request.generation.ignore_eos and request.generation.stream
    assert request.generation.include_usage and request.generation.continuous_usage
    assert read(body(stop="one")).generation.stop == ["one"]
    assert read(body(max_completion_tokens=7)).generation.max_new_tokens == 7


@pytest.mark.parametrize("name", sorted(CHAT.rules))
def test_null_is_always_harmless(name: str) -> None:
    read(body(**{name: None}))


HARMLESS_VALUES = {
    "n": 1,
    "logprobs": False,
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "modalities": ["text"],
    "prompt_cache_retention": "24h",
    "verbosity": "low",
    "reasoning_effort": "none",
    "chat_template_kwargs": {"enable_thinking": False},
}


def test_harmless_values_are_taken() -> None:
    read(body(**HARMLESS_VALUES))


EFFECTS: list[tuple[str, Any]] = [
    ("best_of", 3),
    ("reasoning_effort", "utmost"),
    ("verbosity", 1),
    ("prediction", {}),
    ("no_such_field", 1),
    ("Temperature", 1),
]


@pytest.mark.parametrize(("name", "value"), EFFECTS)
def test_fields_with_an_effect_are_refused_by_name(name: str, value: Any) -> None:
    error = refusal(body(**{name: value}))
    assert (error.status, error.param) == (400, name)
    assert error.message.startswith(f"{name}: ") and "supported" in error.message


def test_tools_that_must_not_be_called_are_harmless() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    read(body(tools=tools, tool_choice="none"))
    read(body(functions=[{"name": "f"}], function_call="none"))
    read_text(json.dumps({"model": "tiny", "prompt": "hi", "tools": tools, "tool_choice": "none"}).encode(), LIMITS)
    assert refusal(body(functions=[{"name": "f"}])).param == "functions"


def test_what_is_supported_instead_is_said() -> None:
    assert refusal(body(best_of=2)).message == "best_of: is 2, only 1 is supported: give n"
    assert refusal(body(functions=[{}])).message == "functions: is an array with 1 entry, only an empty one is supported: give tools"
    assert refusal(body(function_call="f")).message.endswith('only "none" or "auto" is supported: give tool_choice')


def test_a_grammar_says_where_an_answer_ends() -> None:
    asked = read(body(response_format={"type": "json_object"})).generation.grammar
    assert asked is not None and asked.field == "response_format"
    error = refusal(body(ignore_eos=True, guided_regex="a"))
    assert error.message == "ignore_eos: cannot be combined with guided_regex, which says where the answer ends"


BAD_VALUES: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "0 to 2"),
    ("temperature", 2.1, "0 to 2"),
    ("temperature", "hot", "expected a number"),
    ("temperature", True, "expected a number"),
    ("temperature", 10**400, "is an integer of"),
    ("top_p", -0.1, "0 to 1"),
    ("top_p", 1.01, "0 to 1"),
    ("top_k", -2, "-1 to"),
    ("top_k", 1.5, "expected an integer"),
    ("top_k", 10**30, "-1 to"),
    ("min_p", 2, "0 to 1"),
    ("seed", 2**63, "allowed are"),
    ("seed", 1.5, "expected an integer"),
    ("max_tokens", 0, "1 to 2147483647"),
    ("max_tokens", 1 << 31, "1 to 2147483647"),
    ("max_tokens", -2, "1 to 2147483647"),
    ("max_tokens", True, "expected an integer"),
    ("max_completion_tokens", "5", "expected an integer"),
    ("stream", 1, "true or false"),
    ("stream", "true", "true or false"),
    ("ignore_eos", 0, "true or false"),
    ("guidance_scale", 20.5, "0 to 20"),
    ("guidance_scale", -1, "0 to 20"),
    ("negative_prompt", 5, "expected a string"),
    ("user", 5, "only a string of up to 512 characters"),
    ("user", "x" * 513, "only a string of up to 512 characters"),
    ("stop", 5, "expected a string or an array"),
    ("stop", "", "0 characters"),
    ("stop", "x" * 257, "257 characters"),
    ("stop", list("abcdefghijklmnopq"), "17 entries, the limit is 16"),
    ("messages", "hi", "expected an array"),
    ("messages", [], "is empty"),
    ("messages", None, "is required"),
    ("model", 5, "expected a string"),
    ("stream_options", {"include_usage": True}, "only when stream is true"),
]


@pytest.mark.parametrize(("name", "value", "text"), BAD_VALUES)
def test_wrong_types_and_ranges(name: str, value: Any, text: str) -> None:
    error = refusal(body(**{name: value}))
    assert (error.status, error.param) == (400, name)
    assert error.message.startswith(f"{name}: ") and text in error.message


NESTED_BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"stop": ["a", 5]}, "stop[1]", "expected a string"),
    ({"stop": ["a", ""]}, "stop[1]", "0 characters"),
    ({"stop_token_ids": 5}, "stop_token_ids", "expected an array of token ids, got"),
    ({"stop_token_ids": [None]}, "stop_token_ids", "expected token ids, got null"),
    ({"stop_token_ids": [1, 2.0]}, "stop_token_ids", "expected token ids, got 2.0"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", "has 129 entries, the limit is 128"),
    ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", "not supported"),
    ({"stream": True, "stream_options": 5}, "stream_options", "expected an object"),
    ({"messages": ["hi"]}, "messages[0]", "expected an object"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "is required"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role", "allowed are system"),
    ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role", "allowed are system"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "expected a string or an array"),
    ({"messages": [{"role": "user", "content": "hi", "name": 5}]}, "messages[0].name", "expected a string"),
    ({"messages": [{"role": "user", "content": "hi", "name": "B" * 65}]}, "messages[0].name", "65 characters, the limit is 64"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls", "only messages of role assistant"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "max_completion_tokens is 6"),
]


@pytest.mark.parametrize(("fields", "param", "text"), NESTED_BAD)
def test_errors_say_where(fields: dict[str, Any], param: str, text: str) -> None:
    error = refusal(body(**fields))
    assert (error.status, error.param) == (400, param)
    assert text in error.message


def test_the_model_may_be_left_out() -> None:
    assert read(json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()).conversation.messages


def test_an_unknown_model_is_404() -> None:
    error = refusal(body(model="gpt-9"))
    assert (error.status, error.param, error.type) == (404, "model", "not_found_error")
    assert "gpt-9" in error.message and "tiny" in error.message


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "the body is empty"),
        (b" ", "the body is empty"),
        (b"{", "not valid JSON"),
        (b"nonsense", "not valid JSON"),
        (b"[]", "must be a JSON object, got an array"),
        (b"null", "must be a JSON object, got null"),
        (b'{"model": "\xff"}', "not UTF-8"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"temperature": 1e9999}', "not valid JSON"),
        (b'{"temperature": -Infinity}', "not valid JSON"),
        (b'{"seed": ' + b"9" * 100_000 + b"}", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_bodies_that_are_no_json_object(data: bytes, text: str) -> None:
    error = refusal(data)
    assert error.status == 400 and text in error.message


def test_replies_may_be_sent_back_verbatim() -> None:
    reply = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    request = read(body(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "a"}, reply]))
    assert [message.role for message in request.conversation.messages] == ["system", "user", "assistant"]


def data_url(mime: str = "image/png", data: str = PIXEL) -> str:
    return f"data:{mime};base64,{data}"


PERCENTS = "".join(f"%{byte:02x}" for byte in base64.b64decode(PIXEL))
AS_SENT = (  # the forms of base64 that shells, MIME encoders and browsers write
    "\n".join(PIXEL[at : at + 8] for at in range(0, len(PIXEL), 8)),
    "\r\n".join(PIXEL[at : at + 7] for at in range(0, len(PIXEL), 7)) + "\r\n",
    f" {PIXEL}\t",
    PIXEL.rstrip("="),
    base64.urlsafe_b64encode(base64.b64decode(PIXEL)).decode(),
    base64.urlsafe_b64encode(base64.b64decode(PIXEL)).decode().rstrip("="),
)
GOOD_PARTS: list[tuple[Any, str, str]] = [
    ({"type": "image_url", "image_url": {"url": data_url(), "detail": "auto"}}, "image", "image/png"),
    ({"type": "image_url", "image_url": {"url": "DATA:Image/JPEG;charset=x;BASE64," + PIXEL}}, "image", "image/jpeg"),
    ({"type": "video_url", "video_url": {"url": data_url("video/mp4")}}, "video", "video/mp4"),
    ({"type": "video_url", "video_url": {"url": data_url("Image/GIF")}}, "video", "image/gif"),
    ({"type": "video_url", "video_url": {"url": data_url("image/webp")}}, "video", "image/webp"),
    ({"type": "video_url", "video_url": {"url": data_url("image/avif")}}, "video", "image/avif"),
    ({"type": "audio_url", "audio_url": {"url": data_url("audio/ogg")}}, "audio", "audio/ogg"),
    ({"type": "input_audio", "input_audio": {"data": PIXEL, "format": "aiff"}}, "audio", "audio/aiff"),
    ({"type": "input_audio", "input_audio": {"data": PIXEL, "format": "caf"}}, "audio", "audio/caf"),
    ({"type": "input_audio", "input_audio": {"data": PIXEL, "format": "ac3"}}, "audio", "audio/ac3"),
    ({"type": "input_audio", "input_audio": {"data": PIXEL, "format": "eac3"}}, "audio", "audio/eac3"),
    ({"type": "input_video", "input_video": {"data": PIXEL, "format": "avif"}}, "video", "video/avif"),
    ({"type": "input_audio", "input_audio": {"data": PIXEL, "format": "mp3"}}, "audio", "audio/mp3"),
    ({"type": "input_video", "input_video": {"data": PIXEL, "format": "mp4"}}, "video", "video/mp4"),
    ({"type": "input_video", "input_video": {"data": PIXEL, "format": "gif"}}, "video", "video/gif"),
    ({"type": "image_url", "image_url": data_url()}, "image", "image/png"),
    ({"type": "image", "image": data_url("image/jpeg")}, "image", "image/jpeg"),
    ({"type": "video", "video": data_url("video/mp4")}, "video", "video/mp4"),
    ({"type": "audio", "audio": data_url("audio/wav")}, "audio", "audio/wav"),
    ({"type": "image_url", "image_url": {"url": f"data:;base64,{PIXEL}"}}, "image", ""),
    ({"type": "image_url", "image_url": {"url": f"data:image;base64,{PIXEL}"}}, "image", "image"),
    ({"type": "image_url", "image_url": {"url": f"data:base64,{PERCENTS}"}}, "image", "base64"),
    ({"type": "image_url", "image_url": {"url": data_url("application/octet-stream")}}, "image", "application/octet-stream"),
    ({"type": "image_url", "image_url": {"url": data_url("video/mp4")}}, "image", "video/mp4"),
    ({"type": "image_url", "image_url": {"url": f" data: image/png ; BASE64 ,{PIXEL}"}}, "image", "image/png"),
    ({"type": "image_url", "image_url": {"url": f"data:image/png,{PERCENTS}"}}, "image", "image/png"),
    ({"type": "image_url", "image_url": {"url": data_url(data=PIXEL.replace("=", "%3D").replace("c", "%63"))}}, "image", "image/png"),
    ({"type": "input_audio", "input_audio": {"data": data_url("audio/wav"), "format": "mp3"}}, "audio", "audio/wav"),
    ({"type": "input_audio", "input_audio": {"data": f"data:;base64,{PIXEL}", "format": "WAV"}}, "audio", "audio/wav"),
    ({"type": "input_audio", "input_audio": {"data": PIXEL, "format": "audio/x-wav; rate=16000"}}, "audio", "audio/x-wav; rate=16000"),
    ({"type": "input_audio", "input_audio": {"data": PIXEL}}, "audio", ""),
    *[({"type": "image_url", "image_url": {"url": data_url(data=data)}}, "image", "image/png") for data in AS_SENT],
]


@pytest.mark.parametrize(("part", "kind", "mime"), GOOD_PARTS)
def test_media_parts(part: Any, kind: str, mime: str) -> None:
    (medium,) = read(with_part(part)).conversation.media
    assert (medium.kind, medium.mime, medium.data) == (kind, mime, base64.b64decode(PIXEL))


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


BAD_PARTS: list[tuple[Any, str, str, int]] = [
    ("hi", "", "expected an object", 400),
    ({"text": "x"}, ".type", "is required", 400),
    ({"type": "text"}, ".text", "is required", 400),
    ({"type": "text", "text": "x", "cache_control": {}}, ".cache_control", "not supported", 400),
    ({"type": "file", "file": {}}, ".type", "allowed are text, image_url", 400),
    ({"type": ["text"], "text": "x"}, ".type", "allowed are", 400),
    ({"type": "image_url"}, ".image_url", "is required", 400),
    ({"type": "image_url", "image_url": 5}, ".image_url", "expected an object", 400),
    ({"type": "image", "image": {"url": data_url()}}, ".image", "expected a data: URL, got an object", 400),
    ({"type": "image", "image": [data_url()]}, ".image", "expected a data: URL, got an array", 400),
    ({"type": "video", "video": []}, ".video", "is empty, at least one frame is needed", 400),
    ({"type": "video", "video": [data_url(), 5]}, ".video[1]", "expected a data: URL, got 5", 400),
    ({"type": "video", "video": [data_url(), data_url(data="")]}, ".video", "frame 2 is empty", 400),
    ({"type": "video", "video": [data_url()] * 3}, ".video", "media.max_items", 400),
    ({"type": "video_url", "video_url": data_url("video/jpeg", f"{PIXEL},ab#c")}, ".video_url", "(frame 2): is not valid base64", 400),
    ({"type": "video_url", "video_url": data_url("video/jpeg", f"{PIXEL},")}, ".video_url", "frame 2 is empty", 400),
    ({"type": "video_url", "video_url": data_url("video/jpeg", ",".join([PIXEL] * 3))}, ".video_url", "media.max_items", 400),
    (
        {"type": "image_url", "image_url": {"url": data_url(), "detail": "tiny"}},
        ".image_url.detail",
        "allowed are auto, high, original, low",
        400,
    ),
    ({"type": "image_url", "image_url": {"url": data_url(), "size": 5}}, ".image_url.size", "not supported", 400),
    (image("https://example.com/cat.png"), ".image_url.url", "remote media is off", 400),
    (image("HTTP://example.com/cat.png"), ".image_url.url", "remote media is off", 400),
    (image("file:///etc/passwd"), ".image_url.url", "file: URLs are not read", 400),
    (image("/etc/passwd"), ".image_url.url", "expected a data: URL", 400),
    (image("gopher://x"), ".image_url.url", "expected a data: URL", 400),
    (image(5), ".image_url.url", "expected a data: URL", 400),
    (image(data_url(data="")), ".image_url.url", "is empty", 400),
    (image("data:image/png;base64"), ".image_url.url", "expected a data: URL", 400),
    (image(data_url(data="abcde")), ".image_url.url", "not valid base64", 400),
    (image(data_url(data="ab#cdefg")), ".image_url.url", "not valid base64", 400),
    (image(data_url(data="===")), ".image_url.url", "is empty", 400),
    (image(data_url(data="ab==cdef")), ".image_url.url", "not valid base64", 400),
    (image(data_url(data="äöüß")), ".image_url.url", "not valid base64", 400),
    (image(data_url(data="A" * (2 << 20))), ".image_url.url", "media.max_item_mib", 413),
    ({"type": "input_audio", "input_audio": {"data": PIXEL, "format": 5}}, ".input_audio.format", "expected a string", 400),
    ({"type": "input_audio", "input_audio": {"data": "https://x.org/a.wav"}}, ".input_audio.data", "remote media is off", 400),
    ({"type": "input_audio", "input_audio": {"data": 5, "format": "wav"}}, ".input_audio.data", "expected base64", 400),
]


@pytest.mark.parametrize(("part", "suffix", "text", "status"), BAD_PARTS)
def test_bad_media_parts(part: Any, suffix: str, text: str, status: int) -> None:
    error = refusal(with_part(part))
    assert error.status == status
    assert error.param == "messages[0].content[0]" + suffix
    assert text in error.message


def test_long_base64_is_checked_in_slices() -> None:
    limits = Limits(model_name="tiny", kinds=("image",), max_context=2048, media=MediaSection(max_item_mib=4))
    data = bytes(range(256)) * 8192
    text = base64.b64encode(data).decode()
    (medium,) = read(with_part(image(data_url(data=text))), limits).conversation.media
    assert medium.data == data
    cut = text[: 1 << 20]
    for broken in (cut[:-2] + "==" + text, text[:-2] + "#=", text + "AAAA=", cut[:-4] + "A===" + text):
        assert refusal(with_part(image(data_url(data=broken))), limits).status == 400


def test_the_number_of_media_is_limited() -> None:
    part = image(data_url())
    assert len(read(body(messages=[{"role": "user", "content": [part, part]}])).conversation.media) == 2
    error = refusal(body(messages=[{"role": "user", "content": [part, part]}, {"role": "user", "content": [part]}]))
    assert "media.max_items" in error.message and error.param == "messages[1].content[0]"


def png_header(width: int, height: int) -> dict[str, Any]:
    data = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR" + width.to_bytes(4) + height.to_bytes(4)
    return image(data_url(data=base64.b64encode(data).decode()))


def test_pixels_and_work_are_those_of_the_header() -> None:
    media = read(body(messages=[{"role": "user", "content": [png_header(20, 30), png_header(10, 40)]}])).conversation.media
    assert [(medium.num_pixels, medium.work) for medium in media] == [(600, 600), (400, 400)]


def test_a_header_that_says_too_much_counts_for_what_a_picture_may_have() -> None:
    (medium,) = read(with_part(png_header(1 << 31, 1 << 31))).conversation.media
    assert medium.num_pixels == MediaSection().max_pixels


FRAME_PARTS: list[tuple[dict[str, Any], dict[str, Any], float]] = [
    ({}, {}, 2.0),
    ({"fps": 4.0}, {}, 4.0),
    ({"sample_fps": 1.5}, {}, 1.5),
    ({"sample_fps": 1, "raw_fps": 30}, {}, 1.0),
    ({"sample_fps": 1, "fps": 30}, {}, 1.0),
    ({}, {"mm_processor_kwargs": {"fps": 24}}, 24.0),
    ({}, {"mm_processor_kwargs": {"fps": [0.5], "do_sample_frames": False}}, 0.5),
    ({}, {"media_io_kwargs": {"video": {"fps": 3, "num_frames": -1}}}, 3.0),
    ({"fps": 5}, {"mm_processor_kwargs": {"fps": 24}, "media_io_kwargs": {"video": {"fps": 3}}}, 5.0),
]


@pytest.mark.parametrize("form", ["commas", "list"])
@pytest.mark.parametrize(("fields", "more", "rate"), FRAME_PARTS)
def test_a_video_may_come_as_frames(fields: dict[str, Any], more: dict[str, Any], rate: float, form: str) -> None:
    other = base64.b64encode(b"\xff\xd8\xff another").decode()
    part: dict[str, Any] = {"type": "video", "video": [data_url(), data_url("image/jpeg", other)]}
    if form == "commas":
        part = {"type": "video_url", "video_url": {"url": data_url("video/jpeg", f"{PIXEL}\n,{other}")}}
    (medium,) = read(body(messages=[{"role": "user", "content": [{**part, **fields}]}], **more), WITH_VIDEO).conversation.media
    reader = io.BytesIO(medium.data)
    frames = read_frames(reader)
    assert frames is not None and frames.rate == rate and medium.kind == "video"
    assert [frames.picture(reader, at) for at in range(2)] == [base64.b64decode(PIXEL), base64.b64decode(other)]
    assert medium.num_pixels > 0 and medium.options == MediaOptions()


def test_a_single_jpeg_is_a_frame_by_its_type_alone() -> None:
    jpeg = base64.b64encode(b"\xff\xd8\xff a picture").decode()
    for mime, data, is_list in (("video/jpeg", jpeg, True), ("video/mp4", jpeg, False), ("video/jpeg", PIXEL, False)):
        part = {"type": "video_url", "video_url": {"url": data_url(mime, data)}}
        (medium,) = read(with_part(part), WITH_VIDEO).conversation.media
        assert (read_frames(io.BytesIO(medium.data)) is not None) == is_list


@pytest.mark.parametrize("mime", ["video/mp4", "video/jpeg", ""])
def test_nobody_sends_our_own_form_of_frames(mime: str) -> None:
    """It would go around the limits on the number of frames, their rate and their pixels."""
    forged = base64.b64encode(pack_frames([b"\xff\xd8\xff a"] * 1000, 1e-300)).decode()
    error = refusal(with_part({"type": "video_url", "video_url": {"url": data_url(mime, forged)}}), WITH_VIDEO)
    assert error.status == 400 and "in this server's own form" in error.message and error.medium == "video"


def test_every_video_has_its_own_rate_in_a_list() -> None:
    part = {"type": "video", "video": [data_url()]}
    rates = {"mm_processor_kwargs": {"fps": [1.0, 3.0]}}
    media = read(body(messages=[{"role": "user", "content": [part, part]}], **rates), WITH_VIDEO).conversation.media
    assert [found.rate for medium in media if (found := read_frames(io.BytesIO(medium.data)))] == [1.0, 3.0]
    error = refusal(body(messages=[{"role": "user", "content": [part] * 3}], **rates), WITH_VIDEO)
    assert "mm_processor_kwargs.fps: has 2 entries, the request has more videos" in error.message
    one_file = {"type": "video_url", "video_url": {"url": data_url("video/mp4")}}
    error = refusal(
        body(messages=[{"role": "user", "content": [one_file]}], mm_processor_kwargs={"do_sample_frames": False}), WITH_VIDEO
    )
    assert error.param == "mm_processor_kwargs.do_sample_frames"


WITH_VIDEO = Limits(
    model_name="tiny", kinds=("image", "video"), max_context=2048, media=MediaSection(max_items=6), vision_rules=VISION_RULES
)


def test_media_that_the_model_does_not_take() -> None:
    part = {"type": "audio_url", "audio_url": {"url": data_url("audio/wav")}}
    error = refusal(with_part(part), Limits(model_name="tiny", kinds=("image", "video"), max_context=9))
    assert "does not take audio: it takes text, image, video" in error.message
    text_model = Limits(model_name="tiny", family="llama", kinds=(), max_context=9)
    assert "a llama model is served as text" in refusal(with_part(part), text_model).message


def test_media_stand_in_user_messages_only() -> None:
    assert (
        "only messages of the user and results of calls can hold media" in refusal(with_part(image(data_url()), role="system")).message
    )


def test_messages_do_not_repeat_what_was_sent() -> None:
    error = refusal(body(model="x" * 1_000_000))
    assert len(error.message) < 200
    assert len(refusal(body(**{"y" * 100_000: 1})).message) < 200
    assert show({"a": 1}) == "an object with 1 entry"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = [
    "messages",
    "temperature",
    "top_k",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "max_tokens",
    "n",
    "tools",
    "tool_choice",
    "user",
    "mm_processor_kwargs",
]
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["text", "image_url", "input_audio"]) | JSON,
        "text": JSON,
        "image_url": st.fixed_dictionaries({"url": st.sampled_from([data_url(), "data:", "data:,", "http:"]) | JSON}) | JSON,
        "input_audio": JSON,
        "fps": JSON,
        "max_pixels": JSON,
    },
)
CALLS = st.fixed_dictionaries(
    {"type": st.just("function"), "id": st.sampled_from(["c1", "c2"])},
    optional={"function": st.fixed_dictionaries({"name": JSON, "arguments": JSON.map(json.dumps) | JSON}) | JSON},
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "system", "assistant", "tool"]) | JSON,
            "content": st.lists(PARTS) | JSON,
            "tool_calls": st.lists(CALLS) | JSON,
            "tool_call_id": JSON,
        },
    )
    | JSON,
    max_size=3,
)


@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4), messages=st.none() | MESSAGES)
def test_any_json_is_taken_or_refused(fields: dict[str, Any], messages: Any) -> None:
    more = {} if messages is None else {"messages": messages}
    try:
        read(body(**fields, **more) if "messages" not in fields else body(**{**fields, **more}))
    except RequestError as error:
        assert error.status in (400, 404, 413)


@settings(max_examples=examples(300), deadline=None)
@given(data=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RequestError):
        read(data)
