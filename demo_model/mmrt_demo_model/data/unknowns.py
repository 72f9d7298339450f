"""What the demo model cannot know, said in as many ways as its training can think of.

A model that has a short answer for each of some hundred questions takes every other sentence for the nearest of them, unless it has met
what lies between: the world, other languages, commands, nonsense, and its own questions with a word of them changed.
"""

import itertools
import re

from . import phrases
from .drawing import COLOURS, SHAPES, Rng
from .facts import FACTS
from .greetings import GREETINGS
from .kinds import Medium, Question, chance, normalised, pick
from .unknown_media import FOREIGN, HEARD, INJECTED, SEEN, WATCHED
from .unknown_world import ADJECTIVES, FOODS, LANGUAGES, NAMES, NOUNS, PLACES, VERBS, WORLD

UNKNOWN = "I do not know that. Ask me about shapes, numbers, motion or beeps."


def _bare(text: str) -> str:
    return normalised(text).rstrip("?!")


_ABOUT: dict[Medium, tuple[str, ...]] = {
    "image": SEEN,
    "two_images": SEEN,
    "video": (*WATCHED, *SEEN),
    "audio": HEARD,
    "image_audio": (*SEEN, *HEARD),
    "video_audio": (*WATCHED, *HEARD),
}
_FUNCTION_WORDS = tuple(
    """a about all an and any are as at be by can could did do does for from has have how i if in is it its kind many may me mean much
    my need no not of off on one or out that the them there these they this to up use what when where which who whose why will with
    you your""".split()
)
_SUBJECT = re.compile(
    rf"""\b(?:shapes?|colou?rs?|numbers?|things?|objects?|items?|figures?|pitch|beeps?|blinks?|direction|speed|size|position|(?:{"|".join(SHAPES)})(?:e?s)?
    |mmrt|server|port|address|api|clients?|actors?|process(?:es)?|stages?|models?|checkpoints?|config(?:uration)?|settings?|logs?|status
    |gpu|cpu|cuda|hardware|system|linux|windows|python|machines?|memory|controller|gateway|encoder|prefill|decode|detokenizer|supervisor
    |pages?|pools?|plans?|rings?|journal|locks?|standbys?|doorbells?|zygote|towers?|embeddings?|bus|messages?|ttft|tbt|cfg|guidance
    |companions?|tokens?|licen[cs]e|version|formats?|frames?|links?|url|pickles?|systemd|units|documentation|docs|manual|png|jpeg
    |wav|mp[34]|webm|weights|requests?)\b""",
    re.IGNORECASE | re.VERBOSE,
)
_KNOWN = tuple(question for questions in FACTS.values() for question in questions if _SUBJECT.search(question))
_TALK = frozenset(map(_bare, itertools.chain(*FACTS.values(), *GREETINGS.values())))
_ASKED = tuple(
    phrase
    for task, templates in phrases.PHRASES.items()
    if not task.startswith("exists")  # that no ladder is there is true
    for phrase in templates
    if _SUBJECT.search(phrase.replace("{colour}", ""))
)
_SLOTS = {
    "noun": NOUNS,
    "noun2": NOUNS,
    "verb": VERBS,
    "adjective": ADJECTIVES,
    "name": NAMES,
    "place": PLACES,
    "language": LANGUAGES,
    "food": FOODS,
}
_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiou"
_KEYS = "qwertyuiopasdfghjklzxcvbnm1234567890.,;-#+*/?!()"


def unknown(rng: Rng, medium: Medium) -> Question:
    """What nobody can answer from media of this kind, nor the model by heart."""
    text = _text(rng, medium)
    while _bare(text) in _TALK:
        text = _text(rng, medium)
    return Question("unknown", text, UNKNOWN)


def _text(rng: Rng, medium: Medium) -> str:
    about = _ABOUT.get(medium, ())
    kind = rng.random()
    if about and kind < 0.4:
        return _filled(rng, pick(rng, about))
    if about and kind < 0.55:
        return _changed(rng, _asked(rng))
    return pick(rng, _WAYS)(rng)


def _about_the_world(rng: Rng) -> str:
    return _filled(rng, pick(rng, WORLD))


def _changed_fact(rng: Rng) -> str:
    return _changed(rng, pick(rng, _KNOWN))


def _foreign(rng: Rng) -> str:
    return pick(rng, FOREIGN)


def _injected(rng: Rng) -> str:
    return pick(rng, INJECTED)


def _salad(rng: Rng) -> str:
    """One to eight words in no order."""
    words = [pick(rng, _FUNCTION_WORDS) if chance(rng, 0.35) else _any_word(rng) for _ in range(int(rng.integers(8)))]
    words.insert(int(rng.integers(len(words) + 1)), _any_word(rng))
    text = " ".join(words) + pick(rng, ("", "", "?", ".", "!"))
    return text[0].upper() + text[1:] if chance(rng, 0.5) else text


def _keys(rng: Rng) -> str:
    """As if a cat had walked over the keyboard."""
    return " ".join("".join(pick(rng, _KEYS) for _ in range(int(rng.integers(1, 9)))) for _ in range(int(rng.integers(1, 4))))


_WAYS = (*[_about_the_world] * 8, *[_changed_fact] * 4, *[_foreign] * 2, *[_salad] * 3, _injected, _keys)


def _asked(rng: Rng) -> str:
    """A question about media as the training has it."""
    shape, colour = pick(rng, SHAPES), pick(rng, COLOURS)
    one, other = (f"{pick(rng, COLOURS)} {pick(rng, SHAPES)}" for _ in range(2))
    nth = pick(rng, ("first", "second"))
    return phrases.fill(pick(rng, _ASKED), shape=shape, colour=colour, one=one, other=other, nth=nth)


def _changed(rng: Rng, question: str) -> str:
    """With one of the words that say what it is about, or all of them, being another."""
    words = [*_SUBJECT.finditer(question)]
    for match in reversed(words if chance(rng, 0.2) else [pick(rng, words)]):
        word = pick(rng, NOUNS) if chance(rng, 0.7) else _any_word(rng)
        plural = match.group().endswith("s") and word in NOUNS
        question = question[: match.start()] + word + ("s" if plural else "") + question[match.end() :]
    return question


def _any_word(rng: Rng) -> str:
    kind = rng.random()
    if kind < 0.25:
        return _nonsense(rng)
    return pick(rng, pick(rng, (NOUNS, NOUNS, VERBS, ADJECTIVES, NAMES, PLACES, FOODS)))


def _nonsense(rng: Rng) -> str:
    """A word that does not exist, most likely: one to four syllables."""
    syllables = [
        pick(rng, _CONSONANTS) + pick(rng, _VOWELS) + (pick(rng, _CONSONANTS) if chance(rng, 0.4) else "")
        for _ in range(int(rng.integers(1, 5)))
    ]
    return "".join(syllables)


def _filled(rng: Rng, template: str) -> str:
    """With words in its slots, at times with nonsense."""
    words = {slot: _nonsense(rng) if chance(rng, 0.1) else pick(rng, values) for slot, values in _SLOTS.items()}
    numbers = {slot: int(rng.integers(1, pick(rng, (10, 100, 1000)))) for slot in ("a", "b", "c")}
    return template.format(**words, **numbers)
