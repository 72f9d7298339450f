"""One medium's options narrow the rules of the run, and give what transformers' processors give with the same numbers."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mmrt.actors.host.media_rules import for_medium, for_run, image_of_share, option_ranges, share_under
from mmrt.models.architecture import AttentionConfig, LanguageConfig, LayerConfig, MlpConfig, ModelConfig, RopeConfig
from mmrt.models.families import qwen2_5_omni
from mmrt.models.families.internvl import tiles
from mmrt.models.media_config import AudioRules, VisionRules
from mmrt.runtime.config.sections import MediaSection
from mmrt.schema.media import MediaOptions
from mmrt.tests.models.test_items import function_of_transformers

LANGUAGE = LanguageConfig(
    vocab_size=512,
    hidden_size=64,
    rms_norm_eps=1e-6,
    layers=(
        LayerConfig(mixer=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=64), feed_forward=MlpConfig(intermediate_size=64)),
    ),
    ropes=(RopeConfig(theta=1e6),),
)
TEXT = ModelConfig(family="qwen2_5_omni", language=LANGUAGE, dtype="float32", max_context=4096, eos_token_ids=(0,))
MODEL = replace(TEXT, vision_rules=VisionRules(), audio_rules=AudioRules())
RUN = for_run(MODEL, MediaSection())


def rules(options: MediaOptions) -> VisionRules:
    found = for_medium(RUN, options).vision_rules
    assert found is not None
    return found


def test_the_run_sets_the_rate_and_lowers_the_number_of_frames() -> None:
    narrowed = for_run(MODEL, MediaSection(fps=3.0, max_frames=10)).vision_rules
    assert narrowed == VisionRules(fps=3.0, max_frames=10)
    assert for_run(MODEL, MediaSection(max_frames=1000)).vision_rules == VisionRules(max_frames=768)
    assert for_run(TEXT, MediaSection()) == TEXT == for_medium(TEXT, MediaOptions(fps=1.0))


def test_without_options_nothing_changes() -> None:
    assert for_medium(RUN, MediaOptions()) == RUN


NUMBERS = st.none() | st.integers(1, 2_000_000)
SHARES = st.floats(0.05, 1.0)


@given(st.builds(MediaOptions, st.none() | st.floats(0.01, 100), NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.just(False), SHARES))
def test_no_option_raises_what_a_medium_may_cost(options: MediaOptions) -> None:
    run, narrowed = RUN.vision_rules, rules(options)
    assert run is not None
    for name in ("fps", "max_frames", "max_pixels", "video_max_pixels"):
        assert getattr(narrowed, name) <= getattr(run, name)
    for low, high in (("min_frames", "max_frames"), ("min_pixels", "max_pixels"), ("video_min_pixels", "video_max_pixels")):
        assert getattr(narrowed, low) <= getattr(narrowed, high)


def test_a_lower_bound_gives_way() -> None:
    narrowed = rules(MediaOptions(max_pixels=50_000, max_frames=2))
    assert (narrowed.min_frames, narrowed.video_min_pixels, narrowed.video_max_pixels) == (2, 50_000, 50_000)
    assert narrowed.min_pixels == VisionRules().min_pixels


@pytest.mark.parametrize("options", [MediaOptions(fps=0.5), MediaOptions(max_frames=7), MediaOptions(fps=0.25, min_frames=2)])
def test_frames_equal_transformers(options: MediaOptions) -> None:
    reference = function_of_transformers("video_processing_qwen2_vl", "sample_frames")
    processor = SimpleNamespace(num_frames=None, fps=2.0, temporal_patch_size=2, min_frames=4, max_frames=256)
    given = {name: value for name in ("fps", "min_frames", "max_frames") if (value := getattr(options, name)) is not None}
    for total, fps in ((600, 30.0), (301, 24.0), (50, 12.5)):
        expected = reference(processor, SimpleNamespace(total_num_frames=total, fps=fps), **given).numpy()
        found = qwen2_5_omni.sample_frames(for_medium(RUN, options), total, fps)
        np.testing.assert_array_equal(found, expected[expected < total])


def test_sizes_equal_transformers() -> None:
    reference = function_of_transformers("image_processing_qwen2_vl", "smart_resize")
    model = for_medium(RUN, MediaOptions(min_pixels=2000, max_pixels=60_000))
    for height, width in ((480, 640), (1000, 30), (20, 20), (224, 224)):
        _, h, w = qwen2_5_omni.image_item(model, height, width).grid
        assert (14 * h, 14 * w) == reference(height, width, 28, 2000, 60_000)
        _, h, w = qwen2_5_omni.video_item(model, 8, height, width, 2.0).grid
        assert (14 * h, 14 * w) == reference(height, width, 28, 2000, 60_000)


def test_positions_follow_the_rate_asked_for() -> None:
    assert qwen2_5_omni.video_item(for_medium(RUN, MediaOptions(fps=0.5)), 8, 100, 100, 0.5).second_per_grid_s == 4.0


def test_ranges_end_at_the_rules() -> None:
    assert option_ranges(VisionRules(fps=1.5, max_pixels=100)) == {
        "image": {"min_pixels": (100, 100), "max_pixels": (100, 100), "token_share": (0.05, 1.0)},
        "video": {
            "fps": (0.01, 1.5),
            "min_frames": (1, 768),
            "max_frames": (2, 768),
            "min_pixels": (784, 602_112),
            "max_pixels": (784, 602_112),
            "token_share": (0.05, 1.0),
        },
        "audio": {},
    }


@given(st.integers(60, 3000), st.integers(60, 3000), SHARES)
def test_a_picture_has_at_most_its_share_of_tokens(height: int, width: int, share: float) -> None:
    """VL9: and not many fewer, but for the sides that are whole tokens."""
    if max(height, width) > 100 * min(height, width):
        return
    whole = image_of_share(RUN, height, width, 1.0)
    assert whole == qwen2_5_omni.image_item(RUN, height, width)
    part = image_of_share(RUN, height, width, share)
    _, h, w = part.grid
    assert 1 <= part.num_tokens <= max(1, share * whole.num_tokens, h // 2 if w == 2 else w // 2 if h == 2 else 0)
    assert part.num_tokens >= share * whole.num_tokens - (h + w) / 2 - 1


PLAIN = {"patch_size": 14, "temporal_patch_size": 1, "max_frames": 0}
TILED = {**PLAIN, "max_pixels": 12 * 448**2, "min_pixels": 448**2, "tile": 448, "grids": tiles._grids(448, 12)}
NEXT = {**PLAIN, "merge_size": 1, "max_pixels": 672**2, "min_pixels": 336 * 672, "tile": 336}
NEXT |= {"grids": ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))}
POOLED = {**PLAIN, "patch_size": 16, "merge_size": 3, "min_pixels": 48**2, "max_pixels": 280 * 48**2}


@pytest.mark.parametrize(
    ("family", "rules", "counts"),
    [
        ("internvl", TILED, {(900, 1200): (3330, 1282, 258), (448, 448): (258, 258, 258)}),  # 12, 4 and no tiles, and the whole
        ("llava_next", NEXT, {(600, 600): (2928, 1176, 1176), (300, 900): (2328, 1360, 1360)}),
        ("gemma4", POOLED, {(672, 960): (282, 128, 72), (600, 1000): (254, 137, 62)}),
    ],
)
def test_a_picture_in_steps_has_the_step_within_its_share(
    family: str, rules: dict[str, object], counts: dict[tuple[int, int], tuple[int, ...]]
) -> None:
    """VL9: a picture of tiles does not fall to one where more are within its share, nor one of a budget to less than the next."""
    model = replace(MODEL, family=family, vision_rules=VisionRules(**rules), vision_start_token_id=1, vision_end_token_id=2)  # type: ignore
    found = {size: tuple(image_of_share(model, *size, share).num_tokens for share in (1.0, 0.5, 0.25)) for size in counts}
    assert found == counts


def test_pictures_of_one_number_of_tokens_have_no_share() -> None:
    """A share that changes nothing is refused by name, not taken in silence."""
    alike = VisionRules(tile=336, min_pixels=336**2, max_pixels=336**2, max_frames=0)
    assert list(option_ranges(alike)["image"]) == ["min_pixels", "max_pixels"]
    assert "token_share" in option_ranges(VisionRules(**TILED))["image"]  # type: ignore


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_video_has_its_share_of_frames(share: float) -> None:
    whole = qwen2_5_omni.sample_frames(RUN, 600, 30.0)
    assert len(qwen2_5_omni.sample_frames(for_medium(RUN, MediaOptions(token_share=share)), 600, 30.0)) == share * len(whole)


def test_a_share_follows_what_waits() -> None:
    assert [share_under(waiting_s, 4.0) for waiting_s in (0.0, 2.0, 2.1, 4.0, 4.1, 100.0)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
