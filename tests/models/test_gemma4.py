"""Gemma 4's small models against transformers: inputs of each layer, shared keys and values, heads of two sizes, bounded logits."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from mmrt.models.checkpoint.weights import check_weights, read_weights
from mmrt.models.config import load_model_config, weight_bytes
from mmrt.models.errors import CheckpointError
from mmrt.models.families.registry import family_named
from mmrt.models.lm.decoder import Chunk
from mmrt.models.lm.language_model import LanguageModel
from mmrt.models.make.checkpoint import make_checkpoint, write_configs
from mmrt.models.make.tokenizer import write_tokenizer
from mmrt.tests.models.test_text_families import ABSENT, PAGE_TOKENS, SIZES, check, close, edit

SLIDING, FULL = "sliding_attention", "full_attention"
LAYERS = [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, FULL]
SIZES_4 = {
    **SIZES, "vocab_size_per_layer_input": 300, "hidden_size": 48, "hidden_size_per_layer_input": 8, "num_hidden_layers": len(LAYERS),
    "num_kv_shared_layers": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 24, "layer_types": LAYERS,
    "use_double_wide_mlp": True, "final_logit_softcapping": 5.0, "pad_token_id": 0, "tie_word_embeddings": True,
}  # fmt: skip


def randomise(model: Any) -> None:
    """Norms and scalars are not 1, norms not alike in any column, and scores are not large although their scale is 1."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("layer_scalar"):
                weight.fill_(0.5 + torch.rand(()).item())
            elif name.endswith(("router.scale", "per_expert_scale")):
                weight.uniform_(0.5, 1.5)
            elif "norm" in name:
                weight.normal_(0.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0, 0.2)


def save(path: Path, **fields: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("gemma4_text", **{**SIZES_4, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model)
    model.save_pretrained(path)
    return model


def test_logits_equal_those_of_transformers(tmp_path: Path) -> None:
    language = check(tmp_path, save(tmp_path)).language
    assert [layer.mixer.owner for layer in language.layers] == [-1, -1, -1, -1, 3, 2, 3, 2]  # type: ignore[union-attr]
    assert [(group.heads.head_dim, group.layers) for group in language.kv_groups] == [(16, (0, 1, 3)), (32, (2,))]
    assert language.last_owner == 3 and language.intermediate_size == 2 * SIZES["intermediate_size"]


def test_without_shared_layers_and_inputs(tmp_path: Path) -> None:
    ropes = {
        SLIDING: {"rope_type": "default", "rope_theta": 3e3},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 2e5},
    }
    fields = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "final_logit_softcapping": None}
    check(tmp_path, save(tmp_path, **fields, rope_parameters=ropes))


EXPERTS = {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32, "hidden_size": 64,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
}  # fmt: skip


def test_experts_beside_an_mlp(tmp_path: Path) -> None:
    """As 26B-A4B has them in all layers: a norm for each, a router that sees the stream, and a number by which each expert counts."""
    language = check(tmp_path, save(tmp_path, **EXPERTS)).language
    assert [(each.num_experts, each.top_k, each.expert_size) for each in language.experts] == [(8, 3, 32)]
    assert language.widths == (SIZES["intermediate_size"], 32)


@torch.inference_mode()
@pytest.mark.parametrize(("weights", "least"), [("int8", 0.1), ("int8g", 0.02), ("int4", 0.3)])
def test_experts_in_integers(tmp_path: Path, weights: Any, least: float) -> None:
    """A route that turns to another expert by rounding makes an error of its own; most do not."""
    reference = save(tmp_path, **EXPERTS)
    ids = torch.randint(0, 300, (80,), generator=torch.Generator().manual_seed(1))
    expected = reference(input_ids=ids[None], use_cache=False).logits[0]
    config = load_model_config(tmp_path, dtype="float32", weights=weights)
    kv, places = torch.zeros(10, config.kv_page_bytes(PAGE_TOKENS), dtype=torch.uint8), torch.arange(80).expand(3, -1)
    tensors = read_weights(tmp_path, config)
    assert tensors["layers.0.experts_gate_up"].dtype == (torch.uint8 if weights == "int4" else torch.int8)
    lm = LanguageModel(config, tensors, kv, PAGE_TOKENS)
    found = lm.logits(lm.prefill([Chunk(lm.embed(ids), places, 0, torch.arange(10), ids=ids)], [0])[0])
    errors = (found - expected).pow(2).mean(1) / expected.var(1)
    assert 1e-6 < float(errors.median()) < least


