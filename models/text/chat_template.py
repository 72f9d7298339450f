"""Chat templates: a checkpoint's Jinja template, rendered in a sandbox with the helpers that transformers gives templates.

The gateway renders each request's messages with it. The template comes from the checkpoint and is bounded all the same
(``bounded_template``); the messages come from untrusted clients and are data only: never parsed as a template.
"""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime

from ..checkpoint.files import template_source
from ..errors import CheckpointError
from .bounded_template import STEP, BoundedEnvironment, Deadline, TemplateLimit, check_short
from .thoughts import CLOSING
from .tokenizer import Tokenizer
from .tool_calls import OPENING

_PROBE = "a text that no template has"
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")  # variables with values from elsewhere


class TemplateRefusal(ValueError):
    """The template cannot render these messages: it raised, or they lack something that it needs."""


class ChatTemplate:
    """A compiled chat template; ``special_tokens`` are its variables such as ``bos_token``. ``options``: names of variables that it
    uses, and that clients may give values. ``takes_tools``: it shows functions and calls of them by itself; ``calls_are_known``: in the
    form that ``tool_calls`` reads. ``thinks``: the model's answers may begin with thoughts (``thoughts``); ``takes_thoughts``: it shows
    those of earlier answers, which messages have as ``reasoning_content``."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile. Raises CheckpointError for a template that is not Jinja, or does not end with a message of a few words."""
        environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateError, RecursionError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"the chat template cannot be compiled: {error or type(error).__name__}") from error
        self._variables = dict(special_tokens or {})
        self.options = frozenset(names - {*environment.globals, *self._variables, *_GIVEN, STEP})
        self.takes_tools = "tools" in names
        self.calls_are_known = not self.takes_tools or OPENING in source
        self.thinks, self.takes_thoughts = CLOSING in source, "reasoning_content" in source
        self._takes_strings = True
        shows_parts, shows_strings = self._shows_parts(), _PROBE in self._shown(_PROBE)
        self.takes_parts, self._takes_strings = shows_parts or not shows_strings, shows_strings or not shows_parts

    def tells_thoughts(self, tokenizer: Tokenizer) -> bool:
        """Return whether thoughts can be told from answers. Special tokens are left out of texts: where the mark is one, nothing shows
        where thoughts end."""
        return self.thinks and CLOSING in tokenizer.decode(tokenizer.encode(CLOSING))

    @classmethod
    def load(cls, path: Path, special_tokens: Mapping[str, str] | None = None) -> "ChatTemplate":
        """Find a checkpoint's template: in chat_template.jinja, chat_template.json or tokenizer_config.json, in this order.

        Raises:
            CheckpointError: none of them has one.
        """
        return cls(template_source(path), special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt's text. A message's ``content`` is a string or a list of parts of ``type`` text, image, video or audio; a template
        that shows lists alone, as SmolVLM2's and LLaVA's, gets one of a string. ``options``: values of some of ``self.options``.
        ``tools``: functions, in OpenAI's form, for a template that takes them.

        Raises:
            TemplateRefusal: the template raised, fails on these messages, or takes too much time or memory for them.
        """
        if not self._takes_strings:
            messages = [_in_parts(message) for message in messages]
        given = {"messages": messages, "tools": list(tools) or None, "documents": None, "add_generation_prompt": add_generation_prompt}
        chosen = {name: value for name, value in (options or {}).items() if name in self.options}
        context = self._template.new_context({**chosen, **given, **self._variables, STEP: Deadline()})
        try:
            return self._template.environment.concat(self._template.root_render_func(context))
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise TemplateRefusal(f"the model's chat template refused the messages: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise TemplateRefusal(f"the model's chat template fails on the messages: {type(error).__name__}") from error
        finally:
            _drop_macros(context)

    def _shows_parts(self) -> bool:
        """True if a list is shown as ``content``. Templates for text alone print it as it is, omit it or fail."""
        parts = [{"type": "text", "text": _PROBE}]
        shown = self._shown(parts)
        as_it_is = repr(parts) in shown or json.dumps(parts) in shown
        return _PROBE in shown and not as_it_is

    def _shown(self, content: str | list[dict[str, str]]) -> str:
        try:
            return self.render([{"role": "user", "content": content}])
        except TemplateRefusal as error:
            if isinstance(error.__cause__, TemplateLimit):
                raise CheckpointError(f"the chat template cannot be used: {error.__cause__}") from error
            return ""


def _drop_macros(context: jinja2.runtime.Context) -> None:
    """Take its macros, which refer to it, from a context that is no longer needed, and from each macro what it refers to, say itself:
    else all would wait for a collection of garbage."""
    for variable in context.vars.values():
        if isinstance(variable, jinja2.runtime.Macro):
            vars(variable).clear()
    context.vars.clear()


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    check_short(format, "strftime_now")
    return datetime.datetime.now().strftime(format)


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}`` marks the model's answer, for training; here its body is just rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()
