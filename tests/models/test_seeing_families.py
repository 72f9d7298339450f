"""Families that see, beside transformers: what test_oracle does not tell. Processors, checkpoints' files and names, greedy answers."""

import io
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mmrt.actors.video.items import OpenImage, Target
from mmrt.media.limits import UNLIMITED, MediaLimits
from mmrt.media.preprocess import image_rows, temporal_rows, video_rows
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.families.registry import family_of
from mmrt.models.lm.rope import Rope
from mmrt.models.media_config import VisionRules
from mmrt.tests.media.processor_reference import processed

FAMILIES = ("qwen2_vl", "qwen3_vl", "qwen3_5", "glm_ocr", "glm4v")
PICTURES = ((1, 1), (3, 500), (28, 29), (33, 21), (97, 203), (150, 31), (200, 1), (224, 224), (311, 97), (640, 480), (517, 1023))
CLIPS = ((1, 30, 40), (2, 57, 33), (3, 64, 96), (4, 120, 160), (5, 20, 300), (7, 41, 43), (8, 8, 8), (9, 91, 17), (6, 250, 333))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape[-2] * shape[-3]).integers(0, 256, shape, dtype=np.uint8)


MEDIA = {f"image{size}": noise(*size, 3) for size in PICTURES} | {f"video{size}": noise(*size, 3) for size in CLIPS}


def media_of(family: str) -> dict[str, np.ndarray]:
    """What its processors take: Qwen3-VL's, which are Qwen3.5's too, and GLM's refuse clips of one frame."""
    return {name: pixels for name, pixels in MEDIA.items() if family == "qwen2_vl" or not name.startswith("video(1,")}


@pytest.fixture(scope="module")
def references(checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, np.ndarray]]:
    """What the processors of a family's checkpoint make of ``media_of`` it."""
    found: dict[str, dict[str, np.ndarray]] = {}

    def get(family: str) -> dict[str, np.ndarray]:
        if family not in found:
            found[family] = processed(media_of(family), tmp_path_factory.mktemp("reference"), checkpoints(family))
        return found[family]

    return get


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in FAMILIES for name in media_of(family)])
def test_grids_tokens_and_pixels_are_the_processors(checkpoints: Any, references: Any, family: str, name: str) -> None:
    config, pixels = load_model_config(checkpoints(family)), MEDIA[name]
    rules, grid = config.vision_rules, references(family)[f"{name}_grid"].tolist()
    assert rules is not None
    height, width = grid[1] * rules.patch_size, grid[2] * rules.patch_size
    if name.startswith("image"):
        item = family_of(config).image_item(config, *pixels.shape[:2])
        rows = image_rows(pixels, height, width, rules)
    else:
        item = family_of(config).video_item(config, *pixels.shape[:3], 2.0)
        rows = np.concatenate(list(video_rows(iter(pixels), height, width, rules)))
    assert list(item.grid) == grid
    assert sum(segment.num_tokens for segment in item.segments) == np.prod(grid) // 4
    per_channel = rules.row_bytes // 3
    mean, std = (np.repeat(np.float32(values) * np.float32(255), per_channel) for values in (rules.image_mean, rules.image_std))
    np.testing.assert_array_equal((rows.astype(np.float32) - mean) / std, references(family)[name])


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3_5"])
def test_the_filter_is_the_checkpoint_s_own(directory: Callable[..., Path], tmp_path_factory: Any, family: str) -> None:
    """Bilinear of pictures and videos, as its processors resize; both are converted to RGB before (FC11)."""
    path = directory(family)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        fields = json.loads((path / name).read_text()) if (path / name).exists() else {}
        (path / name).write_text(json.dumps(fields | {"resample": 2}))
    config = load_model_config(path)
    rules = config.vision_rules
    assert rules is not None and (rules.resample, rules.video_resample) == ("bilinear", "bilinear")
    media = {name: MEDIA[name] for name in ("image(97, 203)", "image(311, 97)", "video(4, 120, 160)")}
    expected = processed(media, tmp_path_factory.mktemp("reference"), path)
    per_channel = rules.row_bytes // 3
    mean, std = (np.repeat(np.float32(values) * np.float32(255), per_channel) for values in (rules.image_mean, rules.image_std))
    for name, pixels in media.items():
        if name.startswith("image"):
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "png")
            rows = np.concatenate([*OpenImage(file, config, MediaLimits(), UNLIMITED).rows(0)])
        else:
            item = family_of(config).video_item(config, *pixels.shape[:3], 2.0)
            rows = np.concatenate([*temporal_rows(map(Target.of(rules, item).planes, pixels), rules)])
        np.testing.assert_array_equal((rows.astype(np.float32) - mean) / std, expected[name])


