"""The decode actor: continuous batching, CFG combine, sampling, commit. A step is a token of each sequence, and what right guesses add.

It has its own loop: the controller is not on the token path. The rows in phase DECODE that it owns belong to its running set; Admit is
only a hint, since a new generation finds its members in the table. A token counts from the moment its row's count word says so
(commit); an uncommitted token may be computed again, with the same result or another, without harm.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial

from ...models.architecture import kv_layer_parts
from ...models.errors import GrammarError
from ...models.grammar.matcher import Matchers
from ...models.grammar.vocabulary import load_vocabulary
from ...models.lm.warm_up import warm_up_decode
from ...models.sampling.sampler import sampler_for
from ...models.state_layout import state_layout
from ...runtime.bus.messages import Admit, Drop, Dropped, Run, SequenceEnded
from ...runtime.observe.flight import Kind, pack_pair
from ...runtime.process.memory_layout import read_layout
from ...runtime.stage_table import number_of
from ...schema.rows import EndCode, Phase
from ...shm.doorbell import Ringer
from ...shm.pool import PagePool
from ...shm.role_lock import RoleLock
from ...shm.sequence_table import SequenceTable
from ...shm.status import ActorStatus
from ...shm.step_gaps import StepGaps
from ..host.actor import Actor
from ..host.device import Completion, raise_if_fatal
from ..host.language_model import open_decoding_model
from ..host.page_packer import open_packing
from ..host.shared_tensors import SharedTensors
from ..host.solo_trials import SoloTrials, solo_step
from ..host.step_limit import StepLimit
from .gap_counter import GapCounter
from .grammar_compiler import GrammarCompiler
from .page_copier import PageCopier
from .prompt_lookup import PromptLookup
from .recomputing import Recomputing
from .running_set import Outcome, RunningSet

log = logging.getLogger(__name__)

SCAN_S = 0.5
IDLE_S = 0.5
PAUSED_S = 0.005
LAYER_S = 0.002  # between two looks whether a prefill has stored a layer


def main(actor: Actor) -> None:
    """Entry of the decode process."""
    compiler = GrammarCompiler(lambda: Matchers(load_vocabulary(actor.model_path, actor.model)), actor.wake)
    prepared = [compiler.prepare()] if has_time(actor) else []
    layout = actor.wait_for_layout()
    table = SequenceTable.attach(actor.run)
    shared = SharedTensors(actor)
    kv = PagePool.attach(actor.run, actor.kv_pool, "fill")
    model = open_decoding_model(actor, shared, kv, layout)
    shared.close()
    sampler = sampler_for(actor.model.language.vocab_size, shared.device)
    if shared.device.type == "cuda":
        warm_up_decode(model, sampler)
    completion = Completion(shared.device)
    may_launch = shared.device.type == "cuda" and actor.config.actors.turns == "off"
    lookup = PromptLookup(table, layout.kv_page_tokens) if may_guess(actor) else None
    running = RunningSet(
        actor.model,
        model,
        sampler,
        table,
        layout.kv_page_tokens,
        completion,
        launches_ahead=may_launch,
        grammars=compiler,
        lookup=lookup,
        has_windows=layout.has_windows,
    )
    actor.open_turn(completion.wait)
    wait(prepared)
    actor.become_active()
    gc.freeze()
    actor.serving()
    try:
        gaps = StepGaps.attach(actor.run, number_of(actor.name))
        page_tokens = layout.kv_page_tokens
        packing, layers = open_packing(actor, page_tokens), kv_layer_parts(actor.model, page_tokens, layout.has_windows)
        recomputing = None
        if may_recompute(actor, layout.has_windows):
            recomputing = Recomputing(actor.model, model, table, page_tokens, lambda: not running.rows, partial(computing, actor))
        copier = PageCopier(actor, kv, table, page_tokens, packing, layers, recomputing)
        Decoding(actor, table, running, compiler, gaps, Ringer(actor.run, "detokenizer"), copier).run()
    finally:
        compiler.close()
        completion.wait()  # a successor relies on this process to write nothing more


def may_guess(actor: Actor) -> bool:
    """Return whether steps check guesses: not on a device, where a step is launched before the one before ends; nor with recurrent
    states, whose rows take one token a step; nor with a model that computes nothing."""
    on_cuda = actor.config.model.on_cuda
    return actor.config.scheduling.prompt_lookup and not on_cuda and state_layout(actor.model) is None and actor.model.null is None


def may_recompute(actor: Actor, has_windows: bool) -> bool:
    """Return whether what a slow link would bring can be computed: not recurrent states, nor where packed pages are wanted, nor with
    pages of windows, which a row has at its prompt's end alone."""
    is_plain = state_layout(actor.model) is None and actor.model.null is None and not has_windows
    return is_plain and actor.config.num_kv_pools > 1 and actor.config.memory.kv_transfer_dtype == "auto"


