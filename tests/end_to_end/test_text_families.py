"""Checkpoints without towers through all processes: tokens are transformers', media are refused, no memory is kept for them."""

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from mmrt.shm.controller_stats import ControllerStats
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.end_to_end.conftest import Server, also_slow
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")
TIE = 1e-4
QUESTIONS = ["Hi", "What is the colour of the sky on a clear day?", "Tell me a long story. " * 60, "naïve café — ÿ 漢字 🙂"]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


class TextOracle:
    """A checkpoint in transformers, float32."""

    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def ids_of(self, question: str) -> list[int]:
        text = self.tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def logits(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """Those before each token of the answer, all earlier ones given."""
        logits: torch.Tensor = self._model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]
        return logits

    @torch.inference_mode()
    def hidden(self, prompt: list[int]) -> torch.Tensor:
        """The last hidden states of a prompt."""
        states: torch.Tensor = self._model.model(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
        return states

    @torch.inference_mode()
    def check_greedy(self, prompt: list[int], answer: list[int]) -> None:
        """Check that each token of the answer is the argmax, or as good, after all before it."""
        logits = self.logits(prompt, answer)
        said = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        assert answer and float((logits.amax(1) - said).max()) < TIE


@pytest.fixture(scope="module", params=["qwen3_moe", *also_slow("llama", "qwen2", "qwen3", "mistral", "gemma3")])
def text_server(request: pytest.FixtureRequest, launch: Callable[..., Server]) -> Iterator[Server]:
    server = launch(request.param)
    yield server
    server.down()


@pytest.fixture(scope="module")
def text_oracle(text_server: Server) -> TextOracle:
    return TextOracle(text_server.checkpoint)


def test_chats_at_once(text_server: Server, text_oracle: TextOracle) -> None:
    answers: dict[str, list[int]] = {}

    def run(question: str) -> None:
        answers[question] = text_server.chat(question)[1]

    threads = [threading.Thread(target=run, args=(question,)) for question in QUESTIONS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers.keys() == {*QUESTIONS}
    for question, ids in answers.items():
        text_oracle.check_greedy(text_oracle.ids_of(question), ids)
    text_server.wait_until_empty()


@pytest.mark.slow
def test_where_all_layers_have_a_window_a_row_keeps_its_pages_alone(launch: Callable[..., Server]) -> None:
    """Of 4k tokens, with prefill and decode killed on the way. KV pages are places alone."""
    server = launch("mistral")
    oracle, question = TextOracle(server.checkpoint), "one two three four five six seven eight nine ten " * 390
    most, kills, prompt = 0, ["prefill", "decode"], oracle.ids_of(question)
    with RunDirectory.attach(server.run_path) as run, closing(ControllerStats.attach(run)) as stats:
        while kills:  # decode may be done with its 80 tokens between two looks
            ids = list[int]()
            asked = threading.Thread(target=lambda ids=ids: ids.extend(server.chat(question, max_tokens=80)[1]))
            asked.start()
            while asked.is_alive():
                now = stats.read()
                most = max(most, now.pools["window"].used)
                if kills and (now.preparing if kills[0] == "prefill" else now.running) and now.pools["window"].used:
                    server.kill(kills.pop(0))
                asked.join(0.005)
            oracle.check_greedy(prompt, ids)
    assert len(prompt) > 3000 and 0 < most <= 2 * (48 // 16 + 512 // 16) + 8, f"{most} pages of windows of {len(prompt) // 16}"
    server.wait_until_empty()
    server.down()


def test_a_prompt_without_a_template(text_server: Server, text_oracle: TextOracle) -> None:
    found = text_server.client.completions.create(
        model=text_server.checkpoint.name, prompt=QUESTIONS[1], max_tokens=20, temperature=0, extra_body={"return_token_ids": True}
    )
    text_oracle.check_greedy(text_oracle.tokenizer(QUESTIONS[1])["input_ids"], found.choices[0].token_ids)  # type: ignore[attr-defined]


def test_media_are_refused_with_the_kind_of_model(text_server: Server) -> None:
    family = text_server.checkpoint.name.removeprefix("tiny-")
    content: Any = [{"type": "text", "text": "What is this?"}, PICTURE]
    with pytest.raises(openai.BadRequestError, match=f"the model does not take image: a {family} model is served as text"):
        text_server.chat(content)


def test_no_memory_is_kept_for_media(text_server: Server, tmp_path: Path) -> None:
    pools = text_server.status()["pools"]
    assert [pools[name]["pages"] for name in ("media", "patch", "embedding")] == [1, 1, 1]
    other = Server(tmp_path, text_server.checkpoint)
    shown = other.mmrt("up", "--dry-run", "--model", str(other.checkpoint), "--port", "0").stdout
    assert "it takes       text\n" in shown and "1 pages of 65536 bytes (the model takes text alone)" in shown
    assert [line.split()[1] for line in text_server.mmrt("model", "show").stdout.splitlines()] == ["TAKES", "text"]


def test_the_page_is_told(text_server: Server) -> None:
    with urllib.request.urlopen(f"{text_server.url}/page/limits") as answer:
        assert json.load(answer)["kinds"] == []
