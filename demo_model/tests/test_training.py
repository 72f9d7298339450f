"""Training of the demo model: it learns, goes on where it was, by any number of processes; and what it refuses."""

import json
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mmrt.demo_model.tests.small_training import Prepared, lesson, small_recipe, towers
from mmrt.models.config import load_model_config
from mmrt.models.text.tokenizer import Tokenizer
from mmrt_demo_model.training import loop, warm_start
from mmrt_demo_model.training.batches import Batches
from mmrt_demo_model.training.export import export
from mmrt_demo_model.training.grounding import SLOTS
from mmrt_demo_model.training.loop import CURVE, STATE, BegunOtherwiseError, Learner, rate_scale, train
from mmrt_demo_model.training.muon import Muon
from mmrt_demo_model.training.processes import ProcessEndedError, averaged, together
from mmrt_demo_model.training.recipe import LEAST_HEADS, LEAST_LAYERS, RECIPE, load_recipe
from mmrt_demo_model.training.warm_start import begin_with


@pytest.mark.slow
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


@pytest.mark.slow
def test_two_processes_learn_the_mean_of_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "fast_dtype", lambda _: torch.float32)  # a busy machine may find bfloat16 faster, which rounds more
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [([Unloadable()], 3), ([], 1)])
def test_a_process_that_fails_ends_the_training(words: list[Unloadable], code: int) -> None:
    """Before it is there, and while it computes."""
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(ProcessEndedError, match=f"{{1: {code}}}"), together(2, compute, words):
        averaged([parameter], torch.ones(()))
    assert multiprocessing.active_children() == []


def average_none(_: int) -> None:
    averaged([nn.Parameter(torch.ones(2)) for _ in range(3)], torch.tensor(1.0))


@pytest.mark.slow
def test_gradients_of_one_process_count_half() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    parameters[1].grad = torch.tensor([4.0, 6.0])
    with together(2, average_none):
        assert averaged(parameters, torch.tensor(2.0)).item() == 1.5
    assert parameters[0].grad is None and parameters[2].grad is None
    assert parameters[1].grad.tolist() == [2.0, 3.0]


@pytest.mark.parametrize(("device", "most"), [("cpu", load_recipe().smallest_batch), pytest.param("cuda", 1, marks=pytest.mark.slow)])
def test_more_processes_than_can_share_a_batch_are_refused(tmp_path: Path, device: str, most: int) -> None:
    command = [sys.executable, "-m", "mmrt_demo_model.training", str(tmp_path), "--processes", "99", "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    expected = f"error: --processes 99, expected at most {most}: the recipe's smallest batch on a CPU, 1 elsewhere"
    assert done.returncode == 1 and done.stderr.strip().endswith(expected)


@pytest.mark.slow
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


def test_rates_rise_stay_and_fall() -> None:
    recipe = small_recipe(steps=100, warmup_steps=10)
    scales = [rate_scale(recipe, step) for step in range(101)]
    assert scales[0] == pytest.approx(0.1)
    assert scales[50] == 1.0
    assert scales[100] == 0.0
    assert all(np.diff(scales[65:]) <= 0)
    assert rate_scale(small_recipe(steps=100, towers=towers(20), warmup_steps=10), 20) == pytest.approx(0.1), "once more"
    longer = small_recipe(steps=100, lessons=(lesson(50), lesson(20)), warmup_steps=10)
    scales = [rate_scale(longer, step) for step in range(171)]
    assert scales[:100] == [rate_scale(recipe, step) for step in range(100)]
    assert (scales[100], max(scales[100:150]), scales[149]) == (pytest.approx(0.05), pytest.approx(0.42), pytest.approx(0.01))
    assert (scales[150], max(scales[150:]), scales[170]) == (pytest.approx(0.05), pytest.approx(0.35), 0.0), "and once more"


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
        ("mixture = {image = 0.52,", "mixture = {smell = 0.52,", r"unknown media \['smell'\]"),
        ("step = 4000", "step = 40000", r"late.step is 40000, expected 1500 \(towers.steps\) to"),
        ("several = 0.54", "several = 0.95", "late.shares has 0.08 single and 0.95 several, expected 0 to 1 together"),
        ('["mixed", "few", "few", "same"]', "[]", "late.shares has no mixes of several things"),
        ("degraded = 0.6", "degraded = 1.6", "late.shares has degraded 1.6, expected 0 to 1"),
        ("counted_pairs = 0.75", "counted_pairs = -1", "late.shares has counted_pairs -1, expected 0 to 1"),
        ("moving = 0.62", "moving = 2", "late.shares has moving 2, expected 0 to 1"),
        ("share = 0.2", "share = 1.3", r"lessons\[0\] has share 1.3, expected 0 to 1"),
        ("rate = 0.3", "rate = -1", r"lessons\[0\] has rate -1, expected 0 to 1"),
        ('["mixed", "few", "few", "same"]', '["most"]', "Invalid enum value 'most'"),
        ("num_hidden_layers = 4", "num_hidden_layers = 2", "2 layers of 4 heads, grounding takes 3 of 4"),
    ):
        text = RECIPE.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=message):
            load_recipe(file)
    assert (1 + max(layer for layer, _ in SLOTS), 1 + max(head for _, head in SLOTS)) == (LEAST_LAYERS, LEAST_HEADS)
