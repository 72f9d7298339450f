"""The decoder inside a model that sees: one of the families of text, whose fields are in ``text_config``. Pure.

transformers leaves out of that object what its class of decoder has by default.
"""

from ...architecture import AttentionConfig, LanguageConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...checkpoint.tensor_names import tensor_names
from ..fields import max_positions
from .checkpoint import parse_language
from .readings import READINGS
from .ropes import served_positions

_SIZES: dict[str, object] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
_QWEN: dict[str, object] = {**_SIZES, "intermediate_size": 22016, "vocab_size": 151936}
_EXPERTS = {"num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_YARN = {"type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}
_YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}
_DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {**_SIZES, "max_position_embeddings": 2048},
    "mistral": {**_SIZES, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    "ministral3": {
        **_SIZES,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "vocab_size": 131072,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _YARN,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": {
        **_QWEN,
        **_EXPERTS,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
    },
}


def nested_fields(root: JsonObject, default: str, *others: str) -> JsonObject:
    """``text_config`` of a decoder that is one of these, with what the file leaves out. Raises CheckpointError."""
    text = root.object("text_config")
    name = text.text("model_type", default=default, choices=(default, *others))
    return text.with_defaults({**_DEFAULTS[name], "model_type": name})


def nested_positions(text: JsonObject) -> int:
    """Tokens of the longest context that is served. Raises CheckpointError."""
    return served_positions(text, max_positions(text))


def is_tied(files: CheckpointFiles, root: JsonObject, text: JsonObject) -> bool:
    """Return whether the vocabulary serves as the output head. Files with a head have it beside a config.json that does not say so. Of
    files without one, the model or its decoder says so, or neither says anything. Raises CheckpointError."""
    if any("lm_head." in name for name in tensor_names(files.path)):
        return root.boolean("tie_word_embeddings", default=False)
    said = [place.boolean("tie_word_embeddings") for place in (root, text) if place.has("tie_word_embeddings")]
    return any(said) or not said


def parse_nested(text: JsonObject, tie: bool) -> LanguageConfig:
    """The decoder of ``nested_fields``. Raises CheckpointError, also for one with windows."""
    language = parse_language(text, READINGS[text.text("model_type")], tie)
    mixers = (layer.mixer for layer in language.layers)
    if windows := {mixer.window for mixer in mixers if isinstance(mixer, AttentionConfig) and mixer.window}:
        raise text.error("sliding_window", f"is {max(windows)}; windows are not supported beside pictures")
    return language
