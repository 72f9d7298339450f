"""The training loop: batches in, weights out; what it needs to go on after an interruption lies beside them.

``train`` is called by the command. float32 weights, arithmetic in bfloat16 where that is faster; Muon for matrices, AdamW for the rest.
"""

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

from mmrt.models.architecture import ModelConfig
from mmrt.models.config import load_model_config
from mmrt.models.text.tokenizer import Tokenizer

from .batches import Batch, Batches, MediaRows
from .grounding import ANSWER_LAYER, FACTS, WORD_LAYER, missed
from .hints import PLACES, StateHead, sound_heads, vision_heads
from .muon import Muon
from .network import Network
from .processes import averaged, together
from .recipe import Recipe
from .skeleton import write_skeleton

STATE, CURVE, MADE_BY = "state.pt", "curve.jsonl", "recipe"
SAVE_EVERY_S = 120.0
AVERAGE_OVER = 50  # steps


class BegunOtherwiseError(Exception):
    """What is in the directory was begun with another recipe."""


class Learner:
    """Network, optimizers and rates. ``dtype``: of the arithmetic."""

    def __init__(self, recipe: Recipe, config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.device = device
        self.network = Network(config).to(device)
        hidden = config.language.hidden_size
        self.hint_heads = nn.ModuleList([vision_heads(hidden), sound_heads(hidden)]).to(device)
        self.place_head = StateHead(hidden, PLACES).to(device)
        self.fact_head = StateHead(hidden, FACTS).to(device)
        self.modules = {"network": self.network, "hints": self.hint_heads, "place": self.place_head, "facts": self.fact_head}
        self._parameters = [parameter for module in self.modules.values() for parameter in module.parameters()]
        self.dtype = dtype
        rules = config.vision_rules
        assert rules is not None
        frame = rules.temporal_patch_size * rules.patch_size**2
        self._mean = (torch.tensor(rules.image_mean) * 255).repeat_interleave(frame).to(device)
        self._std = (torch.tensor(rules.image_std) * 255).repeat_interleave(frame).to(device)
        matrices, others = _split(self.network)
        muon = Muon(matrices, recipe.matrix_rate, recipe.weight_decay, self.dtype)
        others += [*self.hint_heads.parameters(), *self.place_head.parameters(), *self.fact_head.parameters()]
        adam = AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [(muon, recipe.matrix_rate), (adam, recipe.other_rate)]

    def loss(self, batch: Batch, towers_alone: bool = False) -> tuple[Tensor, Tensor]:
        """What to descend; and for each question whether every token of its answer is the likeliest.

        The mean cross-entropy over the answers' tokens, plus what hints and grounding add; or the hints' alone, and of no question.
        """
        hint = torch.zeros((), device=self.device)
        media = []
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            for rows, head in zip((batch.vision, batch.audio), self.hint_heads, strict=True):
                if rows is not None:
                    media.append((rows.where, self.embed(rows)))
                    hint = hint + head(media[-1][1], rows.hints)
            if towers_alone:
                return hint, torch.zeros(0, device=self.device)
            thought = self.network(batch.ids, batch.positions, batch.mask, media)
            logits = self.network.logits(thought.hidden.flatten(0, 1)[batch.learned - 1])
            ground = missed(batch.looks, thought.attention)
            ground = ground + self.fact_head(thought.states[ANSWER_LAYER].flatten(0, 1)[batch.learned - 1], batch.facts)
            if batch.vision is not None and batch.vision.places is not None:
                ground = ground + self.place_head(thought.states[WORD_LAYER][batch.vision.where], batch.vision.places)
        targets = batch.ids.flatten()[batch.learned]
        right = (logits.argmax(-1) == targets).int()
        all_right = torch.ones(len(batch.tasks), dtype=torch.int32, device=self.device)
        all_right = all_right.scatter_reduce(0, batch.question, right, "amin")
        more = self.recipe.hint_weight * hint + self.recipe.ground_weight * ground
        return F.cross_entropy(logits.float(), targets) + more, all_right

    def embed(self, rows: MediaRows) -> Tensor:
        if rows.positions is None:
            output = self.network.audio_tower(rows.rows, rows.lengths)
        else:
            output = self.network.visual((rows.rows.float() - self._mean) / self._std, rows.positions, rows.lengths)
        kept = torch.arange(output.shape[1], device=output.device) < rows.num_tokens[:, None]
        embedded: Tensor = output[kept]
        return embedded

    def step(self, number: int, batch: Batch, processes: int = 1) -> tuple[float, Tensor]:
        """One update, from the parts of the batch that so many processes have. The mean loss; what is right of this part."""
        with torch.enable_grad():
            loss, right = self.loss(batch.to(self.device), number < self.recipe.towers.steps)
        if loss.requires_grad:  # not so where the towers learn alone and no sample has media
            loss.backward()  # type: ignore[no-untyped-call]
        if processes > 1:
            loss = averaged(self._parameters, loss)
        self.update(number)
        return loss.item(), right

    def update(self, number: int) -> None:
        """What a step does with the gradients."""
        scale = rate_scale(self.recipe, number)
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        nn.utils.clip_grad_norm_(self.network.parameters(), self.recipe.clip_norm)
        for optimizer, _ in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where its products take less time than float32's, as measured; some processors have no units for it."""
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(2048, 256, dtype=dtype, device=device), torch.ones(256, 512, dtype=dtype, device=device)
        best = math.inf
        for _ in range(8):
            began_s = time.perf_counter()
            (a @ b).sum().item()
            best = min(best, time.perf_counter() - began_s)
        times[dtype] = best
    return min(times, key=lambda dtype: times[dtype])


def rate_scale(recipe: Recipe, step: int) -> float:
    """Learning rate at a step, as a share of the full one: a linear rise, a plateau, a linear fall to nothing.

    It rises once for the towers, once more when the language model begins, and again, less, for each lesson behind.
    """
    if (at := recipe.lesson_at(step)) is not None:
        lesson, begun = at
        return lesson.rate * min((begun + 1) / recipe.warmup_steps, (lesson.steps - begun) / lesson.steps)
    decay = recipe.decay_fraction * recipe.steps
    begun = step if step < recipe.towers.steps else step - recipe.towers.steps
    return max(0.0, min(1.0, (begun + 1) / recipe.warmup_steps, (recipe.steps - step) / decay))


def _split(network: Network) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if name == "audio_tower.audio_bos_eos_token.weight":
            continue  # takes no part in the thinker
        (matrices if parameter.dim() == 2 and "embed" not in name else others).append(parameter)
    return matrices, others


def train(
    recipe: Recipe,
    work: Path,
    *,
    workers: int,
    device: str,
    progress: Callable[[int, int, float, dict[str, float]], None],
    processes: int = 1,
    compiled: bool = False,
) -> Network:
    """Train in the directory ``work`` or go on there. ``progress(step, steps, loss, accuracy by task)``, averaged over recent steps.

    The accuracies are those of this process's part of the batches.

    Raises: BegunOtherwiseError if what is there is another recipe's; ProcessEndedError if one of them ends.
    """
    _begin(recipe, work)
    training = Training(recipe, work, torch.device(device), _dtype(work / STATE, torch.device(device)), processes, workers, compiled)
    with together(processes, _follow, training):
        return _lead(training, progress)


def _dtype(state: Path, device: torch.device) -> torch.dtype:
    """Of the arithmetic: what it was, where training goes on."""
    if not state.exists():
        return fast_dtype(device)
    dtype: torch.dtype = torch.load(state, weights_only=True, mmap=True, map_location="cpu")["dtype"]
    return dtype


class Training(NamedTuple):
    """What its processes have in common. ``workers`` of each of them make its batches."""

    recipe: Recipe
    work: Path
    device: torch.device
    dtype: torch.dtype
    processes: int
    workers: int
    compiled: bool

    def begin(self, rank: int) -> tuple[Learner, int, Iterable[Batch]]:
        """A learner as it was last saved, the step that comes next, and this process's parts of the batches from there on."""
        config = load_model_config(self.work)
        learner = Learner(self.recipe, config, self.device, self.dtype)
        file = self.work / STATE
        first = _resume(learner, torch.load(file, weights_only=True, map_location="cpu")) if file.exists() else 0
        if self.compiled:
            for layer in (*learner.network.model.layers, *learner.network.visual.blocks):
                layer.compile(dynamic=True)
        loader = DataLoader(
            Batches(self.recipe, config, Tokenizer.load(self.work), rank, self.processes),
            batch_size=None,
            sampler=range(first, self.recipe.all_steps),
            num_workers=self.workers,
            prefetch_factor=3 if self.workers else None,
            worker_init_fn=_quiet_worker,
        )
        return learner, first, loader


def _follow(rank: int, training: Training) -> None:
    learner, first, loader = training.begin(rank)
    for step, batch in enumerate(loader, first):
        learner.step(step, batch, training.processes)


def _lead(training: Training, progress: Callable[[int, int, float, dict[str, float]], None]) -> Network:
    recipe, work = training.recipe, training.work
    learner, first, loader = training.begin(rank=0)
    _cut_curve(work / CURVE, first)
    recent_loss = 0.0
    recent: dict[str, float] = defaultdict(float)
    saved_s = began_s = time.monotonic()
    with (work / CURVE).open("a", encoding="utf-8") as curve:
        for step, batch in enumerate(loader, first):
            loss, right = learner.step(step, batch, training.processes)
            accuracy = _by_task(batch.tasks, right)
            for task, share in accuracy.items():
                recent[task] += (share - recent[task]) * (2 / AVERAGE_OVER if task in recent else 1.0)
            recent_loss += (loss - recent_loss) * (1.0 if step == first else 2 / AVERAGE_OVER)
            now_s = time.monotonic()
            line = {"step": step, "s": round(now_s - began_s, 1), "medium": batch.medium, "loss": loss, "accuracy": accuracy}
            print(json.dumps(line), file=curve, flush=True)
            progress(step + 1, recipe.all_steps, recent_loss, dict(recent))
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss of step {step} is {loss}")
            if now_s - saved_s > SAVE_EVERY_S:
                saved_s = now_s
                save(learner, step + 1, work / STATE)
    save(learner, recipe.all_steps, work / STATE)
    return learner.network


def _begin(recipe: Recipe, work: Path) -> None:
    """The files of the checkpoint that come before its weights. Raises: BegunOtherwiseError."""
    work.mkdir(parents=True, exist_ok=True)
    made_by = work / MADE_BY
    if not made_by.exists() and not (work / STATE).exists():
        write_skeleton(work, recipe)
        partial = made_by.with_suffix(".partial")
        partial.write_text(repr(recipe))
        partial.rename(made_by)
    elif not made_by.exists() or made_by.read_text() != repr(recipe):
        raise BegunOtherwiseError(f"{work} was begun with another recipe; train in another directory")


def _cut_curve(curve: Path, first: int) -> None:
    """Keep one line for each step before ``first``: later ones are done again, and the last line may be cut short."""
    if curve.exists():
        whole = [line for line in curve.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept = {json.loads(line)["step"]: line for line in whole}
        curve.write_text("".join(kept[step] for step in sorted(kept) if step < first))


def _quiet_worker(_: int) -> None:
    """What computes goes first; while it waits for a batch the worker has the core."""
    torch.set_num_threads(1)
    os.nice(19)


def _by_task(tasks: list[str], right: Tensor) -> dict[str, float]:
    sums: dict[str, list[int]] = defaultdict(list)
    if not len(right):  # the towers learn alone
        return {}
    for task, one in zip(tasks, right.tolist(), strict=True):
        sums[task].append(one)
    return {task: round(sum(ones) / len(ones), 4) for task, ones in sums.items()}


def save(learner: Learner, step: int, file: Path) -> None:
    """Write what is needed to go on with ``step``."""
    partial = file.with_suffix(".partial")
    optimizers = [optimizer.state_dict() for optimizer, _ in learner.optimizers]
    modules = {name: module.state_dict() for name, module in learner.modules.items()}
    torch.save({"step": step, "dtype": learner.dtype, **modules, "optimizers": optimizers}, partial)
    partial.rename(file)


def _resume(learner: Learner, state: dict[str, Any]) -> int:
    """The step that comes next."""
    for name, module in learner.modules.items():
        module.load_state_dict(state[name])
    for (optimizer, _), saved in zip(learner.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"])
