"""The sequences that decode is working on, and the step over all of them.

A CFG pair is one member with two sequences (CF3: both run in the same step or neither); its companions stand behind the conditional
sequences in the batch. Called by the decode actor only.

Where launching does not wait for the result, on CUDA, a step is prepared, except for its ids, while the previous one is computed. It is
launched as soon as these ids arrive, before they are committed and announced, and only for the same members: the only id ever thrown
away is that of a row which is removed meanwhile.

Array suffixes: N members, P members that are pairs, B = N + P sequences, G guesses, H guesses of pairs, S = B + G + H sequences of a
step, V vocabulary.
"""

import logging
import time
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...models.architecture import ModelConfig
from ...models.families.registry import family_of
from ...models.grammar.matcher import Matcher
from ...models.lm.decoder import Decoder
from ...models.sampling.interface import Sampler
from ...models.state_layout import state_layout
from ...runtime.bus.messages import SequenceSpec, decode_sequence_spec
from ...schema.rows import EndCode
from ...shm.errors import StaleRow
from ...shm.sequence_table import SequenceTable
from ..host.device import Completion, raise_if_fatal
from .batch import Batch, Draws, Ints, Member
from .drawing import Answers, Drawing, Drawn
from .prompt_lookup import Guesses, PromptLookup
from .state_pages import StepStates, step_states

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """The result of a step: rows that got tokens, how many each, and rows that ended as (row, generation, code)."""

    rows: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    ended: list[tuple[int, int, EndCode]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Step:
    """Input of a step besides ids: positions and lengths [S], block tables [S, pages], those of windows, draws, recurrent states,
    guesses."""

    positions: Tensor
    lengths: Tensor
    block_tables: Tensor
    window_tables: Tensor | None
    draws: Draws
    states: StepStates | None
    guesses: Guesses | None


class Grammars(Protocol):
    """A maker of matchers: ``GrammarCompiler``, or ``Matchers`` alone."""

    def begin(self, grammar: str) -> Matcher | None:
        """Return the matcher of an answer without ids; None if it is not ready yet. Raises: GrammarError."""
        ...


class _Launched(NamedTuple):
    """A step on the device: what it drew; the guesses that it checks, and the logits behind them: [G + H, V]."""

    drawn: Drawn
    guesses: Guesses | None
    behind: Tensor


class RunningSet:
    """Members and their per-step arrays. A member that ends leaves by itself; ``remove`` is for all other reasons."""

    def __init__(
        self,
        config: ModelConfig,
        model: Decoder,
        sampler: Sampler,
        table: SequenceTable,
        page_tokens: int,
        completion: Completion,
        *,
        launches_ahead: bool = False,
        grammars: Grammars | None = None,
        lookup: PromptLookup | None = None,
        has_windows: bool = False,
    ) -> None:
        """``grammars`` may be None where no row has one. ``lookup``: its guesses are checked. ``has_windows``: layers with a window
        have pages of their own."""
        self._config = config
        self._completion = completion
        self._launches_ahead = launches_ahead
        self._grammars = grammars
        self._model = model
        self._sampler = sampler
        self._eos = np.array(config.eos_token_ids, dtype=np.int64)
        self._drawing = Drawing(sampler, table, self._eos)
        self._drawn_eos = [id for id in config.eos_token_ids if id < config.language.vocab_size]
        self._table = table
        self._page_tokens = page_tokens
        self._has_states, self._has_windows = state_layout(config) is not None, has_windows
        assert not (launches_ahead and self._has_states), (
            "a step launched ahead would overwrite entries of logs that a repeated one reads"
        )
        assert lookup is None or not (launches_ahead or self._has_states), "a guess is checked by a step that ends before the next"
        self._lookup = lookup
        self._members: dict[int, Member] = {}
        self._batch: Batch | None = None
        self._launched: _Launched | None = None  # a step over the batch whose tokens are uncommitted
        self._waiting: list[Member] = []
        self._held: set[int] = set()

    @property
    def rows(self) -> list[int]:
        return list(self._members)

    @property
    def is_ahead(self) -> bool:
        """True if a step has been launched: ``settle`` before the members change."""
        return self._launched is not None

    def hold(self, rows: set[int]) -> None:
        """Keep these rows out of ``step``: they are tried one by one, with ``step_one``."""
        self._keep_counts()
        self._held = rows

    def expire(self, now_s: float) -> None:
        """Remove rows whose deadline has passed (monotonic seconds). The controller, if it is alive, ends them."""
        for member in list(self._members.values()):
            if 0 < member.spec.generation.deadline_s <= now_s:
                self.remove(member.row, member.generation)

    def add(self, row: int, generation: int, now_s: float = 0.0) -> bool:
        """Add a row unless it is a member already, has ended, is late, has another generation by now, or its grammar is not ready.

        It continues after the committed ids. Returns whether it is a new member.
        Raises: GrammarError for a grammar that does not compile, or does not allow these.
        """
        member = self._members.get(row)
        if member is not None and member.generation == generation:
            return False
        if self._table.end(row, generation) != EndCode.NONE:
            return False
        try:
            spec = decode_sequence_spec(self._table.read_spec(row, generation))
        except StaleRow:
            return False
        if 0 < spec.generation.deadline_s <= now_s:
            return False
        count = self._table.committed(row, generation)
        matcher = self._begin_grammar(spec)
        if matcher is None and spec.generation.sampling.grammar:
            return False
        if matcher is not None:
            matcher.follow(self._table.ids[row, :count].tolist())
            matcher.check()
        if (code := self._end_of(row, spec, count, matcher)) != EndCode.NONE:
            self._table.set_end(row, generation, code)  # the process that committed its last token died before it set the end
            return False
        _, delta = family_of(self._config).positions(self._config, spec.num_prompt_tokens, spec.spans)
        self._keep_counts()
        self._members[row] = Member(row, generation, spec, delta, count, matcher)
        return True

    def remove(self, row: int, generation: int) -> None:
        """Remove a row; does nothing if this generation of it is not a member."""
        member = self._members.get(row)
        if member is not None and member.generation == generation:
            self._keep_counts()
            del self._members[row]

    def step(self) -> Outcome:
        """Compute a token for every member that has pages for it, and those behind right guesses; the others wait, pair by pair, until
        they have."""
        if self._launched is None:
            batch = self._current_batch()
            if not batch.members:
                return Outcome()
            if self._lookup is not None:
                return self._step_with_guesses(batch, self._lookup)
            self._launch(batch, self._prepare(batch))
        return self._land(may_launch=self._launches_ahead)

    def _step_with_guesses(self, batch: Batch, lookup: PromptLookup) -> Outcome:
        began_s = time.perf_counter()
        step = self._prepare(batch, guesses=lookup.guess(batch))
        try:
            self._launch(batch, step)
            outcome = self._land(may_launch=False)
        except Exception:
            if step.guesses is not None:
                lookup.give_up(batch, step.guesses)
            raise
        lookup.took(len(step.lengths), time.perf_counter() - began_s)
        return outcome

    def settle(self) -> Outcome:
        """Finish the step that was launched ahead, if there is one."""
        return Outcome() if self._launched is None else self._land(may_launch=False)

    def step_one(self, row: int, generation: int) -> Outcome | None:
        """Compute one token for one member, which ends (ERROR) if that fails. None if it is no member or has no pages now."""
        member = self._members.get(row)
        if member is None or member.generation != generation:
            return None
        self._keep_counts()
        if not self._has_pages(member):
            return None
        try:
            return self._advance_one(member)
        except MemoryError:
            raise
        except Exception as error:
            raise_if_fatal(error)
            log.exception("row %d cannot be computed and ends", row)
            return Outcome([row], [0], [self._give_up(member)])

    def _advance_one(self, member: Member) -> Outcome:
        batch = self._begin([member])
        self._launch(batch, self._prepare(batch))
        outcome = self._land(may_launch=False)
        self._keep_counts()
        return outcome

    def _give_up(self, member: Member) -> tuple[int, int, EndCode]:
        self._batch = None
        self._table.set_end(member.row, member.generation, EndCode.ERROR)
        self.remove(member.row, member.generation)
        return member.row, member.generation, EndCode.ERROR

    def step_apart(self) -> Outcome:
        """After ``step`` has raised, step each member alone, so that one that cannot be computed ends (ERROR) without the others.

        Raises: the last member's exception if there are several and all fail: then no single member is the cause.
        """
        outcome = Outcome()
        failed: list[tuple[Member, Exception]] = []
        self._batch = None
        for member in list(self._members.values()):
            member.count = self._table.committed(member.row, member.generation)
            if member.row in self._held or not self._has_pages(member):
                continue
            try:
                one = self._advance_one(member)
            except MemoryError:
                raise
            except Exception as error:
                raise_if_fatal(error)
                failed.append((member, error))
                self._batch = None
            else:
                outcome.rows += one.rows
                outcome.num_tokens += one.num_tokens
                outcome.ended += one.ended
        if len(failed) > 1 and not outcome.rows:
            raise failed[-1][1]
        for member, cause in failed:
            log.error("row %d cannot be computed and ends", member.row, exc_info=cause)
            outcome.rows.append(member.row)
            outcome.num_tokens.append(0)
            outcome.ended.append(self._give_up(member))
        return outcome

    def _launch(self, batch: Batch, step: _Step) -> None:
        try:
            self._launched = self._forward(batch, step)
        except Exception:
            self._completion.wait()  # launched kernels still write pages, which may soon belong to another row
            raise

    @property
    def num_guesses(self) -> tuple[int, int]:
        """Guesses that steps have checked, and those of them that were right."""
        return (0, 0) if self._lookup is None else (self._lookup.num_checked, self._lookup.num_right)

    def _land(self, *, may_launch: bool) -> Outcome:
        """Prepare the next step, wait for the ids of the launched one, launch the next if all go on, then commit the ids."""
        assert self._batch is not None and self._launched is not None
        batch, launched, self._launched = self._batch, self._launched, None
        try:
            following = self._prepare(batch, 1) if may_launch and self._is_current(batch, 1) else None
        finally:
            tokens_N = launched.drawn.tokens.cpu().numpy()  # also ensures that nothing writes pages any more
        end_N = self._drawing.ends(batch, launched.drawn, tokens_N)
        batch.advance(tokens_N)
        answers = Answers(tokens_N, (end_N < EndCode.ERROR).astype(np.int64), end_N)
        try:
            if following is not None and not end_N.any():
                self._launch(batch, following)
            if launched.guesses is not None and self._lookup is not None:
                answers = self._drawing.check(batch, launched.guesses, launched.behind, answers)
                self._lookup.learn(batch, launched.guesses, answers.num_N - 1)
        finally:
            self._commit(batch, answers)
            ended = self._end(batch, answers.end_N)
        return Outcome(batch.row_N.tolist(), answers.num_N.tolist(), ended)

    def _commit(self, batch: Batch, answers: Answers) -> None:
        some_N = answers.num_N > 0
        num_tokens = None if answers.tokens.ndim == 1 else answers.num_N[some_N]
        self._table.commit(batch.row_N[some_N], batch.generation_N[some_N], answers.tokens[some_N], num_tokens)

    def _end(self, batch: Batch, end_N: Ints) -> list[tuple[int, int, EndCode]]:
        """Set the ends of members whose tokens are committed; they leave."""
        ended = []
        for index in np.flatnonzero(end_N).tolist():
            row, generation, code = int(batch.row_N[index]), int(batch.generation_N[index]), EndCode(end_N[index])
            self._table.set_end(row, generation, code)
            self.remove(row, generation)
            ended.append((row, generation, code))
        return ended

    def _begin_grammar(self, spec: SequenceSpec) -> Matcher | None:
        if not spec.generation.sampling.grammar:
            return None
        assert self._grammars is not None
        return self._grammars.begin(spec.generation.sampling.grammar)

    def _end_of(self, row: int, spec: SequenceSpec, count: int, matcher: Matcher | None) -> EndCode:
        """Return how a sequence with ``count`` committed ids has ended, NONE if it goes on."""
        if matcher is not None and matcher.is_complete:
            return EndCode.STOP
        if count:
            last = int(self._table.ids[row, count - 1])
            if last in spec.generation.stop_token_ids or last in self._eos and not spec.generation.ignore_eos:
                return EndCode.STOP
        return EndCode.LENGTH if count >= spec.max_new_tokens else EndCode.NONE

    def _current_batch(self) -> Batch:
        """Arrays of the members that have pages; rebuilt only when a member came, left, ran out of pages or was granted some."""
        batch = self._batch
        if batch is not None and self._is_current(batch):
            return batch
        self._keep_counts()
        members = [member for member in self._members.values() if member.row not in self._held]
        self._waiting = [member for member in members if not self._has_pages(member)]
        return self._begin([member for member in members if self._has_pages(member)])

    def _begin(self, members: list[Member]) -> Batch:
        """Use the arrays of these members from now on."""
        self._batch = Batch(members, self._table, self._drawn_eos)
        self._sampler.remember(self._batch.histories)
        return self._batch

    def _is_current(self, batch: Batch, ahead: int = 0) -> bool:
        return batch.fits(self._table, self._page_tokens, ahead) and not any(map(self._has_pages, self._waiting))

    def _has_pages(self, member: Member) -> bool:
        spec = member.spec
        capacity = self._table.num_writable_pages(member.row) * self._page_tokens
        if spec.num_companion_tokens and capacity[1] < spec.num_companion_tokens + member.count:
            return False
        return bool(capacity[0] >= spec.num_prompt_tokens + member.count)

    def _keep_counts(self) -> None:
        """Copy the arrays' counts to the members before the arrays are dropped."""
        assert self._launched is None, "a step is launched over these arrays"
        if self._batch is not None:
            for member, count in zip(self._batch.members, self._batch.count_N.tolist(), strict=True):
                member.count = count
            self._batch = None

    def _prepare(self, batch: Batch, ahead: int = 0, guesses: Guesses | None = None) -> _Step:
        """Prepare the batch's next step, or the one ``ahead`` of it."""
        number_S, member_S = batch.number_B, batch.member_B
        length_S = np.concatenate((batch.length_N, batch.companion_length_P)) + ahead
        if guesses is not None:
            number_H, place_H = guesses.number_G[guesses.paired], guesses.place_G[guesses.paired]
            companion_H = batch.companion_length_P[np.searchsorted(batch.pair_P, number_H)]
            length_S = np.concatenate((length_S, batch.length_N[guesses.number_G] + guesses.place_G, companion_H + place_H))
            number_S = np.concatenate((number_S, guesses.number_G, number_H))
            member_S = np.concatenate((member_S, np.repeat((0, 1), (len(guesses.number_G), len(number_H)))))
        position_S = length_S - 1 + np.where(member_S == 0, batch.delta_N[number_S], 0)
        row_S = batch.row_N[number_S]
        return _Step(
            torch.from_numpy(position_S).expand(3, -1),
            torch.from_numpy(length_S),
            torch.from_numpy(self._tables(self._table.block_table, row_S, member_S, length_S)),
            torch.from_numpy(self._tables(self._table.window_table, row_S, member_S, length_S)) if self._has_windows else None,
            batch.draws(ahead),
            step_states(self._table, row_S, member_S, length_S, self._page_tokens) if self._has_states else None,
            guesses,
        )

    def _forward(self, batch: Batch, step: _Step) -> _Launched:
        guesses, states = step.guesses, step.states
        more = () if guesses is None else (guesses.id_G, guesses.id_G[guesses.paired])
        ids = torch.from_numpy(np.concatenate((batch.input_N, batch.companion_input_P, *more)))
        rows = None if states is None else states.rows
        logits_SV = self._model.decode(ids, step.positions, step.lengths, step.block_tables, rows, step.window_tables)
        if states is not None and states.full:  # a commit makes these states valid, so they are written before
            self._model.fold(states.borders, states.full_rows, states.targets)
        changes = None if batch.rules is None else batch.rules.changes()
        num_sequences = len(batch.number_B)
        drawn = self._drawing.draw(logits_SV[:num_sequences], step.draws, batch.penalties, changes)
        return _Launched(drawn, guesses, logits_SV[num_sequences:])

    def _tables(self, table: NDArray[np.uint32], row_S: Ints, member_S: Ints, length_S: Ints) -> Ints:
        """[S, pages of the longest], int64; entries behind a sequence's own pages are not read."""
        used = -(-int(length_S.max()) // self._page_tokens)
        return table[row_S, member_S, :used].astype(np.int64)