@contextmanager
def computing(actor: Actor, plan_id: int) -> Iterator[None]:
    """Declare that decode computes for a plan, in its turn."""
    assert actor.status is not None
    with actor.turn, actor.status.step(plan_id, actor.config.step_limit_s(actor.name)):
        yield


def has_time(actor: Actor) -> bool:
    """Return whether no stream waits for this process: it is the run's first, its predecessor serves, or no row is in decode."""
    if read_layout(actor.run.path) is None or RoleLock.is_held(actor.run, actor.name):
        return True
    return not SequenceTable.attach(actor.run).rows_in(Phase.DECODE)


class Decoding:
    """The loop around the running set: messages and table scans in, tokens and acknowledgements out."""

    def __init__(
        self,
        actor: Actor,
        table: SequenceTable,
        running: RunningSet,
        compiler: GrammarCompiler,
        gaps: StepGaps,
        bell: Ringer,
        copier: PageCopier,
    ) -> None:
        """``compiler`` makes the grammars of ``running``."""
        self._actor = actor
        self._copier = copier
        self._compiler = compiler
        self._flight = actor.flight
        self._table = table
        self._number = number_of(actor.name)
        self._running = running
        self._gaps = GapCounter(gaps.add, gaps.add_first)
        self._bell = bell
        self._scan_at_s = 0.0
        self._num_steps = 0
        assert actor.status is not None
        self._status: ActorStatus = actor.status
        worst_s = actor.status.step_cost_ns / 1e9
        self._limit = StepLimit(actor.config.supervisor.watchdog_s, actor.config.step_limit_s(actor.name), worst_s)
        self._trials = SoloTrials(actor.death, table.rows_of(self._number))

    def run(self) -> None:
        """Step until told to end; wait for messages while there is nothing to step."""
        self._give_up_guilty()
        self._status.set_crashes(self._trials.crashes)
        self._running.hold(self._trials.held)
        while not self._actor.ending:
            self._take_messages()
            self._scan_when_due()
            self._copier.go_on()
            if not self._running.rows:
                self._actor.turn.rest()
                if not self._copier.is_busy:
                    self._compiler.prepare()
                    self._actor.wait(IDLE_S)
                elif self._copier.is_waiting:
                    self._actor.wait(LAYER_S)
                continue
            if self._trials.suspects:
                self._try_one()
            if not self._advance(self._running.step):
                self._actor.turn.rest()
                self._actor.wait(PAUSED_S)
        self._settle()

    def _advance(self, step: Callable[[], Outcome]) -> bool:
        """Take a step and report its outcome. Returns whether anything happened."""
        self._num_steps += 1
        with self._actor.turn:
            num_members, began_ns = len(self._running.rows), time.monotonic_ns()
            with self._status.step(self._num_steps, self._limit.limit_s(1)):
                outcome = self._try(step)
            if outcome.rows:
                self._took(began_ns)
                self._record(began_ns, outcome, num_members)
                self._publish(outcome.ended)
        return bool(outcome.rows)

    def _settle(self) -> None:
        """Finish the step that was launched ahead, before the members change."""
        if self._running.is_ahead:
            self._advance(self._running.settle)

    def _took(self, began_ns: int) -> None:
        step_s = (time.monotonic_ns() - began_ns) / 1e9
        self._actor.turn.took(step_s)
        self._limit.took(1, step_s)
        self._status.set_step_cost(int(1e9 * self._limit.worst_s))
        self._status.set_guesses(*self._running.num_guesses)

    def _give_up_guilty(self) -> None:
        """End the row that has crashed two generations, unless another actor runs it now."""
        guilty = self._trials.guilty
        if guilty is None or self._table.owner(*guilty) != self._number or self._table.end(*guilty) != EndCode.NONE:
            return
        log.error("row %d crashed decode twice; its request fails", guilty[0])
        self._table.set_end(*guilty, EndCode.ERROR)
        self._publish([(*guilty, EndCode.ERROR)])

    def _try_one(self) -> None:
        """Step the first suspect that can be stepped, alone; then it joins the others again."""
        trials = self._trials
        self._settle()
        trials.suspects = [at for at in trials.suspects if self._is_open(*at)]
        for place in trials.suspects:
            with self._actor.turn:
                began_ns = time.monotonic_ns()
                with self._status.step(solo_step(place), self._limit.limit_s(1)):
                    outcome = self._running.step_one(*place)
                if outcome is not None:
                    trials.passed(place)
                    self._record(began_ns, outcome, 1)
                    self._publish(outcome.ended)
                    break
        self._running.hold(trials.held)

    def _is_mine(self, row: int, generation: int) -> bool:
        """True if this actor runs the row now."""
        return self._table.phase(row) == (generation, Phase.DECODE) and self._table.owner(row, generation) == self._number

    def _is_open(self, row: int, generation: int) -> bool:
        """True if the row may still be in the running set and has not ended."""
        theirs, phase = self._table.phase(row)
        is_live = theirs == generation and phase != Phase.FREE and self._table.owner(row, generation) == self._number
        return is_live and self._table.end(row, generation) == EndCode.NONE

    def _try(self, step: Callable[[], Outcome]) -> Outcome:
        """Take a step. A sequence that cannot be computed must not end the others, nor this process again and again."""
        try:
            return step()
        except MemoryError:
            raise  # this process ends: a new one gets back the memory that this one holds
        except Exception as error:
            raise_if_fatal(error)
            log.exception("a step over %d rows failed; retrying each row alone", len(self._running.rows))
            return self._running.step_apart()

    def _record(self, began_ns: int, outcome: Outcome, num_members: int) -> None:
        now_ns = time.monotonic_ns()
        duration_ns = now_ns - began_ns
        self._gaps.committed(outcome.rows, self._running.rows, now_ns, outcome.num_tokens)
        tokens = pack_pair(len(outcome.ended), sum(outcome.num_tokens))
        self._flight.record(Kind.STEP, began_ns, duration_ns, self._num_steps, len(outcome.rows), tokens, num_members)
        for row, generation, code in outcome.ended:
            self._flight.event(Kind.ROW_ENDED, row, generation, code)

    def _take_messages(self) -> None:
        messages = self._actor.receive()
        if messages:
            self._settle()
        for message in messages:
            if isinstance(message, Admit):
                if self._is_mine(message.row, message.row_generation):
                    self._add(message.row, message.row_generation, time.monotonic())
            elif isinstance(message, Run):
                self._copier.take(message)
            elif isinstance(message, Drop):
                self._running.remove(message.row, message.row_generation)
                self._gaps.left(message.row)
                self._actor.send(Dropped(self._actor.generation, message.row, message.row_generation, message.ticket))

    def _scan_when_due(self) -> None:
        """Find members that no message announced: after a restart, when an Admit was lost, or when a grammar is compiled."""
        now_s = time.monotonic()
        if now_s < self._scan_at_s and not self._compiler.take_news():
            return
        self._scan_at_s = now_s + SCAN_S
        self._settle()
        self._running.expire(now_s)
        for row, generation in self._table.rows_of(self._number):
            self._add(row, generation, now_s)

    def _add(self, row: int, generation: int, now_s: float) -> None:
        """Add a row. One that cannot be added ends: it must not end this process again and again."""
        try:
            if self._running.add(row, generation, now_s):
                self._gaps.joined(row, self._table.first_token_ns(row, generation))
        except Exception as error:
            code = EndCode.GRAMMAR if isinstance(error, GrammarError) else EndCode.ERROR
            log.error("row %d cannot be decoded and ends", row, exc_info=error)
            self._table.set_end(row, generation, code)
            self._publish([(row, generation, code)])

    def _publish(self, ended: list[tuple[int, int, EndCode]]) -> None:
        """Announce that the table has changed and which sequences have ended."""
        self._bell.ring()
        for row, generation, _ in ended:
            self._actor.send(SequenceEnded(self._actor.generation, row, generation))
