"""Batches of the demo model's training: prompts, rows, order of questions; and logits that are transformers'."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from mmrt.demo_model.tests.small_training import Prepared, lesson, small_recipe, towers
from mmrt_demo_model.data import TASKS, Shares, sample
from mmrt_demo_model.training.batches import Batch, Batches
from mmrt_demo_model.training.export import export
from mmrt_demo_model.training.loop import CURVE
from mmrt_demo_model.training.recipe import Augment, Late


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
        item, rows, *_ = prepared.batches._prepare(thing)
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


@pytest.mark.slow
@pytest.mark.parametrize("medium", ["image", "two_images", "video", "audio", "image_audio", "video_audio", "text"])
@pytest.mark.parametrize("question_first", [False, True])
def test_logits_equal_transformers(prepared: Prepared, reference: Any, medium: Any, question_first: bool) -> None:
    batches, learner = prepared.batches, prepared.learner
    samples = [sample(5, i, medium) for i in range(2)]
    media, sequences = [], []
    for one in samples:
        media.append([batches._prepare(thing) for thing in one.media])
        sequences.append(batches._builder.conversation([one.item for one in media[-1]], one.questions[:2], "", question_first))
    batch = batches._pad(medium, sequences, media)
    with torch.no_grad():
        embedded = [(part.where, learner.embed(part)) for part in (batch.vision, batch.audio) if part is not None]
        ours = learner.network.logits(learner.network(batch.ids, batch.positions, batch.mask, embedded).hidden)
        for row, one in enumerate(samples):
            inputs = reference_inputs(prepared, batch, row, list(one.media))
            theirs = reference(attention_mask=torch.ones_like(inputs["input_ids"]), **inputs).logits[0]
            torch.testing.assert_close(ours[row, : len(theirs)], theirs, rtol=2e-4, atol=2e-4)


def test_questions_with_one_prefix_are_conversations_of_their_own(prepared: Prepared) -> None:
    batches, learner = prepared.batches, prepared.learner
    one = sample(6, 0, "image_audio")
    media = [batches._prepare(thing) for thing in one.media]
    items = [one.item for one in media]
    questions = one.questions[:3]
    together = batches._pad("image_audio", [batches._builder.shared(items, questions, "", 1000)], [media])
    with torch.no_grad():

        def hidden(batch: Batch) -> torch.Tensor:
            media = [(part.where, learner.embed(part)) for part in (batch.vision, batch.audio) if part is not None]
            return learner.network(batch.ids, batch.positions, batch.mask, media).hidden.flatten(0, 1)[batch.learned - 1]

        found = hidden(together)
        for number, question in enumerate(questions):
            alone = batches._pad("image_audio", [batches._builder.conversation(items, [question], "", False)], [media])
            torch.testing.assert_close(found[together.question == number], hidden(alone), rtol=1e-4, atol=1e-4)


def test_a_prompt_is_what_the_chat_template_makes_of_it(prepared: Prepared) -> None:
    from mmrt.models.text.chat_template import ChatTemplate

    template = ChatTemplate.load(prepared.path)
    one = sample(7, 1, "image_audio")
    items = [prepared.batches._prepare(thing)[0] for thing in one.media]
    content: list[dict[str, str]] = [{"type": item.kind} for item in items]
    question = one.questions[0]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": question.text}]}]
    expected = prepared.tokenizer.encode(template.render(messages))
    row = prepared.batches._builder.shared(items, [question], "", 0)
    prompt = row.ids[: row.answers[0][0]]
    placeholders = (prepared.config.image_token_id, prepared.config.audio_token_id)
    kept = [token for i, token in enumerate(prompt) if token not in placeholders or token != prompt[i - 1]]
    assert kept == expected
    assert prepared.tokenizer.decode(row.ids[row.answers[0]].tolist()).startswith(question.answer)


def test_a_row_takes_the_questions_that_fit(prepared: Prepared) -> None:
    questions = sample(7, 2, "text").questions
    everything = prepared.batches._builder.shared([], questions, "", 1000)
    assert everything.tasks == [question.task for question in questions]
    row = prepared.batches._builder.shared([], questions, "", len(everything.ids) - 1)
    assert len(row.ids) < len(everything.ids) and row.tasks[0] == everything.tasks[0]
    assert row.block.max() == len(row.tasks) == len(row.answers) < len(everything.tasks)


def test_a_batch_depends_on_seed_and_step_alone(prepared: Prepared) -> None:
    recipe = small_recipe(mixture={"image": 1.0})
    first, again, other = (Batches(recipe, prepared.config, prepared.tokenizer)[step] for step in (3, 3, 4))
    assert torch.equal(first.ids, again.ids)
    assert first.tasks == again.tasks
    assert first.vision is not None and again.vision is not None
    assert torch.equal(first.vision.rows, again.vision.rows)
    assert first.ids.shape != other.ids.shape or not torch.equal(first.ids, other.ids)


def collated(prepared: Prepared, **changes: Any) -> Batch:
    """Four pictures, with other probabilities, those left out being 0."""
    augment = Augment(**{**dict.fromkeys(Augment.__struct_fields__, 0.0), "hardest": (), **changes})
    batches = Batches(msgspec.structs.replace(prepared.recipe, augment=augment), prepared.config, prepared.tokenizer)
    rngs = [np.random.default_rng((1, number)) for number in range(4)]
    return batches.collate("image", 0.5, [sample(4, number, "image", False) for number in range(4)], rngs)


def test_the_hardest_questions_come_first_and_those_about_something_else_last(prepared: Prepared) -> None:
    samples = [sample(4, number, "image", False) for number in range(4)]
    hardest = ("list", "position", "digits")
    asked = collated(prepared, on_topic=1.0, turns=1.0, hardest=hardest).tasks
    at = 0
    for one in samples:
        num = min(4, len(one.questions))
        ranks = [(task not in hardest, TASKS[task] == "text") for task in asked[at : at + num]]
        best = sorted((question.task not in hardest, TASKS[question.task] == "text") for question in one.questions)[:num]
        assert ranks == best
        at += num
    assert at == len(asked)


def test_samples_without_anything_teach_the_unconditional_member(prepared: Prepared) -> None:
    batch = collated(prepared, empty=1.0)
    assert set(batch.tasks) == {"empty"} and batch.vision is None


def test_the_question_may_come_before_the_media(prepared: Prepared) -> None:
    for share in (0.0, 1.0):
        batch = collated(prepared, question_first=share)
        ids = batch.ids[0].tolist()
        media = ids.index(prepared.config.image_token_id)
        asked = prepared.tokenizer.decode(ids[:media]).partition("user\n")[2]
        assert (" " in asked) == bool(share), asked


def test_late_batches_are_of_other_media_and_pictures(prepared: Prepared) -> None:
    sizes = {**prepared.recipe.batch, "image": 8}
    recipe = small_recipe(mixture={"text": 1.0}, late=Late(2, {"image": 1.0}, Shares(0.0, 1.0)), batch=sizes)
    batches = Batches(recipe, prepared.config, prepared.tokenizer)
    assert [batches[step].medium for step in range(4)] == ["text", "text", "image", "image"]
    asked = {*batches[2].tasks, *batches[3].tasks}
    assert "list" in asked and not {"describe", "shape", "size"} & asked, "neither numbers nor single things"


def test_the_last_batches_are_of_another_world(prepared: Prepared) -> None:
    recipe = small_recipe(mixture={"text": 1.0}, steps=2, late=Late(2, {"text": 1.0}, Shares()), lessons=(lesson(1), lesson(1)))
    batches = Batches(recipe, prepared.config, prepared.tokenizer)
    assert [batches[step].medium for step in range(len(batches))] == ["text", "text", "audio", "audio"]
    assert "strange" in batches[2].tasks and "strange" not in batches[1].tasks


def test_as_many_samples_are_degraded_as_is_said() -> None:
    hard = [sum(sample(3, number, "audio", None, Shares(degraded=share)).degraded for number in range(40)) for share in (0.0, 0.8, 1.0)]
    assert hard[0] == 0 and 25 <= hard[1] <= 38 and hard[2] == 40


def test_several_things_may_be_of_few_shapes_and_colours() -> None:
    pictures = [sample(3, number, "image", False, Shares(0.0, 1.0, ("few",))).media[0] for number in range(24)]
    kinds = [({thing.label for thing in picture.objects}, {thing.colour for thing in picture.objects}) for picture in pictures]
    assert {(len(labels), len(colours)) for labels, colours in kinds} == {(1, 1), (1, 2), (2, 1), (2, 2)}


def test_towers_learn_from_crowds(prepared: Prepared) -> None:
    recipe = small_recipe(towers=towers(2))
    batch = Batches(recipe, prepared.config, prepared.tokenizer)[0]
    assert batch.vision is not None
    assert int((batch.vision.hints[..., 3] > 0).sum()) >= 2 * 6, "six things or more in each of two pictures"


def test_parts_make_up_a_batch(prepared: Prepared) -> None:
    recipe = small_recipe(batch=dict.fromkeys(prepared.recipe.batch, 3), mixture={"image": 1.0}, steps=6)
    whole, *parts = (Batches(recipe, prepared.config, prepared.tokenizer, *part)[5] for part in ((0, 1), (0, 2), (1, 2)))
    assert [len(part.ids) for part in parts] == [2, 1]
    assert sorted(whole.tasks) == sorted(task for part in parts for task in part.tasks)
    for number, row in enumerate(whole.ids):
        part = parts[number % 2]
        theirs, length = part.ids[number // 2], min(len(row), part.ids.shape[1])
        assert torch.equal(row[:length], theirs[:length]) and not row[length:].any() and not theirs[length:].any()
        assert whole.vision is not None and part.vision is not None
        num_patches = int(whole.vision.lengths[number])
        assert torch.equal(whole.vision.rows[number, :num_patches], part.vision.rows[number // 2, :num_patches])
