"""Templates render as in transformers, refuse with a reason, and messages cannot reach out of the sandbox."""

import gc
import json
from pathlib import Path

import jinja2.runtime
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
        "{{ messages | map(attribute='role') | unique | list | join(', ') }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "{{ messages | rejectattr('role', 'eq', 'user') | map(attribute='content') | map('upper') | join }}",
        "{{ nothing | map('upper') | list }}",
        "{{ messages[0] | dictsort }}",
        "{% for k, v in messages[0] | items %}{{ k | capitalize }}={{ v | replace('b', '') | trim | e }}{% endfor %}",
        "{{ messages[2].content.strip('.').split(' ')[-1].replace('a', 'o').title() }}",
        "{{ '-'.join(['a', 'b']) }}{{ '%s of %d' % ('a', 4) }}",
        "{{ messages[0].content | indent(2, first=true) }}",
        "{{ [1, 2] | sum }}{{ '7' | int + 1 }}{{ 1 | string + 'x' }}{{ [3, 1] | sort | first }}",
        "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}",
        "{% set j = joiner(', ') %}{{ j() }}{{ j() }}{{ dict(a=1).get('a') }}",
        "{{ messages[1].content | selectattr('type', 'in', ['image', 'video']) | map(attribute='type') | list }}",
        "{{ messages | tojson(indent=2, sort_keys=true, separators=(', ', ' = ')) }}",
        "{{ 'ä' | tojson(ensure_ascii=true) }}{{ messages }}",
        "{% block a %}{{ messages[0].content | default('none') }}{% endblock %}{% filter trim %} x {% endfilter %}",
    ],
)
def test_offers_what_transformers_offers(checkpoint: Path, source: str) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    expected = theirs.apply_chat_template(MESSAGES, chat_template=source, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(source, {"eos_token": "<|im_end|>"}).render(MESSAGES) == expected


@pytest.mark.parametrize(
    "shown",
    [
        "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}<image>{% endif %}{% endfor %}",
        "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] }}{% endfor %}",
        "{{ m['content'][0]['text'] }}",
    ],
)
def test_a_template_that_shows_lists_alone_gets_them(shown: str) -> None:
    """As those of SmolVLM2 and LLaVA, which would show nothing of a string."""
    template = ChatTemplate("{% for m in messages %}{{ m['role'] }}: " + shown + "|{% endfor %}")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    assert template.takes_parts and template.render(messages) == "user: hi|assistant: |"


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
BLOCKS = (
    "{% set ns = namespace(n=0) %}{% block a %}{% if ns.n < 60 %}{% set ns.n = ns.n + 1 %}{{ self.a() }}{{ self.a() }}"
    "{% set ns.n = ns.n - 1 %}{% endif %}{% endblock %}"
)
LAUGHS = "{% set ns = namespace(x=['ha']) %}{% for i in range(30) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
LONG = "{% set x = 'x' * 999999 %}"
SQUARING = "{% set ns = namespace(n=10) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}"


@pytest.mark.many
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (ENDLESS, "takes more than"),
        (BRANCHING, "takes more than"),
        (BLOCKS, "takes more than"),
        (DOUBLING, "[+] makes more than 1000000 characters"),
        (DOUBLING.replace("+", "~"), "[+] makes more than 1000000 characters"),
        (SQUARING, "[*] makes an integer of more than 65536 bits"),
        ("{{ 'x' * 10**9 }}", "[*] makes more than 1000000 characters"),
        ("{{ 10**9 * [1] }}", "[*] makes more than 1000000 characters or entries"),
        ("{{ 10**(10**10) }}", "[*][*] makes an integer of more than 65536 bits"),
        ("{% set r = range(90000) | list %}{{ r | select('in', r | reverse | list) | list | length }}", "takes more than"),
        (LAUGHS + "{{ ns.x }}", "as text|takes more than"),
        (LAUGHS + "{{ dict(x=ns.x).values() }}", "as text|takes more than"),
        (LAUGHS + "{{ ns.x | string }}", "as text|takes more than"),
        (LAUGHS + "{{ ns.x | tojson }}", "as text|takes more than"),
        (LAUGHS + "{{ ns.x | join }}", "as text|takes more than"),
        (LAUGHS + "{{ '%s' % ns.x }}", "as text|takes more than"),
        (LONG + "{{ x }}{{ x }}", "the text has more than 1000000 characters"),
        (LONG + "{% for i in range(9) %}{{ x }}{% endfor %}", "the text has more than 1000000 characters"),
        ("{{ '%999999999d' % 1 }}", "% formats with a width of more than 100"),
        ("{{ '%.999999999f' % 1 }}", "% formats with a width of more than 100"),
        ("{{ '%(a)999999999d' % {'a': 1} }}", "% formats with a width of more than 100"),
        ("{{ '%*d' % (999999999, 1) }}", "% formats with a width of more than 100 or one that is computed"),
        (LONG + "{{ '%s%s' % (x, x) }}", "% makes more than 1000000 characters"),
        (LONG + "{{ '%(a)s%(a)s' % {'a': x} }}", "% makes more than 1000000 characters"),
        (LONG + "{{ x | replace('x', 'xy') }}", "replace makes more than 1000000 characters"),
        (LONG + "{{ x.replace('', 'xy') }}", "replace makes more than 1000000 characters"),
        (LONG + "{{ [x, x] | join }}", "join has more than 1000000 characters"),
        (LONG + "{{ x.join('abc') }}", "join has more than 1000000 characters"),
        (LONG + "{{ x.strip(x) }}", "strip has a width of more than 100"),
        (LONG + "{{ x | trim(x) }}", "trim has a width of more than 100"),
        (LONG + "{{ x | int(base=16) }}", "int has a width of more than 100"),
        ("{{ 'a\nb' | indent(999999999) }}", "indent has a width of more than 100"),
        ("{{ ('\n' * 99999) | indent(99, blank=true) }}", "indent makes more than 1000000 characters"),
        ("{{ [1] | tojson(indent=999999999) }}", "tojson has a width of more than 100"),
        ("{{ range(9999) | list | tojson(indent=99) }}", "tojson has more than 1000000 characters"),
        ("{{ [[1], [2]] | sum(start=[]) }}", "sum adds numbers only"),
        ("{{ ('<' * 300000) | e | length }}", "escape makes more than 1000000 characters"),
        ("{{ '%((a))90000000d' % {'(a)': 1} }}", "% names a key with parentheses"),
        ("{{ '%(a\nb)90000000d' % {'a\nb': 1} }}", "% names a key with parentheses"),
        ("{{ ('%(' * 300000) % 1 }}", "% names a key with parentheses"),
        (LONG + "{{ x.rsplit(x) }}", "rsplit has a width of more than 100"),
        (LONG + "{{ x.rpartition(x) }}", "rpartition has a width of more than 100"),
        (LONG + "{{ strftime_now(x) }}", "strftime_now has a width of more than 100"),
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


@pytest.mark.parametrize(
    "name", ["lipsum", "center", "format", "slice", "batch", "pprint", "random", "round", "truncate", "urlize", "wordwrap", "xmlattr"]
)
def test_filters_that_no_chat_template_uses_are_not_there(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"cannot be compiled: No filter named '{name}'"):
        ChatTemplate("{{ 'x' | " + name + " }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ lipsum(n=9) }}",
        "{{ 'x'.center(9) }}",
        "{{ 'x'.ljust(9) }}",
        "{{ 'x'.zfill(9) }}",
        "{{ 'x'.expandtabs(9) }}",
        "{{ '{:9}'.format(1) }}",
        "{{ '{a:9}'.format_map({'a': 1}) }}",
        "{{ ('x' | e).format(1) }}",
        "{{ 'x'.encode() }}",
        "{{ (1).to_bytes(9) }}",
        "{{ {}.fromkeys('x') }}",
    ],
)
def test_methods_and_globals_that_no_chat_template_uses_are_not_there(source: str) -> None:
    with pytest.raises(TemplateRefusal, match="undefined|is unsafe"):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize("source", ["{% set _step = 1 %}", "{% macro m(_step) %}{% endmacro %}", "{% for _step in [] %}{% endfor %}"])
