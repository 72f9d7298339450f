"""Samples as token sequences: what a chat prompt of mmrt becomes, with the answers behind the questions. Pure.

Several questions about the same media share one prefix: each block of question and answer looks at the prefix and at itself, and its
positions continue the prefix. One sequence then teaches what as many separate conversations would.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmrt.models.architecture import ModelConfig
from mmrt.models.families import qwen2_5_omni
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.schema.media import ItemShape, MediaSpan

from ..data import Question

Ids = npt.NDArray[np.int64]
MARKS = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One row of a batch. ``block`` [length]: 0 for the prefix, k for question k; ``answers``: where each answer's tokens stand;
    ``spans``: where each medium does; ``about``: which of these each answer is about, the first and the one behind the last."""

    ids: Ids
    positions: Ids  # [3, length]
    block: Ids
    answers: list[Ids]
    tasks: list[str]
    spans: list[MediaSpan]
    about: list[tuple[int, int]]


class PromptBuilder:
    """Makes sequences for one model and tokenizer."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._placeholders = {"image": config.image_token_id, "video": config.video_token_id, "audio": config.audio_token_id}

    def shared(self, items: Sequence[ItemShape], questions: Sequence[Question], system: str, most_tokens: int) -> TokenRow:
        """Media first; behind them, each for itself, the first question and those others that fit into a row of ``most_tokens``."""
        prefix, spans = self._expand(system + USER + "".join(MARKS[item.kind] for item in items), items)
        positions, delta = qwen2_5_omni.positions(self._config, len(prefix), spans)
        parts, blocks, learned = [prefix], [np.zeros(len(prefix), np.int64)], []
        tasks: list[str] = []
        all_positions = [positions]
        length = len(prefix)
        for question in questions:
            asked, answer = self._question(question)
            ids = np.concatenate([asked, answer])
            if tasks and length + len(ids) > most_tokens:
                continue
            tasks.append(question.task)
            first = len(prefix) + delta
            all_positions.append(np.broadcast_to(np.arange(first, first + len(ids)), (3, len(ids))))
            learned.append(np.arange(length + len(asked), length + len(ids)))
            parts.append(ids)
            blocks.append(np.full(len(ids), len(tasks)))
            length += len(ids)
        ids = np.concatenate(parts)
        about = [(0, len(items))] * len(tasks)
        return TokenRow(ids, np.concatenate(all_positions, 1), np.concatenate(blocks), learned, tasks, spans, about)

    def conversation(
        self,
        items: Sequence[ItemShape],
        questions: Sequence[Question],
        system: str,
        question_first: bool = False,
        turns: Sequence[int] = (),
    ) -> TokenRow:
        """One conversation of as many turns as questions. turns: of each item, as in ``Sample``; empty: all are in the first. An answer
        is about the items of the last turn that has any."""
        turns = turns or (0,) * len(items)
        parts: list[Ids] = []
        spans: list[MediaSpan] = []
        learned, about = [], []
        length, first, end = 0, 0, 0
        for number, question in enumerate(questions):
            mine = [item for item, turn in zip(items, turns, strict=True) if turn == number]
            if mine:
                first, end = end, end + len(mine)
            marks = "".join(MARKS[item.kind] for item in mine)
            asked = question.text + marks if question_first else marks + question.text
            ids, found = self._expand(("\n" if number else system) + USER + asked + ASSISTANT, mine)
            spans += [MediaSpan(length + span.start, span.shape) for span in found]
            answer = self._answer(question)
            length += len(ids)
            learned.append(np.arange(length, length + len(answer)))
            length += len(answer)
            parts += [ids, answer]
            about.append((first, end))
        positions, _ = qwen2_5_omni.positions(self._config, length, spans)
        tasks = [question.task for question in questions]
        return TokenRow(np.concatenate(parts), positions, np.zeros(length, np.int64), learned, tasks, spans, about)

    def _question(self, question: Question) -> tuple[Ids, Ids]:
        return np.array(self._tokenizer.encode(question.text + ASSISTANT), np.int64), self._answer(question)

    def _answer(self, question: Question) -> Ids:
        return np.array(self._tokenizer.encode(question.answer + END), np.int64)

    def _expand(self, prompt: str, items: Sequence[ItemShape]) -> tuple[Ids, list[MediaSpan]]:
        parts: list[Ids] = []
        spans: list[MediaSpan] = []
        length = 0
        waiting = list(items)
        for token in self._tokenizer.encode(prompt):
            count = 1
            if waiting and token == self._placeholders[waiting[0].kind]:
                item = waiting.pop(0)
                spans.append(MediaSpan(length, item))
                count = item.num_tokens
            parts.append(np.full(count, token, np.int64))
            length += count
        assert not waiting
        return np.concatenate(parts), spans
