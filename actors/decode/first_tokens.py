"""The first tokens of answers, drawn by prefill with the prompt's last chunk: so they wait for no step, and need none of their own.

Where the controller lets a chunk reach to the prompt's end, the row is plain: no guidance pair, no grammar, no recurrent states. It is
in phase PREPARE and belongs to no decode, so prefill is the one that commits. A plan that is done again finds the token there. decode
goes on behind it, as after a preemption. Draws depend on (seed, index) alone, so this is the token that decode would draw.

Others wait for a step of decode:

* A row with a grammar. Prefill would need a copy of the vocabulary of its own, which takes 0.4 s for 152,000 tokens, and rows behind
  would wait for a compilation, which decode does beside its steps. Where decode does not know the grammar yet, the second token would
  wait for the same compilation there.
* A pair. Its members' last chunks can be in two plans, of two prefills, and nobody keeps the hidden state of the first. That both end
  in one plan would have to be a rule of all policies, which choose chunks of each member.
* A row of a model with recurrent states. The chunk up to the prompt's end writes the log; it would have to be known beforehand
  whether a chunk ends before the last token, which decode then computes.
* A prompt that a cache knows up to its last token: decode computes that token in a step with other rows.
"""

import time
from collections.abc import Callable

import numpy as np
from torch import Tensor

from ...models.architecture import ModelConfig
from ...models.lm.decoder import Decoder
from ...models.sampling.sampler import CpuSampler
from ...runtime.bus.messages import SequenceSpec
from ...runtime.bus.plans import PrefillChunk
from ...schema.rows import EndCode
from ...shm.sequence_table import SequenceTable
from .batch import Batch, Member
from .drawing import Drawing

NoteDraw = Callable[[int, int, int], object]
"""Called for each row with its number, its generation, and when the draw began, in ns of CLOCK_MONOTONIC."""


class FirstTokens:
    """Draws them from the hidden states of prompts' last tokens, and commits them."""

    def __init__(self, config: ModelConfig, model: Decoder, table: SequenceTable, note: NoteDraw) -> None:
        self._model, self._table, self._note = model, table, note
        self._sampler = CpuSampler(config.language.vocab_size)
        self._drawing = Drawing(self._sampler, table, np.array(config.eos_token_ids, dtype=np.int64))
        self._drawn_eos = [id for id in config.eos_token_ids if id < config.language.vocab_size]

    def are_due(self, spec: SequenceSpec, chunk: PrefillChunk) -> bool:
        """Return whether the chunk ends where the first token is drawn, and nobody has drawn it."""
        is_plain = not spec.num_companion_tokens and not spec.generation.sampling.grammar and spec.generation.pooling is None
        is_end = is_plain and chunk.end == spec.num_prompt_tokens and spec.max_new_tokens > 0
        return is_end and not self._table.committed(chunk.row, chunk.row_generation)

    def draw(self, rows: list[tuple[int, int, SequenceSpec]], hidden: Tensor) -> None:
        """Draw a token for each of these (row, generation, spec) from ``hidden`` [N, H], commit it, and say where it is the last."""
        began_ns = time.monotonic_ns()
        batch = Batch([Member(row, generation, spec, 0, 0) for row, generation, spec in rows], self._table, self._drawn_eos)
        self._sampler.remember(batch.histories)
        changes = None if batch.rules is None else batch.rules.changes()
        drawn = self._drawing.draw(self._model.logits(hidden), batch.draws(), batch.penalties, changes)
        tokens_N = drawn.tokens.numpy()
        end_N = self._drawing.ends(batch, drawn, tokens_N)
        some_N = end_N < EndCode.ERROR
        self._table.note_first(batch.row_N[some_N], batch.generation_N[some_N], time.monotonic_ns())
        self._table.commit(batch.row_N[some_N], batch.generation_N[some_N], tokens_N[some_N])
        for index in np.flatnonzero(end_N).tolist():
            self._table.set_end(int(batch.row_N[index]), int(batch.generation_N[index]), EndCode(end_N[index]))
        for row, generation, _ in rows:
            self._note(row, generation, began_ns)
