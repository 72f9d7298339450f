"""Prompts: media placeholders only where media stand, whatever users write; companions for guidance; lengths."""

import copy
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.actors.gateway.reading.prompt import Prompt, PromptBuilder
from mmrt.actors.gateway.reading.validation import Limits, read_chat, read_text
from mmrt.models.architecture import ModelConfig
from mmrt.models.media_config import VisionRules
from mmrt.models.text.chat_template import ChatTemplate
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.runtime.errors import RequestError
from mmrt.tests.settings import examples

LIMITS = Limits(model_name="tiny", kinds=("image", "video", "audio"), max_context=2048, vision_rules=VisionRules())
TEXT = {"type": "text", "text": "Hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}


def build(prompts: PromptBuilder, messages: list[Any], **more: Any) -> Prompt:
    body = {"model": "tiny", "messages": messages, **more}
    return prompts.build(read_chat(json.dumps(body).encode(), LIMITS))


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    names = {id: content for content, id in tokenizer.control_ids.items()}
    return "".join(names.get(id) or tokenizer.decode([id]) for id in ids)


def test_names_go_to_the_template(tokenizer: Tokenizer, model: ModelConfig) -> None:
    prompts = PromptBuilder(
        tokenizer, ChatTemplate("{% for m in messages %}{{ m['name'] }}{{ m['content'] }}|{% endfor %}"), model, 2048
    )
    messages = [
        {"role": "user", "name": "Ann", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "name": "<|im_end|><|im", "content": "_start|>"},
    ]
    prompt = build(prompts, messages)
    assert tokenizer.decode(prompt.ids) == "Annhi|ho|<|im_end|><|im_start|>|"
    assert not set(tokenizer.control_ids.values()) & set(prompt.ids), "a name is text"
    nameless = PromptBuilder(tokenizer, ChatTemplate("{% for m in messages %}{{ m['content'] }}{% endfor %}"), model, 2048)
    messages = [{"role": "user", "content": "<|im_"}, {"role": "user", "name": "x", "content": "end|>"}]
    prompt = build(nameless, messages)
    assert tokenizer.decode(prompt.ids) == "<|im_end|>"
    assert not set(tokenizer.control_ids.values()) & set(prompt.ids), "what stands at both sides of a name that is left out, too"


@pytest.mark.parametrize("adds", [None, True, False])
def test_a_text_begins_as_the_tokenizer_says_unless_the_client_does_it(
    tokenizer: Tokenizer, model: ModelConfig, adds: bool | None
) -> None:
    """With the token that Llama 3's tokenizer puts before texts."""
    backend = copy.deepcopy(tokenizer._backend)
    begin = backend.token_to_id("<|im_end|>")
    backend.post_processor = TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", begin)])
    prompts = PromptBuilder(Tokenizer(backend), ChatTemplate("x"), model, 2048)
    body = {"model": "tiny", "prompt": "Hello", **({} if adds is None else {"add_special_tokens": adds})}
    prompt = prompts.build(read_text(json.dumps(body).encode(), LIMITS))
    assert prompt.ids == [*([] if adds is False else [begin]), *tokenizer.encode("Hello")]


@pytest.mark.parametrize("written", ["", "{{ bos_token }}"])
def test_a_conversation_begins_as_the_tokenizer_says(tokenizer: Tokenizer, model: ModelConfig, written: str) -> None:
    """LLaVA's templates leave the first token to transformers' processor, which asks the tokenizer; text models have no processor."""
    backend = copy.deepcopy(tokenizer._backend)
    begin = backend.token_to_id("<|im_end|>")
    backend.post_processor = TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", begin)])
    named = {"bos_token": "<|im_end|>"}
    template = ChatTemplate(written + "{{ messages[0].content }}", named)
    text_model = msgspec.structs.replace(model, vision_rules=None, audio_rules=None)
    for its, opens in ((model, True), (text_model, bool(written))):
        prompt = build(
            PromptBuilder(Tokenizer(backend, special_tokens=named), template, its, 2048), [{"role": "user", "content": "Hi"}]
        )
        assert prompt.ids == [*([begin] if opens else []), *tokenizer.encode("Hi")]


def test_a_conversation_with_media(prompts: PromptBuilder, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [VIDEO, {"type": "text", "text": "and"}, IMAGE]},
    ]
    prompt = build(prompts, messages)
    assert text_of(tokenizer, prompt.ids) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n<|video_pad|>and<|image_pad|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.companion_ids is None


