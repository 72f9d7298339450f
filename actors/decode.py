"""The decode actor: continuous batching, one token per sequence and step, CFG combine, sampling, commit.

Its own loop: the controller is not on the token path. A row in phase DECODE belongs to the running set; Admit is only a hint, since
a new generation finds its members by looking at the table. A token counts from the moment its row's count word says so (commit); what
was not committed may be computed again, differently or not, without harm.
"""

import gc
import logging
import time

from ..runtime.messages import Admit, Drop, Dropped, SequenceEnded, TokenHint, encode
from ..shm.doorbell import Ringer
from ..shm.pool import PagePool
from ..shm.ring import Ring
from ..shm.sequence_table import EndCode, Phase, SequenceTable
from .base import Actor
from .language_model import open_language_model
from .running_set import Outcome, RunningSet

log = logging.getLogger(__name__)

SCAN_S = 0.5
IDLE_S = 0.5
PAUSED_S = 0.005


def main(actor: Actor) -> None:
    """Entry of the decode process."""
    layout = actor.wait_for_layout()
    table = SequenceTable.attach(actor.run)
    kv = PagePool.attach(actor.run, "kv")
    model = open_language_model(actor, kv, layout.kv_page_tokens)
    running = RunningSet(actor.model, model, table, layout.kv_page_tokens)
    actor.become_active()
    gc.freeze()
    actor.serving()
    Decoding(actor, table, running, Ring.attach(actor.run, "tokens"), Ringer(actor.run, "detokenizer")).run()


class Decoding:
    """The loop around the running set: messages and table scans in, hints and acknowledgements out."""

    def __init__(self, actor: Actor, table: SequenceTable, running: RunningSet, hints: Ring, bell: Ringer) -> None:
        self._actor = actor
        self._table = table
        self._running = running
        self._hints = hints
        self._bell = bell
        self._scan_at_s = 0.0
        self._num_steps = 0
        self._step_limit_s = actor.config.step_limit_s(actor.name)

    def run(self) -> None:
        """Step until told to end; wait for messages while there is nothing to step."""
        status = self._actor.status
        assert status is not None
        while not self._actor.ending:
            self._take_messages()
            self._scan_when_due()
            if not self._running.rows:
                self._actor.wait(IDLE_S)
                continue
            self._num_steps += 1
            with status.step(self._num_steps, self._step_limit_s):
                outcome = self._step()
            if not outcome.rows:
                self._actor.wait(PAUSED_S)
                continue
            self._publish(outcome.rows, outcome.ended)

    def _step(self) -> Outcome:
        """One token for everybody. One sequence that cannot be computed must not end the others, nor this process again and again."""
        try:
            return self._running.step()
        except Exception:
            log.exception("a step over %d rows failed: each on its own", len(self._running.rows))
            return self._running.step_apart()

    def _take_messages(self) -> None:
        for message in self._actor.receive():
            if isinstance(message, Admit):
                if self._table.phase(message.row) == (message.row_generation, Phase.DECODE):
                    self._running.add(message.row, message.row_generation)
            elif isinstance(message, Drop):
                self._running.remove(message.row, message.row_generation)
                self._actor.send(Dropped(self._actor.generation, message.row, message.row_generation, message.ticket))

    def _scan_when_due(self) -> None:
        """Find members that no message told of: after a restart, or when an Admit was lost."""
        now_s = time.monotonic()
        if now_s < self._scan_at_s:
            return
        self._scan_at_s = now_s + SCAN_S
        for row, generation in self._table.rows_in(Phase.DECODE):
            self._running.add(row, generation)

    def _publish(self, rows: list[int], ended: list[tuple[int, int, EndCode]]) -> None:
        self._hints.try_push(encode(TokenHint(rows)))
        self._bell.ring()
        for row, generation, _ in ended:
            self._actor.send(SequenceEnded(self._actor.generation, row, generation))
