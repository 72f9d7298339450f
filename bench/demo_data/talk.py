"""Questions without a medium: small talk about mmrt, media that are missing, and what the model does not know."""

from . import phrases
from .drawing import COLOURS, SHAPES, Rng
from .facts import FACTS, GREETINGS
from .kinds import Question, chance, pick

UNKNOWN = "I do not know that. Ask me about shapes, numbers, motion or beeps."
MISSING = {"image": "I see no image.", "video": "I see no video.", "audio": "I hear no sound."}
_ASKED = {
    "image": (
        "shape",
        "colour",
        "describe",
        "size",
        "position",
        "count",
        "count_shape",
        "count_colour",
        "exists",
        "exists_shape",
        "find_colour",
        "find_shape",
        "side",
        "digits",
        "pair_more",
        "pair_colour",
    ),
    "video": ("moving", "video_describe", "direction", "speed", "first", "blinks"),
    "audio": ("pitch", "glide", "beeps", "tone_noise", "sound_describe"),
}
_ANIMALS = ("dog", "cat", "bird", "horse", "duck", "cow", "rabbit", "bear", "lion", "elephant")
_PEOPLE = ("man", "woman", "child", "girl", "boy", "person", "teacher", "doctor", "baby", "player")
_OBJECTS = ("car", "house", "tree", "table", "chair", "phone", "book", "cup", "bicycle", "train", "boat", "flower")
_DOINGS = ("doing", "eating", "holding", "wearing", "looking at", "thinking", "saying", "reading", "playing", "drinking")
_PLACES = (
    "France", "Germany", "Italy", "Spain", "Japan", "China", "India", "Brazil", "Egypt", "Canada", "Mexico", "Norway", "Poland",
    "Kenya", "Peru", "Greece", "Turkey", "Russia", "Sweden", "Paris", "London", "Berlin", "Rome", "Tokyo", "New York", "Europe",
    "Africa",
)  # fmt: skip
_FAMOUS = (
    "Einstein", "Newton", "Mozart", "Shakespeare", "Napoleon", "Picasso", "Darwin", "Bach", "Cleopatra", "the president", "the king",
    "the queen", "Marie Curie", "Gandhi", "Beethoven", "Plato",
)  # fmt: skip
_FOODS = ("cake", "bread", "soup", "pizza", "rice", "tea", "coffee", "pasta", "cheese", "salad", "an omelette", "pancakes")
_TOPICS = (
    "love", "history", "football", "music", "physics", "the moon", "the sun", "the weather", "money", "your family", "dreams",
    "chess", "the stock market", "philosophy", "quantum mechanics", "the universe", "biology", "taxes",
)  # fmt: skip
_PROGRAMS = (
    "sorts a list",
    "prints hello",
    "adds two numbers",
    "reads a file",
    "counts words",
    "finds primes",
    "plays chess",
    "opens a page",
)
_LANGUAGES = ("Python", "C", "Java", "Rust", "German", "French", "Spanish", "English", "Latin", "Chinese")
_DAYS = ("today", "tomorrow", "yesterday", "now", "this week", "on Monday", "in summer")
_SLOTS: dict[str, tuple[str, ...]] = {
    "animal": _ANIMALS,
    "person": _PEOPLE,
    "object": _OBJECTS,
    "doing": _DOINGS,
    "place": _PLACES,
    "famous": _FAMOUS,
    "food": _FOODS,
    "topic": _TOPICS,
    "program": _PROGRAMS,
    "language": _LANGUAGES,
    "day": _DAYS,
}
_ANYWHERE = (  # about the world
    "What is the capital of {place}?",
    "Which city is the capital of {place}?",
    "How many people live in {place}?",
    "Where is {place}?",
    "How far is it to {place}?",
    "What language do they speak in {place}?",
    "How do I get to {place}?",
    "What can I see in {place}?",
    "What is {a} plus {b}?",
    "What is {a} times {b}?",
    "What is {a} minus {b}?",
    "What is {a} + {b}?",
    "How much is {a} + {b}?",
    "How much is {a} times {b}?",
    "Is {a} a prime number?",
    "What is the square root of {a}?",
    "What is the weather like {day}?",
    "What is the weather {day}?",
    "Will it rain {day}?",
    "How warm is it {day}?",
    "What is the weather in {place}?",
    "What day is it {day}?",
    "What time is it?",
    "What year is it?",
    "What is the date?",
    "Write a program that {program}.",
    "Write a {language} program that {program}.",
    "How do I write a program that {program}?",
    "Write a poem about {topic}.",
    "Write a story about a {animal}.",
    "Write a song about {topic}.",
    "Tell me a joke.",
    "Tell me a story.",
    "Tell me about {topic}.",
    "Tell me about {famous}.",
    "What do you think about {topic}?",
    "Explain {topic}.",
    "What is {topic}?",
    "Do you like {topic}?",
    "How do I make {food}?",
    "How do I cook {food}?",
    "Give me a recipe for {food}.",
    "Do you like {food}?",
    "What is in {food}?",
    "Who is {famous}?",
    "Who was {famous}?",
    "When was {famous} born?",
    "When did {famous} live?",
    "What did {famous} say?",
    "Who won the game {day}?",
    "Who wrote this book?",
    "Who is the best player?",
    "Translate this to {language}.",
    "How do you say {object} in {language}?",
    "What does {object} mean in {language}?",
    "What is the price of a {object}?",
    "Where can I buy a {object}?",
    "How does a {object} work?",
    "How old is the {person}?",
    "How old are you?",
    "How tall is a {animal}?",
    "What does a {animal} eat?",
    "How long does a {animal} live?",
    "What is the meaning of life?",
    "Do you love me?",
    "Are you happy?",
    "What is my name?",
    "Who am I?",
    "Where am I?",
    "What should I do {day}?",
    "What should I eat {day}?",
    "Can you help me with {topic}?",
    "Why is the sky blue?",
    "Why is {topic} important?",
    "How do I learn {language}?",
    "What is the news {day}?",
)
_SEEN = (  # as if they were in the picture or the video
    "What is the {animal} doing?",
    "What is the {person} doing?",
    "What is the {person} {doing}?",
    "What is the {animal} {doing}?",
    "What colour is the {object}?",
    "What color is the {animal}?",
    "Where is the {animal}?",
    "Where is the {object}?",
    "How many {object}s are there?",
    "How many {animal}s do you see?",
    "How old is the {person}?",
    "Who is the {person}?",
    "Who is this {person}?",
    "Who is in the picture?",
    "Is the {person} happy?",
    "Is the {animal} asleep?",
    "Is the {person} {doing} something?",
    "What kind of {animal} is this?",
    "What kind of {object} is this?",
    "Which city is this?",
    "What colour is the background?",
    "What is behind it?",
    "Who made this picture?",
    "Where was this picture taken?",
    "What is the name of the {person}?",
    "What is the name of the {animal}?",
)
_HEARD = (
    "What does the {person} say?",
    "What is the {person} saying?",
    "Who is speaking?",
    "Which song is this?",
    "Who is the singer?",
    "What language is this?",
    "What instrument is this?",
    "Is the {animal} loud?",
    "How old is the {person} who speaks?",
    "What are the words of the song?",
)