@pytest.mark.parametrize("test", ["part.type == 'image'", "'image' in part or 'image_url' in part"])
def test_templates_know_media_by_type_or_field(tokenizer: Tokenizer, model: ModelConfig, test: str) -> None:
    source = "{% for part in messages[0].content %}{% if " + test + " %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    prompt = build(PromptBuilder(tokenizer, ChatTemplate(source), model, 2048), [{"role": "user", "content": [TEXT, IMAGE]}])
    assert prompt.ids == [*tokenizer.encode("Hi"), model.image_token_id]


def test_sound_tracks_are_opened_and_closed(prompts: PromptBuilder, tokenizer: Tokenizer) -> None:
    """Those that count, by an option of the part or one for all: nothing else is."""
    sounded = {**VIDEO, "use_audio_in_video": True}
    silent = {**VIDEO, "use_audio_in_video": False}

    def between(content: list[Any], **more: Any) -> str:
        prompt = build(prompts, [{"role": "user", "content": content}], guidance_scale=2.0, **more)
        assert prompt.companion_ids is not None and not {5, 6} & set(prompt.companion_ids)
        return text_of(tokenizer, prompt.ids).split("user\n")[1].split("<|im_end|>")[0]

    film = "<|audio_bos|><|video_pad|><|audio_eos|>"
    assert between([IMAGE, sounded, VIDEO, sounded]) == f"<|image_pad|>{film}<|video_pad|>{film}"
    everywhere = {"mm_processor_kwargs": {"use_audio_in_video": True}}
    assert between([VIDEO, IMAGE, silent, {"type": "text", "text": "<|audio_bos|>"}], **everywhere) == (
        f"{film}<|image_pad|><|video_pad|><|audio_bos|>"
    )


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("negative", [None, "a <|im_end|> dog"])
@pytest.mark.parametrize("scale", [0, 1.5, 3.0])
def test_the_companion(prompts: PromptBuilder, tokenizer: Tokenizer, as_list: bool, negative: str | None, scale: float) -> None:
    content: Any = [{"type": "text", "text": "a cat"}, IMAGE] if as_list else "a cat"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": content}]
    prompt = build(prompts, messages, guidance_scale=scale, negative_prompt=negative)
    assert prompt.companion_ids is not None
    assert prompt.companion_ids.count(tokenizer.control_ids["<|im_end|>"]) == 1
    text = tokenizer.decode(prompt.companion_ids)
    assert text == f"user\n{negative or ''}\nassistant\n"
    assert build(prompts, messages).ids == prompt.ids


def test_no_companion_at_scale_one(prompts: PromptBuilder) -> None:
    assert build(prompts, [{"role": "user", "content": "x"}], guidance_scale=1.0, negative_prompt="y").companion_ids is None


PIECES = ["<|image_pad|>", "<|im_", "end|>", "<|", "image_pad|>", "<|video_pad", "|>", "x", "é"]


@settings(max_examples=examples(100), deadline=None)
@given(parts=st.lists(st.lists(st.sampled_from(PIECES), max_size=4).map("".join), min_size=1, max_size=4))
def test_written_placeholders_stay_text(prompts: PromptBuilder, tokenizer: Tokenizer, parts: list[str]) -> None:
    content = [{"type": "text", "text": part} for part in parts]
    prompt = build(prompts, [{"role": "user", "content": [*content, IMAGE]}])
    assert [id for id in prompt.ids if id in (2, 3, 4)] == [2]
    assert prompt.ids.count(0) == 2 and prompt.ids.count(1) == 1
    assert tokenizer.decode(prompt.ids) == "user\n" + "".join(parts) + "\nassistant\n"


def test_a_prompt_that_is_too_long(prompts: PromptBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"prompt is too long: \d+ tokens > 2047 maximum") as caught:
        build(prompts, [{"role": "user", "content": "a 7 " * 1500}])
    assert (caught.value.status, caught.value.param) == (400, "messages")
    monkeypatch.setattr(Tokenizer, "encode_pieces", None)  # hopeless ones are not even tokenized
    with pytest.raises(RequestError, match="at least"):
        build(prompts, [{"role": "user", "content": "x" * 500_000}])
    with pytest.raises(RequestError, match="messages: prompt is too long: 3000 tokens > 2047 maximum"):
        build(prompts, [{"role": "user", "content": ""}] * 3000)


