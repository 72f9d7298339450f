"""Turn a conversation into token ids: the chat template, the guard against forged control tokens, the CFG companion.

Runs in the gateway, for long prompts in a thread of it. The only state is the loaded tokenizer and template.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from ....models.architecture import ModelConfig
from ....models.item_text import with_prompt_texts
from ....models.text.chat_template import ChatTemplate, TemplateRefusal
from ....models.text.thoughts import CLOSING, OPENING
from ....models.text.tokenizer import PromptGuard, Tokenizer
from ....models.text.tool_prompt import written_out
from ....runtime.bus.messages import Borders
from ....runtime.bus.sampling import Sampling
from ....runtime.errors import RequestError, prompt_too_long
from .content import Conversation, MediaPart, Message
from .fields import show
from .ignored import note
from .template_fields import OptionValue, TemplateUse, for_template
from .thinking import SWITCHES
from .tool_messages import Call
from .validation import ChatRequest, TextRequest

MAX_BAD_WORD_TOKENS = 2048
LEAST_TEXT = 256  # tokens behind the last medium: less is prefilled again where another text follows it
MAX_OPENING_TOKENS = 16  # of a mark that opens thoughts, with the blanks behind it
_AT_LEAST = "and the prompt has at least so many"  # by its characters: it has not been tokenized


class Prompt(NamedTuple):
    """``ids`` with one placeholder per medium, in order; ``companion_ids`` is None where there is no guidance. ``sampling``: the
    request's, with the ids of words that must not appear. ``more``: ids of other prompts of the request. ``is_thinking``: the answer
    begins within thoughts; None: it has none. ``borders``: of ``ids``."""

    ids: list[int]
    companion_ids: list[int] | None
    sampling: Sampling
    more: tuple[list[int], ...] = ()
    is_thinking: bool | None = None
    borders: Borders = (0, 0, 0)

    def with_grammar(self, grammar: str) -> "Prompt":
        """Return it for an answer that follows a grammar."""
        return self._replace(sampling=msgspec.structs.replace(self.sampling, grammar=grammar))


class PromptBuilder:
    """Renders and tokenizes prompts. Threads may share it. ``thinks``: answers may begin with thoughts that can be told from them."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, model: ModelConfig, max_context: int) -> None:
        self.tokenizer = self._tokenizer = tokenizer
        self._template = template
        self.thinks = template.tells_thoughts(tokenizer)
        self._placeholders = {kind: model.placeholder_id(kind) for kind in model.media_kinds}
        self._sound_fences = model.audio_start_token_id, model.audio_end_token_id
        self._prompt_texts = model.prompt_texts
        self._vocab_size = model.language.vocab_size
        self._eos_ids = model.eos_token_ids
        self._max_context = max_context
        # transformers' processors put it there where the template does not, its tokenizers never
        self._opening = tokenizer.opening_ids if model.media_kinds else []

    def build(self, request: ChatRequest | TextRequest) -> Prompt:
        """Build the token ids of the prompt and, for a guidance scale other than 1, of its companion (CF2, CF5).

        Of a text the companion is the negative prompt alone, of a conversation the same template around one user turn, the
        negative prompt or "": media, system prompt and earlier turns condition the answer, so the unconditional member has none
        of them. An answer that is continued belongs to both.

        Raises:
            RequestError: 400 if the template refuses the conversation, places its media otherwise, or it is too long; or if a text
                has placeholders of media, or ids that are no tokens.
        """
        generation = request.generation
        self._check_ids(generation.stop_token_ids, "stop_token_ids")
        self._check_ids([id for id, _ in generation.sampling.logit_bias], "logit_bias")
        sampling = msgspec.structs.replace(generation.sampling, bad_words=self._bad_words(generation.bad_words))
        negative_prompt = generation.negative_prompt
        is_guided = sampling.guidance_scale != 1.0
        if isinstance(request, TextRequest):
            adds = request.adds_special_tokens
            ids = self._raw(request.prompt, "prompt", adds)
            more = tuple(self._raw(prompt, f"prompt[{at}]", adds) for at, prompt in enumerate(request.more_prompts, 1))
            generation.output.check_prompts(sum(map(len, (ids, *more))), self._max_context)
            return Prompt(ids, self._raw(negative_prompt, "negative_prompt", adds) if is_guided else None, sampling, more)
        if not self._template.takes_thoughts:
            _note_thoughts(request.conversation.messages)
        use = request.template
        options = for_template(use, self._template.options)
        has_form = generation.grammar is not None and not generation.grammar.leaves_text
        if has_form:  # which has no place for thoughts
            options = {**dict.fromkeys(self._template.options & {*SWITCHES}, False), **options}
        ids = self._encode(request.conversation, use, options, "messages", request.tools.shown if request.tools else ())
        companion_ids = None
        if is_guided:
            is_list = any(not isinstance(message.content, str) for message in request.conversation.messages)
            content = (negative_prompt,) if is_list else negative_prompt
            answer = request.conversation.messages[-1:] if use.continues else ()
            companion_ids = self._encode(Conversation((Message("user", content), *answer), ()), use, options, "negative_prompt")
        is_thinking = self._ends_within_thoughts(request, ids) if self.thinks and not has_form else None
        return Prompt(ids, companion_ids, sampling, is_thinking=is_thinking, borders=self._borders(ids))

    def _ends_within_thoughts(self, request: ChatRequest, ids: Sequence[int]) -> bool:
        if request.template.continues:
            text = "".join(_said(request.conversation.messages[-1]))
            return text.rfind(OPENING) > text.rfind(CLOSING)
        end = self._tokenizer.decode(ids[-MAX_OPENING_TOKENS:], with_control_tokens=True)
        return request.template.opens_answer and end.rstrip().endswith(OPENING)

    def _borders(self, ids: list[int]) -> Borders:
        """Find the ends of messages by the tokens that end an answer: templates put one behind each message."""
        ends = [place for place, id in enumerate(ids, 1) if id in self._eos_ids] or [0]
        placeholders = self._placeholders.values()
        media = next((place for place in range(len(ids), 0, -1) if ids[place - 1] in placeholders), 0) if placeholders else 0
        return ends[0], ends[-1], media if len(ids) - media >= LEAST_TEXT else 0

    def ids_of(self, conversation: Conversation, use: TemplateUse) -> list[int]:
        """Build the token ids of a conversation alone. Raises: as ``build``."""
        return self._encode(conversation, use, for_template(use, self._template.options), "messages")

    def text_ids(self, text: str | list[int], field: str) -> list[int]:
        """Build the token ids of a text without a template. Raises: as ``build``; ``field`` names it."""
        return self._raw(text, field)

    def answer_ids(self, text: str) -> list[int]:
        """Return the ids of an answer to a prompt, with the token that ends it. Control tokens in it are text."""
        guard = PromptGuard(self._tokenizer)
        return [*guard.encode(guard.hide([text])[0], begins=False), self._end_of_answer]

    @cached_property
    def _end_of_answer(self) -> int:
        """The token that the template puts behind an answer; where that is none that ends answers, the first that does."""
        guard = PromptGuard(self._tokenizer)
        messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": guard.mark}]
        try:
            rendered = self._template.render(messages, add_generation_prompt=False)
        except TemplateRefusal:
            return self._eos_ids[0]
        first = self._tokenizer.encode(rendered.rpartition(guard.mark)[2])[:1]
        return first[0] if first and first[0] in self._eos_ids else self._eos_ids[0]

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the ids of each word at the start of a text and, where these differ in the first id alone, behind a space, as vLLM."""
        found: list[list[int]] = []
        for word in words:
            bare, spaced = self._tokenizer.encode_going_on([word.lstrip(), f" {word.lstrip()}"])
            found.append(bare)
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                found.append(spaced)
        if (num_tokens := sum(map(len, found))) > MAX_BAD_WORD_TOKENS:
            raise RequestError(f"bad_words: have {num_tokens} tokens, the limit is {MAX_BAD_WORD_TOKENS}", param="bad_words")
        return found

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, control tokens included. Raises: RequestError 400 for ids that are no tokens."""
        self._check_ids(ids, "tokens")
        return self._tokenizer.decode(ids, with_control_tokens=True)

    def _encode(
        self,
        conversation: Conversation,
        use: TemplateUse,
        options: Mapping[str, OptionValue],
        field: str,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        said = conversation.messages if self._template.takes_thoughts else _without_thoughts(conversation.messages)
        texts = [text for message in said for text in _texts(message)]
        more = [*tools, *(call.arguments for message in said for call in message.calls)]
        self._check_length(self._tokenizer.min_tokens(sum(map(len, texts)) + _num_chars(more)), field, _AT_LEAST)
        if not self._template.calls_are_known and (tools or any(message.calls for message in said)):
            raise RequestError("tools: the model's chat template writes calls in a form that mmrt does not read", param="tools")
        guard = PromptGuard(self._tokenizer)
        hidden = guard.hide(texts)
        if use.continues:
            hidden[-1] += guard.mark
        left = iter(hidden)
        messages = [self._for_template(message, left, guard) for message in said]
        shown = guard.hide_within(list(tools))
        if not self._template.takes_tools:
            messages, shown = written_out(messages, shown), []
        try:
            rendered = self._template.render(messages, use.opens_answer, options, shown)
        except TemplateRefusal as error:
            raise RequestError(f"messages: {error}", param="messages") from None
        if use.continues and (rendered := guard.up_to_mark(rendered) or "") == "":
            raise RequestError("continue_final_message: the model's chat template leaves out the last message", param=None)
        ids = guard.encode(with_prompt_texts(rendered, self._prompt_texts) + use.begins_answer)
        if ids[:1] != self._opening:
            ids = [*self._opening, *ids]
        self._check_length(len(ids), field)
        self._check_placeholders(ids, conversation)
        return self._fence_sound_tracks(ids, conversation)

    def _raw(self, text: str | list[int], field: str, adds_special_tokens: bool = True) -> list[int]:
        """Ids of a text without a template. Control tokens in it keep their meaning: all of it is the client's own."""
        if isinstance(text, str):
            self._check_length(self._tokenizer.min_tokens(len(text)), field, _AT_LEAST)
            ids = self._tokenizer.encode_prompt(text) if adds_special_tokens else self._tokenizer.encode(text)
        else:
            self._check_ids(text, field)
            ids = text
        self._check_length(len(ids), field)
        if {*self._placeholders.values()} & {*ids}:
            raise RequestError(f"{field}: media placeholders are not allowed in a prompt; media belong in messages", param=field)
        return ids

    def _check_ids(self, ids: Sequence[int], field: str) -> None:
        if (wrong := next((id for id in ids if not 0 <= id < self._vocab_size), None)) is not None:
            raise RequestError(f"{field}: has the token id {show(wrong)}, allowed are 0 to {self._vocab_size - 1}", param=field)

    def _check_length(self, num_tokens: int, field: str, more: str = "") -> None:
        """Check that the context has room for the prompt and one token of the answer. The controller counts media later."""
        if num_tokens >= self._max_context:
            raise prompt_too_long(field, num_tokens, self._max_context, more)

    def _check_placeholders(self, ids: Sequence[int], conversation: Conversation) -> None:
        """Check, as the last defence after the template, that placeholders in the prompt are exactly the request's media."""
        known = set(self._placeholders.values())
        found = [id for id in ids if id in known]
        expected = [self._placeholders[medium.kind] for medium in conversation.media]
        if found != expected:
            raise RequestError(
                f"messages: the model's chat template makes {len(found)} media placeholders of {len(expected)} media,"
                " or puts them in another order",
                param="messages",
            )

    def _fence_sound_tracks(self, ids: list[int], conversation: Conversation) -> list[int]:
        """Put the tokens that open and close sound around the placeholder of each video whose sound track counts."""
        if not any(medium.options.use_audio_in_video for medium in conversation.media):
            return ids
        opening, closing = self._sound_fences
        placeholders = set(self._placeholders.values())
        media = iter(conversation.media)
        fenced: list[int] = []
        for id in ids:
            has_sound_track = id in placeholders and next(media).options.use_audio_in_video
            fenced += [opening, id, closing] if has_sound_track else [id]
        return fenced

    def _for_template(self, message: Message, hidden: Iterator[str], guard: PromptGuard) -> dict[str, Any]:
        """Convert a message for the template, with the hidden texts in place of the user's."""
        said: dict[str, Any] = {"role": message.role}
        if message.thoughts:
            said["reasoning_content"] = next(hidden)
        if message.name:
            said["name"] = guard.hide_apart(message.name)
        if message.calls:
            said["tool_calls"] = [_for_template(call, guard) for call in message.calls]
        if message.call_id:
            said["tool_call_id"] = guard.hide_within(message.call_id)
        if isinstance(message.content, str):
            return {**said, "content": next(hidden)}
        parts = [_media(part) if isinstance(part, MediaPart) else {"type": "text", "text": next(hidden)} for part in message.content]
        is_text = all(part["type"] == "text" for part in parts)
        if is_text and (message.role == "tool" or not self._template.takes_parts):
            return {**said, "content": "\n".join(part["text"] for part in parts)}
        return {**said, "content": parts}


def _media(part: MediaPart) -> dict[str, str]:
    """Convert it for the template, which may look at its type or, as Qwen2-Audio's, for a field of its name."""
    return {"type": part.kind, part.kind: ""}


def _for_template(call: Call, guard: PromptGuard) -> dict[str, Any]:
    function = {"name": call.name, "arguments": guard.hide_within(call.arguments)}
    return {"id": guard.hide_within(call.id), "type": "function", "function": function}


def _note_thoughts(messages: Sequence[Message]) -> None:
    for message in messages:
        if message.thoughts_field:
            note(message.thoughts_field, "the model's chat template has no place for it")


def _without_thoughts(messages: Sequence[Message]) -> list[Message]:
    return [message._replace(thoughts="") for message in messages]


def _num_chars(value: Any) -> int:
    """Characters in the strings of a JSON value, which is not deep."""
    if isinstance(value, str):
        return len(value)
    return sum(map(_num_chars, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()))


def _texts(message: Message) -> list[str]:
    return [*([message.thoughts] if message.thoughts else []), *_said(message)]


def _said(message: Message) -> list[str]:
    content = (message.content,) if isinstance(message.content, str) else message.content
    return [part for part in content if isinstance(part, str)]
