"""inspect-ai: a task with pictures that are drawn here, greedy, scored by the answer; and one without."""

from pathlib import Path
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageUser, ContentImage, ContentText, get_model
from inspect_ai.scorer import match
from served import BASE_URL, COLOUR, COLOUR_ANSWER, HELLO, HELLO_ANSWER, MODEL, PICTURE_URL

QUESTIONS = {COLOUR: COLOUR_ANSWER, "What shape is yellow?": "A star.", "Where is the star?": "Bottom right."}


def about_the_picture(question: str, answer: str) -> Sample:
    parts: list[Any] = [ContentImage(image=PICTURE_URL), ContentText(text=question)]
    return Sample(input=[ChatMessageUser(content=parts)], target=answer)


model = get_model(f"openai-api/mmrt/{MODEL}", base_url=BASE_URL, api_key="none")
samples = [about_the_picture(*pair) for pair in QUESTIONS.items()] + [Sample(input=HELLO, target=HELLO_ANSWER)]
task = Task(dataset=MemoryDataset(samples), scorer=match(location="exact"))
(log,) = eval(task, model=model, temperature=0, max_tokens=64, log_dir=str(Path("logs").absolute()), display="none", max_retries=0)
assert log.status == "success" and log.results is not None, log.error
assert log.results.scores[0].metrics["accuracy"].value == 1
(usage,) = log.stats.model_usage.values()
assert usage.output_tokens > len(samples) and usage.input_tokens > len(samples)
