"""Templates render as in transformers, refuse with a reason, and messages cannot reach out of the sandbox."""

import json
from pathlib import Path

import pytest

from mmrt.models.errors import CheckpointError
from mmrt.models.text import bounded_template
from mmrt.models.text.chat_template import ChatTemplate, TemplateRefusal

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'true'."},
    {"role": "user", "content": [{"type": "text", "text": "What is\n{{ this }}?"}, {"type": "image"}, {"type": "video"}]},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "Sure?"},
]


def test_renders_as_transformers(checkpoint: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    ours = ChatTemplate.load(checkpoint)
    for messages in (MESSAGES, MESSAGES[1:2]):
        assert ours.render(messages) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}",
        "{{ messages | tojson(indent=2) }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
        "{% if tools %}tools{% endif %}{% if add_generation_prompt %}go{% endif %}",
        "{{ strftime_now('%Y') }}",
        "{% for m in messages %}{{ m.role ~ ': ' ~ loop.index ~ undefined_name ~ m.content }}{% endfor %}",
    ],
)
def test_offers_what_transformers_offers(checkpoint: Path, source: str) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    expected = theirs.apply_chat_template(MESSAGES, chat_template=source, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(source, {"eos_token": "<|im_end|>"}).render(MESSAGES) == expected


def test_a_refusal_gives_the_template_s_reason() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        template.render(MESSAGES)


@pytest.mark.parametrize("source", ["{{ messages[9].content.x }}", "{{ messages + 1 }}", "{{ ''.__class__.__mro__[1] }}"])
def test_failures_and_escapes_are_refusals(source: str) -> None:
    with pytest.raises(TemplateRefusal):
        ChatTemplate(source).render(MESSAGES)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
BRANCHING = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
DOUBLING = "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"
SQUARING = "{% set ns = namespace(n=10) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (ENDLESS, "takes more than"),
        (BRANCHING, "takes more than"),
        (DOUBLING, "[+] makes more than 1000000 characters"),
        (DOUBLING.replace("+", "~"), "[+] makes more than 1000000 characters"),
        (SQUARING, "[*] makes an integer of more than 65536 bits"),
        ("{{ 'x' * 10**9 }}", "[*] makes more than 1000000 characters"),
        ("{{ 10**9 * [1] }}", "[*] makes more than 1000000 characters or entries"),
        ("{{ 10**(10**10) }}", "[*][*] makes an integer of more than 65536 bits"),
    ],
)
def test_what_takes_too_much_is_refused(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_template, "MAX_RENDER_S", 0.1)
    monkeypatch.setattr(bounded_template, "MAX_CHARS", 1_000_000)
    with pytest.raises(CheckpointError, match=f"the chat template cannot be used: .*{message}"):
        ChatTemplate(source)
    late = ChatTemplate("{% if messages | length > 1 %}" + source + "{% endif %}")
    with pytest.raises(TemplateRefusal, match=message):
        late.render(MESSAGES)
    assert late.render(MESSAGES[:1]) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 1e308 ** 2 }}",
        "{{ 1 / 0 }}",
        "{{ range(10**9) }}",
    ],
)
def test_no_failure_gets_through(source: str) -> None:
    with pytest.raises(TemplateRefusal):
        ChatTemplate(source).render(MESSAGES)


def test_a_template_that_is_nested_too_deeply_is_the_checkpoint_s_fault() -> None:
    with pytest.raises(CheckpointError, match="cannot be compiled"):
        ChatTemplate("{{ " + "(" * 5000 + ")" * 5000 + " }}")


def test_messages_are_immutable_to_templates() -> None:
    with pytest.raises(TemplateRefusal):
        ChatTemplate("{{ messages.append(1) }}").render(list(MESSAGES))


def test_a_broken_template_is_the_checkpoint_s_fault() -> None:
    with pytest.raises(CheckpointError, match="cannot be compiled"):
        ChatTemplate("{% for %}")


def test_where_templates_are_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no chat template"):
        ChatTemplate.load(tmp_path)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "config"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path).render([]) == "config"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert ChatTemplate.load(tmp_path).render([]) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert ChatTemplate.load(tmp_path).render([]) == "jinja"
