"""The decoder in the other shapes that it knows: one rotary axis, no biases, norms of queries and keys, tied embeddings."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mmrt.models.architecture import AttentionConfig, LanguageConfig, LayerConfig, MlpConfig, ModelConfig, RopeConfig
from mmrt.models.checkpoint.weights import attach_weights, write_weights
from mmrt.models.lm.decoder import Chunk
from mmrt.models.lm.language_model import LanguageModel

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize(
    ("name", "bias", "norms", "tie"),
    [("Llama", False, False, False), ("Qwen2", True, False, True), ("Qwen3", False, True, False)],
)
@torch.inference_mode()
def test_against_transformers(tmp_path: Path, name: str, bias: bool, norms: bool, tie: bool) -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {**SIZES, "tie_word_embeddings": tie, "initializer_range": 0.2}
    if name == "Qwen2":  # its head_dim is hidden_size / num_attention_heads
        sizes["head_dim"] = 16
    reference = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).eval()
    save_file({key: value.clone() for key, value in reference.state_dict().items()}, tmp_path / "model.safetensors")
    language = LanguageConfig(
        vocab_size=300,
        hidden_size=64,
        rms_norm_eps=1e-5,
        tie_embeddings=tie,
        layers=(
            LayerConfig(
                mixer=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=int(sizes["head_dim"]), bias=bias, qk_norm=norms),
                feed_forward=MlpConfig(intermediate_size=96),
            ),
        )
        * 3,
        ropes=(RopeConfig(theta=5000.0),),
    )
    config = ModelConfig(family="qwen2_5_vl", language=language, dtype="float32", max_context=1000, eos_token_ids=())
    buffer = bytearray(1 << 22)
    weights = attach_weights(memoryview(buffer), write_weights(tmp_path, config, lambda n: memoryview(buffer)[:n]))
    lm = LanguageModel(config, weights, torch.zeros(16, config.kv_page_bytes(8), dtype=torch.uint8), 8)
    ids = torch.randint(0, 300, (50,))
    expected = reference(input_ids=ids[None], use_cache=False).logits[0]
    table, places = torch.randperm(16), torch.arange(50).expand(3, -1)
    for start, end in ((0, 13), (13, 14), (14, 40)):
        lm.prefill([Chunk(lm.embed(ids[start:end]), places[:, start:end], start, table)])
    for i in range(40, 50):
        logits = lm.decode(ids[i : i + 1], places[:, i : i + 1], torch.tensor([i + 1]), table[None])
        torch.testing.assert_close(logits[0], expected[i], rtol=0, atol=1e-4)
