"""Our positions, towers and decoder against transformers' model of the same checkpoint, in float32, tokens forced."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mmrt.models.towers.interface import TowerInput
from mmrt.tests.models.glm_reference import embedded

Loaded = Any  # conftest.Loaded
Prompt = Any  # conftest.Prompt

TOLERANCE = 1e-4
NUM_DECODED = 6


def prompts(model: Loaded) -> dict[str, Prompt]:
    """Every kind of prompt that the model takes."""
    if "prompts" in model.cache:
        return model.cache["prompts"]
    family, config = model.family, model.config
    image = family.image_item(config, 75, 131)
    odd = family.image_item(config, 300, 41)
    cases: dict[str, list] = {
        "one token": [1],
        "text": [37],
        "image": [3, image, 5],
        "images": [1, image, odd, 4, image, 2],
    }
    if "video" in config.media_kinds:
        video = family.video_item(config, 7, 90, 60, sampled_fps=1.3)
        cases |= {"video": [2, video, 9], "mixed": [4, odd, 3, video, 6, image, 7]}
    if config.audio is not None:
        audio, short = family.audio_item(config, 431), family.audio_item(config, 3)
        cases |= {"audio": [2, audio, 3], "audios": [2, short, 1, audio, 4]}
        cases["all"] = [2, audio, 3, odd, 1, short, video, 5, image, 2]
        for name, (num_frames, num_mel_frames) in SOUND_TRACKS.items():
            film = family.video_item(config, num_frames, 90, 60, sampled_fps=2.0)
            cases[name] = [2, family.video_with_sound(config, film, family.audio_item(config, num_mel_frames)), 5]
        cases["sound tracks"] = [3, odd, *cases["sound a little longer"], audio, 2, *cases["video much longer"], image, 4]
    model.cache["prompts"] = {name: model.build_prompt(parts, seed) for seed, (name, parts) in enumerate(cases.items())}
    return model.cache["prompts"]


SOUND_TRACKS = {  # sampled frames at two per second, mel frames at a hundred
    "within a chunk": (3, 130),
    "a whole chunk": (4, 200),
    "a chunk and two mel frames": (4, 202),
    "several chunks": (12, 600),
    "sound a little longer": (8, 431),
    "sound much longer": (4, 1003),
    "video a little longer": (10, 403),
    "video longer within a chunk": (8, 230),
    "video much longer": (18, 100),
}
CASES = ("one token", "text", "image", "images", "video", "mixed", "audio", "audios", "all", *SOUND_TRACKS, "sound tracks")


@pytest.fixture(params=CASES)
def prompt(request: pytest.FixtureRequest, loaded: Loaded) -> Prompt:
    found = prompts(loaded)
    if request.param not in found:
        pytest.skip("the family takes no such media")
    return found[request.param]


def reference_positions(model: Loaded, prompt: Prompt) -> tuple[torch.Tensor, int]:
    inputs = prompt.reference_inputs
    names = ("input_ids", "image_grid_thw", "video_grid_thw", "attention_mask")
    kwargs = {name: inputs[name] for name in names if name in inputs}
    if prompt.has_sound_tracks:
        kwargs["use_audio_in_video"] = True
    if model.config.family == "qwen2_5_omni":
        if "feature_attention_mask" in inputs:
            kwargs["audio_seqlens"] = inputs["feature_attention_mask"].sum(1)
        kwargs["second_per_grids"] = inputs.get("video_second_per_grid")
        found, delta = model.reference.get_rope_index(**kwargs)
    else:
        if "second_per_grid_ts" in inputs:
            kwargs["second_per_grid_ts"] = inputs["second_per_grid_ts"]
        found, delta = model.reference.model.get_rope_index(mm_token_type_ids=inputs["mm_token_type_ids"], **kwargs)
    return found[:, 0], int(delta)


def test_positions_equal_get_rope_index(loaded: Loaded, prompt: Prompt) -> None:
    expected, delta = reference_positions(loaded, prompt)
    positions, our_delta = loaded.family.positions(loaded.config, len(prompt.ids), prompt.spans)
    assert positions.dtype == np.int64
    np.testing.assert_array_equal(positions, expected.numpy())
    assert our_delta == delta


@pytest.mark.many
def test_towers_equal_transformers(loaded: Loaded, prompt: Prompt) -> None:
    inputs, model = prompt.reference_inputs, loaded.reference.model
    found = dict.fromkeys(("image", "video", "audio"), torch.empty(0, loaded.config.language.hidden_size))
    if "pixel_values" in inputs:
        found["image"] = rows_of(model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]))
    if "pixel_values_videos" in inputs:
        found["video"] = rows_of(model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"]))
    if "input_features" in inputs:
        found["audio"] = model.get_audio_features(inputs["input_features"], inputs["feature_attention_mask"]).last_hidden_state
    ours: dict[str, list[torch.Tensor]] = {kind: [] for kind in found}
    for span, segments in zip(prompt.spans, loaded.encode(prompt), strict=True):
        for part, rows in zip(span.shape.segments, segments, strict=True):
            assert len(rows) == part.num_tokens
            ours[part.kind].append(rows)
    for kind, expected in found.items():
        if expected.numel():
            torch.testing.assert_close(torch.cat(ours[kind]), expected, rtol=1e-4, atol=1e-4)


def rows_of(features: Any) -> torch.Tensor:
    """What a vision tower gives for each token: the embedding, and behind it what deepstack adds."""
    deep = [torch.cat(parts) for parts in getattr(features, "deepstack_features", None) or ()]
    return torch.cat([torch.cat(features.pooler_output), *deep], 1)


@pytest.mark.many
@pytest.mark.parametrize("step", [16, 4096])
def test_teacher_forced_logits(loaded: Loaded, prompt: Prompt, step: int) -> None:
    """Prefill in chunks or at once on pages in random order, then decode one by one: as transformers' forward over everything."""
    length = len(prompt.ids)
    rng = torch.Generator().manual_seed(length)
    following = torch.randint(0, 1000, (NUM_DECODED,), generator=rng).tolist()
    expected = reference_logits(loaded, prompt, following)
    lm = loaded.language_model()
    table = torch.randperm(256, generator=rng)[: (length + NUM_DECODED) // loaded.page_tokens + 1]
    positions, delta = loaded.family.positions(loaded.config, length, prompt.spans)
    for chunk in loaded.prompt_chunks(lm, prompt, torch.from_numpy(positions), table, step):
        lm.prefill([chunk])
    token, place = prompt.ids[-1], torch.tensor(positions[:, -1:])
    for i, forced in enumerate(following):
        logits = lm.decode(torch.tensor([token]), place, torch.tensor([length + i]), table[None])
        check(logits[0], expected[length - 1 + i])
        token, place = forced, torch.full((3, 1), length + i + delta)


def reference_logits(model: Loaded, prompt: Prompt, following: list[int]) -> torch.Tensor:
    """Logits of prompt and following tokens in one forward, these at the positions that ``generate`` gives to them.

    Without them, Qwen2.5-VL's forward would count on from a video's sides, and ``generate`` from its last temporal position.
    """
    inputs = dict(prompt.reference_inputs)
    positions, delta = reference_positions(model, prompt)
    after = torch.arange(len(prompt.ids), len(prompt.ids) + len(following)) + delta
    inputs["position_ids"] = torch.cat((positions, after.expand(3, -1)), 1).unsqueeze(1)
    more = torch.tensor([following])
    inputs["input_ids"] = torch.cat((inputs["input_ids"], more), 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = torch.cat((inputs["mm_token_type_ids"], torch.zeros_like(more)), 1)
    if model.config.family.startswith("glm"):
        inputs = embedded(model.reference.model, inputs)
    return model.reference(**inputs, use_cache=False).logits[0]


def check(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Within what float32 is worth: transformers' own logits of GLM, of up to 14, are 1e-4 from those that it computes in float64."""
    assert logits.dtype == torch.float32
    tolerance = max(TOLERANCE, 2e-5 * float(expected.abs().max()))
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)
    assert expected.max() - expected[logits.argmax()] < tolerance


def test_several_sequences_at_once(loaded: Loaded) -> None:
    """Chunks of several prompts in one forward, then one decode batch of very different lengths."""
    names = ("text", "mixed", "one token", "image", "video")
    batch = [prompts(loaded).get(name, prompts(loaded)["images"]) for name in names]
    generator = torch.Generator().manual_seed(5)
    lm = loaded.language_model()
    pages = torch.randperm(320, generator=generator).view(-1, 64)
    following = [torch.randint(0, 1000, (2,), generator=generator).tolist() for _ in batch]
    pending, layouts = [], []
    for prompt, table in zip(batch, pages, strict=True):
        positions, delta = loaded.family.positions(loaded.config, len(prompt.ids), prompt.spans)
        layouts.append((torch.tensor(positions), delta))
        pending.append(loaded.prompt_chunks(lm, prompt, layouts[-1][0], table, 24 if loaded.grid == 1 else 2 * loaded.grid))
    while any(pending):
        lm.prefill([queue.pop(0) for queue in pending if queue])
    lengths = torch.tensor([len(prompt.ids) for prompt in batch])
    expected = [reference_logits(loaded, prompt, tokens) for prompt, tokens in zip(batch, following, strict=True)]
    tokens = torch.tensor([prompt.ids[-1] for prompt in batch])
    places = torch.stack([positions[:, -1] for positions, _ in layouts], 1)
    for step in range(2):
        logits = lm.decode(tokens, places, lengths + step, pages)
        for row, reference in enumerate(expected):
            check(logits[row], reference[lengths[row] - 1 + step])
        tokens = torch.tensor([tokens_[step] for tokens_ in following])
        places = (lengths + step + torch.tensor([delta for _, delta in layouts])).expand(3, -1)


def test_segments_encode_as_the_whole(loaded: Loaded) -> None:
    family, config = loaded.family, loaded.config
    if config.media_kinds == ("image",):
        pytest.skip("a picture has one segment")
    items = [family.video_item(config, 24, 200, 400, 2.0)]
    if config.audio is not None:
        items.append(family.audio_item(config, 6202))
    for item in items:
        assert len(item.segments) > 1
        prompt = loaded.build_prompt([item])
        whole = loaded.towers.encode([TowerInput(item.kind, np.concatenate(prompt.rows[0]), item.grid)])[0]
        torch.testing.assert_close(torch.cat(loaded.encode(prompt)[0]), whole, rtol=1e-5, atol=1e-5)


def test_audio_rows_may_come_as_bytes(models) -> None:
    loaded = models("qwen2_5_omni")
    rows = np.random.default_rng(0).normal(size=(250, 128)).astype(np.float32)
    plain, raw = loaded.towers.encode([TowerInput("audio", rows, (250, 0, 0)), TowerInput("audio", rows.view(np.uint8), (250, 0, 0))])
    torch.testing.assert_close(plain, raw, rtol=1e-5, atol=1e-5)


def test_nan_of_one_request_does_not_reach_the_next(loaded: Loaded) -> None:
    ids = torch.arange(40)
    places, table = torch.arange(40).expand(3, -1), torch.arange(3)

    def run(lm: Any) -> torch.Tensor:
        for chunk in loaded.chunks(lm.embed(ids), places, table, 20 if loaded.grid == 1 else loaded.grid):
            lm.prefill([chunk])
        return lm.decode(ids[-1:], places[:, -1:], torch.tensor([40]), table[None])

    clean, dirty = loaded.language_model(), loaded.language_model()
    for value in (float("nan"), float("inf")):
        broken = torch.full((49, loaded.config.language.hidden_size), value)
        for chunk in loaded.chunks(broken, torch.arange(49).expand(3, -1), table, 48):
            dirty.prefill([chunk])
    torch.testing.assert_close(run(dirty), run(clean), rtol=0, atol=1e-4)


def test_nothing_of_the_weights_is_copied(loaded: Loaded) -> None:
    held = {tensor.data_ptr() for tower in loaded.towers._towers.values() for tensor in tensors_of(tower)}
    towers = {name: tensor for name, tensor in loaded.weights.items() if name.startswith(("vision.", "audio."))}
    assert not [name for name, tensor in towers.items() if tensor.data_ptr() not in held]


def tensors_of(holder: Any) -> Iterator[torch.Tensor]:
    """All tensors in the attributes, lists and tuples of an object of ours."""
    if isinstance(holder, torch.Tensor):
        yield holder
    elif isinstance(holder, list | tuple):
        for part in holder:
            yield from tensors_of(part)
    elif type(holder).__module__.startswith("mmrt.models") and hasattr(holder, "__dict__"):
        yield from tensors_of(list(vars(holder).values()))
