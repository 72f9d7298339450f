"""Batches: samples of ``demo_model.data`` through mmrt's own preprocessing, padded into tensors.

Step k's batch, or a part of it, depends on the seed and k alone. The training loop reads them through worker processes
(``torch.utils.data``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mmrt.media.mel import LogMel
from mmrt.media.preprocess import image_rows, video_rows
from mmrt.models.architecture import ModelConfig
from mmrt.models.families import qwen2_5_omni
from mmrt.models.text.tokenizer import Tokenizer

from ..data import SHARES, TASKS, Clip, Medium, Picture, Question, Sample, Shares, Sound, crowded, history, roundtrip, sample
from .grounding import Looks, looks
from .hints import Prepared, heard, places, seen
from .prompts import PromptBuilder, TokenRow
from .recipe import Recipe
from .scene import Vocabulary, scenes_of

SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are mmrt.", "Answer briefly.", "You are a helpful assistant. Answer briefly.")

EMPTY_TASK = "empty"
MOST_TURNS = 4


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Media of one kind of a batch, in the order of their tokens.

    Vision: rows uint8 [groups, patches, row bytes], positions [groups, patches, 2], one group per temporal patch.
    Audio: rows float32 [windows, bins, frames]. ``lengths`` patches or frames, ``num_tokens`` per group or window.
    ``hints`` [tokens, parts, questions] and ``places`` [tokens, 4]: hints.py.
    """

    rows: Tensor
    lengths: Tensor
    num_tokens: Tensor
    where: Tensor  # bool [batch, length]: the tokens that they become
    hints: Tensor
    positions: Tensor | None = None
    places: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """ids [batch, length]; positions [batch, 3, length]; mask [batch, length, length]; learned [n]: flat indices of tokens to predict.

    ``question`` [n]: which question each of them answers; ``tasks`` names every question's task. ``looks``, ``facts`` [n, len(FACTS)]:
    grounding.py.
    """

    medium: Medium | Literal["history"]
    ids: Tensor
    positions: Tensor
    mask: Tensor
    learned: Tensor
    question: Tensor
    tasks: list[str]
    vision: MediaRows | None
    audio: MediaRows | None
    looks: Looks
    facts: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The batch with its tensors there."""
        moved: Batch = _moved(self, device)
        return moved


def _moved(values: Any, device: torch.device) -> Any:
    """A dataclass with every tensor in it on the device."""
    changes = {}
    for field in fields(values):
        value = getattr(values, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = value.to(device, non_blocking=True)
        elif is_dataclass(value):
            changes[field.name] = _moved(value, device)
    return replace(values, **changes)


class Batches(Dataset[Batch]):
    """``batches[k]`` is the batch of step k, or one of the ``parts`` of it, of the same medium: every ``parts``-th sample."""

    def __init__(self, recipe: Recipe, config: ModelConfig, tokenizer: Tokenizer, part: int = 0, parts: int = 1) -> None:
        assert config.audio_rules is not None
        self._recipe = recipe
        self._part, self._parts = part, parts
        self._config = config
        self._builder = PromptBuilder(config, tokenizer)
        self._log_mel = LogMel(config.audio_rules)
        self._words = Vocabulary(tokenizer)

    def __len__(self) -> int:
        return self._recipe.all_steps

    def __getitem__(self, step: int) -> Batch:
        recipe = self._recipe
        rng = np.random.default_rng((recipe.seed, step))
        alone = step < recipe.towers.steps
        mixture, batch, shares = recipe.mixture, recipe.batch, SHARES
        if alone:
            mixture, batch = recipe.towers.mixture, recipe.towers.batch
        elif step >= recipe.late.step:
            mixture, shares = recipe.late.mixture, recipe.late.shares
        if (at := recipe.lesson_at(step)) is not None:
            lesson = at[0]
            mixture, shares = lesson.mixture, msgspec.structs.replace(recipe.late.shares, strange=lesson.share)
            if lesson.histories and rng.random() < lesson.histories:
                return self._histories(step, lesson.history_batch, shares)
        names = sorted(mixture)
        weights = np.array([mixture[name] for name in names])
        medium = cast(Medium, names[rng.choice(len(names), p=weights / weights.sum())])
        # Sample numbers of a step are its own: no step needs to know how many samples others took.
        degraded = False if step < recipe.towers.clean_steps else None
        numbers = range(step * 1000, step * 1000 + batch[medium])[self._part :: self._parts]
        if alone and medium == "image":
            samples = [crowded(recipe.seed, number, degraded) for number in numbers]
        else:
            samples = [sample(recipe.seed, number, medium, degraded, shares) for number in numbers]
        return self.collate(medium, rng.random(), samples, [np.random.default_rng((recipe.seed, step, number)) for number in numbers])

    def _histories(self, step: int, size: int, shares: Shares) -> Batch:
        numbers = range(step * 1000, step * 1000 + size)[self._part :: self._parts]
        samples = [history(self._recipe.seed, number, shares) for number in numbers]
        media = [[self._prepare(thing) for thing in one.media] for one in samples]
        rows = [
            self._builder.conversation([prepared.item for prepared in theirs], one.questions, "", turns=one.turns)
            for one, theirs in zip(samples, media, strict=True)
        ]
        return self._pad("history", rows, media)

    def collate(self, medium: Medium, style: float, samples: Sequence[Sample], rngs: Sequence[np.random.Generator]) -> Batch:
        """One batch of these samples; ``style`` (0 to 1) and each sample's ``rng`` decide on what is not in them: order, turns,
        artefacts, questions."""
        augment = self._recipe.augment
        sequences: list[TokenRow] = []
        media: list[list[Prepared]] = []
        for one, rng in zip(samples, rngs, strict=True):
            if rng.random() < augment.empty:
                unasked = replace(self._choose(one.questions, rng)[0], task=EMPTY_TASK, text="")
                one = replace(one, media=(), questions=(unasked,))
            things = [roundtrip(thing, rng) if rng.random() < augment.roundtrip else thing for thing in one.media]
            media.append([self._prepare(thing, number) for number, thing in enumerate(things)])
            items = [prepared.item for prepared in media[-1]]
            chosen = self._choose(one.questions, rng)
            if rng.random() < augment.on_topic:
                chosen.sort(key=lambda question: (question.task not in augment.hardest, TASKS.get(question.task) == "text"))
            system = ""
            if rng.random() < augment.system:
                system = f"<|im_start|>system\n{SYSTEM_PROMPTS[rng.integers(len(SYSTEM_PROMPTS))]}<|im_end|>\n"
            if style < augment.question_first:
                sequences.append(self._builder.conversation(items, chosen[:2], system, True))
            elif style < augment.question_first + augment.turns:
                sequences.append(self._builder.conversation(items, chosen[:MOST_TURNS], system))
            else:
                sequences.append(self._builder.shared(items, chosen, system, self._recipe.row_tokens[medium]))
        return self._pad(medium, sequences, media)

    def _choose(self, questions: Sequence[Question], rng: np.random.Generator) -> list[Question]:
        return [questions[i] for i in rng.permutation(len(questions))]

    def _prepare(self, thing: Picture | Clip | Sound, number: int = 0) -> Prepared:
        """number: which of the sample's media it is; pictures come before sounds."""
        config = self._config
        rules = config.vision_rules
        assert rules is not None
        if isinstance(thing, Sound):
            mel = self._log_mel(thing.pcm)
            item = qwen2_5_omni.audio_item(config, len(mel))
            return Prepared(item, mel, heard(thing, item.num_tokens))
        if isinstance(thing, Picture):
            item = qwen2_5_omni.image_item(config, *thing.pixels.shape[:2])
            rows = image_rows(thing.pixels, item.grid[1] * rules.patch_size, item.grid[2] * rules.patch_size, rules)[None]
            hints = seen([thing.objects], item.grid)
            return Prepared(item, rows, hints, places(item.grid, hints, number))
        wanted = qwen2_5_omni.sample_frames(config, len(thing.frames), thing.fps)
        _, height, width, _ = thing.frames.shape
        item = qwen2_5_omni.video_item(config, len(wanted), height, width, rules.fps)
        height, width = item.grid[1] * rules.patch_size, item.grid[2] * rules.patch_size
        rows = np.stack(list(video_rows((thing.frames[i] for i in wanted), height, width, rules)))
        hints = seen([thing.scenes[i] for i in wanted], item.grid)
        return Prepared(item, rows, hints, places(item.grid, hints, number))

    def _pad(self, medium: Medium | Literal["history"], sequences: Sequence[TokenRow], media: Sequence[Sequence[Prepared]]) -> Batch:
        size, length = len(sequences), max(len(one.ids) for one in sequences)
        ids = np.zeros((size, length), np.int64)
        positions = np.zeros((size, 3, length), np.int64)
        block = np.full((size, length), -1)
        learned: list[npt.NDArray[np.int64]] = []
        for i, one in enumerate(sequences):
            n = len(one.ids)
            ids[i, :n], positions[i, :, :n], block[i, :n] = one.ids, one.positions, one.block
            learned += [i * length + answer for answer in one.answers]
        same = (block[:, None, :] == 0) | (block[:, None, :] == block[:, :, None])
        mask = same & np.tri(length, dtype=bool)
        mask |= np.eye(length, dtype=bool)
        config = self._config
        told = [looks(one, scenes_of(one, config, theirs), self._words) for one, theirs in zip(sequences, media, strict=True)]
        aims = [(i, *aim) for i, (mine, _) in enumerate(told) for aim in mine]
        at, slot, position = torch.tensor([aim[:3] for aim in aims]).unbind(1)
        target = np.zeros((len(aims), length), np.float32)
        for row, (*_, wanted) in zip(target, aims, strict=True):
            row[: len(wanted)] = wanted
        vision = [one for theirs in media for one in theirs if one.item.kind != "audio"]
        audio = [one for theirs in media for one in theirs if one.item.kind == "audio"]
        is_seen = torch.from_numpy((ids == config.image_token_id) | (ids == config.video_token_id))
        is_heard = torch.from_numpy(ids == config.audio_token_id)
        return Batch(
            medium,
            torch.from_numpy(ids),
            torch.from_numpy(positions),
            torch.from_numpy(mask),
            torch.from_numpy(np.concatenate(learned)),
            torch.from_numpy(np.repeat(np.arange(len(learned)), [len(answer) for answer in learned])),
            [task for one in sequences for task in one.tasks],
            _vision(vision, is_seen) if vision else None,
            _audio(audio, is_heard, config) if audio else None,
            Looks(slot, at, position, torch.from_numpy(target)),
            torch.from_numpy(np.concatenate([facts for _, facts in told])),
        )


