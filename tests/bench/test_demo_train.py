"""Training of the demo model: the network is transformers', blocks do not see each other, and training can be continued."""

import json
import math
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mmrt.bench.demo_data import TASKS, Clip, Picture, Placed, Sound, sample
from mmrt.bench.demo_data.kinds import Note, Question
from mmrt.bench.demo_train import loop, warm_start
from mmrt.bench.demo_train.batches import Batch, Batches
from mmrt.bench.demo_train.export import export
from mmrt.bench.demo_train.grounding import (
    COLOURS,
    NAMED,
    OTHER_WORDS,
    OTHERS,
    SLOTS,
    THINGS,
    WORDS,
    Looks,
    Vocabulary,
    looks,
    missed,
    scene_of,
)
from mmrt.bench.demo_train.hints import IGNORED, INKS, LABELS, heard, seen
from mmrt.bench.demo_train.loop import CURVE, STATE, BegunOtherwiseError, Learner, rate_scale, train
from mmrt.bench.demo_train.muon import Muon
from mmrt.bench.demo_train.processes import ProcessEndedError, averaged, together
from mmrt.bench.demo_train.prompts import TokenRow
from mmrt.bench.demo_train.recipe import LEAST_HEADS, LEAST_LAYERS, RECIPE, Augment, Recipe, Towers, load_recipe
from mmrt.bench.demo_train.skeleton import write_skeleton
from mmrt.bench.demo_train.warm_start import begin_with
from mmrt.models.config import load_model_config
from mmrt.models.tokenizer import Tokenizer


def towers(steps: int) -> Towers:
    return Towers(steps, 1, {"image": 2}, {"image": 1.0})


def small_recipe(**changes: Any) -> Recipe:
    recipe = load_recipe()
    batch = dict.fromkeys(recipe.batch, 2)
    text = {**recipe.model.text, "num_hidden_layers": 3}
    model = msgspec.structs.replace(recipe.model, text=text, image_pixels=(112 * 112, 140 * 140))  # 4 by 4 tokens of a square picture
    return msgspec.structs.replace(
        recipe, **{"batch": batch, "model": model, "steps": 4, "towers": towers(0), "warmup_steps": 1, **changes}
    )


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
    from mmrt.models.chat_template import ChatTemplate

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


def test_towers_learn_from_crowds(prepared: Prepared) -> None:
    recipe = small_recipe(towers=towers(2))
    batch = Batches(recipe, prepared.config, prepared.tokenizer)[0]
    assert batch.vision is not None
    assert int((batch.vision.hints[..., 3] > 0).sum()) >= 2 * 6, "six things or more in each of two pictures"


def test_training_learns_and_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "fast_dtype", lambda _: torch.float32)  # both in the same one, whatever is measured
    recipe = small_recipe(mixture={"text": 1.0}, steps=6)
    steps: list[int] = []

    class Interrupted(Exception):
        pass

    def interrupt(step: int, *_: Any) -> None:
        steps.append(step)
        if step == 3:
            raise Interrupted

    whole = train(recipe, tmp_path / "whole", workers=0, device="cpu", progress=lambda *_: None)
    monkeypatch.setattr(loop, "SAVE_EVERY_S", 0.0)
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


def test_parts_make_up_a_batch(prepared: Prepared) -> None:
    recipe = small_recipe(batch=dict.fromkeys(prepared.recipe.batch, 3), mixture={"image": 1.0})
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


def test_two_processes_learn_the_mean_of_their_parts(tmp_path: Path) -> None:
    recipe = small_recipe(batch=dict.fromkeys(load_recipe().batch, 3), mixture={"text": 1.0}, steps=3)
    learned = train(recipe, tmp_path, workers=1, device="cpu", processes=2, progress=lambda *_: None)
    losses = [json.loads(line)["loss"] for line in (tmp_path / CURVE).read_text().splitlines()]
    config, tokenizer = load_model_config(tmp_path), Tokenizer.load(tmp_path)
    learner = Learner(recipe, config, torch.device("cpu"), torch.load(tmp_path / STATE, weights_only=True)["dtype"])
    parts = [Batches(recipe, config, tokenizer, part, 2) for part in range(2)]
    for step, loss in enumerate(losses):
        with torch.enable_grad():  # as other tests may leave it
            expected = torch.stack([learner.loss(part[step])[0] for part in parts]).mean()
            expected.backward()
        assert loss == pytest.approx(expected.item(), rel=1e-4)
        learner.update(step)
    for name, value in learner.network.state_dict().items():
        torch.testing.assert_close(learned.state_dict()[name], value, msg=name)


