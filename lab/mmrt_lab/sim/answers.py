"""Measures how a run reads its own answers. A client sends back their text, which may be tokenized differently.

A part of ``mmrt bench profile``. The questions are those of the scenario ``chat``: about a picture, where the model takes any.
"""

import asyncio
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from mmrt.bench.serve.target import Target
from mmrt.bench.serve.workload import Lengths, Message, Modality, RequestPlan, plan_steady

from .costs import Answers

NEXT: Message = {"role": "user", "content": "And then?"}
_NUM_ANSWERS = 32
_NUM_AT_ONCE = 4
_LENGTHS = Lengths(input_low=64, input_high=64, max_tokens=96)
_END = 4  # tokens at an answer's end that may change because it is cut there


class Answer(NamedTuple):
    """An answer of ``num_tokens``: the first ``num_kept`` came back as they were, and ``num_new`` others followed."""

    num_tokens: int
    num_kept: int
    num_new: int


async def measure_answers(target: Target, kinds: Sequence[Modality]) -> Answers:
    """Ask questions, and look how the server reads their answers in the next prompt. Raises: BenchError."""
    modality: Modality = "image" if "image" in kinds else "text"
    room = asyncio.Semaphore(_NUM_AT_ONCE)

    async def measure(plan: RequestPlan) -> Answer:
        async with room:
            return await measure_answer(target, target.message(plan), _LENGTHS.max_tokens)

    return summarise(await asyncio.gather(*map(measure, plan_steady({modality: 1.0}, _NUM_ANSWERS, _LENGTHS, 0))))


async def measure_answer(target: Target, question: Message, num_tokens: int) -> Answer:
    """Ask a question, and look how the server reads its answer in the next prompt. Raises: BenchError."""
    options = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    (choice,) = (await target.post("/v1/chat/completions", {"messages": [question], **options}))["choices"]

    async def tokens_of(*messages: Message) -> list[int]:
        return (await target.post("/tokenize", {"messages": messages}))["tokens"]  # type: ignore[no-any-return]

    made: list[int] = choice["token_ids"]
    asked = await tokens_of(question)
    said: list[Message] = [{"role": "assistant", "content": text} for text in (choice["message"]["content"], "")]
    again, without = [await tokens_of(question, answer, NEXT) for answer in said]
    read = again[len(asked) :][: max(0, len(again) - len(without))]  # without what encloses an answer
    num_kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(made, read, strict=False)))
    return Answer(len(made), num_kept, len(read) - num_kept)


def summarise(found: Sequence[Answer]) -> Answers:
    """Combine the answers of a run (pure)."""
    kept = [None if one.num_kept >= one.num_tokens - _END else one.num_kept for one in found]
    changed = [one for one, count in zip(found, kept, strict=True) if count is not None]
    num_others = sum(one.num_tokens - one.num_kept for one in changed)
    return Answers(kept=kept, growth=sum(one.num_new for one in changed) / num_others if changed else 1.0)
