"""Logits of a checkpoint's decoder, as the actors compute them."""

from pathlib import Path

import torch
from torch import Tensor

from mmrt.models.architecture import ModelConfig
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.lm.decoder import Chunk
from mmrt.models.lm.language_model import build_language_model

PAGE_TOKENS = 16


def our_logits(checkpoint: Path, config: ModelConfig, ids: Tensor, num_prompt: int) -> Tensor:
    """float32 [S, T - num_prompt, V] of ids [S, T]: all but the last token of the prompt prefilled, the rest decoded as one batch."""
    num_sequences, length = ids.shape
    num_pages = -(-length // PAGE_TOKENS)
    kv = torch.zeros((num_sequences * num_pages, config.kv_page_bytes(PAGE_TOKENS)), dtype=torch.uint8)
    tables = torch.arange(num_sequences * num_pages).view(num_sequences, num_pages)
    model = build_language_model(config, read_weights(checkpoint, config), kv, PAGE_TOKENS)
    prompt = torch.arange(num_prompt - 1).expand(3, -1)
    beginnings = [row[: num_prompt - 1] for row in ids]
    model.prefill([Chunk(model.embed(row), prompt, 0, table, ids=row) for row, table in zip(beginnings, tables, strict=True)])
    steps = []
    for position in range(num_prompt - 1, length - 1):
        lengths = torch.full((num_sequences,), position + 1)
        steps.append(model.decode(ids[:, position], torch.full((3, num_sequences), position), lengths, tables))
    return torch.stack(steps, dim=1)
