"""How many tokens of an answer the next turn finds in the cache: as a run with a cache says."""

import asyncio

from mmrt.bench.serve.client import open_session
from mmrt.bench.serve.options import parse_options
from mmrt.bench.serve.target import Target
from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.oracle import Oracle
from mmrt.tests.end_to_end.test_prefix_cache import LONG, Answer, whole_pages
from mmrt_lab.sim import answers as measured
from mmrt_lab.sim.answers import NEXT, measure_answer


def test_a_profile_says_how_answers_come_back(server: Server, oracle: Oracle) -> None:
    """``bench profile`` measures how many tokens of an answer the next turn finds in the cache, and how many are new."""
    questions = [{"role": "user", "content": f"Question {number}. {LONG}"} for number in range(4)]

    async def measure() -> list[measured.Answer]:
        async with open_session(60) as session:
            target = Target(session, parse_options(["--url", server.url]), server.url, server.checkpoint.name)
            return [await measure_answer(target, question, 32) for question in questions]

    found = asyncio.run(measure())
    assert any(one.num_kept < one.num_tokens for one in found)
    for question, one in zip(questions, found, strict=True):
        first = Answer(server, [question], max_tokens=one.num_tokens, extra_body={"ignore_eos": True})
        turns = [[question, {"role": "assistant", "content": text}, NEXT] for text in (first.text, "")]
        asked, with_answer, without = [oracle.inputs(messages)["input_ids"].shape[1] for messages in ([question], *turns)]
        assert with_answer - without == one.num_kept + one.num_new
        second = Answer(server, turns[0])
        assert whole_pages(asked + one.num_kept - 1) <= second.num_cached <= asked + one.num_kept
