"""mmrt's own ``POST /v1/decisions``: questions about one conversation, each with the probability of each possible answer.

No answer is generated. Prefill finds the log-probability of each possible answer behind the question, with the token that ends it; the
probabilities of a question's answers are these, normalised over the answers. The prompts of one question share the pages before its
answers, and all prompts those of the conversation, by the prefix cache.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..answers.choices import Usage
from ..reading.content import Conversation, Message, read_messages
from ..reading.field_rules import settle
from ..reading.field_table import chat as table
from ..reading.fields import STRING, Fields, Schema, kind_of, refuse, show
from ..reading.json_body import Body, decode_body
from ..reading.media import MediaIntake
from ..reading.media_options import FOR_ALL, OptionReader
from ..reading.prompt import PromptBuilder
from ..reading.template_fields import OptionValue, TemplateUse, read_options
from ..reading.validation import Limits, read_prefill_fields
from .openai.answers import final_usage
from .prefills import Found, PrefillRequest, PromptRow, check_num_tokens

ID_PREFIX = "dec-"
TYPES = ("choice", "boolean", "integer")
MAX_QUESTIONS = 128
MAX_OPTIONS = 128  # of a question
MAX_ROWS = 1024  # options of all questions
MAX_OPTION_CHARS = 256
MAX_QUESTION_CHARS = 16384
MAX_NAME_CHARS = 64
MAX_INTEGER = 10**9
_OPTION: Schema = {**STRING, "minLength": 1, "maxLength": MAX_OPTION_CHARS}


class Question(NamedTuple):
    """``options``: what may be answered, by the texts that the model would answer with."""

    name: str | None
    text: str
    type: str
    options: Mapping[str, str | bool | int]


class AskedDecisions(NamedTuple):
    """A valid request. ``options``: of the chat template."""

    conversation: Conversation
    questions: Sequence[Question]
    options: Mapping[str, OptionValue]
    priority: int
    cache_salt: str | None


def read_decisions(body: Body, limits: Limits) -> AskedDecisions:
    """Validate the body of ``POST /v1/decisions``.

    Raises:
        RequestError: 400, or 404 for an unknown model, or 413 for a medium that is too large.
    """
    fields = Fields(decode_body(body, limits.body))
    priority, cache_salt = read_prefill_fields(fields, limits)
    messages, questions, for_all = fields.take_required("messages"), fields.take_required("questions"), fields.take(FOR_ALL)
    options = read_options(fields)
    settle(fields, table.DECISIONS)
    asked = _read_questions(questions)
    intake = MediaIntake(limits.kinds, limits.media, OptionReader(for_all, limits.kinds, limits.vision_rules), limits.family)
    return AskedDecisions(read_messages(messages, intake, limits.max_context), asked, options, priority, cache_salt)


class Decision:
    """One request and its answer."""

    def __init__(self) -> None:
        self._questions: Sequence[Question] = ()
        self._rows: Sequence[PromptRow] = ()

    def read(self, body: Body, limits: Limits, prompts: PromptBuilder) -> PrefillRequest:
        """Validate the body, and return a row for each option of each question. Raises: RequestError, as ``read_decisions``."""
        asked, rows, num_tokens = read_decisions(body, limits), list[PromptRow](), 0
        for question in asked.questions:
            ids = prompts.ids_of(with_question(asked.conversation, question.text), TemplateUse(options=asked.options))
            num_tokens += len(ids)
            check_num_tokens(num_tokens, limits.max_context, "questions")
            rows += [PromptRow(ids, prompts.answer_ids(option), is_counted=not at) for at, option in enumerate(question.options)]
        self._questions, self._rows = asked.questions, rows
        return PrefillRequest(rows, asked.conversation.media, asked.priority, asked.cache_salt)

    def answer(self, id: str, created: int, model: str, found: Sequence[Found], usage: Usage) -> dict[str, Any]:
        """Return the body of the answer. ``found``: of the rows, in order."""
        left = zip(found, map(_num_scored, self._rows), strict=True)
        answers = [_answer(question, left) for question in self._questions]
        return {"id": id, "object": "decisions", "created": created, "model": model, "answers": answers, "usage": final_usage(usage)}


def with_question(conversation: Conversation, question: str) -> Conversation:
    """Return the conversation with the question at its end: in its last message if that is the user's, else in one of its own."""
    *before, last = conversation.messages
    if last.role != "user":
        return conversation._replace(messages=(*before, last, Message("user", question)))
    if isinstance(last.content, str):
        content: Any = f"{last.content}\n{question}" if last.content else question
    else:
        content = (*last.content, f"\n{question}" if isinstance(last.content[-1], str) and last.content[-1] else question)
    return conversation._replace(messages=(*before, last._replace(content=content)))