def test_a_negative_prompt_that_is_too_long_is_named(prompts: PromptBuilder) -> None:
    with pytest.raises(RequestError, match=r"negative_prompt: prompt is too long: \d+ tokens") as caught:
        build(prompts, [{"role": "user", "content": "x"}], guidance_scale=2.0, negative_prompt="a 7 " * 1500)
    assert caught.value.param == "negative_prompt"


def test_a_template_that_refuses(tokenizer: Tokenizer, model: ModelConfig) -> None:
    prompts = PromptBuilder(tokenizer, ChatTemplate("{{ raise_exception('no system role') }}"), model, 2048)
    with pytest.raises(RequestError, match="no system role") as caught:
        build(prompts, [{"role": "user", "content": "x"}])
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "printed",
    [
        "{{ m['content'] }}",
        "{{ 'said: ' + m['content'] }}",
        "{{ m.content | trim }}",
        "{{ m.content | tojson }}",
        "{% if m.content is string %}{{ m.content }}{% endif %}",
    ],
)
def test_a_template_for_text_alone_is_given_text(tokenizer: Tokenizer, model: ModelConfig, printed: str) -> None:
    """Many clients always send lists; such a template would print them as Python does, or fail."""
    prompts = PromptBuilder(tokenizer, ChatTemplate("{% for m in messages %}" + printed + "{% endfor %}"), model, 2048)
    texts = [{"type": "text", "text": "what's up"}, {"type": "text", "text": "there?"}]
    as_list, as_text = (build(prompts, [{"role": "user", "content": content}]) for content in (texts, "what's up\nthere?"))
    assert as_list.ids == as_text.ids
    with pytest.raises(RequestError, match="messages: the model's chat template"):
        build(prompts, [{"role": "user", "content": [*texts, IMAGE]}])


@pytest.mark.parametrize("source", ["nothing", "<|image_pad|><|video_pad|>", "<|video_pad|>", "<|image_pad|><|image_pad|>"])
def test_a_template_that_misplaces_media(tokenizer: Tokenizer, model: ModelConfig, source: str) -> None:
    prompts = PromptBuilder(tokenizer, ChatTemplate(source), model, 2048)
    with pytest.raises(RequestError, match="placeholders of 1 media"):
        build(prompts, [{"role": "user", "content": [IMAGE]}])


def test_words_that_must_not_appear_have_the_ids_of_both_places(prompts: PromptBuilder, tokenizer: Tokenizer) -> None:
    words = ["fox", "  the quick"]
    found = build(prompts, [{"role": "user", "content": "hi"}], bad_words=words).sampling.bad_words
    texts = [tokenizer.decode(ids) for ids in found]
    assert texts[0] == "fox" and "the quick" in texts and {text.strip() for text in texts} == {"fox", "the quick"}
    assert all(ids == tokenizer.encode(text) for ids, text in zip(found, texts, strict=True))
    with pytest.raises(RequestError, match=r"bad_words: have \d+ tokens, the limit is 2048"):
        build(prompts, [{"role": "user", "content": "hi"}], bad_words=["ÄÖ" * 64] * 60)


def test_a_bias_of_no_token_is_refused(prompts: PromptBuilder, model: ModelConfig) -> None:
    size = model.language.vocab_size
    with pytest.raises(RequestError, match=f"logit_bias: has the token id {size}, allowed are 0 to {size - 1}"):
        build(prompts, [{"role": "user", "content": "hi"}], logit_bias={str(size): 1})


ANSWERED = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": " quick  "}]
QWEN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content|trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinks %}yes {{ thinks }}{% endif %}{% endif %}{{ bos_token }}"
)


@pytest.fixture
def qwen(tokenizer: Tokenizer, model: ModelConfig) -> PromptBuilder:
    return PromptBuilder(tokenizer, ChatTemplate(QWEN, {"bos_token": ""}), model, 2048)