def fact(rng: Rng) -> Question:
    """Something true about mmrt."""
    questions, answer = pick(rng, FACTS)
    return Question("talk", pick(rng, questions), answer)


def greeting(rng: Rng) -> Question:
    """Hello, thanks, who are you."""
    questions, answer = pick(rng, GREETINGS)
    return Question("talk", pick(rng, questions), answer)


def missing(rng: Rng, present: tuple[str, ...]) -> Question:
    """A question about a medium that is not there. present: of image, video, audio.

    A video is a picture too: with one there nobody asks about images.
    """
    absent = [medium for medium in MISSING if medium not in present and not (medium == "image" and "video" in present)]
    medium = pick(rng, absent)
    shape, colour, other = pick(rng, SHAPES), pick(rng, COLOURS), pick(rng, COLOURS)
    slots = {
        "shape": shape,
        "colour": colour,
        "a": "an" if colour == "orange" else "a",
        "one": f"{colour} {shape}",
        "other": f"{other} {pick(rng, SHAPES)}",
        "nth": pick(rng, ("first", "second")),
    }
    return Question("missing", phrases.fill(pick(rng, phrases.PHRASES[pick(rng, _ASKED[medium])]), **slots), MISSING[medium])


def unknown(rng: Rng, present: tuple[str, ...]) -> Question:
    """A question that no training answers. With media half of them are about what is not in them."""
    templates: tuple[str, ...] = _ANYWHERE
    if present and chance(rng, 0.5):
        templates = _HEARD if present == ("audio",) else _SEEN
    text = pick(rng, templates)
    slots = {slot: pick(rng, values) for slot, values in _SLOTS.items()}
    text = text.format(a=int(rng.integers(1, 100)), b=int(rng.integers(1, 100)), **slots)
    return Question("unknown", text, UNKNOWN)