def _vision(media: Sequence[Prepared], where: Tensor) -> MediaRows:
    groups = sum(one.item.grid[0] for one in media)
    most = max(one.item.grid[1] * one.item.grid[2] for one in media)
    rows = np.zeros((groups, most, media[0].rows.shape[-1]), np.uint8)
    positions = np.zeros((groups, most, 2), np.int64)
    lengths = np.zeros(groups, np.int64)
    at = 0
    for one in media:
        t, h, w = one.item.grid
        rows[at : at + t, : h * w] = one.rows
        positions[at : at + t, : h * w] = patch_positions(h, w)
        lengths[at : at + t] = h * w
        at += t
    counts = torch.from_numpy(lengths)
    hints = torch.cat([one.hints for one in media])
    return MediaRows(
        torch.from_numpy(rows),
        counts,
        counts // 4,
        where,
        hints,
        torch.from_numpy(positions),
        torch.cat([one.places for one in media if one.places is not None]),
    )


def patch_positions(h: int, w: int) -> npt.NDArray[np.int64]:
    """[h * w, 2]: row and column of each patch, in the order of 2 x 2 blocks in which rows lie."""
    grid = np.stack(np.meshgrid(np.arange(h), np.arange(w), indexing="ij"), axis=-1)
    return grid.reshape(h // 2, 2, w // 2, 2, 2).transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def _audio(media: Sequence[Prepared], where: Tensor, config: ModelConfig) -> MediaRows:
    assert config.audio_rules is not None
    step = config.audio_rules.window_frames
    windows = [one.rows[at : at + step] for one in media for at in range(0, len(one.rows), step)]
    lengths = np.array([len(window) for window in windows])
    rows = np.zeros((len(windows), windows[0].shape[1], lengths.max()), np.float32)
    for row, window in zip(rows, windows, strict=True):
        row[:, : len(window)] = window.T
    hints = torch.cat([one.hints for one in media])
    return MediaRows(torch.from_numpy(rows), torch.from_numpy(lengths), torch.from_numpy((lengths + 1) // 2 // 2), where, hints)
