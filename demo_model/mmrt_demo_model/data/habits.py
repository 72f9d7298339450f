"""How people type what they ask: in short forms, with a few words more than it takes, with slips, in lower case."""

import re

from .drawing import Rng
from .kinds import chance, pick
from .phrases import TOLD

_SHORT = (
    ("hat is ", "hat's "),
    ("here is ", "here's "),
    ("ow is ", "ow's "),
    ("Who is ", "Who's "),
    (" do not ", " don't "),
    ("I am ", "I'm "),
)
_AROUND = (
    "Hi! {}", "Hello, {}", "Hey, {}", "OK, {}", "So, {}", "And {}", "Now {}", "Please: {}", "Question: {}", "I have a question. {}",
    "A quick question: {}", "Tell me, {}", "{} Please.", "{} Thanks!", "{} Thank you.", "{} I am curious.", "{} Be brief.",
)  # fmt: skip
_WORD = re.compile(r"[A-Za-z]{4,}")


def typed(rng: Rng, text: str) -> str:
    """The same question as somebody may type it."""
    if chance(rng, 0.15):
        for long, short in _SHORT:
            text = text.replace(long, short)
    if chance(rng, 0.1) and text.endswith("?"):  # greetings have their own words
        text = pick(rng, _AROUND).format(text)
    if chance(rng, 0.06):
        text = _slip(rng, text)
    if chance(rng, 0.12):
        text = text.rstrip("?.!") or text
    return text.lower() if chance(rng, 0.15) else text


def _slip(rng: Rng, text: str) -> str:
    """A letter left out, doubled, or in the place of the next, in one of the longer words; no word of ``TOLD`` goes or comes."""
    words = [match for match in _WORD.finditer(text) if match.group().lower() not in TOLD]
    if not words:
        return text
    word = pick(rng, words)
    at = int(rng.integers(word.start() + 1, word.end() - 1))
    slipped = pick(rng, (text[at + 1 : at + 2] + text[at], text[at] * 2 + text[at + 1 : at + 2], text[at + 1 : at + 2]))
    other = text[word.start() : at] + slipped + text[at + 2 : word.end()]
    return text if other.lower() in TOLD else text[: word.start()] + other + text[word.end() :]
