"""Penalties through the openai client, against transformers' logits: its own repetition processor, and the other two by hand."""

import os
import signal
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.oracle import Media, Oracle, check_argmax
from mmrt.tests.end_to_end.test_guidance import companion, guided
from mmrt.tests.end_to_end.test_media import image_part, picture, text

QUESTION = "Say the same word again and again and again."


def penalised(logits: torch.Tensor, prompt: torch.Tensor, ids: list[int], repetition: float, presence: float, frequency: float) -> Any:
    """logits [len(ids), V] before each id."""
    process = RepetitionPenaltyLogitsProcessor(repetition)
    rows = []
    for number in range(len(ids)):
        said = torch.tensor([ids[:number]], dtype=torch.int64)
        row = process(torch.cat((prompt, said), 1), logits[number : number + 1].clone())[0]
        counts = torch.bincount(said[0], minlength=len(row))
        rows.append(row - frequency * counts - presence * (counts > 0))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.5, 0.0, 0.0), (0.8, 0.0, 0.0), (1.0, 2.0, 0.0), (1.0, 0.0, 1.3), (1.2, -0.5, 0.7)]
)
def test_penalised_tokens(server: Server, oracle: Oracle, repetition: float, presence: float, frequency: float) -> None:
    extra = {"repetition_penalty": repetition}
    _, ids = server.chat(QUESTION, max_tokens=40, presence_penalty=presence, frequency_penalty=frequency, extra_body=extra)
    inputs = oracle.inputs([{"role": "user", "content": QUESTION}])
    check_argmax(penalised(oracle.logits(inputs, ids), inputs["input_ids"], ids, repetition, presence, frequency), ids)


def test_with_guidance_and_an_image(server: Server, oracle: Oracle) -> None:
    """After guidance, over the prompt with its media."""
    pixels = picture(4, 98, 126)
    _, ids = server.chat([image_part(pixels), text(QUESTION)], extra_body={"guidance_scale": 2.0, "repetition_penalty": 1.4})
    inputs = oracle.inputs([{"role": "user", "content": [{"type": "image"}, text(QUESTION)]}], Media(images=[pixels]))
    logits = guided(oracle, inputs, companion(oracle, ""), ids, 2.0)
    check_argmax(penalised(logits, inputs["input_ids"], ids, 1.4, 0.0, 0.0), ids)
    server.wait_until_empty()


def test_what_was_said_is_not_forgotten_in_a_crash(server: Server) -> None:
    options: dict[str, Any] = {
        "max_tokens": 150,
        "frequency_penalty": 0.6,
        "extra_body": {"ignore_eos": True, "repetition_penalty": 1.1},
    }
    expected = server.chat(QUESTION, **options)[1]
    ids: list[int] = []
    victim = server.pid("decode")
    for chunk in server.stream(QUESTION, **options):
        ids += [token for choice in chunk.choices for token in (getattr(choice, "token_ids", None) or [])]
        if victim and len(ids) > 20:
            os.kill(victim, signal.SIGKILL)
            victim = 0
    assert not victim and ids == expected
