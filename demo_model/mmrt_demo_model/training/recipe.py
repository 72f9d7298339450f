"""The recipe: ``recipe.toml`` as checked values."""

from pathlib import Path
from typing import get_args

import msgspec

from ..data import TASKS, Medium, Shares

LEAST_LAYERS, LEAST_HEADS = 3, 4  # so many there are in grounding.SLOTS
RECIPE = Path(__file__).with_name("recipe.toml")


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The architecture, in the words of config.json; ``image_pixels`` and ``video_pixels`` are the least and the most."""

    vocab_size: int
    num_merges: int
    context: int
    rope_theta: float
    mrope_section: tuple[int, int, int]
    text: dict[str, int]
    vision: dict[str, int]
    audio: dict[str, int]
    image_pixels: tuple[int, int]
    video_pixels: tuple[int, int]
    max_frames: int


class Augment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Probabilities."""

    roundtrip: float
    question_first: float
    turns: float
    system: float
    on_topic: float
    hardest: tuple[str, ...]
    empty: float


class Towers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the towers learn from alone, at first; none of it degraded for the first ``clean_steps``."""

    steps: int
    clean_steps: int
    batch: dict[str, int]
    mixture: dict[str, float]


class Late(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From ``step`` on, when the simple is learned: another mixture, and other samples."""

    step: int
    mixture: dict[str, float]
    shares: Shares


class Lesson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """So many ``steps`` behind those of the recipe and earlier lessons: ``share`` of the media that come alone are of another world,
    and ``histories`` of the steps are of ``history_batch`` long prompts; the rest is as late as it gets. Rates rise to ``rate`` of the
    full ones and fall to nothing."""

    steps: int
    rate: float
    share: float
    mixture: dict[str, float]
    histories: float = 0.0
    history_batch: int = 1


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one training is."""

    seed: int
    steps: int
    warmup_steps: int
    decay_fraction: float
    matrix_rate: float
    other_rate: float
    weight_decay: float
    clip_norm: float
    hint_weight: float
    ground_weight: float
    batch: dict[str, int]
    row_tokens: dict[str, int]
    mixture: dict[str, float]
    late: Late
    lessons: tuple[Lesson, ...]
    towers: Towers
    augment: Augment
    model: Shape

    @property
    def all_steps(self) -> int:
        """With those of the lessons."""
        return self.steps + sum(lesson.steps for lesson in self.lessons)

    def lesson_at(self, step: int) -> tuple[Lesson, int] | None:
        """The lesson that a step belongs to, and how many of its steps come before; None for those before all lessons and behind."""
        begun = step - self.steps
        for lesson in self.lessons:
            if 0 <= begun < lesson.steps:
                return lesson, begun
            begun -= lesson.steps
        return None

    @property
    def all_media(self) -> set[str]:
        """Of every mixture but the towers'."""
        return {*self.mixture, *self.late.mixture}.union(*(lesson.mixture for lesson in self.lessons))

    @property
    def smallest_batch(self) -> int:
        """In samples: no more processes can share one."""
        sizes = [self.batch[medium] for medium in self.all_media]
        sizes += [lesson.history_batch for lesson in self.lessons if lesson.histories]
        return min(sizes + [self.towers.batch[medium] for medium in self.towers.mixture])


def load_recipe(file: Path = RECIPE) -> Recipe:
    """Raises: ValueError for a key that is missing, unknown or of a wrong type, and for sizes that do not fit together."""
    recipe = msgspec.toml.decode(file.read_bytes(), type=Recipe)
    if strangers := set(recipe.augment.hardest) - set(TASKS):
        raise ValueError(f"hardest has unknown tasks {sorted(strangers)}, expected some of {sorted(TASKS)}")
    unknown = {*recipe.all_media, *recipe.towers.mixture} - {*get_args(Medium)}
    if unknown:
        raise ValueError(f"mixture of unknown media {sorted(unknown)}, expected {get_args(Medium)}")
    for name, sizes, mixture in (
        ("batch", recipe.batch, recipe.all_media),
        ("row_tokens", recipe.row_tokens, recipe.all_media | {*recipe.towers.mixture}),
        ("towers.batch", recipe.towers.batch, {*recipe.towers.mixture}),
    ):
        if missing := mixture - set(sizes):
            raise ValueError(f"{name} says nothing of {sorted(missing)}, which are in the mixture")
    mixtures = (recipe.mixture, recipe.late.mixture, recipe.towers.mixture, *(lesson.mixture for lesson in recipe.lessons))
    if not all(mixtures) or recipe.smallest_batch < 1:
        raise ValueError("a mixture is empty, or a batch has no samples, expected one of each at least")
    if not recipe.towers.steps <= recipe.late.step <= recipe.steps:
        raise ValueError(f"late.step is {recipe.late.step}, expected {recipe.towers.steps} (towers.steps) to {recipe.steps} (steps)")
    shares = recipe.late.shares
    if min(shares.single, shares.several) < 0 or shares.single + shares.several > 1:
        raise ValueError(f"late.shares has {shares.single:g} single and {shares.several:g} several, expected 0 to 1 together")
    if not shares.mixes:
        raise ValueError("late.shares has no mixes of several things, expected one at least")
    for name in ("counted_pairs", "moving", "degraded"):
        if not 0 <= (share := getattr(shares, name)) <= 1:
            raise ValueError(f"late.shares has {name} {share:g}, expected 0 to 1")
    for number, lesson in enumerate(recipe.lessons):
        for name in ("rate", "share", "histories"):
            if not 0 <= (share := getattr(lesson, name)) <= 1:
                raise ValueError(f"lessons[{number}] has {name} {share:g}, expected 0 to 1")
    layers, heads = (recipe.model.text.get(name, 0) for name in ("num_hidden_layers", "num_attention_heads"))
    if layers < LEAST_LAYERS or heads < LEAST_HEADS:
        raise ValueError(f"model.text has {layers} layers of {heads} heads, grounding takes {LEAST_LAYERS} of {LEAST_HEADS}")
    return recipe
