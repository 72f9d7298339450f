"""What all families that see pictures have beside transformers: pixels, prompts, tower, logits, names."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.families.item_check import fault_of
from mmrt.models.lm.warm_up import warm_up_towers
from mmrt.models.towers.interface import TowerInput
from mmrt.tests.models.conftest import Loaded, Prompt
from mmrt.tests.models.picture_families import PICTURE_FAMILIES, PictureFamily
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
    family: PictureFamily
    processor: Any

    def prompt(self, *content: Any) -> Prompt:
        return prompt_of(self.loaded, self.processor, content)


@pytest.fixture(scope="module", params=PICTURE_FAMILIES)
def case(request: pytest.FixtureRequest, models: Callable[[str], Loaded]) -> Iterator[Case]:
    loaded, family = models(request.param), PICTURE_FAMILIES[request.param]
    rules = loaded.config.vision_rules
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        if rules is not None and rules.resample == "bicubic":
            patch.setattr("transformers.image_processing_backends.np_resize", bicubic)
        yield Case(loaded, family, family.processor_of(loaded.path))


def rows_of(case: Case, prompt: Prompt) -> np.ndarray:
    """transformers' pixels of a prompt as our rows, without what fills up batches: of whole patches in squares that make a token; where
    pictures are not tiles their last token is filled up with black."""
    rules, pixels = case.loaded.config.vision_rules, prompt.reference_inputs["pixel_values"].numpy()
    patch, merge = rules.patch_size, rules.merge_size
    if (grids := prompt.reference_inputs.get("image_grid_thw")) is not None:
        parts = np.split(pixels, np.cumsum(grids.prod(1).numpy())[:-1])
        tiles = [
            part.reshape(h, w, 3, patch, patch).transpose(2, 0, 3, 1, 4).reshape(1, 3, h * patch, w * patch)
            for part, (_, h, w) in zip(parts, grids.tolist(), strict=True)
        ]
    elif (sizes := prompt.reference_inputs.get("target_sizes")) is not None:  # patches side by side
        parts = np.split(pixels, np.cumsum(sizes.prod(1).numpy())[:-1] * patch, 3)
        tiles = [
            part.reshape(1, 3, patch, h, w, patch).transpose(0, 1, 3, 2, 4, 5).reshape(1, 3, h * patch, w * patch)
            for part, (h, w) in zip(parts, sizes.tolist(), strict=True)
        ]
    elif not rules.tile:
        sizes = prompt.reference_inputs["image_sizes"].tolist()
        tiles = [_filled(its[None, :, :h, :w], patch * merge) for its, (h, w) in zip(pixels, sizes, strict=True)]
    elif pixels.ndim == 4:
        tiles = [pixels]
    else:
        counts = [sum(segment.grid[0] for segment in span.shape.segments) for span in prompt.spans]
        tiles = [its[:count] for its, count in zip(pixels, counts, strict=True)] if len(pixels) > 1 else [pixels[0]]
    found = []
    for views in tiles:
        h, w = (side // patch // merge for side in views.shape[2:])
        whole = views[:, :, : h * merge * patch, : w * merge * patch].reshape(-1, 3, h, merge, patch, w, merge, patch)
        found.append(whole.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, 3 * patch**2))
    mean, std = (np.repeat(np.array(numbers), patch**2) * 255 for numbers in (rules.image_mean, rules.image_std))
    rows: np.ndarray = np.nan_to_num(np.rint(np.concatenate(found) * std + mean))
    return rows


def _filled(picture: np.ndarray, unit: int) -> np.ndarray:
    height, width = (-(-side // unit) * unit for side in picture.shape[2:])
    filled = np.full((1, 3, height, width), np.nan, picture.dtype)
    filled[:, :, : picture.shape[2], : picture.shape[3]] = picture
    return filled


def test_pictures_are_transformers_pixels_and_tokens(case: Case) -> None:
    """To the last bit, with what is around them. Readers believe the shapes."""
    contents = [[noise(*size), "What is it?"] for size in case.family.pictures]
    contents += [["only text"], ["One", noise(30, 90), "\ntwo\n", noise(90, 300), " three."], [noise(29, 39), noise(100, 29)]]
    for content in contents:
        prompt = case.prompt(*content)
        assert prompt.ids == prompt.reference_inputs["input_ids"][0].tolist()
        assert [fault_of(case.loaded.config, "image", span.shape) for span in prompt.spans] == [""] * len(prompt.spans)
        if prompt.spans:
            ours = np.concatenate([rows for found in prompt.rows for rows in found])
            np.testing.assert_array_equal(ours, rows_of(case, prompt))


def test_the_tower_equals_transformers(case: Case) -> None:
    """Also of several pictures at once, which do not see each other."""
    for sizes in ([(75, 131), (20, 20)], [(131, 20)], [(300, 41)], [(41, 210), (60, 61), (56, 56)]):
        prompt = case.prompt(*(noise(*size) for size in sizes))
        names = ("pixel_values", "image_sizes", "batch_num_images", "image_grid_thw", "pixel_attention_mask", "target_sizes")
        inputs = {name: prompt.reference_inputs[name] for name in names if name in prompt.reference_inputs}
        expected = torch.cat(list(case.loaded.reference.model.get_image_features(**inputs).pooler_output))
        all_rows = torch.cat([rows for found in case.loaded.encode(prompt) for rows in found])
        ids = torch.tensor([prompt.ids[at] for start, segment in prompt.segments for at in range(start, start + segment.num_tokens)])
        ours = all_rows[ids == case.loaded.config.image_token_id]
        torch.testing.assert_close(ours, expected.flatten(0, -2), rtol=1e-5, atol=1e-5)
        found = [
            its for span, rows in zip(prompt.spans, prompt.rows, strict=True) for its in zip(span.shape.segments, rows, strict=True)
        ]
        at_once = [TowerInput("image", rows, segment.grid, segment.details, segment.ids) for segment, rows in found]
        torch.testing.assert_close(torch.cat(case.loaded.towers.encode(at_once)), all_rows, rtol=1e-5, atol=1e-5)


def test_logits_in_any_cuts(case: Case) -> None:
    check_logits_in_cuts(case.loaded, case.loaded.reference, case.prompt("See", noise(61, 290), "and", noise(80, 58), "Compare."))


def test_greedy_tokens_equal_those_of_generate(case: Case) -> None:
    check_greedy_tokens(case.loaded, case.prompt(noise(131, 75), "Tell."))


def test_logits_of_rounded_weights(case: Case) -> None:
    prompt = case.prompt(noise(131, 75), "Tell.")
    check_rounded_logits(case.loaded, prompt, "int8")
    check_rounded_logits(case.loaded, prompt, "int4")


def test_each_spelling_of_names(case: Case, tmp_path: Path) -> None:
    loaded = case.loaded
    family, tensors, expected = loaded.family, load_file(loaded.path / "model.safetensors"), read_weights(loaded.path, loaded.config)
    assert all(family.checkpoint_name(family.canonical_name(name)) == name for name in tensors)
    for spell in case.family.spellings:
        others = {spell(name): tensor for name, tensor in tensors.items()}
        assert others.keys() != tensors.keys() and len(others) == len(tensors)
        save_file(others, tmp_path / "model.safetensors")
        found = read_weights(tmp_path, loaded.config)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_the_first_launches_are_of_a_tile(case: Case) -> None:
    config, grids = case.loaded.config, list[tuple[int, int, int]]()

    def watched(parts: list[TowerInput]) -> list[torch.Tensor]:
        grids.extend(part.grid for part in parts)
        return case.loaded.towers.encode(parts)

    warm_up_towers(SimpleNamespace(encode=watched), config)  # type: ignore[arg-type]
    side = config.vision_rules.tile // config.vision_rules.patch_size
    assert grids == [(1, side, side)] if side else len(grids) > 1
