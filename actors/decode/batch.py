"""Members of the running set as arrays, one element per member or sequence: the input of a decode step.

Array suffixes: N members, P members that are pairs (CF3), Q members with log-probabilities, B = N + P sequences of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ...models.grammar.matcher import Matcher
from ...models.sampling.interface import Pairs, SamplingRows
from ...models.sampling.penalties import History, Penalties
from ...models.sampling.rules import LogitRules, RowRules
from ...runtime.bus.messages import SequenceSpec
from ...schema.rows import EndCode
from ...shm.sequence_table import SequenceTable
from .grammar_rows import GrammarRows

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Luck:
    """``share``: of a row's guesses (``prompt_lookup``), those that were right. ``tried_at``: its count of ids when it last looked for
    one."""

    share: float = 0.5
    tried_at: int = 0


@dataclass(slots=True)
class Member:
    row: int
    generation: int
    spec: SequenceSpec
    delta: int  # M-RoPE: position of a generated token minus its index
    count: int
    matcher: Matcher | None = None
    luck: Luck = field(default_factory=Luck)


@dataclass(frozen=True, slots=True)
class Draws:
    """The inputs of some members' next draws. ``number_A``: their numbers in the batch, rising; the rest is in this order.
    ``logprob_Q``: the places, among these, of those who want log-probabilities, with ``num_alternatives``."""

    number_A: Ints
    sampling: SamplingRows
    pairs: Pairs | None
    logprob_Q: Ints
    num_alternatives: list[int]
    grammars: GrammarRows | None


class Batch:
    """The arrays of some members, in one order."""

    def __init__(self, members: list[Member], table: SequenceTable, eos: Sequence[int] = ()) -> None:
        """``eos``: the model's end-of-sequence ids."""
        self.members = members
        specs = [member.spec for member in members]
        asked = [spec.generation for spec in specs]
        sampling = [one.sampling for one in asked]
        self.row_N = np.array([member.row for member in members], dtype=np.int64)
        self.generation_N = np.array([member.generation for member in members], dtype=np.int64)
        self.count_N = np.array([member.count for member in members], dtype=np.int64)
        self.delta_N = np.array([member.delta for member in members], dtype=np.int64)
        self.max_new_N = np.array([spec.max_new_tokens for spec in specs], dtype=np.int64)
        self.ignore_eos_N = np.array([one.ignore_eos for one in asked], dtype=bool)
        self.stops = [(number, np.array(one.stop_token_ids)) for number, one in enumerate(asked) if one.stop_token_ids]
        self.length_N = np.array([d.num_prompt_tokens for d in specs], dtype=np.int64) + self.count_N
        self.input_N = self._inputs(table, members, 0)
        self.pair_P = np.flatnonzero([d.num_companion_tokens > 0 for d in specs])
        pairs = [members[index] for index in self.pair_P]
        self.number_N = np.arange(len(members))
        self.number_B = np.concatenate((self.number_N, self.pair_P))
        self.member_B = np.repeat((0, 1), (len(members), len(pairs)))
        self.companion_length_P = np.array([m.spec.num_companion_tokens + m.count for m in pairs], dtype=np.int64)
        self.companion_input_P = self._inputs(table, pairs, 1)
        scale_P = np.array([m.spec.generation.sampling.guidance_scale for m in pairs], dtype=np.float32)
        self.pairs = Pairs(self.pair_P, len(members) + np.arange(len(pairs)), scale_P) if pairs else None
        self.sampling = SamplingRows(
            temperature=np.array([one.temperature for one in sampling], dtype=np.float32),
            top_k=np.array([one.top_k for one in sampling], dtype=np.int64),
            top_p=np.array([one.top_p for one in sampling], dtype=np.float32),
            min_p=np.array([one.min_p for one in sampling], dtype=np.float32),
            seed=np.array([one.seed for one in sampling], dtype=np.uint64),
            index=self.count_N,
        )
        self.penalties, self.histories = self._penalties(table)
        self.rules = self._rules(table, eos)
        self.may_guess_N = np.array([not (one.has_rules or one.has_penalties) for one in sampling], dtype=bool)
        wanted = [(number, count) for number, one in enumerate(sampling) if (count := one.logprobs) is not None]
        self.logprob_Q = np.array([number for number, _ in wanted], dtype=np.int64)
        self.num_alternatives = [count for _, count in wanted]
        self.grammars = self._grammars(table)

    def _grammars(self, table: SequenceTable) -> GrammarRows | None:
        """The members that follow grammars, their matchers behind the committed ids."""
        chosen = [(number, member.matcher) for number, member in enumerate(self.members) if member.matcher is not None]
        for number, matcher in chosen:
            member = self.members[number]
            matcher.follow(table.ids[member.row, : member.count].tolist())
        return GrammarRows(*zip(*chosen, strict=True)) if chosen else None

    def _rules(self, table: SequenceTable, eos: Sequence[int]) -> LogitRules | None:
        """The rules of members that have any."""
        rows = [
            RowRules(
                number,
                asked.logit_bias,
                asked.bad_words,
                [*eos, *member.spec.generation.stop_token_ids],
                asked.min_tokens,
                table.ids[member.row, : member.count].tolist(),
            )
            for number, member in enumerate(self.members)
            if (asked := member.spec.generation.sampling).has_rules
        ]
        return LogitRules(rows) if rows else None

    def _penalties(self, table: SequenceTable) -> tuple[Penalties | None, list[History]]:
        """The penalties of members that have any, and the ids these have generated so far."""
        chosen = [(number, member) for number, member in enumerate(self.members) if member.spec.generation.sampling.has_penalties]
        if not chosen:
            return None, []
        asked = [member.spec.generation.sampling for _, member in chosen]
        penalties = Penalties(
            row=np.array([number for number, _ in chosen], dtype=np.int64),
            repetition=np.array([one.repetition_penalty for one in asked], dtype=np.float32),
            presence=np.array([one.presence_penalty for one in asked], dtype=np.float32),
            frequency=np.array([one.frequency_penalty for one in asked], dtype=np.float32),
        )
        histories = [
            History(
                table.prompt[member.row, 0, : member.spec.num_prompt_tokens].astype(np.int64),
                table.ids[member.row, : member.count].astype(np.int64),
            )
            for _, member in chosen
        ]
        return penalties, histories

    @staticmethod
    def _inputs(table: SequenceTable, members: list[Member], which: int) -> Ints:
        """The id that each sequence feeds next: the last committed one, or the last of its prompt."""
        inputs = np.empty(len(members), dtype=np.int64)
        for index, member in enumerate(members):
            if member.count:
                inputs[index] = table.ids[member.row, member.count - 1]
            else:
                spec = member.spec
                length = spec.num_companion_tokens if which else spec.num_prompt_tokens
                inputs[index] = table.prompt[member.row, which, length - 1]
        return inputs

    def fits(self, table: SequenceTable, page_tokens: int, ahead: int = 0) -> bool:
        """True if every sequence has a page for the token that it feeds next, or for the one ``ahead`` further."""
        tokens = table.num_writable_pages(self.row_N) * page_tokens - ahead
        return bool((tokens[:, 0] >= self.length_N).all() and (tokens[self.pair_P, 1] >= self.companion_length_P).all())

    def room(self, table: SequenceTable, page_tokens: int, number: int) -> int:
        """Return for how many tokens more than the next one a member has pages, and its answer has room."""
        pages = table.num_writable_pages(int(self.row_N[number])) * page_tokens
        room = min(int(pages[0]) - int(self.length_N[number]), int(self.max_new_N[number] - self.count_N[number]) - 1)
        for companion in np.flatnonzero(self.pair_P == number).tolist():
            room = min(room, int(pages[1]) - int(self.companion_length_P[companion]))
        return room

    def width(self, number: int) -> int:
        """Return how many sequences a member is."""
        return 2 if self.members[number].spec.num_companion_tokens else 1

    def draws(self, ahead: int = 0) -> Draws:
        """Return the next draws of all members, or those ``ahead`` of them."""
        sampling = replace(self.sampling, index=self.count_N + ahead)
        return Draws(self.number_N, sampling, self.pairs, self.logprob_Q, self.num_alternatives, self.grammars)

    def draws_of(self, number_A: Ints) -> Draws:
        """Return the next draws of some members. The companions' logits stand behind those of all, in the same order."""
        place_A = np.flatnonzero(np.isin(number_A, self.pair_P))
        pairs = None
        if self.pairs is not None and place_A.size:
            scale = self.pairs.scale[np.searchsorted(self.pair_P, number_A[place_A])]
            pairs = Pairs(place_A, len(number_A) + np.arange(len(place_A)), scale)
        logprob_Q = np.flatnonzero(np.isin(number_A, self.logprob_Q))
        asked = [self.num_alternatives[at] for at in np.searchsorted(self.logprob_Q, number_A[logprob_Q]).tolist()]
        grammars = None if self.grammars is None else self.grammars.some(number_A)
        return Draws(number_A, self.sampling.of(number_A), pairs, logprob_Q, asked, grammars)

    def ends(self, draws: Draws, tokens_A: Ints, eos: Ints) -> Ints:
        """[A] EndCodes: how members end with their tokens, NONE where they go on. Grammars take the tokens: call it once for each."""
        number_A = draws.number_A
        is_last_A = self.count_N[number_A] + 1 >= self.max_new_N[number_A]
        stops_A = np.isin(tokens_A, eos) & ~self.ignore_eos_N[number_A]
        for number, ids in self.stops:
            at = int(np.searchsorted(number_A, number))
            if at < len(number_A) and number_A[at] == number:
                stops_A[at] |= (ids == tokens_A[at]).any()
        end_A = np.where(stops_A, int(EndCode.STOP), np.where(is_last_A, int(EndCode.LENGTH), int(EndCode.NONE)))
        if draws.grammars is not None:
            draws.grammars.take(tokens_A, end_A)
        return end_A

    def advance(self, tokens_N: Ints) -> None:
        """Record one more token per member; both sequences of a pair feed it next (CF3)."""
        self.count_N += 1
        self.length_N += 1
        self.companion_length_P += 1
        self.input_N = tokens_N.copy()
        if self.rules is not None:
            self.rules.advance(tokens_N)
        self.companion_input_P = tokens_N[self.pair_P]

    def advance_some(self, number_A: Ints, tokens_A: Ints) -> None:
        """Record one more token for some members, which have no rules."""
        self.count_N[number_A] += 1
        self.length_N[number_A] += 1
        self.input_N[number_A] = tokens_A
        is_theirs_P = np.isin(self.pair_P, number_A)
        self.companion_length_P[is_theirs_P] += 1
        self.companion_input_P[is_theirs_P] = self.input_N[self.pair_P[is_theirs_P]]
