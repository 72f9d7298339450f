"""Training that begins with the weights of a checkpoint; heads and optimizers, which are no part of it, begin anew. The command calls
it."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from mmrt.models.config import load_model_config
from mmrt.models.text.tokenizer import Tokenizer

from .batches import Batches
from .export import FILES
from .loop import MADE_BY, STATE, Learner, fast_dtype, save
from .recipe import Recipe

HEAD_STEPS = 240  # in which the heads learn alone: new ones would spoil what they are told by
_HEAD_RATE = 3e-3


def begin_with(weights: Path, first: int, recipe: Recipe, work: Path, *, workers: int, device: str) -> None:
    """Make ``work`` what it is before step ``first``, for ``train`` to go on. Nothing where training has begun already.

    Raises: ValueError for a step that is none of the recipe's; RuntimeError for weights of another shape.
    """
    if (work / STATE).exists():
        return
    if not 0 <= first < recipe.all_steps:
        raise ValueError(f"step {first} is none of the recipe's {recipe.all_steps}")
    work.mkdir(parents=True, exist_ok=True)
    for name in FILES:  # the weights belong to their tokenizer
        shutil.copyfile(weights / name, work / name)
    config = load_model_config(work)
    learner = Learner(recipe, config, torch.device(device), fast_dtype(torch.device(device)))
    learner.network.load_state_dict(load_file(weights / "model.safetensors", device))
    learner.network.requires_grad_(False)
    heads = [parameter for name, module in learner.modules.items() if name != "network" for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(heads, lr=_HEAD_RATE, weight_decay=0.0)
    steps = range(first, min(first + HEAD_STEPS, recipe.all_steps))
    for batch in DataLoader(Batches(recipe, config, Tokenizer.load(work)), batch_size=None, sampler=steps, num_workers=workers):
        with torch.enable_grad():
            loss, _ = learner.loss(batch.to(learner.device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    learner.network.requires_grad_(True)
    save(learner, first, work / STATE)
    (work / MADE_BY).write_text(repr(recipe))
