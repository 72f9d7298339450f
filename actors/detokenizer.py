"""The detokenizer: turn committed token ids into text deltas for the gateway, and end a text at a stop string.

The sequence table is the truth. This process can rebuild all it remembers of a row from it at any time, so it may die
anywhere: a new generation emits every text from byte 0 and the gateway drops what it has. So does this one for a new gateway.
decode rings when there is something to look at. A text that cannot be made, or that this process has died of twice, ends with an
error; the others go on.
"""

import contextlib
import logging
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..models.text.stop_strings import StopMatcher
from ..models.text.tokenizer import IncrementalDecoder, Tokenizer
from ..runtime.bus.messages import Delta, FinishReason, decode_sequence_spec
from ..runtime.bus.request_keys import deltas_of, gateway_of
from ..runtime.bus.wire import encode
from ..runtime.observe.flight import Kind
from ..runtime.stage_table import InstanceId, number_of, stage_of
from ..schema.rows import EndCode, Phase
from ..shm.doorbell import Listener, Ringer
from ..shm.errors import StaleRow
from ..shm.fence import fence
from ..shm.ring import Ring
from ..shm.sequence_table import SequenceTable
from ..shm.status import ActorStatus, ActorTable
from .host.actor import Actor
from .host.solo_trials import Place, SoloTrials, solo_step

log = logging.getLogger(__name__)

SCAN_S = 0.5
BLOCKED_S = 0.002
REPEAT_S = 2.0
MAX_REPEAT_S = 30.0
MAX_DELTA_BYTES = 16 * 1024
_LOW_BITS = np.uint64(0xFFFF_FFFF)
_PHASE_BITS = 8
_GENERATION_BITS = 32
_FINISH: dict[int, FinishReason] = {EndCode.STOP: "stop", EndCode.LENGTH: "length", EndCode.ERROR: "error", EndCode.GRAMMAR: "grammar"}


def main(actor: Actor) -> None:
    """Entry of the detokenizer process."""
    tokenizer = Tokenizer.load(actor.model_path, eos_ids=actor.model.eos_token_ids)
    actor.wait_for_layout()
    status = actor.become_active()
    table = SequenceTable.attach(actor.run, writable=False)
    actors = ActorTable.attach(actor.run, writable=False)
    gateways = [InstanceId(name) for name in actors.present if stage_of(name) == "gateway"]
    detokenizer = Detokenizer(table, [Ring.attach(actor.run, deltas_of(name)) for name in gateways], tokenizer)
    trials = SoloTrials(actor.death, table.rows_in(Phase.DECODE))
    limit_s = actor.config.supervisor.watchdog_s
    with Listener(actor.run, "detokenizer") as listener, contextlib.ExitStack() as stack:
        bells = [stack.enter_context(Ringer(actor.run, name)) for name in gateways]
        readers = [0] * len(gateways)
        actor.serving()
        _try_suspects(detokenizer, trials, status, limit_s)
        while not actor.ending:
            actor.receive()
            listener.drain()
            before, readers = readers, [actors.read(name).generation for name in gateways]
            for number, (reader, its_before) in enumerate(zip(readers, before, strict=True)):
                if reader != its_before:
                    detokenizer.begin_again(number)
            began_ns = time.monotonic_ns()
            with status.step(0, limit_s):
                pushed = detokenizer.step(time.monotonic())
            for number in pushed:
                bells[number].ring()
            if pushed:
                actor.flight.record(Kind.TEXT, began_ns, time.monotonic_ns() - began_ns)
            actor.wait(BLOCKED_S if detokenizer.is_blocked else SCAN_S, [listener.fd])


def _try_suspects(detokenizer: "Detokenizer", trials: SoloTrials, status: ActorStatus, limit_s: float) -> None:
    """Make every text once on its own, each in a step that names it, so that a second death identifies the text."""
    if trials.guilty is not None:
        detokenizer.give_up(trials.guilty)
    status.set_crashes(trials.crashes)
    for place in trials.suspects:
        with status.step(solo_step(place), limit_s):
            detokenizer.step(time.monotonic(), place[0])


