"""How things are asked: every question in many wordings, with slots."""

from collections.abc import Callable

from .clip_phrases import CLIP_PHRASES
from .drawing import COLOURS, SHAPES, Rng
from .kinds import NUMBERS, Question, Wording, alternatives, pick
from .picture_phrases import PICTURE_PHRASES

PHRASES = PICTURE_PHRASES | CLIP_PHRASES
# What fits any medium.
ANYTHING = alternatives(
    {
        "anything": """
        What is this? | What is that? | What's this? | What's that? | What is it? | Describe this. | Describe it. | Tell me about
        this. | Tell me what this is. | What is going on? | What is happening here? | What do you make of this? | Can you tell me
        what this is? | Explain this. | What have we here? | Any idea what this is? | Describe this for me, please. | Give me a
        description. | What is in here? | What's in this file? | Tell me what is in the file. | What did I just send you? | Summarise
        this. | Say what it is. | And this? | And now?
        """
    }
)["anything"]
ORDERS = ("first", "second", "last")  # what {nth} may be
REFERENCES = ("from", "side")  # before two things: the first of them is what the other is seen from


def plural(shape: str) -> str:
    return "crosses" if shape == "cross" else f"{shape}s"


# What training tells heads by: each is a token of its own behind a space, and nobody's slip.
TOLD = (*SHAPES, *map(plural, SHAPES), *COLOURS, *NUMBERS[2:], *ORDERS, *REFERENCES)


def groups(shape: str, colour: str) -> tuple[str, str, str, str]:
    """What such a thing may be counted among."""
    return "things", plural(shape), f"{colour} things", f"{colour} {plural(shape)}"


def asker(rng: Rng) -> Callable[..., Question]:
    """ask(task, answer, phrase=task, naming="", **slots): a question in one of its phrasings, in one with ``naming`` in it."""

    def ask(task: str, answer: str, phrase: str = "", naming: str = "", **slots: str) -> Question:
        phrase = phrase or task
        template = pick(rng, [text for text in PHRASES[phrase] if naming in text])
        return Question(task, fill(template, **slots), answer, Wording(phrase, template, tuple(slots.items())))

    return ask


def fill(phrase: str, **slots: str) -> str:
    """The phrase with its slots filled; {shapes} is the plural of {shape}."""
    if shape := slots.get("shape"):
        slots["shapes"] = plural(shape)
    return phrase.format(**slots)