def _num_scored(row: PromptRow) -> int:
    return len(row.scored)


def _answer(question: Question, left: Iterator[tuple[Found, int]]) -> dict[str, Any]:
    """Return the answer to a question, whose options come next, each with the number of its tokens."""
    found = [next(left) for _ in question.options]
    logprobs = [one.logprob for one, _ in found]
    values = list(question.options.values())
    highest = max(logprobs)
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    probabilities = [weight / sum(weights) for weight in weights]
    best = max(range(len(values)), key=lambda at: logprobs[at])
    options = [
        {"value": value, "text": text, "probability": probability, "logprob": one.logprob, "num_tokens": num_tokens}
        for (text, value), probability, (one, num_tokens) in zip(question.options.items(), probabilities, found, strict=True)
    ]
    answer = {"name": question.name, "type": question.type, "value": values[best], "probability": probabilities[best]}
    if question.type == "integer":
        answer["mean"] = sum(int(value) * probability for value, probability in zip(values, probabilities, strict=True))
    return {**answer, "options": options}


def _read_questions(value: Any) -> list[Question]:
    if not isinstance(value, list):
        raise refuse("questions", f"expected an array, got {kind_of(value)}")
    if not 1 <= len(value) <= MAX_QUESTIONS:
        raise refuse("questions", f"has {len(value)} entries, allowed are 1 to {MAX_QUESTIONS}")
    questions = [_read_question(Fields(entry, f"questions[{at}]")) for at, entry in enumerate(value)]
    if (num_rows := sum(len(question.options) for question in questions)) > MAX_ROWS:
        raise refuse("questions", f"have {num_rows} options together, the limit is {MAX_ROWS}")
    names = [question.name for question in questions if question.name is not None]
    if (twice := next((name for at, name in enumerate(names) if name in names[:at]), None)) is not None:
        raise refuse("questions", f"two have the name {show(twice)}")
    return questions


def _read_question(fields: Fields) -> Question:
    name = fields.take_str("name", MAX_NAME_CHARS)
    fields.require("question")
    text = fields.take_str("question", MAX_QUESTION_CHARS)
    if not text:
        raise refuse(fields.path("question"), "is empty")
    kind = fields.take_choice("type", TYPES)
    options: Mapping[str, str | bool | int]
    if kind == "choice":
        fields.require("options")
        options = {option: option for option in _read_options(fields, 2, MAX_OPTIONS) or ()}
    elif kind == "boolean":
        yes, no = _read_options(fields, 2, 2) or ("Yes", "No")
        options = {yes: True, no: False}
    else:
        options = {str(number): number for number in _read_range(fields)}
    settle(fields, table.QUESTION)
    return Question(name, text, kind, options)


def _read_options(fields: Fields, least: int, most: int) -> list[str] | None:
    value = fields.take("options", {"type": "array", "items": _OPTION, "minItems": least, "maxItems": most})
    path = fields.path("options")
    if value is None:
        return None
    if not isinstance(value, list):
        raise refuse(path, f"expected an array of strings, got {kind_of(value)}")
    if not least <= len(value) <= most:
        allowed = f"{least} to {most}" if least < most else f"{least}, for true and for false"
        raise refuse(path, f"has {len(value)} entries, allowed are {allowed}")
    for at, option in enumerate(value):
        if not isinstance(option, str):
            raise refuse(f"{path}[{at}]", f"expected a string, got {kind_of(option)}")
        if not 1 <= len(option) <= MAX_OPTION_CHARS:
            raise refuse(f"{path}[{at}]", f"has {len(option)} characters, allowed are 1 to {MAX_OPTION_CHARS}")
        if option in value[:at]:
            raise refuse(f"{path}[{at}]", f"is {show(option)}, as another option is")
    return value


def _read_range(fields: Fields) -> range:
    bounds = []
    for name in ("minimum", "maximum"):
        fields.require(name)
        bounds.append(fields.take_int(name, -MAX_INTEGER, MAX_INTEGER) or 0)
    low, high = bounds
    if not 2 <= high - low + 1 <= MAX_OPTIONS:
        raise refuse(fields.path("maximum"), f"is {high}, with minimum {low} allowed are {low + 1} to {low + MAX_OPTIONS - 1}")
    return range(low, high + 1)