class _Text:
    """The text of one row generation, as far as it has been made: ``offset`` bytes have been sent, ``pending`` wait."""

    def __init__(self, tokenizer: Tokenizer, generation: int, spec: bytes, repeat_s: float) -> None:
        row = decode_sequence_spec(spec)
        asked = row.generation
        self.generation = generation
        self.key = row.key
        self.gateway = number_of(gateway_of(row.key))
        self.repeat_s = repeat_s
        self.repeat_at_s = float("inf")
        self.num_ids = 0
        self.offset = 0
        self.pending = b""
        self.ids: list[int] | None = [] if asked.return_token_ids else None  # those not yet sent in a delta
        self.finish: FinishReason | None = None
        self.is_out = False  # the last delta is in the ring
        self._decoder = IncrementalDecoder(tokenizer)
        self._matcher = StopMatcher(asked.stop, asked.include_stop) if asked.stop else None
        self._min_tokens = asked.sampling.min_tokens
        self._hidden = frozenset() if asked.ignore_eos else tokenizer.eos_ids

    def extend(self, ids: list[int], end: int) -> None:
        """Take new ids, and the end code when these are the last ones.

        ``num_ids`` counts completion tokens as OpenAI and vLLM do: the end-of-sequence id counts, and so does the token that
        completes a stop string, but none behind it.
        """
        if self.finish is not None:
            return
        text, before = "", self.num_ids
        if self._matcher is None:
            self.num_ids += len(ids)
            text = self._decoder.push(self._visible(ids))
        else:
            for id in ids:
                self.num_ids += 1
                more = self._decoder.push(self._visible([id]))
                text += more if self.num_ids <= self._min_tokens else self._matcher.push(more)
                if self._matcher.stopped:
                    self.finish = "stop"
                    break
        if self.finish is None and end != EndCode.NONE:
            text += self._flush()
            self.finish = "stop" if self._matcher is not None and self._matcher.stopped else _FINISH[end]
        self.pending += text.encode()
        if self.ids is not None:
            self.ids += ids[: self.num_ids - before]

    @property
    def stop(self) -> str:
        """The stop string that ended the text, "" if none did."""
        return "" if self._matcher is None else self._matcher.found

    def _visible(self, ids: list[int]) -> list[int]:
        """The ids without an end-of-sequence id, which is always the last one and never shown."""
        return ids[:-1] if ids and ids[-1] in self._hidden else ids

    def _flush(self) -> str:
        tail = self._decoder.flush()
        if self._matcher is None:
            return tail
        return self._matcher.push(tail) + self._matcher.flush()


