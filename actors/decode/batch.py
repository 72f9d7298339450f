"""Members of the running set as arrays, one element per member or sequence: the input of a decode step.

Array suffixes: N members, P members that are pairs (CF3), Q members with log-probabilities, B = N + P sequences of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
class Member:
    row: int
    generation: int
    spec: SequenceSpec
    delta: int  # M-RoPE: position of a generated token minus its index
    count: int
    matcher: Matcher | None = None


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
        tokens = table.num_pages[self.row_N].astype(np.int64) * page_tokens - ahead
        return bool((tokens[:, 0] >= self.length_N).all() and (tokens[self.pair_P, 1] >= self.companion_length_P).all())

    def ends(self, tokens_N: Ints, eos: Ints) -> Ints:
        """[N] EndCodes: how each member ends with its token, NONE where it goes on. Grammars take the tokens: call it once a step."""
        is_last_N = self.count_N + 1 >= self.max_new_N
        stops_N = np.isin(tokens_N, eos) & ~self.ignore_eos_N
        for number, ids in self.stops:
            stops_N[number] |= (ids == tokens_N[number]).any()
        end_N = np.where(stops_N, int(EndCode.STOP), np.where(is_last_N, int(EndCode.LENGTH), int(EndCode.NONE)))
        if self.grammars is not None:
            self.grammars.take(tokens_N, end_N)
        return end_N

    def advance(self, tokens_N: Ints) -> None:
        """Record one more token per member; both sequences of a pair feed it next (CF3)."""
        self.count_N += 1
        self.length_N += 1
        self.companion_length_P += 1
        self.input_N = tokens_N
        if self.rules is not None:
            self.rules.advance(tokens_N)
        self.companion_input_P = tokens_N[self.pair_P]
