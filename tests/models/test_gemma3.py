"""Gemma 3 against transformers: windows, two ropes, norms of 1 + w, and the configurations of files in both spellings."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.lm.decoder import Chunk
from mmrt.models.lm.language_model import LanguageModel
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.tests.models.test_text_families import ABSENT, PAGE_TOKENS, SIZES, check, edit

SIZES_3 = {
    **SIZES, "num_hidden_layers": 4, "head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 24, "hidden_size": 48,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
}  # fmt: skip


def save(path: Path, **fields: Any) -> Any:
    """A random checkpoint whose norms are not alike in any column."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("gemma3_text", **{**SIZES_3, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.normal_(0, 0.3)
    model.save_pretrained(path)
    return model


def test_logits_equal_those_of_transformers(tmp_path: Path) -> None:
    language = check(tmp_path, save(tmp_path)).language
    assert language.norm_offset == 1 and language.embedding_scale == 48**0.5 and language.tie_embeddings
    assert [layer.mixer.window for layer in language.layers] == [24, 0, 24, 24]  # type: ignore[union-attr]
    assert [rope.theta for rope in language.ropes] == [1e4, 1e6]


def test_bounded_logits_and_a_longer_context(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e5}
    ropes = {"full_attention": linear, "sliding_attention": {"rope_type": "default", "rope_theta": 3e3}}
    check(tmp_path, save(tmp_path, rope_parameters=ropes, final_logit_softcapping=2.0, tie_word_embeddings=False))


def test_fields_as_transformers_4_wrote_them(tmp_path: Path) -> None:
    """And as files have them that leave out what a class has by default."""
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e5}
    ropes = {"full_attention": linear, "sliding_attention": {"rope_type": "default", "rope_theta": 3e3}}
    reference = save(tmp_path, rope_parameters=ropes, layer_types=None, sliding_window_pattern=2, query_pre_attn_scalar=256)
    old = {"rope_theta": 2e5, "rope_local_base_freq": 3e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    absent = ("rope_parameters", "layer_types", "tie_word_embeddings", "hidden_activation", "query_pre_attn_scalar", "rms_norm_eps")
    edit(tmp_path, **old, sliding_window_pattern=2, rms_norm_eps=1e-5, **dict.fromkeys(absent[:-1], ABSENT))
    check(tmp_path, reference)


@torch.inference_mode()
def test_quantized_weights_and_cache(tmp_path: Path) -> None:
    """int8g and a cache of int8 change logits a little, and the same whether a prompt is read or its tokens are steps."""
    reference = save(tmp_path, hidden_size=64, intermediate_size=128)
    ids = torch.randint(0, 300, (80,), generator=torch.Generator().manual_seed(1))
    expected = reference(input_ids=ids[None], use_cache=False).logits[0]
    places, table = torch.arange(80).expand(3, -1), torch.arange(80 // PAGE_TOKENS)
    for weights, kv_dtype in (("int8g", "auto"), ("int8", "int8"), ("float32", "fp8")):
        config = replace(load_model_config(tmp_path, dtype="float32"), weights=weights, kv_dtype=kv_dtype)  # type: ignore[arg-type]
        kv = torch.zeros(len(table), config.kv_page_bytes(PAGE_TOKENS), dtype=torch.uint8)
        lm = LanguageModel(config, read_weights(tmp_path, config), kv, PAGE_TOKENS)
        lm.prefill([Chunk(lm.embed(ids[:70]), places[:, :70], 0, table)])
        found = [lm.decode(ids[at : at + 1], places[:, at : at + 1], torch.tensor([at + 1]), table[None])[0] for at in range(70, 80)]
        error = (torch.stack(found) - expected[70:]).pow(2).mean() / expected[70:].var()
        assert 1e-8 < float(error) < 0.02, (weights, kv_dtype)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; bounds of scores are not supported"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu', expected 'gelu_pytorch_tanh'"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types has chunked_attention"),
        ({"layer_types": None, "sliding_window": None}, "sliding_window is null, expected the window of 4 layers"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "sliding_attention.rope_type is 'linear'"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    save(tmp_path)
    edit(tmp_path, **fields)
    with pytest.raises(CheckpointError, match=said):
        load_model_config(tmp_path)


def test_made_checkpoints_are_read_by_transformers(tmp_path: Path) -> None:
    """Also their template and tokens, as generate takes them."""
    from transformers import AutoModelForCausalLM

    make_checkpoint("tiny", tmp_path / "made", "gemma3")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32).eval()
    check(tmp_path / "made", reference)


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """Of its class for Gemma, whose spaces are U+2581, without one in front, and whose rare characters are bytes."""
    import tokenizers
    import transformers

    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    trained.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    lines = ["the quick brown fox jumps over the lazy dog", "  two spaces and \n a line", "user: thank you, model"] * 3
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, special_tokens=[*specials, *(f"<0x{byte:02X}>" for byte in range(256))])
    trained.train_from_iterator(lines, trainer)
    learned = json.loads(trained.to_str())["model"]
    theirs = transformers.GemmaTokenizer(
        vocab=learned["vocab"], merges=[tuple(merge) for merge in learned["merges"]], extra_special_tokens=specials[-2:]
    )
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    texts = [
        *lines,
        "",
        " fox",
        "the  fox ",
        "\n\nthe",
        "na\u00efve \u6f22\u5b57 \U0001f642",
        "<start_of_turn>user\nthe fox<end_of_turn>\n the",
    ]
    for text in texts:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, with_control_tokens=True) == text
        assert ours.encode_prompt(text) == theirs(text).input_ids
    assert ours.encode_going_on(["the fox", " the"]) == [ours.encode("the fox"), ours.encode(" the")]
    assert {"<start_of_turn>", "<end_of_turn>", "<bos>"} <= ours.control_ids.keys() and ours.special_tokens["bos_token"] == "<bos>"