@pytest.mark.parametrize("file", ["preprocessor_config.json", "video_preprocessor_config.json"])
def test_other_filters_are_refused(directory: Callable[..., Path], file: str) -> None:
    """transformers takes bicubic for Lanczos of tensors, and warns; the others are not smooth."""
    path = directory("qwen3_vl")
    fields = json.loads((path / file).read_text()) if (path / file).exists() else {}
    for number in (0, 1, 4):
        (path / file).write_text(json.dumps(fields | {"resample": number}))
        with pytest.raises(CheckpointError, match=rf"resample is {number}, expected 2 \(bilinear\) or 3 \(bicubic\)"):
            load_model_config(path)


@pytest.fixture
def directory(checkpoints: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a checkpoint's small files, with fields of config.json replaced, by their dotted place; ABSENT: taken away."""

    def make(family: str, **fields: object) -> Path:
        for file in checkpoints(family).glob("*.json"):
            (tmp_path / file.name).write_text(file.read_text())
        config = json.loads((tmp_path / "config.json").read_text())
        for place, value in fields.items():
            *outer, name = place.split("__")
            inner = config
            for part in outer:
                inner = inner[part]
            inner[name] = value
            if value is ABSENT:
                del inner[name]
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


ABSENT = object()
REFUSED: dict[str, dict[str, tuple[object, str]]] = {
    "qwen2_vl": {
        "vision_config__hidden_act": ("gelu", "vision_config.hidden_act is 'gelu', expected 'quick_gelu'"),
        "vision_config__hidden_size": (64, r"vision_config.hidden_size is 64, expected the decoder's hidden_size \(128\)"),
        "vision_config__embed_dim": (24, "vision_config.embed_dim is 24, expected a multiple of 4 x num_heads"),
        "vision_config__mlp_ratio": (0, "vision_config.mlp_ratio is 0, expected a number above 0"),
        "text_config__hidden_act": ("gelu", "text_config.hidden_act is 'gelu', expected 'silu'"),
        "text_config__use_sliding_window": (True, "use_sliding_window is true"),
        "text_config__rope_parameters__rope_type": ("longrope", "rope_type is 'longrope', expected 'default' or 'linear' or"),
        "image_token_id": (5000, "image placeholder id is 5000, outside the vocabulary of 1216"),
    },
    "qwen3_vl": {
        "vision_config__hidden_act": ("gelu", "vision_config.hidden_act is 'gelu', expected 'gelu_pytorch_tanh'"),
        "vision_config__out_hidden_size": (64, r"vision_config.out_hidden_size is 64, expected the decoder's hidden_size \(128\)"),
        "vision_config__num_position_embeddings": (150, "num_position_embeddings is 150, expected the square of a number"),
        "vision_config__deepstack_visual_indexes": ([0, 3, 5], r"\[0, 3, 5\], expected ascending numbers below depth \(5\)"),
        "text_config__rope_parameters__rope_type": ("longrope", "rope_type is 'longrope', expected 'default' or 'linear' or"),
        "text_config__rope_parameters__mrope_section": ([12, 10, 9], r"\[12, 10, 9\], expected three numbers that sum to the 32 pairs"),
        "text_config__partial_rotary_factor": (0.5, "partial_rotary_factor is 0.5; partly rotated heads"),
        "text_config__rope_parameters__mrope_interleaved": (False, "mrope_interleaved is false; only axes that take turns"),
        "vision_start_token_id": (1216, "vision_start_token_id is 1216, outside the vocabulary of 1216"),
        "vision_end_token_id": (5000, "vision_end_token_id is 5000, outside the vocabulary of 1216"),
        "text_config__vocab_size": (80, "is .*, outside the vocabulary of 80"),
    },
    "glm_ocr": {
        "vision_config__hidden_act": ("gelu", "vision_config.hidden_act is 'gelu', expected 'silu'"),
        "vision_config__attention_bias": (False, "vision_config.attention_bias is false; only a tower with biases"),
        "vision_config__out_hidden_size": (64, r"vision_config.out_hidden_size is 64, expected the decoder's hidden_size \(128\)"),
        "vision_config__rms_norm_eps": (0, "vision_config.rms_norm_eps is 0, expected a number above 0"),
        "text_config__hidden_act": ("gelu", "text_config.hidden_act is 'gelu', expected 'silu'"),
        "text_config__rope_parameters__mrope_section": ([8, 12, 11], r"\[8, 12, 11\], expected three numbers that sum to the 32 pairs"),
        "image_token_id": (ABSENT, "image placeholder id is 59280, outside the vocabulary of 1216"),
    },
    "glm4v": {
        "vision_config__hidden_act": ("gelu", "vision_config.hidden_act is 'gelu', expected 'silu'"),
        "vision_config__attention_bias": (True, "vision_config.attention_bias is true; only a tower without biases"),
        "vision_config__out_hidden_size": (64, r"vision_config.out_hidden_size is 64, expected the decoder's hidden_size \(128\)"),
        "vision_config__image_size": (7, "vision_config.image_size is 7, expected a multiple of patch_size"),
        "text_config__model_type": ("glm4v_moe_text", "text_config.model_type is 'glm4v_moe_text', expected 'glm4v_text'"),
        "text_config__rope_parameters__partial_rotary_factor": (0.04, "is 0.04; 1 of a head's 32 values would turn, expected pairs"),
        "text_config__rope_parameters__mrope_section": ([2, 3, 4], r"\[2, 3, 4\], expected three numbers that sum to the 8 pairs"),
        "image_token_id": (ABSENT, "image placeholder id is 151343, outside the vocabulary of 1216"),
    },
    "qwen3_5": {
        "vision_config__hidden_act": ("gelu", "vision_config.hidden_act is 'gelu', expected 'gelu_pytorch_tanh'"),
        "vision_config__out_hidden_size": (64, r"vision_config.out_hidden_size is 64, expected the decoder's hidden_size \(128\)"),
        "vision_config__num_position_embeddings": (150, "num_position_embeddings is 150, expected the square of a number"),
        "text_config__rope_parameters__mrope_section": ([4, 2, 1], r"\[4, 2, 1\], expected three numbers that sum to the 8 pairs"),
        "text_config__rope_parameters__mrope_interleaved": (False, "mrope_interleaved is false; only axes that take turns"),
        "text_config__attn_output_gate": (False, "text_config.attn_output_gate is false"),
        "video_token_id": (ABSENT, "video placeholder id is 248057, outside the vocabulary of 1216"),
        "image_token_id": (ABSENT, "image placeholder id is 248056, outside the vocabulary of 1216"),
        "vision_start_token_id": (ABSENT, "vision_start_token_id is 248053, outside the vocabulary of 1216"),
        "vision_end_token_id": (ABSENT, "vision_end_token_id is 248054, outside the vocabulary of 1216"),
    },
}


@pytest.mark.parametrize(("family", "field"), [(family, field) for family, fields in REFUSED.items() for field in fields])
def test_what_is_not_supported_is_refused_by_name(directory: Callable[..., Path], family: str, field: str) -> None:
    value, message = REFUSED[family][field]
    with pytest.raises(CheckpointError, match=message):
        load_model_config(directory(family, **{field: value}))


def test_a_configuration_as_transformers_4_wrote_it(directory: Callable[..., Path], checkpoints: Callable[[str], Path]) -> None:
    """The published Qwen2-VL: text fields at the top, rope_scaling, and the tower's older names."""
    path = directory("qwen2_vl")
    config = json.loads((path / "config.json").read_text())
    text, vision = config.pop("text_config"), config["vision_config"]
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    vision |= {"in_chans": vision.pop("in_channels"), "spatial_patch_size": vision.pop("patch_size"), "model_type": "qwen2_vl"}
    text["torch_dtype"] = config.pop("dtype")
    (path / "config.json").write_text(json.dumps({**text, **config}))
    assert load_model_config(path) == load_model_config(checkpoints("qwen2_vl"))


@pytest.mark.parametrize(("root", "text"), [(True, False), (False, True), (ABSENT, True)], ids=["whole", "text", "text alone"])
def test_heads_are_tied_where_transformers_ties_them(directory: Callable[..., Path], family: str, root: object, text: object) -> None:
    """text_config says something else than the whole model in files that transformers 5 wrote."""
    import transformers

    path = directory(family, tie_word_embeddings=root, text_config__tie_word_embeddings=text)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.from_pretrained(path))
    assert load_model_config(path).language.tie_embeddings == bool(model.get_expanded_tied_weights_keys(all_submodels=True))


