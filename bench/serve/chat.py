"""The ``chat`` scenario: what does a server remember of a conversation?

A conversation begins with a question about a medium. Every later turn sends all of it again, the server's own answers included, and
asks on, as chat clients do. So the first turn costs a picture, and of the later ones a server with a prefix cache computes only what
is new. Called by ``command`` in its event loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from .drivers import Notice, new_record
from .record import Record
from .workload import Lengths, Message, Modality, RequestPlan, plan_steady

WITHOUT_CACHES = ", no caches"  # of the groups of a comparison

Ask = Callable[[Sequence[Message], RequestPlan, Record], Awaitable[str]]
"""Send the messages so far as a request, fill its record, and return the answer's text."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A request per turn, and the user's message of each."""

    turns: tuple[RequestPlan, ...]
    questions: tuple[Message, ...]

    def renamed(self, suffix: str) -> "Conversation":
        """The same conversation, its records in groups of other names."""
        turns = tuple(msgspec.structs.replace(turn, group=turn.group + suffix) for turn in self.turns)
        return msgspec.structs.replace(self, turns=turns)


def plan_chat(modalities: Mapping[Modality, float], num_chats: int, num_turns: int, lengths: Lengths, seed: int) -> list[RequestPlan]:
    """The turns of conversations, one after the other. First turns have an item of each modality named; all have text. The group is
    the turn."""
    width = len(str(num_turns))
    return [
        msgspec.structs.replace(
            chat,
            index=chat.index * num_turns + turn,
            seed=f"{chat.seed}/{turn}",
            group=f"turn {turn + 1:0{width}}",
            media=chat.media if turn == 0 else (),
        )
        for chat in plan_steady(modalities, num_chats, lengths, seed)
        for turn in range(num_turns)
    ]


def make_conversations(plans: Sequence[RequestPlan], num_turns: int, message: Callable[[RequestPlan], Message]) -> list[Conversation]:
    """The conversations of ``plan_chat``'s turns, with their questions."""
    chats = (tuple(plans[start : start + num_turns]) for start in range(0, len(plans), num_turns))
    return [Conversation(turns=turns, questions=tuple(map(message, turns))) for turns in chats]


async def hold(conversation: Conversation, ask: Ask, notice: Notice) -> list[Record]:
    """Ask the questions in order. A turn that fails ends the conversation."""
    records: list[Record] = []
    messages: list[Message] = []
    for plan, question in zip(conversation.turns, conversation.questions, strict=True):
        messages.append(question)
        record = new_record(plan, time.monotonic())
        records.append(record)
        answer = await ask(messages, plan, record)
        notice(record)
        if not record.is_success:
            break
        messages.append({"role": "assistant", "content": answer})
    return records


async def run_chat(conversations: Sequence[Conversation], concurrency: int, ask: Ask, notice: Notice) -> list[Record]:
    """Keep ``concurrency`` conversations going until all are over."""
    records: list[Record] = []
    waiting = iter(conversations)

    async def worker() -> None:
        for conversation in waiting:
            records.extend(await hold(conversation, ask, notice))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(conversations))):
            group.create_task(worker())
    return records


async def run_alternated(conversations: Sequence[Conversation], with_caches: Ask, without: Ask, notice: Notice) -> list[Record]:
    """Hold every conversation with two servers, one after the other, each first in turn, so that neither has the quieter machine."""
    records: list[Record] = []
    for number, conversation in enumerate(conversations):
        pair = [(conversation, with_caches), (conversation.renamed(WITHOUT_CACHES), without)]
        for held, ask in pair if number % 2 == 0 else reversed(pair):
            records += await hold(held, ask, notice)
    return records