def test_published_files_say_sizes_in_another_way(tmp_path: Path) -> None:
    """``head_dim`` of layers that attend to all is a field of its own, and not of each layer; the last layer is one of them anyway."""
    reference = save(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["per_layer_config"]["2"] == {"head_dim": 32} and "global_head_dim" not in saved
    edit(tmp_path, per_layer_config=ABSENT, global_head_dim=32, num_global_key_value_heads=None, layer_types=[*LAYERS[:-1], SLIDING])
    check(tmp_path, reference)


@torch.inference_mode()
def test_prompts_end_at_the_last_layer_with_keys_of_its_own(tmp_path: Path) -> None:
    """What is stored, and the next tokens, are the same bits whether hidden states are wanted or not."""
    save(tmp_path)
    config = load_model_config(tmp_path, dtype="float32")
    weights, ids = read_weights(tmp_path, config), torch.randint(0, 300, (60,), generator=torch.Generator().manual_seed(1))
    places, table, pools, logits = torch.arange(60).expand(3, -1), torch.arange(8), [], []
    for wanted in ([], [0]):
        calls: list[int] = []
        kv = torch.zeros(8, config.kv_page_bytes(PAGE_TOKENS), dtype=torch.uint8)
        lm = LanguageModel(config, weights, kv, PAGE_TOKENS)
        for start, end in ((0, 40), (40, 59)):
            part = ids[start:end]
            lm.prefill([Chunk(lm.embed(part), places[:, start:end], start, table, ids=part)], wanted, partial(calls.append, 0))
        assert len(calls) == 2 * (len(LAYERS) if wanted else 3)
        logits.append(lm.decode(ids[59:], places[:, 59:], torch.tensor([60]), table[None]))
        pools.append(kv)
    assert torch.equal(*pools) and torch.equal(*logits)


@torch.inference_mode()
def test_the_ends_of_prompts_go_through_all_layers(tmp_path: Path) -> None:
    """Of two chunks in one forward: the hidden states that they have where those of all tokens are wanted, and the same pages."""
    save(tmp_path)
    config = load_model_config(tmp_path, dtype="float32")
    weights, ids = read_weights(tmp_path, config), torch.randint(0, 300, (60,), generator=torch.Generator().manual_seed(1))
    places, states, pools = torch.arange(60).expand(3, -1), [], []
    for wanted, ends in (([0, 1], []), ([], [0, 1]), ([0], [1])):
        kv = torch.zeros(16, config.kv_page_bytes(PAGE_TOKENS), dtype=torch.uint8)
        lm = LanguageModel(config, weights, kv, PAGE_TOKENS)
        lm.prefill([Chunk(lm.embed(ids[:40]), places[:, :40], 0, torch.arange(8), ids=ids[:40])])
        chunks = [
            Chunk(lm.embed(ids[40:]), places[:, 40:], 40, torch.arange(8), ids=ids[40:]),
            Chunk(lm.embed(ids[:33]), places[:, :33], 0, torch.arange(8, 13), ids=ids[:33]),
        ]
        found = lm.prefill(chunks, wanted, ends=ends)
        assert [len(part) for part in found] == [20 if 0 in wanted else 1, 33 if 1 in wanted else 1]
        states.append(torch.cat([part[-1:] for part in found]))
        pools.append(kv.view(torch.float32))
    for state, pool in zip(states[1:], pools[1:], strict=True):
        close(state, states[0])
        torch.testing.assert_close(pool, pools[0], atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_a_checkpoint_with_towers_is_served_as_text(tmp_path: Path) -> None:
    """Names of both spellings; and a placeholder of media has the inputs of padding, whatever its embedding is."""
    import transformers

    text = transformers.Gemma4TextConfig(**SIZES_4)
    tokens = {"image_token_id": 290, "video_token_id": 291, "audio_token_id": 292}
    whole = transformers.Gemma4Config(text_config=text, vision_config=None, audio_config=None, **tokens)
    reference = transformers.Gemma4ForConditionalGeneration(whole).eval()
    randomise(reference)
    reference.save_pretrained(tmp_path)
    config = load_model_config(tmp_path, dtype="float32")
    assert config.language.per_layer is not None and config.language.per_layer.placeholders == (290, 291, 292)
    assert config.media_kinds == () and not check_weights(tmp_path, config).problems
    lm = LanguageModel(config, read_weights(tmp_path, config), torch.zeros(8, config.kv_page_bytes(PAGE_TOKENS), dtype=torch.uint8), 8)
    ids = torch.randint(0, 280, (50,), generator=torch.Generator().manual_seed(1))
    embeds, places = lm.embed(ids), torch.arange(50).expand(3, -1)
    ids[10:20] = 290
    rows = torch.randn(10, 48)
    embeds[10:20] = rows
    found = lm.logits(lm.prefill([Chunk(embeds, places, 0, torch.arange(8), ids=ids)], [0])[0])
    pictures = {"image": type("Rows", (), {"pooler_output": [rows]})()}
    kinds = (ids == 290).long()[None]
    expected = reference(
        input_ids=ids[None], mm_token_type_ids=kinds, mm_encoder_outputs=pictures, attention_mask=torch.ones(1, 50).long()
    )
    close(found, expected.logits[0])


@torch.inference_mode()
def test_quantized_weights_and_caches(tmp_path: Path) -> None:
    """The table of inputs is in int8g but in a model of float32: it is the largest part of the real ones."""
    reference = save(tmp_path, hidden_size=64, hidden_size_per_layer_input=32, vocab_size_per_layer_input=320)
    ids = torch.randint(0, 300, (80,), generator=torch.Generator().manual_seed(1))
    expected = reference(input_ids=ids[None], use_cache=False).logits[0]
    places, table = torch.arange(80).expand(3, -1), torch.arange(80 // PAGE_TOKENS)
    whole = load_model_config(tmp_path, dtype="bfloat16")
    for dtype, weights, kv_dtype in (("float32", "int8g", "auto"), ("bfloat16", "auto", "int8"), ("float32", "float32", "fp8")):
        config = replace(load_model_config(tmp_path, dtype=dtype), weights=weights, kv_dtype=kv_dtype)  # type: ignore[arg-type]
        tensors = read_weights(tmp_path, config)
        assert tensors["per_layer_table"].dtype == (torch.float32 if weights == "float32" else torch.int8)
        kv = torch.zeros(len(table), config.kv_page_bytes(PAGE_TOKENS), dtype=torch.uint8)
        lm = LanguageModel(config, tensors, kv, PAGE_TOKENS)
        lm.prefill([Chunk(lm.embed(ids[:70]), places[:, :70], 0, table, ids=ids[:70])])
        found = [lm.decode(ids[at : at + 1], places[:, at : at + 1], torch.tensor([at + 1]), table[None])[0] for at in range(70, 80)]
        error = (torch.stack(found) - expected[70:]).pow(2).mean() / expected[70:].var()
        assert 1e-8 < float(error) < 0.03, (weights, kv_dtype)
    assert weight_bytes(whole) < 2 * sum(weight.numel() for weight in reference.parameters())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts is 5, expected an integer from 1 to 4"),
        ({"enable_moe_block": True, "num_experts": None}, "num_experts is missing"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all', expected 'vision'"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers is 7; layer 2 finds no earlier one of its type"),
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers is 8, expected an integer from 0 to 7"),
        ({"per_layer_config": {"2": {"head_dim": 33}}}, "per_layer_config says that layer 2 has 2 heads of keys of size 33"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn"}}}, "full_attention.rope_type is 'yarn', expected 'proportional'"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    save(tmp_path)
    edit(tmp_path, **fields)
    with pytest.raises(CheckpointError, match=said):
        load_model_config(tmp_path)


def test_made_checkpoints_are_read_by_transformers(tmp_path: Path) -> None:
    from transformers import Gemma4ForConditionalGeneration

    make_checkpoint("tiny", tmp_path / "made", "gemma4")
    reference = Gemma4ForConditionalGeneration.from_pretrained(tmp_path / "made", dtype=torch.float32).eval()
    check(tmp_path / "made", reference)


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("gemma3", "270m"),
        ("gemma3", "1b"),
        ("gemma4", "e2b"),
        ("gemma4", "e4b"),
        ("gemma4", "31b"),
        ("gemma4", "26b-a4b"),
        ("gemma3_seeing", "4b"),
        ("gemma3_seeing", "27b"),
    ],
)
def test_published_sizes_have_the_tensors_of_transformers(tmp_path: Path, family: str, size: str) -> None:
    """Without memory for any."""
    import transformers

    recipe = family_named(family).recipes()[size]
    ids = write_tokenizer(tmp_path, recipe._replace(vocab_size=256 + len(recipe.special_tokens), num_merges=0))
    write_configs(tmp_path, recipe, ids)
    classes = transformers.AutoModelForCausalLM if family == "gemma3" else transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        reference = classes.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    canonical = family_named(family).canonical_name
    expected = {canonical(name): tuple(values.shape) for name, values in reference.state_dict().items() if name != "lm_head.weight"}
    specs = family_named(family).tensor_specs(load_model_config(tmp_path))
    wholes = (source.part or source for spec in specs for source in spec.sources)
    assert {whole.name: whole.shape for whole in wholes} == expected
