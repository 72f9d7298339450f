"""Families of text alone against transformers: logits, greedy tokens, every rope, and what is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from mmrt.models.architecture import ModelConfig, WeightFormat
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config, weight_bytes
from mmrt.models.errors import CheckpointError, UnsupportedMediaError
from mmrt.models.families.family import Family
from mmrt.models.families.registry import FAMILIES, family_named
from mmrt.models.lm.decoder import Chunk, Stream
from mmrt.models.lm.language_model import LanguageModel
from mmrt.models.make.checkpoint import make_checkpoint, write_configs
from mmrt.tests.models.kept import exact

DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PART_FAMILIES = ("phi3", "glm", "glm4")  # of whose heads a part may turn
TEXT_FAMILIES = (*DENSE_FAMILIES, "smollm3", "ernie4_5", "seed_oss", "granite", "olmo2", "olmo3", *PART_FAMILIES, "qwen3_moe")
MULTIPLIERS = {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.37, "logits_scaling": 3.0}
ORIGINAL, CONTEXT = 64, 256  # tokens that ropes were trained with, and that they are to reach
LENGTH, PAGE_TOKENS = 200, 8
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [7, 9],
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}  # of three layers
LLAMA_3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SLIDING = "sliding_attention"
WINDOWS = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {**LLAMA_3, "original_max_position_embeddings": ORIGINAL},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn-not-truncated": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "truncate": False, "beta_fast": 16.0,
        "mscale": 1.0, "mscale_all_dim": 0.5,
    },
    "yarn-of-files": {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 0.9},
}  # fmt: skip


def save(path: Path, family: str, **fields: Any) -> Any:
    """Write a random checkpoint of transformers, and return its model. Biases and norms are random, too."""
    import transformers

    torch.manual_seed(0)
    experts = EXPERTS if family.endswith("_moe") else {}
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **experts, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(path)
    return model


def load(path: Path) -> tuple[ModelConfig, LanguageModel]:
    config = load_model_config(path, dtype="float32")
    num_pages = 4 * CONTEXT // PAGE_TOKENS
    kv = torch.zeros(num_pages, config.kv_page_bytes(PAGE_TOKENS), dtype=torch.uint8)
    return config, LanguageModel(config, read_weights(path, config), kv, PAGE_TOKENS)


@torch.inference_mode()
def check(path: Path, reference: Any, num_steps: int = 20) -> ModelConfig:
    """Compare two prompts in chunks, then steps of both in one batch, with transformers without a cache."""
    config, lm = load(path)
    ids = torch.randint(0, 300, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = reference(input_ids=ids, use_cache=False).logits
    lengths = [LENGTH - num_steps, ORIGINAL - 3]  # one is beyond the trained context, one crosses its end
    tables = torch.randperm(2 * CONTEXT // PAGE_TOKENS, generator=torch.Generator().manual_seed(2)).view(2, -1)
    places = torch.arange(LENGTH).expand(3, -1)
    for row, length in enumerate(lengths):
        for start, end in ((0, 13), (13, 14), (14, 50), (50, length)):
            part = ids[row, start:end]
            hidden = lm.prefill([Chunk(lm.embed(part), places[:, start:end], start, tables[row], ids=part)], [0])
            close(lm.logits(hidden[0]), expected[row, start:end])
    for step in range(num_steps):
        at = [length + step for length in lengths]
        step_ids = torch.stack([ids[row, place] for row, place in enumerate(at)])
        logits = lm.decode(step_ids, torch.tensor(at).expand(3, -1), torch.tensor(at) + 1, tables)
        close(logits, torch.stack([expected[row, place] for row, place in enumerate(at)]))
    return config


def close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_logits_equal_those_of_transformers(tmp_path: Path, family: str, tie: bool) -> None:
    config = check(tmp_path, save(tmp_path, family, tie_word_embeddings=tie))
    assert config.family == family and config.language.tie_embeddings == tie and config.media_kinds == ()
    assert config.eos_token_ids == (7, 9) and config.max_context == CONTEXT


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_biases_of_attention(tmp_path: Path, family: str) -> None:
    config = check(tmp_path, save(tmp_path, family, attention_bias=True))
    assert config.language.heads.bias and config.language.heads.output_bias


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mistral", {"sliding_window": 24}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 1}),
        ("qwen2", {**WINDOWS, "sliding_window": 40}),
        ("olmo3", {"sliding_window": 24, "layer_types": [SLIDING, "full_attention", SLIDING]}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 24, "layer_types": [SLIDING, "full_attention", SLIDING]}),
    ],
)
def test_windows(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    """Smaller than both prompts, and than some chunks."""
    reference = save(tmp_path, family, **fields)
    language, kinds = check(tmp_path, reference).language, getattr(reference.config, "layer_types", None) or [SLIDING] * 3
    assert [layer.mixer.window for layer in language.layers] == [fields["sliding_window"] * (kind == SLIDING) for kind in kinds]
    assert len(language.kv_groups) == len(set(kinds))


@pytest.mark.many
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_ropes_up_to_and_beyond_the_trained_context(tmp_path: Path, family: str, rope: str) -> None:
    check(tmp_path, save(tmp_path, family, rope_parameters={"rope_theta": 5000.0, **ROPES[rope]}))


@pytest.mark.parametrize("family", PART_FAMILIES)
def test_heads_of_which_a_part_turns(tmp_path: Path, family: str) -> None:
    rope = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.75}
    config = check(tmp_path, save(tmp_path, family, head_dim=32, rope_parameters=rope, rms_norm_eps=1e-4))
    assert len(config.language.ropes[0].axes) == 12
    edit(tmp_path, head_dim=8, rope_parameters={**rope, "partial_rotary_factor": 0.4})
    with pytest.raises(CheckpointError, match="is 0.4; 3 of a head's 8 values would turn, expected pairs"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("is_old", [False, True], ids=["5", "4"])
def test_the_short_side_of_longrope(tmp_path: Path, is_old: bool) -> None:
    """The context is the trained one: beyond, all that was cached would turn otherwise. As transformers 4 and 5 write it."""
    factors = {"short_factor": [1.0, 1.2, 1.7, 2.5, 4.0, 7.0], "long_factor": [2.0] * 6}
    rope = {"rope_type": "longrope", "rope_theta": 5000.0, "partial_rotary_factor": 0.75, **factors}
    trained = {"max_position_embeddings": 4 * CONTEXT, "original_max_position_embeddings": CONTEXT}
    reference = save(tmp_path, "phi3", rope_parameters={**rope, "original_max_position_embeddings": CONTEXT}, **trained)
    if is_old:
        scaling = {"type": "longrope", **factors}
        edit(tmp_path, rope_parameters=ABSENT, rope_theta=5000.0, partial_rotary_factor=0.75, rope_scaling=scaling)
    config = check(tmp_path, reference)
    assert config.max_context == CONTEXT and config.language.ropes[0].factor == pytest.approx(1.118, abs=1e-3)
    edit(tmp_path, **{"rope_scaling" if is_old else "rope_parameters": {**rope, "short_factor": [1.0] * 5}})
    with pytest.raises(CheckpointError, match="short_factor has 5 numbers, expected one for each of the 6 pairs that turn"):
        load_model_config(tmp_path)


def test_layers_in_which_no_head_turns(tmp_path: Path) -> None:
    config = check(tmp_path, save(tmp_path, "smollm3", no_rope_layer_interval=2))
    assert [layer.mixer.rope for layer in config.language.layers] == [0, 1, 0]
    config = check(tmp_path, save(tmp_path, "smollm3", no_rope_layers=[0, 1, 1, 1], attention_bias=True))
    assert [layer.mixer.rope for layer in config.language.layers] == [1, 0, 0]
    edit(tmp_path, tie_word_embeddings=ABSENT)
    assert load_model_config(tmp_path).language.tie_embeddings
    edit(tmp_path, no_rope_layers=[0, 1])
    with pytest.raises(CheckpointError, match=r"no_rope_layers has 2 numbers, expected one for each of num_hidden_layers \(3\)"):
        load_model_config(tmp_path)
    edit(tmp_path, use_sliding_window=True)
    with pytest.raises(CheckpointError, match="use_sliding_window is true"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("family", ["glm", "glm4"])
def test_biases_of_glm(tmp_path: Path, family: str) -> None:
    config = check(tmp_path, save(tmp_path, family, attention_bias=False))
    assert not config.language.heads.bias and config.language.layers[0].has_output_norms == (family == "glm4")


def test_multipliers_of_granite(tmp_path: Path) -> None:
    config = check(tmp_path, save(tmp_path, "granite", **MULTIPLIERS))
    lm = config.language
    assert (lm.embedding_scale, lm.heads.scale, lm.layers[2].output_scale, lm.logits_divisor) == tuple(MULTIPLIERS.values())


@pytest.mark.parametrize("is_old", [False, True], ids=["5", "4"])
def test_the_ropes_of_olmo_3(tmp_path: Path, is_old: bool) -> None:
    """Layers with a window keep theirs where the context is longer than the trained one; each fourth layer has none."""
    yarn = ROPES["yarn"]
    ropes = {"full_attention": {"rope_theta": 5e5, **yarn}, SLIDING: {"rope_type": "default", "rope_theta": 5e5}}
    reference = save(tmp_path, "olmo3", sliding_window=24, num_hidden_layers=5, rope_parameters=ropes)
    if is_old:
        edit(tmp_path, rope_parameters=ABSENT, rope_theta=5e5, rope_scaling=yarn, layer_types=ABSENT, sliding_window_pattern=2)
    config = check(tmp_path, reference)
    assert [layer.mixer.rope for layer in config.language.layers] == [1, 1, 1, 0, 1]
    edit(tmp_path, sliding_window=4 * CONTEXT)
    assert [layer.mixer.window for layer in load_model_config(tmp_path).language.layers] == [0] * 5
    assert load_model_config(tmp_path).language.layers[0].mixer.rope == 1


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("family", ["granite", "olmo2", "olmo3"])
@torch.inference_mode()
def test_rounded_weights(tmp_path: Path, family: str, weights: WeightFormat) -> None:
    """Logits are those of the values that the format has, but for the rounding of activations."""
    save(tmp_path, family, **(MULTIPLIERS if family == "granite" else {}))
    config = load_model_config(tmp_path, "float32", weights=weights)
    rounded = read_weights(tmp_path, config)
    exactly = {name: exact(rounded, name).float() if f"{name}.scales" in rounded else value for name, value in rounded.items()}
    ids, logits = torch.randint(0, 300, (60,), generator=torch.Generator().manual_seed(4)), list[torch.Tensor]()
    for form, values in ((config, rounded), (replace(config, weights="auto"), exactly)):
        kv = torch.zeros(8, config.kv_page_bytes(PAGE_TOKENS), dtype=torch.uint8)
        lm = LanguageModel(form, values, kv, PAGE_TOKENS)
        (hidden,) = lm.prefill([Chunk(lm.embed(ids), torch.arange(60).expand(3, -1), 0, torch.arange(8), ids=ids)], [0])
        logits.append(lm.logits(hidden))
    assert 0 < (logits[0] - logits[1]).abs().mean() / logits[1].std() < 0.05


@pytest.mark.parametrize("family", ["granite", "olmo2"])
def test_layers_of_several_processes(tmp_path: Path, family: str) -> None:
    """The stream that one hands to the next has the bits that it would have within."""
    save(tmp_path, family)
    ids, hidden = torch.arange(10, 50), list[torch.Tensor]()
    for is_divided in (False, True):
        _, lm = load(tmp_path)
        chunks, stream = [Chunk(lm.embed(ids), torch.arange(40).expand(3, -1), 0, torch.arange(8), ids=ids)], None
        for layer in range(2 if is_divided else 0):
            stream = lm.prefill_layers(chunks, range(layer, layer + 1), stream)
            stream = Stream(stream.hidden.clone(), stream.normed.clone())
        hidden += lm.prefill(chunks, [0], stream=stream, first=2 if is_divided else 0)
    assert torch.equal(*hidden)


def test_biases_of_seed_oss(tmp_path: Path) -> None:
    for has_biases in (True, False):
        config = check(tmp_path, save(tmp_path, "seed_oss", attention_bias=has_biases, attention_out_bias=not has_biases))
        assert config.language.heads.bias == has_biases != config.language.heads.output_bias


PUBLISHED_BILLIONS = [
    *(("ernie4_5", "0.3b", 0.3607), ("seed_oss", "36b", 36.15), ("granite", "3.3-2b", 2.534), ("granite", "3.3-8b", 8.171)),
    *(("olmo2", "1b", 1.485), ("olmo2", "7b", 7.299), ("olmo2", "13b", 13.716), ("olmo2", "32b", 32.234), ("olmo3", "7b", 7.298)),
]


@pytest.mark.parametrize(("family", "size", "billions"), PUBLISHED_BILLIONS)
def test_published_sizes(sized: Callable[[str, str], int], family: str, size: str, billions: float) -> None:
    assert sized(family, size) / 1e9 == pytest.approx(billions, rel=0.001)


def test_what_published_files_leave_out(tmp_path: Path) -> None:
    """ERNIE's and Seed's classes have values of their own."""
    import transformers

    save(tmp_path, "llama")
    for family in ("ernie4_5", "seed_oss"):
        left_out = (
            "num_key_value_heads",
            "rms_norm_eps",
            "head_dim",
            "max_position_embeddings",
            "tie_word_embeddings",
            "attention_bias",
        )
        edit(tmp_path, model_type=family, **dict.fromkeys(left_out, ABSENT), num_attention_heads=8)
        found, theirs = load_model_config(tmp_path).language, transformers.AutoConfig.from_pretrained(tmp_path)
        assert found.heads.head_dim == theirs.head_dim == 128 and found.heads.num_kv_heads == theirs.num_key_value_heads
        assert found.rms_norm_eps == theirs.rms_norm_eps and found.tie_embeddings == theirs.tie_word_embeddings
        assert found.ropes[0].theta == theirs.rope_parameters["rope_theta"]
        assert found.heads.bias == getattr(theirs, "attention_bias", False)


def test_fields_as_transformers_4_wrote_them(tmp_path: Path) -> None:
    rope = {name: value for name, value in ROPES["llama3"].items() if name != "rope_type"}
    reference = save(tmp_path, "llama", rope_parameters={"rope_theta": 5000.0, **ROPES["llama3"]})
    edit(tmp_path, rope_parameters=None, rope_theta=5000.0, rope_scaling={"type": "llama3", **rope}, dtype=None, torch_dtype="float32")
    check(tmp_path, reference)


ABSENT = object()


def edit(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    changed = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in changed.items() if value is not ABSENT}))


PUBLISHED = [(family, size) for family in TEXT_FAMILIES for size in family_named(family).recipes() if size != "tiny"]


@pytest.mark.parametrize(("family", "size"), PUBLISHED, ids=map("-".join, PUBLISHED))
def test_made_checkpoints_have_the_tensors_of_transformers(tmp_path: Path, family: str, size: str) -> None:
    """The largest too: no tensor is written, and transformers' model has no memory."""
    import transformers

    recipe = family_named(family).recipes()[size]
    added = (*recipe.special_tokens, *recipe.plain_tokens)
    write_configs(tmp_path, recipe, {token: at for at, token in enumerate(added)})
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    expected = {name: tuple(values.shape) for name, values in reference.named_parameters()}
    config = load_model_config(tmp_path)
    specs = family_named(family).tensor_specs(config)
    found: dict[str, tuple[int, ...]] = {}
    parts: dict[str, dict[tuple[int, int], int]] = {}
    for source in (source for spec in specs for source in spec.sources):
        whole = source.part or source
        name = family_named(family).checkpoint_name(whole.name)
        found[name] = whole.shape
        if source.part is not None:
            parts.setdefault(name, {})[source.part.number, source.part.first] = source.shape[0]
    assert found == expected
    assert all(sum(rows.values()) == expected[name][0] * expected[name][1] for name, rows in parts.items())
    num_values = sum(values.numel() for values in reference.parameters())
    assert weight_bytes(config) == 2 * num_values
    in_int8, in_int8g = (weight_bytes(replace(config, weights=form)) for form in ("int8", "int8g"))
    assert num_values < in_int8 < 1.02 * num_values < in_int8g < 1.09 * num_values
    assert num_values / 2 < weight_bytes(replace(config, weights="int4")) < in_int8


