"""The null model: a decoder without weights that takes a fixed time and gives the same tokens for the same prompt."""

import time
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ..architecture import ModelConfig, NullConfig
from .decoder import AfterLayer, Chunk, StateRows, Stream

_SPOKEN = 256  # ids below are single bytes in the tokenizers that ``make`` trains: never control tokens


class NullModel:
    """``Decoder`` whose next token is a function of the input token and its place."""

    def __init__(self, config: ModelConfig, times: NullConfig) -> None:
        self._config = config
        self._times = times

    def embed(self, ids: Tensor) -> Tensor:
        return torch.zeros(ids.shape[0], self._config.language.hidden_size)

    def prefill(
        self,
        chunks: list[Chunk],
        wanted: Collection[int] = (),
        after_layer: AfterLayer | None = None,
        ends: Collection[int] = (),
        stream: Stream | None = None,
        first: int = 0,
    ) -> list[Tensor]:
        self._take_time(chunks, self._config.language.num_layers - first)
        return [chunks[index].embeds if index in wanted else chunks[index].embeds[-1:] for index in sorted({*wanted, *ends})]

    def prefill_layers(
        self, chunks: list[Chunk], layers: range, stream: Stream | None = None, after_layer: AfterLayer | None = None
    ) -> Stream:
        self._take_time(chunks, len(layers))
        hidden = torch.cat([chunk.embeds for chunk in chunks])
        return Stream(hidden, hidden)

    def _take_time(self, chunks: list[Chunk], num_layers: int) -> None:
        share = num_layers / self._config.language.num_layers
        time.sleep(share * self._times.prefill_token_ms / 1e3 * sum(chunk.embeds.shape[0] for chunk in chunks))

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape[0], self._config.language.vocab_size)

    def fold(self, borders: Sequence[int], states: StateRows, targets: Sequence[int]) -> None:
        """It has no states."""

    def decode(
        self,
        ids: Tensor,
        positions: Tensor,
        lengths: Tensor,
        block_tables: Tensor,
        states: StateRows | None = None,
        window_tables: Tensor | None = None,
    ) -> Tensor:
        end = time.monotonic() + self._times.step_ms / 1e3
        spoken = min(_SPOKEN, self._config.language.vocab_size)
        following = (ids * 31 + lengths * 17 + 7) % spoken
        logits = torch.zeros(ids.shape[0], self._config.language.vocab_size)
        logits.scatter_(1, following.unsqueeze(1), 1.0)
        if (rest := end - time.monotonic()) > 0:  # sleep(0) would yield the processor
            time.sleep(rest)
        return logits
