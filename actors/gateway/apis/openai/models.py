"""The model in ``GET /v1/models``, with the limits by the names that clients read. Pure."""

from typing import Any

from ...reading.validation import Limits


def model_entry(limits: Limits, created: int) -> dict[str, Any]:
    """Return the model. ``created``: Unix time in seconds.

    The context stands by the names of vLLM, llama.cpp, OpenRouter, LM Studio, Groq and Anthropic. What an answer may have is null, as
    with OpenRouter: only the context limits it, and clients that subtract a number from it would have no room for a prompt.
    """
    name, context = limits.model_name, limits.max_context
    inputs = ["text", *limits.kinds]
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "mmrt",
        "root": name,
        "parent": None,
        **dict.fromkeys(("max_model_len", "context_length", "context_window", "max_context_length", "max_input_tokens"), context),
        "meta": {"n_ctx": context, "n_ctx_train": context, "n_embd": limits.hidden_size, "size": limits.weight_bytes},
        "architecture": {
            "modality": f"{'+'.join(inputs)}->text",
            "input_modalities": inputs,
            "output_modalities": ["text"],
        },
        "top_provider": {"context_length": context, "max_completion_tokens": None, "is_moderated": False},
        "supported_parameters": [
            *_PARAMETERS,
            *(("tools", "tool_choice") if limits.takes_tools else ()),
            *(("include_reasoning",) if limits.thinks else ()),
        ],
    }


_PARAMETERS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "logprobs", "top_logprobs", "response_format", "structured_outputs",
)  # fmt: skip
