"""A recipe of a few steps with few samples each, and what it begins with."""

from pathlib import Path
from typing import Any

import msgspec
import torch

from mmrt.models.config import load_model_config
from mmrt.models.text.tokenizer import Tokenizer
from mmrt_demo_model.training.batches import Batches
from mmrt_demo_model.training.loop import Learner
from mmrt_demo_model.training.recipe import Lesson, Recipe, Towers, load_recipe
from mmrt_demo_model.training.skeleton import write_skeleton


def towers(steps: int) -> Towers:
    return Towers(steps, 1, {"image": 2}, {"image": 1.0})


def lesson(steps: int, **changes: Any) -> Lesson:
    return msgspec.structs.replace(Lesson(steps, 0.5, 1.0, {"audio": 1.0}), **changes)


def small_recipe(**changes: Any) -> Recipe:
    recipe = load_recipe()
    batch = dict.fromkeys(recipe.batch, 2)
    text = {**recipe.model.text, "num_hidden_layers": 3}
    model = msgspec.structs.replace(recipe.model, text=text, image_pixels=(112 * 112, 140 * 140))  # 4 by 4 tokens of a square picture
    return msgspec.structs.replace(
        recipe,
        **{"batch": batch, "model": model, "steps": 4, "towers": towers(0), "lessons": (), "warmup_steps": 1, **changes},
    )


class Prepared:
    def __init__(self, path: Path) -> None:
        self.recipe = small_recipe()
        self.path = path
        write_skeleton(path, self.recipe, corpus_samples=40)
        self.config = load_model_config(path)
        self.tokenizer = Tokenizer.load(path)
        self.batches = Batches(self.recipe, self.config, self.tokenizer)
        self.learner = Learner(self.recipe, self.config, torch.device("cpu"))
