"""lm-eval: multiple choice, perplexity and generation, with data sets made here and the tokenizer of the checkpoint."""

import json
import os
from pathlib import Path
from typing import Any

os.environ |= {"HF_HOME": str(Path("hf").absolute()), "HF_HUB_OFFLINE": "1"}  # before libraries read them

import requests
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from served import BASE_URL, CHECKPOINT, HELLO, HELLO_ANSWER, MODEL, URL

COLOURS = ["red", "green", "dark blue"]
SHAPES = [{"shape": shape, "colour": COLOURS[at % 3]} for at, shape in enumerate(["circle", "square", "star", "cross"])]
MANAGER = TaskManager(include_defaults=False)
GREETING = [{"question": HELLO, "answer": HELLO_ANSWER}]


def task(name: str, docs: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    """A task whose data set is a file made here."""
    file = Path(f"{name}.jsonl").absolute()
    file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        **options,
    }


def evaluate(*tasks: dict[str, Any], with_template: bool = False, batch_size: int = 1, num_concurrent: int = 1) -> Any:
    """Run tasks by text completions."""
    arguments = {"model": MODEL, "base_url": f"{BASE_URL}/completions", "tokenizer": str(CHECKPOINT), "num_concurrent": num_concurrent}
    options = {"batch_size": batch_size, "apply_chat_template": with_template, "bootstrap_iters": 0, "task_manager": MANAGER}
    return simple_evaluate("local-completions", model_args=arguments, tasks=list(tasks), **options)


def evaluate_chats(task: dict[str, Any]) -> Any:
    arguments = {"model": MODEL, "base_url": f"{BASE_URL}/chat/completions", "max_retries": 1}
    options = {"apply_chat_template": True, "bootstrap_iters": 0, "task_manager": MANAGER}
    return simple_evaluate("local-chat-completions", model_args=arguments, tasks=[task], **options)


def logprobs(context: str, rest: str) -> list[float]:
    """The server's log-probabilities of the tokens of ``rest``, by another way than ``echo``."""
    known, ids = (
        requests.post(f"{URL}/tokenize", json={"prompt": text}, timeout=60).json()["tokens"] for text in (context, context + rest)
    )
    asked = {"model": MODEL, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    (choice,) = requests.post(f"{BASE_URL}/completions", json=asked, timeout=60).json()["choices"]
    return [entry[str(id)]["logprob"] for entry, id in list(zip(choice["prompt_logprobs"], ids, strict=True))[len(known) :]]


def generation(name: str, **rules: Any) -> dict[str, Any]:
    """A greeting, to which the demo model knows the answer."""
    rules = {"until": ["<|im_end|>"], "temperature": 0, "max_gen_toks": 64, **rules}
    metric = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    fields = {"doc_to_text": "{{question}}", "doc_to_target": "answer", "generation_kwargs": rules, "metric_list": [metric]}
    return task(name, GREETING, output_type="generate_until", **fields)


# Loglikelihoods, one by one and four prompts to a request.
shapes = {"doc_to_text": "The {{shape}} is", "doc_to_choice": COLOURS, "doc_to_target": "colour"}
texts = {"doc_to_text": "", "doc_to_target": "A {{shape}} is {{colour}}, and a tone is not."}
for batch_size in (1, 4):
    found = evaluate(
        task("shapes", SHAPES, output_type="multiple_choice", **shapes),
        task("texts", SHAPES, output_type="loglikelihood_rolling", **texts),
        batch_size=batch_size,
    )
    for sample in found["samples"]["shapes"]:
        for (context, rest), ((logprob, _),) in zip(sample["arguments"], sample["resps"], strict=True):
            assert abs(logprob - sum(logprobs(context, rest))) < 1e-4, (context, rest)
    for sample in found["samples"]["texts"]:
        ((text,),), ((logprob,),) = sample["arguments"], sample["resps"]
        assert abs(logprob - sum(logprobs("<|im_end|>", text))) < 1e-4, text  # lm-eval begins a text by the token that ends one

# With the chat template the model knows the answer.
choice = {
    "doc_to_text": "{{question}}",
    "doc_to_choice": [HELLO_ANSWER, "Red.", "Three."],
    "doc_to_target": "answer",
    "target_delimiter": "",
}
greeting = task("greeting", GREETING, output_type="multiple_choice", **choice)
found = evaluate(greeting, generation("continued"), with_template=True, batch_size=2, num_concurrent=2)
assert found["results"]["greeting"]["acc,none"] == 1, found["samples"]["greeting"]
assert found["results"]["continued"]["exact_match,none"] == 1, found["samples"]["continued"]
found = evaluate_chats(generation("answered"))
assert found["results"]["answered"]["exact_match,none"] == 1, found["samples"]["answered"]
try:
    evaluate_chats(generation("refused", top_p=7))
except requests.HTTPError as raised:
    assert raised.response.status_code == 400 and "top_p" in raised.response.text
else:
    raise AssertionError("a top_p of 7 was not refused")