def test_a_template_cannot_stop_the_clock(source: str) -> None:
    with pytest.raises(CheckpointError, match="_step is no name for a variable"):
        ChatTemplate(source)


def test_a_template_that_is_nested_too_deeply_is_the_checkpoint_s_fault() -> None:
    with pytest.raises(CheckpointError, match="cannot be compiled"):
        ChatTemplate("{{ " + "(" * 5000 + ")" * 5000 + " }}")


def test_a_namespace_does_not_print_what_is_in_it() -> None:
    """Nothing has counted it."""
    assert ChatTemplate(LAUGHS + "{{ ns }}").render(MESSAGES) == "<Namespace>"


@pytest.mark.parametrize("more", ["", "{% if m is mapping %}{{ said(m.content) }}{% endif %}"])
def test_a_render_leaves_no_garbage(more: str) -> None:
    """Its macros and its context refer to each other, and a macro that calls itself to itself."""
    template = ChatTemplate(
        "{% macro said(m) %}{% if m is mapping %}{{ m.role }}: {{ m.content }}{% endif %}"
        + more
        + "{% endmacro %}{% for m in messages %}{{ said(m) }}{% endfor %}"
    )
    gc.collect()
    gc.disable()
    try:
        assert template.render(MESSAGES[2:]) == "assistant: A cat.user: Sure?"
        assert not [one for one in gc.get_objects() if type(one) is jinja2.runtime.Context]
    finally:
        gc.enable()


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
