"""Shapes that the process that decodes media may lie about: those of the rules pass, and each that differs from them is found."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mmrt.models.architecture import ModelConfig
from mmrt.models.config import load_model_config
from mmrt.models.families.item_check import fault_of
from mmrt.models.families.registry import family_of
from mmrt.runtime.bus import messages as m
from mmrt.schema.media import ItemShape, MediaSpan, SegmentShape, View
from mmrt.tests.runtime.controller.test_machine import KEY, Driver, image, refused

FAMILIES = ("qwen2_5_omni", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_5")


@pytest.fixture(scope="module", params=FAMILIES)
def config(request: pytest.FixtureRequest, checkpoints: Callable[[str], Path]) -> ModelConfig:
    return load_model_config(checkpoints(request.param))


def items(config: ModelConfig) -> list[ItemShape]:
    family = family_of(config)
    found = [family.image_item(config, height, width) for height, width in ((28, 28), (300, 500), (2000, 90))]
    videos = [family.video_item(config, num_frames, 120, 200, 2.0) for num_frames in (1, 5, 40)]
    if config.audio_rules is not None:
        sounds = [family.audio_item(config, num_frames) for num_frames in (3, 100, 3001, 9000)]
        found += [*sounds, family.video_with_sound(config, videos[2], sounds[1])]
    return found + videos


def test_what_the_rules_give_passes(config: ModelConfig) -> None:
    for item in items(config):
        assert fault_of(config, item.kind, item) == ""


def test_a_picture_in_views_with_text_in_it(checkpoints: Callable[[str], Path]) -> None:
    """Text in place of placeholders is found, and views of another size."""
    config = msgspec.structs.replace(load_model_config(checkpoints("qwen2_vl")), item_text_ids=(7, 8))
    placeholder, size, row_bytes = config.image_token_id, (56, 28), 2 * 3 * 14 * 14
    tokens = (placeholder, 2), (7, 1), (placeholder, 2)
    segment = SegmentShape("image", (2, 4, 2), 16, row_bytes, 5, (8,), (), tokens, (View((size,)), View(((9, 9),), (0, 0, 28, 56))))
    item = ItemShape("image", (4, 4, 2), 12, [segment, segment])
    assert fault_of(config, "image", item) == ""
    for name, lie in {
        "fewer tokens": {"ids": ((placeholder, 1), (7, 2), (placeholder, 2))},
        "a wide view": {"views": (View((size,)), View((size,), (0, 0, 29, 56)))},
        "fewer views": {"views": (View((size,)),)},
        "other text": {"ids": ((placeholder, 2), (9, 1), (placeholder, 2))},
    }.items():
        told = ItemShape("image", (4, 4, 2), 12, [segment, msgspec.structs.replace(segment, **lie)])
        assert fault_of(config, "image", told).startswith("segment 1 has "), name


@pytest.mark.parametrize("family", ["smolvlm", "internvl", "llava", "llava_next", "llava_onevision"])
def test_a_tile_of_another_size(checkpoints: Callable[[str], Path], family: str) -> None:
    """Its rows are as many as its grid says, and the tower takes whole tiles alone."""
    config = load_model_config(checkpoints(family))
    assert config.vision_rules is not None
    assert fault_of(config, "image", family_of(config).image_item(config, 90, 120)) == ""
    side, row_bytes = config.vision_rules.merge_size, config.vision_rules.row_bytes
    segment = SegmentShape("image", (1, side, side), side**2, row_bytes, 1)
    told = fault_of(config, "image", ItemShape("image", segment.grid, 1, [segment]))
    assert told.startswith(f"segment 0 has {side**2} rows")


def lies(config: ModelConfig, item: ItemShape, number: int) -> dict[str, ItemShape]:
    """The same item, each time with one untruth; of its segments, in one of this number."""
    (t, h, w), segment = item.grid, item.segments[number]
    placeholder = config.placeholder_id(segment.kind)

    def in_segment(**changes: Any) -> ItemShape:
        segments = list(item.segments)
        segments[number] = msgspec.structs.replace(segment, **changes)
        num_tokens = sum(one.num_prompt_tokens for one in segments)
        return msgspec.structs.replace(item, segments=segments, num_tokens=num_tokens)

    change = partial(msgspec.structs.replace, item)
    return {
        "kind": change(kind="audio" if item.kind != "audio" else "image"),
        "grid": change(grid=(t + 1, h, w)),
        "wide grid": change(grid=(t, h, w + 2)),
        "tokens": change(num_tokens=item.num_tokens + 1),
        "no segments": change(segments=[], num_tokens=0),
        "twice": change(segments=item.segments * 2, num_tokens=2 * item.num_tokens),
        "seconds": change(second_per_grid_s=math.nan),
        "endless": change(second_per_grid_s=math.inf),
        "back in time": change(second_per_grid_s=-1.0),
        "far": change(second_per_grid_s=1e300),
        "kind of a segment": in_segment(kind="image" if segment.kind != "image" else "video"),
        "grid of a segment": in_segment(grid=(segment.grid[0], segment.grid[1] + 2, segment.grid[2])),
        "rows": in_segment(num_rows=segment.num_rows + 1),
        "bytes": in_segment(row_bytes=segment.row_bytes * 2),
        "tokens of a segment": in_segment(num_tokens=segment.num_tokens + 1),
        "none": in_segment(num_tokens=0),
        "text": in_segment(lead=(*segment.lead, 1 << 40)),
        "text behind": in_segment(trail=(-1,)),
        "more ids": in_segment(ids=((placeholder, segment.num_tokens + 1),)),
        "no ids": in_segment(ids=((placeholder, segment.num_tokens), (placeholder, 0))),
        "negative ids": in_segment(ids=((placeholder, segment.num_tokens + 1), (placeholder, -1))),
        "ids of text": in_segment(ids=((1 << 40, segment.num_tokens),)),
        "views": in_segment(views=(View(((14, 14),)),)),
        "no view": in_segment(views=(View(()),) * segment.grid[0]),
        "details": in_segment(details=(1,)),
        "details of a size": in_segment(details=(*segment.grid[1:], 5)),
    }


def test_what_differs_is_found(config: ModelConfig) -> None:
    for item in items(config):
        for number in {0, len(item.segments) - 1}:
            believed = [what for what, lie in lies(config, item, number).items() if fault_of(config, item.kind, lie) == ""]
            assert not believed, item


def test_a_request_whose_analysis_contradicts_itself_fails_alone(config: ModelConfig) -> None:
    """Each lie, told to a controller with this model's positions: before they are computed it ends the request, and goes on."""

    def positions(num_tokens: int, spans: list[MediaSpan]) -> tuple[bytes, int]:
        found, delta = family_of(config).positions(config, num_tokens, spans)
        return found.T.tobytes(), delta

    known = family_of(config).image_item(config, 56, 56)
    for lie in lies(config, known, 0).values():
        driver = Driver(max_context=1000, num_kv_pages=1000, fault_of=partial(fault_of, config), positions=positions, prefix_cache=True)
        driver.submit(image())
        driver.receive("gateway", m.Filled(1, KEY)).tick()
        failed = refused(driver.done("video", m.Analysed(lie)))
        assert failed.status == 500 and "the analysis of the image contradicts itself" in failed.message
        driver.receive("gateway", m.Delivered(1, KEY)).tick()
        assert driver.is_empty
