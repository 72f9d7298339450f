"""Prefill's pipeline (RS1): the layers of a stage, and the residual stream from the stage before it and to the one behind it.

Stages are the prefill actors of a run with ``scheduling.prefill_pipeline``, by number. All have the same weights and KV pages mapped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...models.architecture import ModelConfig
from ...models.checkpoint.filling import tensor_over
from ...models.checkpoint.weights import torch_dtype
from ...models.lm.decoder import Stream
from ...runtime.bus.plans import PrefillChunk
from ...runtime.config.runtime_config import RuntimeConfig
from ...runtime.stage_table import number_of
from ...shm.run_directory import RunDirectory
from ...shm.stream_file import StreamFile


def open_streams(run: RunDirectory, config: RuntimeConfig, model: ModelConfig, *, writable: bool) -> StreamFile:
    """Open the file of streams."""
    return StreamFile(run, config.max_prefill_tokens, model.stream_token_bytes(), writable=writable)


def layers_of_rank(num_layers: int, rank: int, num_ranks: int) -> range:
    """Return the layers of a stage: stages differ by one layer at most, the later ones have more."""
    return range(num_layers * rank // num_ranks, num_layers * (rank + 1) // num_ranks)


@dataclass(frozen=True)
class PipelineStage:
    """One stage of a pipeline, or the only one of a run without."""

    rank: int
    num_ranks: int
    layers: range
    _streams: StreamFile | None
    _dtype: torch.dtype
    _hidden_size: int
    _device: torch.device

    @classmethod
    def open(cls, run: RunDirectory, config: RuntimeConfig, model: ModelConfig, actor: str, device: torch.device) -> "PipelineStage":
        """Return the stage of this actor."""
        count, rank = config.prefill_ranks, number_of(actor) if config.scheduling.prefill_pipeline else 0
        streams = open_streams(run, config, model, writable=True) if count > 1 else None
        layers = layers_of_rank(model.language.num_layers, rank, count)
        return cls(rank, count, layers, streams, torch_dtype(model.dtype), model.language.hidden_size, device)

    @classmethod
    def whole(cls, model: ModelConfig, device: torch.device) -> "PipelineStage":
        """Return the only stage of a run."""
        return cls(0, 1, range(model.language.num_layers), None, torch_dtype(model.dtype), model.language.hidden_size, device)

    @property
    def is_last(self) -> bool:
        """True of the stage that draws tokens and writes log-probabilities."""
        return self.rank == self.num_ranks - 1

    def read(self, relay: int, chunks: Sequence[PrefillChunk]) -> Stream | None:
        """Read the stream before its first layer, of these chunks; None at the model's first one. Raises: ValueError where there is
        none."""
        if self._streams is None or not self.rank:
            return None
        place = self._place(relay, self.rank - 1)
        data = bytearray().join([self._streams.read(place, chunk.stream_at, chunk.end - chunk.start) for chunk in chunks])
        both = tensor_over(memoryview(data), torch.uint8).view(self._dtype).view(-1, 2, self._hidden_size).to(self._device)
        return Stream(both[:, 0].contiguous(), both[:, 1].contiguous())

    def write(self, relay: int, chunks: Sequence[PrefillChunk], stream: Stream) -> None:
        """Write the stream behind its last layer. Raises: OSError, ENOSPC."""
        assert self._streams is not None
        both = torch.stack((stream.hidden, stream.normed), 1).cpu()
        parts = torch.split(both, [chunk.end - chunk.start for chunk in chunks])
        for chunk, part in zip(chunks, parts, strict=True):
            self._streams.write(self._place(relay, self.rank), chunk.stream_at, part.view(torch.uint8).numpy().tobytes())

    def _place(self, relay: int, rank: int) -> int:
        """Return the place of the stream behind a stage: a stage that is done again finds what it read before."""
        return relay * (self.num_ranks - 1) + rank