def test_training_goes_on_with_another_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SAVE_EVERY_S", 0.0)

    class Interrupted(Exception):
        pass

    def interrupt(step: int, *_: Any) -> None:
        if step in (3, 5):
            raise Interrupted

    recipe = small_recipe(mixture={"text": 1.0}, steps=6)
    for processes in (2, 1):
        with pytest.raises(Interrupted):
            train(recipe, tmp_path, workers=0, device="cpu", processes=processes, progress=interrupt)
    train(recipe, tmp_path, workers=0, device="cpu", processes=2, progress=lambda *_: None)
    assert [json.loads(line)["step"] for line in (tmp_path / CURVE).read_text().splitlines()] == [0, 1, 2, 3, 4, 5]


def test_a_process_that_is_killed_ends_the_training(tmp_path: Path) -> None:
    recipe = small_recipe(mixture={"text": 1.0}, steps=1000)

    def kill_the_other(step: int, *_: Any) -> None:
        if step == 2:
            (other,) = (one for one in multiprocessing.active_children() if isinstance(one, SpawnProcess))
            other.kill()

    with pytest.raises(ProcessEndedError, match="{1: -9}"):
        train(recipe, tmp_path, workers=1, device="cpu", processes=2, progress=kill_the_other)
    assert multiprocessing.active_children() == []


class Unloadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


def compute(_: int, words: list[Unloadable]) -> None:
    raise RuntimeError(f"this process computes nothing: {words}")


@pytest.mark.parametrize(("words", "code"), [([Unloadable()], 3), ([], 1)])
def test_a_process_that_fails_ends_the_training(words: list[Unloadable], code: int) -> None:
    """Before it is there, and while it computes."""
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(ProcessEndedError, match=f"{{1: {code}}}"), together(2, compute, words):
        averaged([parameter], torch.ones(()))
    assert multiprocessing.active_children() == []


def average_none(_: int) -> None:
    averaged([nn.Parameter(torch.ones(2)) for _ in range(3)], torch.tensor(1.0))


def test_gradients_of_one_process_count_half() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    parameters[1].grad = torch.tensor([4.0, 6.0])
    with together(2, average_none):
        assert averaged(parameters, torch.tensor(2.0)).item() == 1.5
    assert parameters[0].grad is None and parameters[2].grad is None
    assert parameters[1].grad.tolist() == [2.0, 3.0]


