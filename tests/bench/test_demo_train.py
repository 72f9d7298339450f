"""Training of the demo model: the network is transformers', blocks do not see each other, and training can be continued."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from mmrt.bench.demo_data import sample
from mmrt.bench.demo_train.batches import Batch, Batches
from mmrt.bench.demo_train.export import export
from mmrt.bench.demo_train.loop import CURVE, Learner, rate_scale, train
from mmrt.bench.demo_train.recipe import RECIPE, Recipe, load_recipe
from mmrt.bench.demo_train.skeleton import write_skeleton
from mmrt.models.config import load_model_config
from mmrt.models.tokenizer import Tokenizer


def small_recipe(**changes: Any) -> Recipe:
    recipe = load_recipe()
    batch = dict.fromkeys(recipe.batch, 2) | {"questions": 3}
    model = msgspec.structs.replace(recipe.model, text={**recipe.model.text, "num_hidden_layers": 2})
    return msgspec.structs.replace(recipe, **{"batch": batch, "model": model, "steps": 4, "warmup_steps": 1, **changes})


class Prepared:
    def __init__(self, path: Path) -> None:
        self.recipe = small_recipe()
        self.path = path
        write_skeleton(path, self.recipe)
        self.config = load_model_config(path)
        self.tokenizer = Tokenizer.load(path)
        self.batches = Batches(self.recipe, self.config, self.tokenizer)
        self.learner = Learner(self.recipe, self.config, torch.device("cpu"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(tmp_path_factory.mktemp("skeleton"))


@pytest.fixture(scope="module")
def reference(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration

    out = tmp_path_factory.mktemp("export")
    (prepared.path / CURVE).write_text('{"loss": 1.0}\n' * 8)
    with torch.no_grad():  # biases and norms that are not neutral
        generator = torch.Generator().manual_seed(3)
        for parameter in prepared.learner.network.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            parameter.copy_(parameter.bfloat16())
    export(prepared.learner.network, prepared.path, out)
    return Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(out, dtype=torch.float32).eval()


def reference_inputs(prepared: Prepared, batch: Batch, row: int, media: list[Any]) -> dict[str, Any]:
    """One row of a batch as transformers takes it."""
    learner = prepared.learner
    length = int((batch.ids[row] != 0).nonzero().max()) + 1
    inputs: dict[str, Any] = {"input_ids": batch.ids[row : row + 1, :length]}
    pixels: dict[str, list[torch.Tensor]] = {"image": [], "video": []}
    grids: dict[str, list[tuple[int, ...]]] = {"image": [], "video": []}
    for thing in media:
        item, rows = prepared.batches._prepare(thing)
        if item.kind == "audio":
            inputs |= {
                "input_features": torch.from_numpy(rows.T.copy())[None],
                "feature_attention_mask": torch.ones(1, len(rows), dtype=torch.long),
            }
        else:
            normal = (torch.from_numpy(rows.reshape(-1, rows.shape[-1])).float() - learner._mean) / learner._std
            pixels[item.kind].append(normal)
            grids[item.kind].append(item.grid)
    if pixels["image"]:
        inputs |= {"pixel_values": torch.cat(pixels["image"]), "image_grid_thw": torch.tensor(grids["image"])}
    if pixels["video"]:
        inputs |= {"pixel_values_videos": torch.cat(pixels["video"]), "video_grid_thw": torch.tensor(grids["video"])}
        inputs["video_second_per_grid"] = torch.tensor([1.0])
    return inputs


@pytest.mark.parametrize("medium", ["image", "two_images", "video", "audio", "image_audio", "video_audio", "text"])
@pytest.mark.parametrize("question_first", [False, True])
def test_logits_equal_transformers(prepared: Prepared, reference: Any, medium: Any, question_first: bool) -> None:
    batches, learner = prepared.batches, prepared.learner
    samples = [sample(5, i, medium) for i in range(2)]
    rows, items, sequences = [], [], []
    for one in samples:
        pairs = [batches._prepare(thing) for thing in one.media]
        items.append([item for item, _ in pairs])
        rows.append([data for _, data in pairs])
        sequences.append(batches._builder.conversation(items[-1], one.questions[:2], "", question_first))
    batch = batches._pad(medium, sequences, items, rows)
    with torch.no_grad():
        media = [(part.where, learner.embed(part)) for part in (batch.vision, batch.audio) if part is not None]
        ours = learner.network.logits(learner.network(batch.ids, batch.positions, batch.mask, media))
        for row, one in enumerate(samples):
            inputs = reference_inputs(prepared, batch, row, list(one.media))
            theirs = reference(attention_mask=torch.ones_like(inputs["input_ids"]), **inputs).logits[0]
            torch.testing.assert_close(ours[row, : len(theirs)], theirs, rtol=2e-4, atol=2e-4)


def test_questions_with_one_prefix_are_conversations_of_their_own(prepared: Prepared) -> None:
    batches, learner = prepared.batches, prepared.learner
    one = sample(6, 0, "image_audio")
    pairs = [batches._prepare(thing) for thing in one.media]
    items, rows = [item for item, _ in pairs], [data for _, data in pairs]
    questions = one.questions[:3]
    together = batches._pad("image_audio", [batches._builder.shared(items, questions, "")], [items], [rows])
    with torch.no_grad():

        def hidden(batch: Batch) -> torch.Tensor:
            media = [(part.where, learner.embed(part)) for part in (batch.vision, batch.audio) if part is not None]
            return learner.network(batch.ids, batch.positions, batch.mask, media).flatten(0, 1)[batch.learned - 1]

        found = hidden(together)
        for number, question in enumerate(questions):
            alone = batches._pad("image_audio", [batches._builder.conversation(items, [question], "", False)], [items], [rows])
            torch.testing.assert_close(found[together.question == number], hidden(alone), rtol=1e-4, atol=1e-4)


def test_a_prompt_is_what_the_chat_template_makes_of_it(prepared: Prepared) -> None:
    from mmrt.models.chat_template import ChatTemplate

    template = ChatTemplate.load(prepared.path)
    one = sample(7, 1, "image_audio")
    items = [prepared.batches._prepare(thing)[0] for thing in one.media]
    content: list[dict[str, str]] = [{"type": item.kind} for item in items]
    question = one.questions[0]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": question.text}]}]
    expected = prepared.tokenizer.encode(template.render(messages))
    row = prepared.batches._builder.shared(items, [question], "")
    prompt = row.ids[: row.answers[0][0]]
    placeholders = (prepared.config.image_token_id, prepared.config.audio_token_id)
    kept = [token for i, token in enumerate(prompt) if token not in placeholders or token != prompt[i - 1]]
    assert kept == expected
    assert prepared.tokenizer.decode(row.ids[row.answers[0]].tolist()).startswith(question.answer)


def test_a_batch_depends_on_seed_and_step_alone(prepared: Prepared) -> None:
    first, again = prepared.batches[3], prepared.batches[3]
    assert torch.equal(first.ids, again.ids)
    assert first.tasks == again.tasks


def test_training_learns_and_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    recipe = small_recipe(mixture={"text": 1.0}, steps=6)
    seen: list[int] = []

    class Interrupted(Exception):
        pass

    def interrupt(step: int, *_: Any) -> None:
        seen.append(step)
        if step == 3:
            raise Interrupted

    import mmrt.bench.demo_train.loop as loop

    whole = train(recipe, tmp_path / "whole", workers=0, device="cpu", progress=lambda *_: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "SAVE_EVERY_S", 0.0)
        with pytest.raises(Interrupted):
            train(recipe, tmp_path / "parts", workers=0, device="cpu", progress=interrupt)
        with (tmp_path / "parts" / CURVE).open("a") as curve:
            curve.write('{"step": 3, "lo')  # killed in the middle of a line
        parts = train(recipe, tmp_path / "parts", workers=0, device="cpu", progress=lambda *_: None)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], value, msg=name)
    lines = [json.loads(line) for line in (tmp_path / "parts" / CURVE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]  # step 2 was done twice
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_rates_rise_stay_and_fall() -> None:
    recipe = small_recipe(steps=100, warmup_steps=10)
    scales = [rate_scale(recipe, step) for step in range(101)]
    assert scales[0] == pytest.approx(0.1)
    assert scales[50] == 1.0
    assert scales[100] == 0.0
    assert all(np.diff(scales[65:]) <= 0)


def test_a_recipe_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text("stepz = 3\n" + RECIPE.read_text())
    with pytest.raises(ValueError, match="stepz"):
        load_recipe(file)
    file.write_text(RECIPE.read_text().replace("[mixture]", "[mixture]\nsmell = 0.10"))
    with pytest.raises(ValueError, match="smell"):
        load_recipe(file)