SECTIONS = {"qwen2_vl": [4, 6, 6], "qwen3_vl": [12, 10, 10], "qwen3_5": [4, 2, 2]}
ROPES: dict[str, dict[str, dict[str, Any]]] = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 64, "mrope_interleaved": True}},
    "empty": {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {}},
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("family", SECTIONS)
def test_angles_of_heads_equal_those_of_transformers(directory: Callable[..., Path], family: str, name: str) -> None:
    import transformers

    rope = {field: {**values, "mrope_section": SECTIONS[family]} if values else {} for field, values in ROPES[name].items()}
    rope = {"rope_theta": 3e5, **rope}  # beside it, as transformers 4 wrote it
    path = directory(family, **{f"text_config__{field}": value for field, value in rope.items()})
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    rotary = {"qwen2_vl": "Qwen2VL", "qwen3_vl": "Qwen3VLText", "qwen3_5": "Qwen3_5Text"}[family] + "RotaryEmbedding"
    places = torch.stack([torch.arange(90), torch.arange(90) * 3 % 17, torch.arange(90) * 7 % 23])
    expected = getattr(modeling, rotary)(transformers.AutoConfig.from_pretrained(path).text_config)(torch.zeros(1), places[:, None])
    language = load_model_config(path).language
    for found, theirs in zip(Rope(language.ropes[0], language.heads.head_dim).rotation(places), expected, strict=False):
        torch.testing.assert_close(found[:, 0], theirs[0, :, : found.shape[-1]])


