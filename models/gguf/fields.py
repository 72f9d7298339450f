"""The configuration of a GGUF file as a checkpoint's config.json and generation_config.json, so that its family reads it. Pure.

Keys begin with the architecture's name. What a file does not say is as llama.cpp takes it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ..checkpoint.gguf_blocks import BLOCKS, NARROW_TYPES
from ..checkpoint.json_fields import JsonObject
from ..errors import CheckpointError
from . import decoders, gemma4
from .contents import ROPE_FACTORS, Contents, Fields

_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of Llama 3.1 to 3.3
_LLAMA_3_CONTEXT = 8192
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<end_of_turn>", "<|end|>", "<turn|>", "<|tool_response>")
"""Some files do not say that these end answers."""

_INTERLEAVED = (11, 11, 10)  # sections of rope where a file does not say
_LEAST_VALUES = 300_000_000  # of a model in its codes
_WINDOW, _PART = "attention.sliding_window", "rope.dimension_count"
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class Architecture(NamedTuple):
    """``model_type`` of the family that serves it. ``permuted``: see ``GgufQuantization``. ``has_delta``: most layers have a DeltaNet.
    ``towers``: of a model that sees, the families by ``clip.projector_type`` of the tower's file; without that file it is text
    alone. ``own``: changes config.json. ``reads``: whether ``own`` reads windows, and the part of heads that turns; others are refused.
    ``has_experts``: None if some models do. ``differing``: keys that layers may differ in, which ``own`` reads."""

    model_type: str
    permuted: bool = False
    has_experts: bool | None = False
    has_delta: bool = False
    towers: Mapping[str, str] = MappingProxyType({})
    own: Callable[[JsonObject, Fields, Contents], Fields] | None = None
    reads: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()


OMNI = "qwen2_5_omni_thinker"  # which hears as well
_PIXTRAL, _LIGHTON = {"pixtral": "mistral3"}, {"lightonocr": "lighton_ocr"}
_INTERNVL, _CLIP = {"internvl": "internvl"}, {"mlp": "llava"}
ARCHITECTURES = {
    "llama": Architecture("llama", permuted=True, towers={"idefics3": "smolvlm", **_PIXTRAL, **_INTERNVL, **_CLIP}),
    "qwen2": Architecture("qwen2", towers={**_INTERNVL, **_LIGHTON}),
    "qwen3": Architecture("qwen3", towers={**_INTERNVL, **_LIGHTON}),
    "qwen3moe": Architecture("qwen3_moe", has_experts=True, towers=_INTERNVL),
    "mistral3": Architecture("mistral", permuted=True, own=decoders.mistral3, towers=_PIXTRAL),
    "qwen2vl": Architecture("qwen2", towers={"qwen2vl_merger": "qwen2_vl", "qwen2.5vl_merger": "qwen2_5_vl", "qwen2.5o": OMNI}),
    "qwen3vl": Architecture("qwen3", towers={"qwen3vl_merger": "qwen3_vl"}),
    "qwen3vlmoe": Architecture("qwen3_moe", has_experts=True, towers={"qwen3vl_merger": "qwen3_vl_moe"}),
    "qwen35": Architecture("qwen3_5", has_delta=True, towers={"qwen3vl_merger": "qwen3_5"}),
    "qwen35moe": Architecture("qwen3_5_moe", has_experts=True, has_delta=True, towers={"qwen3vl_merger": "qwen3_5_moe"}),
    "gemma3": Architecture("gemma3_text", own=decoders.gemma3, reads=(_WINDOW,), towers={"gemma3": "gemma3"}),
    "gemma4": Architecture(
        "gemma4_text",
        has_experts=None,
        own=gemma4.decoder_fields,
        reads=(_WINDOW,),
        towers={"gemma4v": "gemma4"},
        differing=("feed_forward_length", "attention.head_count_kv"),
    ),
    "glm4": Architecture("glm4", own=decoders.glm4, reads=(_PART,), towers={"glm4v": "glm4v"}),
    "phi3": Architecture("phi3", own=decoders.phi3, reads=(_WINDOW, _PART)),
    "smollm3": Architecture("smollm3", permuted=True),
    "granite": Architecture("granite", permuted=True, own=decoders.granite),
    "olmo2": Architecture("olmo2", own=decoders.olmo, reads=(_WINDOW,)),
    "ernie4_5": Architecture("ernie4_5"),
    "seed_oss": Architecture("seed_oss", own=decoders.seed_oss),
}
TOWER = "clip"  # the architecture of a file with a tower


def towers_of(metadata: Mapping[str, Any]) -> Mapping[str, str]:
    """``Architecture.towers`` of a model; none of one that no family serves."""
    name = metadata.get("general.architecture")
    return ARCHITECTURES[name].towers if isinstance(name, str) and name in ARCHITECTURES else {}


def architecture_of(contents: Contents) -> Architecture:
    """Raises: CheckpointError for one that no family serves."""
    name = contents.metadata.get("general.architecture")
    if name == TOWER:
        raise CheckpointError(f"{contents.where}: is the part of a model that sees (mmproj): name the model's file")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{contents.where}: general.architecture is {name!r}, expected one of {', '.join(ARCHITECTURES)}; "
            "of other models mmrt reads the Hugging Face checkpoint directory, with safetensors"
        )
    return ARCHITECTURES[name]


def config_fields(contents: Contents) -> Fields:
    """config.json. Raises: CheckpointError naming the key and its value."""
    known = architecture_of(contents)
    facts = _facts(contents)
    own, name = facts.data, contents.metadata["general.architecture"]
    heads = facts.integer("attention.head_count")
    embeddings = contents.shapes.get("token_embd.weight", ())
    if len(embeddings) != 2:
        raise CheckpointError(f"{contents.where}: tensor 'token_embd.weight' has shape {list(embeddings)}, expected 2 axes")
    if _WINDOW not in known.reads and facts.integer(_WINDOW, default=0, least=0):
        raise facts.error(_WINDOW, f"is {own[_WINDOW]}; windows are not supported")
    if not facts.boolean("attention.causal", default=True):
        raise facts.error("attention.causal", "is false; texts that see what follows are not supported")
    if known.has_experts is False and facts.integer("expert_count", default=0, least=0):
        raise facts.error("expert_count", f"is {own['expert_count']}; models of architecture {name} with experts are not supported")
    hidden = facts.integer("embedding_length")
    head_dim = facts.integer("attention.key_length", default=hidden // heads)
    turning = facts.integer(_PART, default=head_dim, most=head_dim)
    if turning != head_dim and not known.has_delta and _PART not in known.reads:
        raise facts.error(_PART, f"is {own[_PART]}; partly rotated heads are not supported")
    context = facts.integer("context_length")
    form = form_of(contents)
    fields: Fields = {
        "model_type": known.model_type,
        "vocab_size": embeddings[0],
        "hidden_size": hidden,
        "num_hidden_layers": number_of_blocks(contents) - facts.integer("nextn_predict_layers", default=0, least=0),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.integer("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "intermediate_size": facts.integer(*(("feed_forward_length", "expert_feed_forward_length")[: 1 + bool(known.has_experts)])),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
        "rope_parameters": _rope(facts, contents, context),
        "tie_word_embeddings": "output.weight" not in contents.types,
        "attention_bias": "blk.0.attn_q.bias" in contents.types,
        "dtype": "float32" if form == "float32" else "bfloat16",
        "quantization_config": {"quant_method": "gguf", "form": form, "permuted": known.permuted},
    }
    if known.has_experts:
        fields |= {
            "num_experts": facts.integer("expert_count"),
            "num_experts_per_tok": facts.integer("expert_used_count"),
            "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    if known.own is not None:
        return known.own(facts, fields, contents)
    return _delta_fields(facts, fields, turning) if known.has_delta else fields


def _delta_fields(facts: JsonObject, fields: Fields, turning: int) -> Fields:
    """``fields`` of a model with DeltaNets, ``turning`` of whose heads' values turn."""
    heads = facts.integer("ssm.time_step_rank")
    shared = {"shared_expert_intermediate_size": facts.integer("expert_shared_feed_forward_length")} if "num_experts" in fields else {}
    return {
        **fields,
        **shared,
        "linear_num_value_heads": heads,
        "linear_num_key_heads": facts.integer("ssm.group_count"),
        "linear_key_head_dim": facts.integer("ssm.state_size"),
        "linear_value_head_dim": facts.integer("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": facts.integer("ssm.conv_kernel"),
        "full_attention_interval": facts.integer("full_attention_interval", default=4),
        "rope_parameters": {
            **fields["rope_parameters"],
            "partial_rotary_factor": turning / fields["head_dim"],
            "mrope_section": list(facts.integers("rope.dimension_sections", default=_INTERLEAVED)[:3]),
        },
    }


def _facts(contents: Contents) -> JsonObject:
    """Read the fields of a file's architecture, by keys without the name of the architecture."""
    name = contents.metadata["general.architecture"]
    own = {key.removeprefix(f"{name}."): _of_all(value) for key, value in contents.metadata.items() if key.startswith(f"{name}.")}
    for key in architecture_of(contents).differing:
        if isinstance(value := own.get(key), list) and value:
            own[key] = value[0]
    return JsonObject(own, contents.where, name)


def number_of_blocks(contents: Contents) -> int:
    """Layers, and those behind them that only guess tokens. Raises: CheckpointError."""
    return _facts(contents).integer("block_count")


def form_of(contents: Contents) -> str:
    """The format of weights for what most of a file's values are: int4 for types of up to 4 bits that it holds, int8g for others in
    blocks. 16 bits for the smallest models: many of their tokens are nearly equal, and activations of 8 bits choose among these in
    another way, for little memory."""
    sizes: dict[str, int] = {}
    for name, kind in contents.types.items():
        sizes[kind] = sizes.get(kind, 0) + math.prod(contents.shapes[name])
    total = sum(sizes.values())
    if total >= _LEAST_VALUES and 2 * sum(sizes.get(kind, 0) for kind in NARROW_TYPES) > total:
        return "int4"
    if total >= _LEAST_VALUES and 2 * sum(size for kind, size in sizes.items() if BLOCKS[kind][0] > 1) > total:
        return "int8g"
    most = max(sizes, key=lambda kind: sizes[kind], default="")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def generation_fields(contents: Contents) -> Fields:
    """generation_config.json: what ends an answer, and defaults of sampling: llama.cpp's, with which files are tried. Raises:
    CheckpointError."""
    tokens = contents.metadata.get("tokenizer.ggml.tokens") or []
    ends = {token for key in _END_KEYS if (token := token_of(contents.metadata, key, tokens)) is not None}
    facts = JsonObject(contents.metadata, contents.where)
    return {
        "eos_token_id": [number for number, token in enumerate(tokens) if token in ends or token in END_TOKENS],
        "temperature": facts.number("general.sampling.temp", default=0.8, least=0),
        "top_k": facts.integer("general.sampling.top_k", default=40, least=-1),
        "top_p": facts.number("general.sampling.top_p", default=0.95, most=1.0),
        "min_p": facts.number("general.sampling.min_p", default=0.05, least=0, most=1.0),
    }


def token_of(metadata: Mapping[str, Any], key: str, tokens: Sequence[str]) -> str | None:
    """The token whose number ``tokenizer.ggml.`` ``key`` is; None for no such number."""
    number = metadata.get(f"tokenizer.ggml.{key}")
    return tokens[number] if type(number) is int and 0 <= number < len(tokens) else None


def _of_all(value: Any) -> Any:
    """Return the one value of an array whose layers are alike; else the value itself. Layers that differ are refused where a number is
    expected."""
    return value[0] if isinstance(value, list) and len(set(value)) == 1 else value


def _rope(facts: JsonObject, contents: Contents, context: int) -> Fields:
    """The rotary embedding, and how it reaches beyond the context that the model was first trained with."""
    theta = facts.number("rope.freq_base", default=10000.0)
    if factors := contents.factors.get(ROPE_FACTORS):
        return {"rope_theta": theta, **_llama_3(factors, theta)}
    kind = facts.text("rope.scaling.type", default="linear", choices=("none", "linear", "yarn"))
    factor = facts.number("rope.scaling.factor", "rope.scale_linear", default=1.0, least=0) or 1.0
    if kind == "none" or factor == 1.0:
        return {"rope_theta": theta, "rope_type": "default"}
    scaling: Fields = {"rope_theta": theta, "rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = facts.integer("rope.scaling.original_context_length", default=context)
        if facts.has("rope.scaling.attn_factor"):  # beside what yarn itself multiplies by
            scaling["attention_factor"] = facts.number("rope.scaling.attn_factor") * (1 + 0.1 * math.log(max(factor, 1.0)))
        for name in ("beta_fast", "beta_slow"):
            if facts.has(f"rope.scaling.yarn_{name}"):
                scaling[name] = facts.number(f"rope.scaling.yarn_{name}")
    return scaling


def _llama_3(factors: tuple[float, ...], theta: float) -> Fields:
    """Of a file that has the factors of Llama 3's rope in a tensor, what they were made of: the largest is ``factor``, and each between
    1 and it tells the context. ``check_rope`` compares what comes of this."""
    factor = max(factors)
    low, high = _LLAMA_3["low_freq_factor"], _LLAMA_3["high_freq_factor"]
    trained = _LLAMA_3_CONTEXT
    for pair, found in enumerate(factors):
        if 1.001 < found < 0.999 * factor:
            kept = (1 / found - 1 / factor) / (1 - 1 / factor)
            trained = round(2 * math.pi * (low + kept * (high - low)) * theta ** (pair / len(factors)))
            break
    return {"rope_type": "llama3", "factor": factor, **_LLAMA_3, "original_max_position_embeddings": trained}


def check_rope(contents: Contents, stretches: Sequence[tuple[float, ...]]) -> None:
    """Compare a file's factors with those of the configuration's ropes that were made of them. Raises: CheckpointError."""
    found = contents.factors.get(ROPE_FACTORS)
    if found and not any(len(found) == len(own) and all(map(_is_near, found, own)) for own in stretches):
        raise CheckpointError(f"{contents.where}: tensor {ROPE_FACTORS!r} has other factors than this model's rope: not supported")


def _is_near(found: float, own: float) -> bool:
    return abs(found - own) <= 1e-4 * own
