"""The memory that a model needs in a run. ``memory`` and ``mmrt up --dry-run`` compute it, without torch."""

from ...models.architecture import ModelConfig, TransferDType
from ...models.config import weight_bytes
from ...runtime.process.pool_sizes import ModelFacts


def facts_of(model: ModelConfig, kv_page_tokens: int, kv_transfer_dtype: TransferDType = "auto") -> ModelFacts:
    """Return the model's memory needs."""
    return ModelFacts(
        kv_page_bytes=model.kv_page_bytes(kv_page_tokens),
        embedding_row_bytes=model.embedding_row_bytes(),
        max_context=model.max_context,
        patch_row_bytes=model.patch_row_bytes(),
        prefill_token_bytes=model.prefill_token_bytes(),
        logits_bytes=model.logits_bytes(),
        weight_bytes=weight_bytes(model),
        packed_page_bytes=model.packed_page_bytes(kv_page_tokens, kv_transfer_dtype),
    )