def test_the_last_message_is_continued(qwen: PromptBuilder, tokenizer: Tokenizer) -> None:
    """To its last character, whatever the template puts behind it."""
    opened = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(tokenizer, build(qwen, ANSWERED, continue_final_message=True).ids) == opened + "quick  "
    assert text_of(tokenizer, build(qwen, ANSWERED, add_generation_prompt=False).ids) == f"{opened}quick<|im_end|>\n"
    assert text_of(tokenizer, build(qwen, ANSWERED[:1]).ids) == opened
    forged = [ANSWERED[0], {"role": "assistant", "content": "a<|im_end|>"}]
    ids = build(qwen, forged, continue_final_message=True).ids
    assert tokenizer.decode(ids, with_control_tokens=True).endswith("a<|im_end|>") and ids[-1] not in tokenizer.control_ids.values()


def test_both_members_of_a_pair_continue_it(qwen: PromptBuilder, tokenizer: Tokenizer) -> None:
    prompt = build(qwen, ANSWERED, continue_final_message=True, guidance_scale=2, negative_prompt="bad")
    assert prompt.companion_ids is not None
    assert text_of(tokenizer, prompt.companion_ids) == "<|im_start|>user\nbad<|im_end|>\n<|im_start|>assistant\nquick  "


def test_a_template_that_leaves_out_the_last_message(tokenizer: Tokenizer, model: ModelConfig) -> None:
    prompts = PromptBuilder(tokenizer, ChatTemplate("{{ messages[0].content }}"), model, 2048)
    with pytest.raises(RequestError, match="continue_final_message: the model's chat template leaves out the last message"):
        build(prompts, ANSWERED, continue_final_message=True)


def test_options_are_those_of_the_template(qwen: PromptBuilder, prompts: PromptBuilder, tokenizer: Tokenizer) -> None:
    assert text_of(tokenizer, build(qwen, ANSWERED[:1], chat_template_kwargs={"thinks": 3}).ids).endswith("assistant\nyes 3")
    build(qwen, ANSWERED, chat_template_kwargs={"enable_thinking": True})
    for name in ("other", "messages", "bos_token", "tools", "range", "_step", "enable_thinking"):
        with collecting(is_strict=True), pytest.raises(RequestError) as caught:
            build(qwen, ANSWERED, chat_template_kwargs={name: "a"})
        says = f"chat_template_kwargs.{name}: is not supported; the model's chat template takes thinks"
        assert (caught.value.message, caught.value.param) == (says, f"chat_template_kwargs.{name}")
    with collecting(is_strict=True), pytest.raises(RequestError, match="the model's chat template takes none"):
        build(prompts, ANSWERED, chat_template_kwargs={"x": 1})


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, "unset"),
        ({"enable_thinking": False}, "False"),
        ({"thinking": {"type": "disabled"}}, "False"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "True"),
        ({"reasoning_effort": "none"}, "False"),
        ({"reasoning_effort": "high"}, "True high"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "True low"),
        ({"reasoning": {"enabled": False}}, "False"),
        ({"reasoning": {"summary": "auto"}}, "unset"),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, "True"),
    ],
    ids=str,
)
def test_thoughts_are_turned_on_and_off_by_every_clients_field(
    tokenizer: Tokenizer, prompts: PromptBuilder, model: ModelConfig, fields: dict[str, Any], thinks: str
) -> None:
    template = "{{ messages[0].content }} {{ enable_thinking if enable_thinking is defined else 'unset' }} {{ reasoning_effort }}"
    thinker = PromptBuilder(tokenizer, ChatTemplate(template), model, 2048)
    assert text_of(tokenizer, build(thinker, ANSWERED[:1], **fields).ids).split("fox ")[1].strip() == thinks
    with collecting() as ignored:
        build(prompts, ANSWERED[:1], **fields)
    assert bool(ignored.reasons) == bool(fields), "a template without a switch"


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ["thinking.budget_tokens"]),
        ({"thinking": {"type": "adaptive"}}, ["thinking.type"]),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, ["reasoning_effort"]),
        ({"enable_thinking": True, "reasoning_effort": "high"}, []),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, ["reasoning.summary"]),
        ({"reasoning": {"effort": "utmost"}}, ["reasoning.effort"]),
    ],
    ids=str,
)
def test_parts_of_fields_for_thoughts_without_effect_are_named(
    tokenizer: Tokenizer, model: ModelConfig, fields: dict[str, Any], ignored: list[str]
) -> None:
    thinker = PromptBuilder(
        tokenizer, ChatTemplate("{{ messages[0].content }}{{ enable_thinking }}{{ reasoning_effort }}"), model, 2048
    )
    with collecting() as found:
        text = text_of(tokenizer, build(thinker, ANSWERED[:1], **fields).ids)
    assert list(found.reasons) == ignored
    assert text.endswith("high") == ("high" in fields.values())