class Detokenizer:
    """The texts of all rows. ``step`` reads the table and pushes new text, at most a few deltas per row. ``deltas``: the ring of each
    gateway, by its number."""

    def __init__(self, table: SequenceTable, deltas: Sequence[Ring], tokenizer: Tokenizer) -> None:
        self._table = table
        self._deltas = deltas
        self._tokenizer = tokenizer
        self._texts: dict[int, _Text] = {}
        self._blocked: set[int] = set()
        self._due: set[int] = set()  # changed, and passed over
        self._given_up: set[Place] = set()
        self._seen: NDArray[np.uint64] = np.zeros((3, table.num_rows), np.uint64)

    def begin_again(self, gateway: int = 0) -> None:
        """Make every text of this gateway again from its beginning: whoever had what was pushed is gone."""
        for row in [row for row, text in self._texts.items() if text.gateway == gateway]:
            del self._texts[row]
            self._blocked.discard(row)
            self._seen[:, row] = 0

    @property
    def is_blocked(self) -> bool:
        """The ring to the gateway was full, or a text could not be made: step again soon."""
        return bool(self._blocked or self._due)

    def give_up(self, place: Place) -> None:
        """End this text with an error instead of making it. Forgotten when the row goes to another request."""
        log.error("the text of row %d has ended this process twice and is given up", place[0])
        self._given_up.add(place)

    def step(self, now_s: float, alone: int | None = None) -> set[int]:
        """Bring every row, or one ``alone``, up to date. Returns the gateways that a delta was pushed for: the caller wakes them."""
        # Ends before counts before phases: an end read here has all its ids, a count its spec.
        ends = self._table.ends.copy()
        fence()
        counts = self._table.counts.copy()
        fence()
        words = np.stack([self._table.phases, counts, ends])
        fence()
        changed = np.flatnonzero((words != self._seen).any(axis=0))
        self._seen = words
        rows = {*changed.tolist(), *self._blocked, *self._due, *self._overdue(now_s)}
        self._due = set() if alone is None else rows - {alone}
        self._blocked.clear()
        pushed = set[int]()
        for row in sorted(rows - self._due):
            phase, count, end = words[:, row].tolist()
            try:
                if self._update(row, phase, count, end, now_s):
                    pushed.add(self._texts[row].gateway)
            except MemoryError:
                raise
            except Exception:
                log.exception("row %d: its text cannot be made and ends with an error", row)
                self._given_up.add((row, phase >> _PHASE_BITS))
                if (text := self._texts.get(row)) is not None:
                    text.pending, text.finish = b"", "error"
                    self._due.add(row)  # without a text no request is known to tell: its deadline ends it
        return pushed

    def _overdue(self, now_s: float) -> list[int]:
        """Rows to send again in full: their last delta was sent long ago, but no answer of the gateway has reached the row."""
        overdue = [row for row, text in self._texts.items() if now_s >= text.repeat_at_s]
        for row in overdue:
            log.info("row %d: no answer to its last delta, its text is sent again", row)
        return overdue

    def _update(self, row: int, phase: int, count: int, end: int, now_s: float) -> bool:
        """Bring one row up to date with its words. Returns whether a delta was pushed."""
        generation = phase >> _PHASE_BITS
        if phase & 0xFF != Phase.DECODE:
            self._texts.pop(row, None)
            if phase & 0xFF != Phase.PREPARE:  # else it was preempted, and comes back
                self._given_up.discard((row, generation))
            return False
        text = self._texts.get(row)
        if text is None or text.generation != generation or now_s >= text.repeat_at_s:
            repeat_s = REPEAT_S if text is None or text.generation != generation else min(2 * text.repeat_s, MAX_REPEAT_S)
            try:
                spec = self._table.read_spec(row, generation)
            except StaleRow:
                self._texts.pop(row, None)
                return False
            text = self._texts[row] = _Text(self._tokenizer, generation, spec, repeat_s)
            if (row, generation) in self._given_up:
                text.finish = "error"
        num_ids = count & int(_LOW_BITS) if count >> _GENERATION_BITS == generation else 0
        end_code = end & int(_LOW_BITS) if end >> _GENERATION_BITS == generation else EndCode.NONE
        text.extend(self._table.ids[row, text.num_ids : num_ids].tolist(), end_code)
        return self._push(row, text, now_s)

    def _push(self, row: int, text: _Text, now_s: float) -> bool:
        """Move pending text into the ring as far as there is room; the rest waits for the next step."""
        pushed = False
        while text.pending or (text.finish is not None and not text.is_out):
            data = _head(text.pending)
            is_last = len(data) == len(text.pending)
            finish = text.finish if is_last else None
            ids = text.ids if text.ids and is_last else []
            stop = text.stop if is_last else ""
            delta = Delta(text.key, text.generation, text.offset, text.num_ids, data, finish, ids, row, stop)
            if not self._deltas[text.gateway].try_push(encode(delta)):
                self._blocked.add(row)
                return pushed
            pushed = True
            if ids:
                text.ids = []
            text.offset += len(data)
            text.pending = text.pending[len(data) :]
            if finish is not None:
                text.is_out = True
                text.repeat_at_s = now_s + text.repeat_s
        return pushed


def _head(data: bytes) -> bytes:
    """The head of the text that fits into one delta, cut between characters."""
    if len(data) <= MAX_DELTA_BYTES:
        return data
    end = MAX_DELTA_BYTES
    while data[end] & 0xC0 == 0x80:
        end -= 1
    return data[:end]
