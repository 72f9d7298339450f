"""K and V of prompts that decode's device computes anew, where that is faster than to copy them from the device that prefilled them
(KT2), by the speeds of both as measured.

It computes all layers of leading tokens, since a layer needs the hidden states of the one below it, and it does so only of text, only
while decode has no row to step, and only what prefill has done: a prompt that ends prefill's process must not end this one.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median

import numpy as np
import torch

from ...models.architecture import ModelConfig
from ...models.families.registry import family_of
from ...models.lm.decoder import Chunk, Decoder
from ...runtime.bus.copy_plans import TransferChunk
from ...runtime.bus.messages import decode_sequence_spec
from ...shm.sequence_table import SequenceTable

AT_ONCE_TOKENS = 128  # a row that comes meanwhile waits for them
_NUM_PIECES, _LEAST_PIECES = 33, 3


class Pace:
    """The seconds that a unit of work takes: the median of the last pieces, for a process may lose its core in any of them."""

    def __init__(self) -> None:
        self._pieces: deque[float] = deque(maxlen=_NUM_PIECES)

    def took(self, num_units: int, seconds: float) -> None:
        """Count a piece of work."""
        self._pieces.append(seconds / num_units)

    @property
    def unit_s(self) -> float:
        """0 before the first few pieces."""
        return median(self._pieces) if len(self._pieces) >= _LEAST_PIECES else 0.0


class Recomputing:
    """Computes leading pages of copies into the pool of this actor's device."""

    def __init__(
        self,
        config: ModelConfig,
        model: Decoder,
        table: SequenceTable,
        page_tokens: int,
        is_idle: Callable[[], bool],
        step: Callable[[int], AbstractContextManager[object]],
    ) -> None:
        """``is_idle``: whether decode has no row to step. ``step``: to be in while it computes for a plan."""
        self._config, self._model, self._table, self._page_tokens = config, model, table, page_tokens
        self._is_idle, self._step = is_idle, step
        self._pace = Pace()

    def pays(self, chunk: TransferChunk, num_tokens: int, copy_s: float, token_s: float) -> bool:
        """Return whether tokens of a chunk are sooner computed than copied in ``copy_s``. ``token_s``: of prefill, which counts before
        this device has computed any; 0: not known."""
        token_s = self._pace.unit_s or token_s
        return 0 < num_tokens * token_s < copy_s and self._is_idle() and self._is_text(chunk)

    def compute(self, plan_id: int, chunk: TransferChunk, start: int, end: int) -> None:
        """Write the pages of tokens [start, end), all of whose predecessors have theirs."""
        began_s = time.monotonic()
        with self._step(plan_id):
            self._model.prefill([self._chunk(chunk, start, end)])
        self._pace.took(end - start, time.monotonic() - began_s)

    def _is_text(self, chunk: TransferChunk) -> bool:
        return chunk.member > 0 or not decode_sequence_spec(self._table.read_spec(chunk.row)).spans

    def _chunk(self, chunk: TransferChunk, start: int, end: int) -> Chunk:
        spec = decode_sequence_spec(self._table.read_spec(chunk.row))
        length = spec.num_companion_tokens if chunk.member else spec.num_prompt_tokens
        prompt = self._table.prompt[chunk.row, chunk.member, start : min(end, length)]
        generated = self._table.ids[chunk.row, max(0, start - length) : max(0, end - length)]
        ids = torch.from_numpy(np.concatenate((prompt, generated), dtype=np.int64, casting="unsafe"))
        positions, delta = family_of(self._config).positions(self._config, length, [])
        beyond = np.broadcast_to(np.arange(length, max(end, length)) + delta, (3, max(end, length) - length))
        positions = np.concatenate((positions, beyond), axis=1)[:, start:end]
        pages = self._table.pages(chunk.row, chunk.member)[: -(-end // self._page_tokens)].astype(np.int64)
        return Chunk(self._model.embed(ids), torch.from_numpy(positions.copy()), start, torch.from_numpy(pages), ids=ids)