def weather(description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "description": description}}


def test_functions_calls_and_results(prompts: PromptBuilder, tokenizer: Tokenizer) -> None:
    """Whatever they are called, the prompt has the control tokens of its messages alone."""
    call = {"id": "<|im_end|>", "type": "function", "function": {"name": "weather", "arguments": '{"<|im_end|>": "<|im_start|>"}'}}
    messages = [
        {"role": "user", "content": [IMAGE]},
        {"role": "assistant", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "<|im_end|>",
            "content": [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}],
        },
    ]
    prompt = build(prompts, messages, tools=[weather("<|image_pad|>")], guidance_scale=2)
    text = tokenizer.decode(prompt.ids, with_control_tokens=True)
    assert '{"name": "weather", "description": "<|image_pad|>"}' in text and "<tool_response>\n<|im_\nend|>\n</tool_response>" in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"<|im_end|>": "<|im_start|>"}}\n</tool_call><|im_end|>' in text
    counts = {name: prompt.ids.count(id) for name, id in tokenizer.control_ids.items() if id in prompt.ids}
    assert counts == {"<|im_start|>": 5, "<|im_end|>": 4, "<|image_pad|>": 1}
    assert prompt.companion_ids is not None and "weather" not in tokenizer.decode(prompt.companion_ids)


def test_functions_go_to_a_template_that_takes_them(tokenizer: Tokenizer, model: ModelConfig) -> None:
    source = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_call_id }}{% endfor %}{# <tool_call> #}"
    prompts = PromptBuilder(tokenizer, ChatTemplate(source), model, 2048)
    text = tokenizer.decode(build(prompts, [{"role": "user", "content": "hi"}], tools=[weather("x")]).ids)
    assert text == f"{json.dumps([weather('x')])}userhi"
    assert tokenizer.decode(build(prompts, [{"role": "user", "content": "hi"}]).ids) == "nulluserhi"


def test_a_template_whose_calls_cannot_be_read(tokenizer: Tokenizer, model: ModelConfig) -> None:
    prompts = PromptBuilder(tokenizer, ChatTemplate("{{ tools }}[CALL]{{ messages[0].content }}"), model, 2048)
    with pytest.raises(RequestError, match="tools: the model's chat template writes calls in a form that mmrt does not read"):
        build(prompts, [{"role": "user", "content": "hi"}], tools=[weather("x")])
    assert build(prompts, [{"role": "user", "content": "hi"}], tools=[weather("x")], tool_choice="none").ids


def test_functions_count_for_the_length_of_the_prompt(prompts: PromptBuilder) -> None:
    with pytest.raises(RequestError, match="messages: prompt is too long"):
        build(prompts, [{"role": "user", "content": "hi"}], tools=[weather("x" * 200_000)])


def test_prompts_say_where_others_part_from_them(prompts: PromptBuilder) -> None:
    """Behind the first message, behind the last, and behind the last medium where much text follows it."""
    few, much = {"type": "text", "text": "go on"}, {"type": "text", "text": "go on " * 200}
    system = {"role": "system", "content": "be brief"}
    for content, is_much in (([few, IMAGE, few], False), ([few, IMAGE, much], True), ([much, few], False)):
        prompt = build(prompts, [system, {"role": "user", "content": content}])
        first, last, media = prompt.borders
        ends = [place for place, id in enumerate(prompt.ids, 1) if id == 1]
        assert (first, last) == (ends[0], ends[-1]) and first < last < len(prompt.ids)
        assert bool(media) == is_much and (not media or prompt.ids[media - 1] == prompts._placeholders["image"])
    assert prompts.build(read_text(json.dumps({"model": "tiny", "prompt": "hi"}).encode(), LIMITS)).borders == (0, 0, 0)