def test_of_two_descriptions_of_positions_the_older_counts(directory: Callable[..., Path], family: str) -> None:
    import transformers

    rope = transformers.AutoConfig.from_pretrained(directory(family)).text_config.rope_parameters
    path = directory(family, text_config__rope_scaling={**rope, "rope_theta": 7e5})
    assert load_model_config(path).language.ropes[0].theta == 7e5
    assert transformers.AutoConfig.from_pretrained(path).text_config.rope_parameters["rope_theta"] == 7e5


PROCESSED_OTHERWISE: dict[str, tuple[object, str]] = {
    "do_resize": (False, "is false"),
    "do_rescale": (False, "is false"),
    "do_normalize": (False, "is false"),
    "resample": (1, r"is 1, expected 2 \(bilinear\) or 3"),
    "rescale_factor": (1.0, "is 1, expected 0.00392"),
    "temporal_patch_size": (1, "is 1, but the vision tower has 2"),
    "merge_size": (4, "is 4, but the vision tower has 2"),
}


@pytest.mark.parametrize("kind", ["preprocessor_config.json", "video_preprocessor_config.json"])
@pytest.mark.parametrize("field", [*PROCESSED_OTHERWISE, "num_frames"])
def test_processors_that_make_other_pixels_are_refused(directory: Callable[..., Path], family: str, kind: str, field: str) -> None:
    file = directory(family) / kind
    plain = json.loads(file.read_text()) if file.exists() else {}
    usual = {"do_resize": True, "resample": 3, "rescale_factor": 0.00392156862745098, "num_frames": None}
    file.write_text(json.dumps({**plain, **usual}))
    load_model_config(file.parent)
    if field == "num_frames" and (kind == "preprocessor_config.json" or family.startswith("glm")):  # whose files name it for nothing
        return
    value, said = PROCESSED_OTHERWISE.get(field, (32, "is 32; only frames by time"))
    file.write_text(json.dumps({**plain, **usual, field: value}))
    with pytest.raises(CheckpointError, match=f"{kind}: {field} {said}"):
        load_model_config(file.parent)


def rules_of(path: Path) -> VisionRules:
    rules = load_model_config(path).vision_rules
    assert rules is not None
    return rules


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_processor_files_of_transformers_4_and_5(directory: Callable[..., Path], family: str) -> None:
    """One file for images and another for videos with bounds of their own, or one for both with sizes."""
    path = directory(family)
    for file in path.glob("*processor_config.json"):
        file.unlink()
    colours = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
    (path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 5000, "max_pixels": 90000, **colours}))
    video = {"size": {"shortest_edge": 6000, "longest_edge": 200000}, "fps": 1, "min_frames": 6, "max_frames": 60, **colours}
    (path / "video_preprocessor_config.json").write_text(json.dumps(video))
    expected = rules_of(path)
    assert (expected.min_pixels, expected.max_pixels) == (5000, 90000)
    assert (expected.video_min_pixels, expected.video_max_pixels) == (6000, 200000)
    assert (expected.fps, expected.min_frames, expected.max_frames) == (1.0, 6, 60)
    assert (expected.image_mean, expected.image_std) == ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    for file in path.glob("*processor_config.json"):
        file.unlink()
    image = {"size": {"shortest_edge": 5000, "longest_edge": 90000}, **colours}
    (path / "processor_config.json").write_text(json.dumps({"image_processor": image, "video_processor": video}))
    assert rules_of(path) == expected