@pytest.mark.parametrize(("device", "most"), [("cpu", load_recipe().smallest_batch), ("cuda", 1)])
def test_more_processes_than_can_share_a_batch_are_refused(tmp_path: Path, device: str, most: int) -> None:
    command = [sys.executable, "-m", "mmrt.bench.demo_train", str(tmp_path), "--processes", "99", "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    expected = f"error: --processes 99, expected at most {most}: the recipe's smallest batch on a CPU, 1 elsewhere"
    assert done.returncode == 1 and done.stderr.strip().endswith(expected)


def test_the_towers_learn_alone_at_first_and_another_recipe_does_not_go_on(tmp_path: Path) -> None:
    recipe = small_recipe(towers=towers(2), mixture={"text": 1.0}, steps=3)
    train(recipe, tmp_path, workers=0, device="cpu", progress=lambda *_: None)
    lines = [json.loads(line) for line in (tmp_path / CURVE).read_text().splitlines()]
    assert [(line["medium"], bool(line["accuracy"])) for line in lines] == [("image", False), ("image", False), ("text", True)]
    (tmp_path / STATE).unlink()  # killed before it was first saved
    with pytest.raises(BegunOtherwiseError, match="another recipe"):
        train(msgspec.structs.replace(recipe, steps=5), tmp_path, workers=0, device="cpu", progress=lambda *_: None)


def test_training_may_begin_with_the_weights_of_a_checkpoint(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as they were before the first step, and their tokenizer comes with them."""
    monkeypatch.setattr(warm_start, "HEAD_STEPS", 2)
    recipe, out = small_recipe(mixture={"text": 1.0}, steps=8), tmp_path / "out"
    (prepared.path / CURVE).write_text('{"loss": 1.0}\n' * 8)
    export(prepared.learner.network, prepared.path, out)
    (out / "tokenizer.json").write_text((out / "tokenizer.json").read_text() + "\n")
    with torch.no_grad():  # as other tests may leave it
        begin_with(out, 6, recipe, tmp_path / "after", workers=0, device="cpu")
    state = torch.load(tmp_path / "after" / STATE, weights_only=True)
    assert state["step"] == 6
    for name, value in load_file(out / "model.safetensors").items():
        assert torch.equal(state["network"][name], value.float()), name
    train(recipe, tmp_path / "after", workers=0, device="cpu", progress=lambda *_: None)
    lines = [json.loads(line) for line in (tmp_path / "after" / CURVE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [6, 7] and (tmp_path / "after" / "tokenizer.json").read_text().endswith("\n")
    begin_with(out, 6, recipe, tmp_path / "after", workers=0, device="cpu")
    assert torch.load(tmp_path / "after" / STATE, weights_only=True)["step"] == 8, "what has begun goes on"


def test_training_cannot_begin_behind_its_end(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step 4 is none of the recipe's 4"):
        begin_with(tmp_path, 4, small_recipe(), tmp_path / "work", workers=0, device="cpu")


def test_muon_does_what_torchs_does() -> None:
    generator = torch.Generator().manual_seed(1)
    ours = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((8, 24), (24, 8), (8, 24))]
    theirs = [nn.Parameter(one.detach().clone()) for one in ours]
    optimizers = [
        Muon(ours, 0.01, 0.1, torch.bfloat16),
        torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)


def test_what_a_picture_hints_at() -> None:
    digits = ((0.5, 0.75, 0.75, 1.0), (0.75, 0.75, 1.0, 1.0))
    things = (Placed("star", "red", (0.0, 0.0, 0.5, 0.5)), Placed("12", "black", (0.5, 0.75, 1.0, 1.0), digits))
    hints = seen([things], (1, 4, 4))
    by_patch = torch.empty(4, 4, 7, dtype=torch.int64)
    for token, (row, column) in enumerate([(0, 0), (0, 2), (2, 0), (2, 2)]):
        by_patch[row : row + 2, column : column + 2] = hints[token, :, :7].view(2, 2, 7)
    star, one, two = LABELS.index("star"), LABELS.index("1"), LABELS.index("2")
    assert by_patch[..., 0].tolist() == [[star, star, 0, 0], [star, star, 0, 0], [0, 0, 0, 0], [0, 0, one, two]]
    assert by_patch[0, 0, 1] == INKS.index("red") and by_patch[3, 3, 1] == INKS.index("black")
    assert (by_patch[..., 2] == IGNORED).sum() == 10 and by_patch[0, 0, 2] > by_patch[3, 3, 2]
    assert by_patch[..., 3].nonzero().tolist() == by_patch[..., 4].nonzero().tolist() == [[1, 1], [3, 3]]
    middles = {(row, column): by_patch[row, column, 5:].tolist() for row, column in by_patch[..., 5].nonzero().tolist()}
    red, black = INKS.index("red"), INKS.index("black")
    assert middles == {(1, 1): [star, red], (3, 2): [one, black], (3, 3): [two, black]}
    assert hints[..., 7].tolist() == [[0] * 4, [0] * 4, [0] * 4, [2, 3, 0, 0]], "the first digit of the number is 1, the second 2"


def test_what_a_clip_hints_at() -> None:
    left, right = (Placed("heart", "blue", (x, 0.0, x + 0.25, 0.25)) for x in (0.0, 0.75))
    hints = seen([(left,), (right,), (), (right,), ()], (3, 4, 4)).view(3, 2, 2, 2, 2, 8)
    first, last = hints[..., 3], hints[..., 4]
    assert first[0].nonzero().tolist() == [[0, 0, 0, 0]] and last[0].nonzero().tolist() == [[0, 1, 0, 1]]
    assert not first[1].any() and last[1].any()
    assert (hints[..., 5] > 0).sum(dim=(1, 2, 3, 4)).tolist() == [2, 1, 0], "the middles of all frames"
    assert not hints[2, ..., 0].any()
    clip = sample(3, 0, "video_audio", False).media[0]
    assert isinstance(clip, Clip) and len(clip.scenes) == len(clip.frames)
    assert {bool(scene) for scene in clip.scenes} == {True, False} or clip.count == 1


def test_what_a_sound_hints_at() -> None:
    notes = (Note(0.1, 0.3, (440.0,)), Note(0.5, 0.7, (880.0, 440.0)))
    hints = heard(Sound(np.zeros(16000, np.float32), "beeps", notes), 25)[:, 0]
    assert hints[:, 0].tolist() == [0] * 2 + [1] * 5 + [0] * 5 + [1] * 5 + [0] * 8
    assert hints[:, 2].nonzero().flatten().tolist() == [2, 12]
    assert hints[12, 1] - hints[16, 1] == 5 and hints[5, 1] == hints[16, 1] and hints[0, 1] == IGNORED
    assert heard(Sound(np.zeros(16000, np.float32), "noise", (Note(0.0, 1.0),)), 25)[:, 0, 0].unique().tolist() == [2]


def test_rates_rise_stay_and_fall() -> None:
    recipe = small_recipe(steps=100, warmup_steps=10)
    scales = [rate_scale(recipe, step) for step in range(101)]
    assert scales[0] == pytest.approx(0.1)
    assert scales[50] == 1.0
    assert scales[100] == 0.0
    assert all(np.diff(scales[65:]) <= 0)
    assert rate_scale(small_recipe(steps=100, towers=towers(20), warmup_steps=10), 20) == pytest.approx(0.1), "once more"


def test_a_recipe_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text("stepz = 3\n" + RECIPE.read_text())
    with pytest.raises(ValueError, match="stepz"):
        load_recipe(file)
    file.write_text(RECIPE.read_text().replace("[mixture]", "[mixture]\nsmell = 0.10"))
    with pytest.raises(ValueError, match="smell"):
        load_recipe(file)
    file.write_text(RECIPE.read_text().replace('hardest = ["', 'hardest = ["taste", "'))
    with pytest.raises(ValueError, match="taste"):
        load_recipe(file)
    for old, new, message in (
        ("[batch]                   # samples per step\nimage = 32", "[batch]", r"batch says nothing of \['image'\]"),
        ("batch = {image = 64,", "batch = {", r"towers.batch says nothing of \['image'\]"),
        ("batch = {image = 64,", "batch = {image = 0,", "a batch has no samples"),
        ("num_hidden_layers = 4", "num_hidden_layers = 2", "2 layers of 4 heads, grounding takes 3 of 4"),
    ):
        text = RECIPE.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=message):
            load_recipe(file)
    assert (1 + max(layer for layer, _ in SLOTS), 1 + max(head for _, head in SLOTS)) == (LEAST_LAYERS, LEAST_HEADS)


Told = dict[tuple[tuple[int, int], int], dict[int, float]]


def told(
    prepared: Prepared, things: Sequence[Picture | Clip | Sound], questions: Sequence[Question]
) -> tuple[Told, TokenRow, list[int], list[list[int]]]:
    """(slot, position) -> {position: share}; the row; positions of the media's tokens; the facts of each answer's first token."""
    found, row, media, facts = told_of_each_token(prepared, things, questions)
    return found, row, media, [one[0] for one in facts]


def told_of_each_token(
    prepared: Prepared, things: Sequence[Picture | Clip | Sound], questions: Sequence[Question]
) -> tuple[Told, TokenRow, list[int], list[list[list[int]]]]:
    """As ``told``, with the facts of each token of each answer."""
    media = [prepared.batches._prepare(thing, number) for number, thing in enumerate(things)]
    row = prepared.batches._builder.shared([one.item for one in media], questions, "", 1000)
    found: Told = {}
    scene = scene_of(row.ids, prepared.config, media)
    targets, facts = looks(row, scene, Vocabulary(prepared.tokenizer))
    assert len(facts) == sum(map(len, row.answers))
    for slot, position, target in targets:
        found[SLOTS[slot], position] = {int(at): pytest.approx(target[at]) for at in np.flatnonzero(target)}
    config = prepared.config
    ends = np.cumsum([len(answer) for answer in row.answers])
    media_tokens = np.flatnonzero(np.isin(row.ids, (config.image_token_id, config.video_token_id))).tolist()
    return found, row, media_tokens, [part.tolist() for part in np.split(facts, ends[:-1])]


def picture(*things: Placed, width: int = 84) -> Picture:
    return Picture(np.zeros((84, width, 3), np.uint8), things)


NONE = [1] * 5  # of the facts that compare
RED, BLUE = Placed("circle", "red", (0.3, 0.0, 0.6, 0.3)), Placed("circle", "blue", (0.3, 0.35, 0.65, 0.65))  # tokens 1 and 9 of 16


def test_heads_are_told_to_look_at_what_is_asked_about(prepared: Prepared) -> None:
    questions = [
        Question("count_some", "How many circles are there?", "Two."),
        Question("exists", "Is there a green circle?", "No."),
        Question("find_shape", "What shape is red?", "A circle."),
        Question("side", "Is the blue circle left or right of the red circle?", "Left."),
        Question("list", "What do you see?", "A red circle and a blue circle."),
    ]
    found, row, media, facts = told_of_each_token(prepared, [picture(RED, BLUE)], questions)
    assert len(media) == 16
    red, blue = media[1], media[9]
    firsts = [int(answer[0]) - 1 for answer in row.answers]
    assert found[THINGS, firsts[0]] == {0: 1 / 3, red: 1 / 3, blue: 1 / 3}, "two things, counted against the first token"
    assert found[THINGS, firsts[1]] == {0: 1.0}, "no green circle"
    assert found[THINGS, firsts[2]] == {0: 0.5, red: 0.5}
    assert found[THINGS, firsts[3]] == {0: 0.5, blue: 0.5} and found[OTHERS, firsts[3]] == {0: 0.5, red: 0.5}
    texts = [prepared.tokenizer.decode([id]).strip() for id in row.ids]
    assert found[COLOURS, texts.index("green")] == {0: 1.0} and red in found[COLOURS, texts.index("red")]
    assert found[WORDS, firsts[2]] == found[OTHER_WORDS, firsts[2]] == {texts.index("red"): 1.0}
    words = [[texts[at] for at in found[slot, firsts[3]]] for slot in (WORDS, OTHER_WORDS)]
    assert words == [["blue", "circle"], ["red", "circle"]]
    listed = [int(at) - 1 for at in row.answers[4]]
    assert [texts[at + 1].lower() for at in listed[:7]] == ["a", "red", "circle", "and", "a", "blue", "circle"]
    one, other = {0: 0.5, red: 0.5}, {0: 0.5, blue: 0.5}
    assert [found.get((NAMED, at)) for at in listed[:7]] == [one, {red: 1.0}, {red: 1.0}, None, other, {blue: 1.0}, {blue: 1.0}]
    said = [[texts[at] for at in found[WORDS, at]] for at in listed[:7]]
    assert said == [[""], [""], [""], ["red", "circle"], ["red", "circle"], ["red", "circle"], ["red", "circle"]], "what was said last"
    assert [found[OTHER_WORDS, at] for at in listed] == [found[WORDS, at] for at in listed]
    both, last = {0: 1 / 3, red: 1 / 3, blue: 1 / 3}, {0: 0.5, blue: 0.5}
    assert [found[OTHERS, at] for at in listed[:8]] == [both, both, both, last, last, last, last, {0: 1.0}], "what is not yet listed"
    assert [one[0] for one in facts] == [
        [2, 0, *NONE], [0, 0, *NONE], [1, 0, *NONE], [1, 1, 0, *NONE[1:]], [1, 2, *NONE],
    ], "the red one is further up; of the two of the list the first is one"  # fmt: skip
    assert [numbers[:2] for numbers in facts[4][:8]] == [[1, 2], [2, 2], [2, 2], [2, 1], [1, 1], [2, 1], [2, 1], [2, 0]]


def test_of_two_pictures_each_is_looked_at_by_its_head(prepared: Prepared) -> None:
    question = Question("pair_more", "Which picture has more things?", "The first.")
    found, row, media, facts = told(prepared, [picture(RED, BLUE), picture(BLUE)], [question])
    first = int(row.answers[0][0]) - 1
    assert found[THINGS, first] == {0: 1 / 3, media[1]: 1 / 3, media[9]: 1 / 3}
    assert found[OTHERS, first] == {0: 0.5, media[25]: 0.5}
    assert facts == [[2, 1, 1, 1, 2, 1, 1]], "the first are more"
    _, _, _, facts = told(prepared, [picture(RED), picture(BLUE)], [question])
    assert facts == [[1, 1, 1, 1, 1, 2, 0]], "as many; the shape is the same, the colour is not"


def clip(*scenes: tuple[Placed, ...]) -> Clip:
    return Clip(np.zeros((len(scenes), 84, 84, 3), np.uint8), 2.0, "", (), scenes)


def star(x: float) -> tuple[Placed]:
    return (Placed("star", "red", (x, 0.0, x + 0.25, 0.25)),)


WHAT = Question("talk", "What is this?", "I do not know.")


def test_what_moves_is_looked_at_where_it_begins_and_ends(prepared: Prepared) -> None:
    found, row, media, facts = told(prepared, [clip(*(star(x) for x in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75)))], [WHAT])
    first, tokens = int(row.answers[0][0]) - 1, len(media) // 4
    assert found[THINGS, first] == {0: 0.5, media[0]: 0.5}
    assert found[OTHERS, first] == {0: 0.5, media[3 * tokens + math.isqrt(tokens) - 1]: 0.5}
    assert facts == [[1, 1, 1, 2, 1, 1, 1]], "to the right"
    resting = Placed("heart", "blue", (0.0, 0.7, 0.3, 1.0))
    _, _, _, facts = told(prepared, [clip(*((*star(x), resting) for x in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75)))], [WHAT])
    assert facts == [[1, 1, 1, 2, 1, 1, 1]], "beside something that rests"
    moves = Question("video_describe", "What happens?", "A red star moves to the right.")
    _, _, _, facts = told(prepared, [clip(*(star(x) for x in (0.0, 0.2, 0.4, 0.75)))], [moves])
    assert facts == [[1, 1, 1, 2, 1, 1, 1]], "one, in however many frames"
    _, _, _, facts = told(prepared, [clip(*(star(x) for x in (0.3, 0.3, 0.2, 0.2)))], [WHAT])
    assert facts == [[1, 1, 1, 0, 1, 1, 1]], "less than a token to the left"


def test_what_comes_in_again_is_looked_at_before_that(prepared: Prepared) -> None:
    found, row, media, facts = told(prepared, [clip(*(star(x) for x in (0.4, 0.7, 0.0, 0.3)))], [WHAT])
    looked = set(found[OTHERS, int(row.answers[0][0]) - 1])
    assert 0 in looked and len(looked) > 1 and looked <= {0, *media[: len(media) // 2]}
    assert facts == [[1, 1, 1, 2, 1, 1, 1]]


def test_what_blinks_is_looked_at_wherever_it_appears(prepared: Prepared) -> None:
    lit = star(0.0)
    found, row, media, facts = told(prepared, [clip(lit, lit, (), (), (), lit, lit, ())], [WHAT])
    first, tokens = int(row.answers[0][0]) - 1, len(media) // 4
    assert found[THINGS, first] == {0: 1 / 3, media[0]: 1 / 3, media[2 * tokens]: 1 / 3}
    assert found[OTHERS, first] == {0: 0.5, media[3 * tokens]: 0.5}
    assert facts == [[2, 1, *NONE]]


def test_beeps_are_counted(prepared: Prepared) -> None:
    sound = Sound(np.zeros(32000, np.float32), "beeps", tuple(Note(at, at + 0.2, (440.0,)) for at in (0.2, 0.9, 1.5)))
    _, _, _, facts = told(prepared, [sound], [WHAT])
    assert facts == [[0, 3, *NONE]]
    _, _, _, facts = told(prepared, [picture(RED, BLUE), sound], [WHAT])
    assert facts == [[2, 3, 1, 1, 0, 1, 1]], "fewer things than beeps"
    beep = Sound(np.zeros(32000, np.float32), "beeps", (Note(0.2, 0.4, (440.0,)),))
    _, _, _, facts = told(
        prepared, [picture(RED, BLUE), beep], [Question("list", "What do you see?", "A red circle and a blue circle.")]
    )
    assert facts == [[1, 1, 1, 1, 2, 1, 1]], "more things than beeps, of which the first is about to be named"


def test_what_something_is_seen_from_comes_second(prepared: Prepared) -> None:
    for question in (
        "Is the red circle left or right of the blue circle?",
        "On which side of the blue circle is the red circle?",
        "Left or right: where is the red circle from the blue circle?",
        "Seen from the blue circle, is the red circle left or right?",
    ):
        found, row, media, facts = told(prepared, [picture(RED, BLUE)], [Question("side", question, "Left.")])
        first = int(row.answers[0][0]) - 1
        assert found[THINGS, first] == {0: 0.5, media[1]: 0.5} and found[OTHERS, first] == {0: 0.5, media[9]: 0.5}
        assert facts == [[1, 1, 2, *NONE[1:]]], question


def test_words_for_one_of_several_are_looked_at(prepared: Prepared) -> None:
    found, row, _, _ = told(prepared, [clip((), star(0.0))], [Question("first", "What appears first?", "A red star.")])
    (at,) = found[WORDS, int(row.answers[0][0]) - 1]
    assert prepared.tokenizer.decode([int(row.ids[at])]) == " first"


def test_a_head_is_told_to_read_digit_by_digit(prepared: Prepared) -> None:
    """The number 337, each digit with its middle in another token."""
    digits = tuple((k / 3, 0.1, (k + 1) / 3, 0.4) for k in range(3))
    number = picture(Placed("337", "black", (0.0, 0.1, 1.0, 0.4), digits), width=168)
    found, row, media, _ = told(prepared, [number], [Question("digits", "What is the number?", "337.")])
    across = prepared.batches._prepare(number).item.grid[2] // 2
    assert [found[NAMED, int(at) - 1] for at in row.answers[0][:3]] == [{media[int(across * k / 6)]: 1.0} for k in (1, 3, 5)]
    assert found[NAMED, int(row.answers[0][2])] == {0: 1.0}, "there is no fourth"


def test_what_heads_miss_is_the_divergence_from_where_they_should_look() -> None:
    target = torch.tensor([[0.5, 0.5, 0.0]])
    attention = [torch.full((1, 4, 3, 3), 1 / 3) for _ in range(3)]
    look = Looks(torch.tensor([SLOTS.index(THINGS)]), torch.tensor([0]), torch.tensor([2]), target)
    assert missed(look, attention).item() == pytest.approx(np.log(1.5), abs=1e-3)
    attention[THINGS[0]][0, THINGS[1], 2] = target[0]
    assert missed(look, attention).item() == pytest.approx(0, abs=1e-3)
