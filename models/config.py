"""Load a checkpoint directory's configuration, find its family, and tell the memory that it needs. Pure: torch is not imported."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from ..schema.model_facts import ModelFacts
from ..schema.quantization import find_quantization
from .architecture import (
    DTYPE_BYTES,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    AttentionConfig,
    KvDType,
    ModelConfig,
    SamplingDefaults,
    TransferDType,
    WeightFormat,
)
from .checkpoint.json_fields import CheckpointFiles
from .checkpoint.weight_specs import TensorSpec, stored_parts
from .errors import CheckpointError
from .families.registry import FAMILIES, family_name, family_named, family_of
from .state_layout import GRID, state_layout

DEFAULT_MAX_CONTEXT = 32768
TIME_ID = "an id in the text of times"
ITEM_TEXT_ID = "an id in the text of media"
GPU_HEADS = (16, 32, 64, 128, 256, 512)  # values, as paged attention on a GPU has kernels for
NULL_TYPE = "mmrt_null"  # for benches; not documented for users


def load_model_config(
    path: Path | str,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    max_context: int = 0,
    kv_dtype: KvDType = "auto",
    weights: WeightFormat = "auto",
) -> ModelConfig:
    """Read a Hugging Face checkpoint directory's configuration.

    ``dtype`` "auto" is the checkpoint's own; ``max_context`` 0 is the checkpoint's own, at most 32768 tokens; ``kv_dtype`` and
    ``weights`` "auto" are ``dtype``.

    Raises: CheckpointError naming file, field and value.
    """
    files = CheckpointFiles(Path(path))
    root = files.required("config.json")
    model_type = root.text("model_type")
    tower = root.data.get("vision_config")
    name = family_name(model_type, tower.get("model_type") if isinstance(tower, dict) else None)
    if name is None:
        told = ", ".join(dict.fromkeys(entry.model_types[0] for entry in FAMILIES.values() if entry.model_types[0] != NULL_TYPE))
        raise root.error("model_type", f"is {model_type!r}, expected one of {told}")
    try:
        quantization = find_quantization(root.data)
    except ValueError as error:
        raise CheckpointError(f"{files.path / 'config.json'}: {error}") from None
    config = family_named(name).parse_config(files)
    _check_ids(Path(path), config)
    if config.vision_rules is not None and min(config.vision_rules.image_std) <= 0:
        raise CheckpointError(f"{path}: image_std is {list(config.vision_rules.image_std)}, expected numbers above 0")
    if max_context > config.max_context:
        raise CheckpointError(f"{path}: max_context of {max_context} is above the model's limit of {config.max_context}")
    dtype = config.dtype if dtype == "auto" else dtype
    return msgspec.structs.replace(
        config,
        dtype=dtype,
        weights="auto" if weights == dtype else weights,
        quantization=quantization,
        kv_dtype=kv_dtype,
        max_context=max_context or min(config.max_context, DEFAULT_MAX_CONTEXT),
        sampling=_sampling_defaults(files),
    )


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of the model's weights as they are kept."""
    return kept_bytes(family_of(config).tensor_specs(config), config)


def kept_bytes(specs: Iterable[TensorSpec], config: ModelConfig) -> int:
    """Bytes of these tensors of the model as they are kept."""
    return sum(DTYPE_BYTES[part.dtype] * math.prod(part.shape) for spec in specs for part in stored_parts(spec, config))


def facts_of(config: ModelConfig, kv_page_tokens: int, kv_transfer_dtype: TransferDType = "auto") -> ModelFacts:
    """Return what a run needs to know to divide its memory."""
    states = state_layout(config)
    return ModelFacts(
        kv_page_bytes=config.kv_page_bytes(kv_page_tokens),
        embedding_row_bytes=config.embedding_row_bytes(),
        max_context=config.max_context,
        patch_row_bytes=config.patch_row_bytes(),
        prefill_token_bytes=config.prefill_token_bytes(),
        logits_bytes=config.logits_bytes(),
        step_bytes=config.step_bytes(),
        weight_bytes=weight_bytes(config),
        packed_page_bytes=config.packed_page_bytes(kv_page_tokens, kv_transfer_dtype),
        takes_media=bool(config.media_kinds),
        state_bytes=states.base_bytes if states is not None else 0,
        log_bytes=states.log_bytes if states is not None else 0,
        state_grid=GRID if states is not None else 0,
        gpu_fault=gpu_fault(config),
        pipeline_fault=pipeline_fault(config),
        stream_token_bytes=config.stream_token_bytes(),
        num_layers=config.language.num_layers,
        window_page_bytes=config.window_page_bytes(kv_page_tokens),
        window_tokens=config.language.window,
        window_chunk_tokens=config.language.window_chunk,
    )