@pytest.mark.parametrize(("size", "billions"), [("9b", 9.40), ("32b", 32.57)])
def test_glm_4_has_its_published_size(sized: Callable[[str, str], int], size: str, billions: float) -> None:
    assert sized("glm4", size) / 1e9 == pytest.approx(billions, abs=0.01)


def test_greedy_tokens_equal_those_of_generate(tmp_path: Path) -> None:
    for family in TEXT_FAMILIES:
        reference = save(tmp_path / family, family)
        _, lm = load(tmp_path / family)
        ids = torch.randint(10, 300, (1, 40), generator=torch.Generator().manual_seed(3))
        expected = reference.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 40:].tolist()
        table = torch.arange(CONTEXT // PAGE_TOKENS)
        hidden = lm.prefill([Chunk(lm.embed(ids[0]), torch.arange(40).expand(3, -1), 0, table)], [0])
        said = [int(lm.logits(hidden[0][-1:]).argmax())]
        while len(said) < 30:
            at = torch.tensor([39 + len(said)])
            said.append(int(lm.decode(torch.tensor(said[-1:]), at.expand(3, -1), at + 1, table[None]).argmax()))
        assert said == expected, family


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias is true"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "rope_type is 'longrope', expected 'default' or"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
        ("llama", {"rope_parameters": {**LLAMA_3, "high_freq_factor": 1.0}}, "high_freq_factor is 1, expected more than low_freq"),
        ("qwen2", {**WINDOWS, "sliding_window": 0}, "sliding_window is 0"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types has sliding_attention"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "layer_types names 4 layers, expected 3"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types has chunked_attention; only full_attention and sliding"),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, "layer_types has sliding_attention; only full_attention is"),
        ("mistral", {"sliding_window": -1}, "sliding_window is -1"),
        ("llama", {"rope_parameters": None, "rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_theta is 1"),
        ("qwen3", {"layer_types": "sliding_attention"}, "layer_types is 'sliding_attention', expected a list of names"),
        ("qwen3", {"quantization_config": {"quant_method": "quip"}}, "quip"),
        ("ernie4_5", {"use_bias": True}, "use_bias is true; a feed-forward with biases"),
        ("seed_oss", {"mlp_bias": True}, "mlp_bias is true"),
        ("granite", {"mlp_bias": True}, "mlp_bias is true"),
        ("granite", {"residual_multiplier": 0.0}, "residual_multiplier is 0"),
        ("olmo3", {"sliding_window": None}, "no window is used"),
        ("olmo3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters has those of all layers alike"),
        ("olmo3", {"rope_parameters": {SLIDING: {"rope_type": "yarn"}}}, "sliding_attention.rope_type is 'yarn', expected 'default'"),
        ("qwen3", {"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, family: str, fields: dict[str, Any], said: str) -> None:
    save(tmp_path, family)
    edit(tmp_path, **fields)
    with pytest.raises(CheckpointError, match=said):
        load_model_config(tmp_path)


def test_a_window_that_no_layer_uses_is_accepted(tmp_path: Path) -> None:
    check(tmp_path, save(tmp_path, "qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=3))


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_made_checkpoints_are_read_by_transformers(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    make_checkpoint("tiny", tmp_path / "made", family)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32).eval()
    check(tmp_path / "made", reference)


def test_media_are_refused() -> None:
    for name in TEXT_FAMILIES:
        family: Family = family_named(name)
        assert name in FAMILIES
        config: Any = type("Config", (), {"family": name})
        refused: list[Callable[[], object]] = [
            lambda family=family, config=config: family.image_item(config, 10, 10),  # type: ignore[misc]
            lambda family=family, config=config: family.sample_frames(config, 10, 1.0),  # type: ignore[misc]
            lambda family=family, config=config: family.audio_item(config, 10),  # type: ignore[misc]
        ]
        for refuse in refused:
            with pytest.raises(UnsupportedMediaError, match="this model takes no (image|video|audio)$"):
                refuse()
