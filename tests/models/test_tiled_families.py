"""What all families that cut pictures into tiles have beside transformers: pixels, prompts, tower, logits, names."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrt.models.architecture import WeightFormat
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.families.item_check import fault_of
from mmrt.models.lm.warm_up import warm_up_towers
from mmrt.tests.models.conftest import Loaded, Prompt
from mmrt.tests.models.tiled_families import TILED, Tiled
from mmrt.tests.models.whole_prompts import (
    bicubic,
    check_greedy_tokens,
    check_logits_in_cuts,
    check_rounded_logits,
    noise,
    prompt_of,
)


class Case(NamedTuple):
    loaded: Loaded
    tiled: Tiled
    processor: Any

    def prompt(self, *content: Any) -> Prompt:
        return prompt_of(self.loaded, self.processor, content)


@pytest.fixture(scope="module", params=TILED)
def case(request: pytest.FixtureRequest, models: Callable[[str], Loaded]) -> Iterator[Case]:
    loaded, tiled = models(request.param), TILED[request.param]
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr("transformers.image_processing_backends.np_resize", bicubic)
        yield Case(loaded, tiled, tiled.processor_of(loaded.path))


def views_of(prompt: Prompt) -> np.ndarray:
    """transformers' pixels float [n, 3, height, width] of all views of a prompt, without what fills up batches."""
    pixels = prompt.reference_inputs["pixel_values"].numpy()
    if pixels.ndim == 4:
        return pixels
    counts = [sum(segment.grid[0] for segment in span.shape.segments) for span in prompt.spans]
    return np.concatenate([its[:count] for its, count in zip(pixels, counts, strict=True)] if len(pixels) > 1 else [pixels[0]])


def test_pictures_are_transformers_pixels_and_tokens(case: Case) -> None:
    """To the last bit, with what is around them. Readers believe the shapes."""
    config, rules = case.loaded.config, case.loaded.config.vision_rules
    patch, merge = rules.patch_size, rules.merge_size
    side = rules.tile // patch
    mean, std = (np.repeat(np.array(numbers), patch**2) * 255 for numbers in (rules.image_mean, rules.image_std))
    contents = [[noise(*size), "What is it?"] for size in case.tiled.pictures]
    contents += [["only text"], ["One", noise(30, 90), "\ntwo\n", noise(90, 300), " three."], [noise(9, 9), noise(100, 9)]]
    for content in contents:
        prompt = case.prompt(*content)
        assert prompt.ids == prompt.reference_inputs["input_ids"][0].tolist()
        assert [fault_of(config, "image", span.shape) for span in prompt.spans] == [""] * len(prompt.spans)
        if not prompt.spans:
            continue
        theirs = views_of(prompt)[:, :, : side * patch, : side * patch]
        blocks = theirs.reshape(-1, 3, side // merge, merge, patch, side // merge, merge, patch).transpose(0, 2, 5, 3, 6, 1, 4, 7)
        ours = np.concatenate([rows for found in prompt.rows for rows in found])
        np.testing.assert_array_equal(ours, np.rint(blocks.reshape(len(ours), -1) * std + mean))


def test_the_tower_equals_transformers(case: Case) -> None:
    for sizes in ([(75, 131), (20, 20)], [(131, 20)], [(300, 41)], [(41, 300), (60, 61)]):
        prompt = case.prompt(*(noise(*size) for size in sizes))
        names = ("pixel_values", "image_sizes", "batch_num_images")
        inputs = {name: prompt.reference_inputs[name] for name in names if name in prompt.reference_inputs}
        expected = torch.cat(list(case.loaded.reference.model.get_image_features(**inputs).pooler_output))
        ours = torch.cat([rows for found in case.loaded.encode(prompt) for rows in found])
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_logits_in_any_cuts(case: Case) -> None:
    check_logits_in_cuts(case.loaded, case.loaded.reference, case.prompt("See", noise(61, 290), "and", noise(80, 58), "Compare."))


def test_greedy_tokens_equal_those_of_generate(case: Case) -> None:
    check_greedy_tokens(case.loaded, case.prompt(noise(131, 75), "Tell."))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_logits_of_rounded_weights(case: Case, weights: WeightFormat) -> None:
    check_rounded_logits(case.loaded, case.prompt(noise(131, 75), "Tell."), weights)


def test_each_spelling_of_names(case: Case, tmp_path: Path) -> None:
    loaded = case.loaded
    family, tensors, expected = loaded.family, load_file(loaded.path / "model.safetensors"), read_weights(loaded.path, loaded.config)
    assert all(family.checkpoint_name(family.canonical_name(name)) == name for name in tensors)
    for spell in case.tiled.spellings:
        others = {spell(name): tensor for name, tensor in tensors.items()}
        assert others.keys() != tensors.keys() and len(others) == len(tensors)
        save_file(others, tmp_path / "model.safetensors")
        found = read_weights(tmp_path, loaded.config)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_the_first_launches_are_of_a_tile(case: Case) -> None:
    warm_up_towers(case.loaded.towers, case.loaded.config)