OLD_NAMES = {"model.language_model.": "model.", "model.visual.": "visual."}
NEW_NAMES = {"model.layers.": "model.language_model.layers.", "model.embed_tokens.": "model.language_model.embed_tokens."} | {
    "model.norm.": "model.language_model.norm.",
    "visual.": "model.visual.",
}


def test_both_spellings_of_tensors_names(checkpoints: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    path = checkpoints(family)
    config, tensors = load_model_config(path), load_file(path / "model.safetensors")
    expected = read_weights(path, config)
    for names in (OLD_NAMES, NEW_NAMES):
        renamed = {}
        for name, tensor in tensors.items():
            start = next((old for old in names if name.startswith(old)), "")
            renamed[names.get(start, "") + name.removeprefix(start)] = tensor
        save_file(renamed, tmp_path / "model.safetensors")
        found = read_weights(tmp_path, config)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    name = next(name for name in renamed if name.endswith(("attn.proj.bias", "downsample.bias")))
    del renamed[name]
    save_file(renamed, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="bias' of shape .* is missing"):
        read_weights(tmp_path, config)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_5_moe", "qwen3_vl_moe"])
def test_greedy_tokens_equal_those_of_generate(models: Callable[[str], Any], family: str) -> None:
    loaded = models(family)
    config, ours = loaded.config, loaded.family
    with torch.inference_mode():
        parts = [3, ours.image_item(config, 75, 131), 4, ours.video_item(config, 5, 60, 90, 2.0), 6]
        if family.startswith("glm"):
            parts[1:2] = []  # transformers' forward takes pictures or videos
        prompt = loaded.build_prompt(parts, seed=3)
        reference = {**prompt.reference_inputs, "max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = loaded.reference.generate(**reference)[0, len(prompt.ids) :].tolist()
        lm, table = loaded.language_model(), torch.randperm(64, generator=torch.Generator().manual_seed(0))
        positions, delta = ours.positions(config, len(prompt.ids), prompt.spans)
        for chunk in loaded.prompt_chunks(lm, prompt, torch.from_numpy(positions), table, 5 if loaded.grid == 1 else loaded.grid):
            lm.prefill([chunk])
        said, token, place = [], prompt.ids[-1], torch.from_numpy(positions[:, -1:])
        while len(said) < 20:
            length = len(prompt.ids) + len(said)
            token = int(lm.decode(torch.tensor([token]), place, torch.tensor([length]), table[None]).argmax())
            said.append(token)
            place = torch.full((3, 1), length + delta)
    assert said == expected


QWEN3_5 = {"0.8b": 0.873, "2b": 2.274, "4b": 4.660, "9b": 9.653, "27b": 27.78}
DRAFT_HEADS = {"0.8b": 0.0204, "2b": 0.0608, "4b": 0.1206, "9b": 0.2433, "27b": 0.4247}  # of its files; not read


@pytest.mark.parametrize(
    ("family", "shape", "billions"),
    [
        *(("qwen2_vl", *size) for size in (("2b", 2.2), ("7b", 8.3), ("72b", 73.4))),
        *(("qwen3_vl", *size) for size in (("2b", 2.13), ("4b", 4.44), ("8b", 8.77), ("32b", 33.4))),
        *(("qwen3_vl_moe", *size) for size in (("30b-a3b", 31.1), ("235b-a22b", 236))),
        *(("qwen3_5_moe", *size) for size in (("35b-a3b", 35), ("122b-a10b", 122), ("397b-a17b", 397))),
        *(("qwen3_5", size, whole - DRAFT_HEADS[size]) for size, whole in QWEN3_5.items()),
    ],
)
def test_published_shapes_have_their_published_size(sized: Callable[..., float], family: str, shape: str, billions: float) -> None:
    assert sized(family, shape) / 1e9 == pytest.approx(billions, rel=0.002 if family == "qwen3_5" else 0.02)
