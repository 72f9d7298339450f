"""Gemma 3 with pictures, served: a prefill plan holds a picture whole, whatever its budget; greedy tokens are transformers' argmax from
bytes on, and outlive each stage."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from mmrt.tests.end_to_end.conftest import Server, launching
from mmrt.tests.end_to_end.oracle import check_argmax
from mmrt.tests.end_to_end.test_embedding_cache import KNOWN, Asked, work
from mmrt.tests.end_to_end.test_media import image_part, num_prompt_tokens, picture, text
from mmrt.tests.models.test_gemma3_seeing import processor_of
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")
SMALL = "[scheduling]\nprefill_budget_tokens = 20\n"  # less than a picture's 64


class Case(NamedTuple):
    server: Server
    processor: Any
    model: Any

    def inputs(self, content: list[str | np.ndarray]) -> dict[str, Any]:
        parts = [text(part) if isinstance(part, str) else {"type": "image"} for part in content]
        prompt = self.processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        images = [Image.fromarray(part) for part in content if not isinstance(part, str)] or None
        return dict(self.processor(text=[prompt], images=images, return_tensors="pt"))

    @torch.inference_mode()
    def logits(self, content: list[str | np.ndarray], ids: list[int]) -> torch.Tensor:
        """Of each id."""
        inputs = self.inputs(content)
        prompt = inputs["input_ids"]
        inputs["input_ids"] = torch.cat((prompt, torch.tensor([ids[:-1]], dtype=torch.long)), 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["token_type_ids"] = torch.nn.functional.pad(inputs["token_type_ids"], (0, len(ids) - 1))
        found: torch.Tensor = self.model(**inputs, use_cache=False).logits[0, prompt.shape[1] - 1 :].float()
        return found


def sent(content: list[str | np.ndarray]) -> list[dict[str, Any]]:
    return [text(part) if isinstance(part, str) else image_part(part) for part in content]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, checkpoints: Callable[..., Any]) -> Iterator[Case]:
    path = checkpoints("gemma3_seeing")
    with launching(tmp_path_factory, checkpoints) as start, processor_of(path) as processor:
        torch.set_num_threads(1)
        model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        yield Case(start("gemma3_seeing", SMALL), processor, model)


def test_pictures_and_again(case: Case) -> None:
    """Between newlines that become tokens with those of the text. A second conversation has neither video nor encoder work."""
    for opening in ("First\n", "Once more"):
        content = [opening, picture(1, 56, 56), "then\n\n", picture(2, 31, 400), picture(3, 237, 136), "Compare."]
        asked = Asked(case.server, sent(content))
        check_argmax(case.logits(content, asked.ids), asked.ids)
    assert work(case.server, asked) == KNOWN
    assert num_prompt_tokens(case.server, sent(content)) == case.inputs(content)["input_ids"].shape[1]


def test_hits_that_end_within_a_picture(case: Case) -> None:
    """The page where two prompts part ends within a picture that they share, or the one before does."""
    shared = picture(4, 90, 120)
    for more in range(3):
        content = ["Look at this: " + "and this " * more, shared, "What is it?"]
        for question in ("What is it?", "Where?", "Of which colour is all of it?"):
            content[-1] = question
            asked = Asked(case.server, sent(content), salt=f"hits {more}")
            check_argmax(case.logits(content, asked.ids), asked.ids)


def test_guidance(case: Case) -> None:
    content = [picture(5, 98, 126), "Describe the weather."]
    _, ids = case.server.chat(sent(content), extra_body={"guidance_scale": 2.0})
    c, u = case.logits(content, ids), case.logits([""], ids)
    check_argmax(u + 2.0 * (c - u), ids)


def test_killed_stages_change_no_token(case: Case) -> None:
    content = [picture(6, 90, 120), "and", picture(7, 50, 60), "Compare."]
    answers: list[list[int]] = []
    threads = [threading.Thread(target=lambda: answers.append(case.server.chat(sent(content), max_tokens=60)[1])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for stage in ("encoder", "prefill", "decode"):
        time.sleep(0.1)
        case.server.kill(stage)
    for thread in threads:
        thread.join()
    assert len(answers) == 3 and answers[0] == answers[1] == answers[2]
    check_argmax(case.logits(content, answers[0]), answers[0])
    case.server.wait_until_empty()