def gpu_fault(config: ModelConfig) -> str:
    """What a model has that no kernel for a GPU computes; "" for one that runs there."""
    if state_layout(config) is not None:
        return "recurrent states"
    mixers = {layer.mixer for layer in config.language.layers if isinstance(layer.mixer, AttentionConfig)}
    if any(mixer.has_joint_norms for mixer in mixers):
        return "norms of all query heads together"
    if sizes := {mixer.head_dim for mixer in mixers} - {*GPU_HEADS}:
        return f"heads of {max(sizes)} values, not {', '.join(map(str, GPU_HEADS))}"
    turning = ((2 * len(config.language.ropes[mixer.rope].axes), mixer.head_dim) for mixer in mixers)
    if parts := {(turned, size) for turned, size in turning if 0 < turned < size}:
        return "heads of {1} values of which {0} turn".format(*max(parts))
    return ""


def pipeline_fault(config: ModelConfig) -> str:
    """Return what keeps a model's layers from being divided among stages of prefill; "" for one whose layers can be."""
    language = config.language
    if state_layout(config) is not None:
        return "recurrent states"
    if language.per_layer is not None:
        return "inputs of each layer by a token's id"
    if language.last_owner < language.num_layers - 1:
        return "layers that share keys and values"
    return f"layers that attend to a window ({language.window} tokens)" if language.window else ""


def _sampling_defaults(files: CheckpointFiles) -> SamplingDefaults:
    """The defaults of generation_config.json. Answers are greedy unless it sets ``do_sample``; its penalty applies in either case."""
    found = files.optional("generation_config.json")
    if found is None:
        return SamplingDefaults()
    repetition_penalty = found.number("repetition_penalty", default=1.0, least=MIN_REPETITION_PENALTY, most=MAX_REPETITION_PENALTY)
    if not found.boolean("do_sample", default=True):
        return SamplingDefaults(temperature=0.0, repetition_penalty=repetition_penalty)
    return SamplingDefaults(
        repetition_penalty=repetition_penalty,
        temperature=found.number("temperature", default=1.0, least=0, most=MAX_TEMPERATURE),
        top_p=found.number("top_p", default=1.0, most=1.0),
        top_k=max(found.integer("top_k", default=0, least=-1), 0),
        min_p=found.number("min_p", default=0.0, least=0, most=1.0),
    )


def _check_ids(path: Path, config: ModelConfig) -> None:
    ids = [("eos_token_id", token) for token in config.eos_token_ids]
    kinds = [kind for kind in config.media_kinds if kind != "video" or not config.video_is_pictures]
    ids += [(f"{kind} placeholder id", config.placeholder_id(kind)) for kind in kinds]
    if config.audio_start_token_id != -1:
        ids += [("audio_start_token_id", config.audio_start_token_id), ("audio_end_token_id", config.audio_end_token_id)]
    if config.times is not None or config.prompt_texts:
        ids += [("vision_start_token_id", config.vision_start_token_id), ("vision_end_token_id", config.vision_end_token_id)]
    if config.times is not None:
        ids += [(TIME_ID, token) for token in config.times.ids]
    ids += [(ITEM_TEXT_ID, token) for token in config.item_text_ids]
    files = {"eos_token_id": "generation_config.json or config.json", TIME_ID: "tokenizer.json", ITEM_TEXT_ID: "tokenizer.json"}
    for name, token in ids:
        if not 0 <= token < config.language.vocab_size:
            file = files.get(name, "config.json")
            raise CheckpointError(f"{path}: {file}: {name} is {token}, outside the vocabulary of {config.language.vocab_size}")
