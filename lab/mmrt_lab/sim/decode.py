"""decode, simulated: continuous batching with no event per token.

Between two events the members of the batch, the rate and the cost of a step are the same, so steps are equal and only counted. An event
is due when a member ends or lacks pages for its next token, or when the batch's context has grown by ``CONTEXT_QUANTUM``; a
message or a change of rate comes between. Messages take effect at the end of the step under way, as in ``actors/decode``.
"""

from collections.abc import Callable
from heapq import heappop, heappush

from mmrt.runtime.bus.messages import Admit, Drop, Dropped, SequenceEnded, ToActor, ToController
from mmrt.runtime.controller.state.request import Request
from mmrt.runtime.stage_table import InstanceId
from mmrt.schema.gap_buckets import bucket_of
from mmrt.schema.rows import EndCode, Phase

from .costs import CONTEXT_QUANTUM, Costs, step_seconds
from .events import EventQueue, to_ns
from .jitter import Jitter, StepTimes
from .processors import Processors
from .rows import Member, Rows
from .step_log import StepLog
from .turns import Turns


class Decode:
    """One actor of decode. ``gap_counts``: of times between tokens, by bucket, of all decodes. ``post``: sends to the controller.
    ``on_stretch``: takes a request's key, and the first and last step of consecutive tokens of it; ``on_end``: takes the key of a
    request that has all its tokens, at the time of its last. ``turns``: of its process, where its stages compute one at a time: each
    step is one turn."""

    stage = "decode"

    def __init__(
        self,
        name: InstanceId,
        costs: Costs,
        queue: EventQueue,
        processors: Processors,
        rows: Rows,
        gap_counts: list[int],
        post: Callable[[str, ToController], None],
        on_stretch: Callable[[int, int, int], None],
        on_end: Callable[[int], None],
        jitter: Jitter,
        turns: Turns | None = None,
    ) -> None:
        self.name = name
        self.log = StepLog(queue.now_ns)
        self._gap_counts = gap_counts
        self._costs, self._queue, self._processors, self._rows = costs, queue, processors, rows
        self._post, self._on_stretch, self._on_end, self._jitter = post, on_stretch, on_end, jitter
        self._turns, self._has_turn, self._has_asked = turns, False, False
        self._step_ns: dict[tuple[int, int], int] = {}
        self._members: dict[int, Member] = {}
        self._inbox: list[Admit | Drop] = []
        self._due: list[tuple[int, int, Member]] = []  # (step, number, member): as far as was known
        self._number = 0
        self._num_active = self._num_sequences = self._context = 0  # of the active members
        self._num_fresh = 0  # active members without a token since they became active
        self.is_running = False  # a step is under way
        self._wake_ns, self._is_awake = to_ns(costs.decode_wake_s), False
        self._rate, self._together = 1.0, "decode"  # and the stages at work since this rate holds
        self._left_ns = self._since_ns = self._end_ns = 0  # of the step under way: alone; since when at this rate; its end
        self._gap_ns = 0  # of a step over the active members at this rate, if all are equal
        self._times: StepTimes | None = None  # of each, if they vary
        self._num_planned = 0  # steps until the next event
        self._version = 0

    # ------------------------------------------------------------------------------------------------------- messages

    def take(self, message: ToActor) -> None:
        """Take a message of the controller's."""
        assert isinstance(message, Admit | Drop)
        self._inbox.append(message)
        self._stop_after_step()

    def pages_added(self, row: int) -> None:
        """The row has more pages."""
        member = self._members.get(row)
        if member is not None:
            member.room = self._room(member.request)
            if not member.active:
                self._stop_after_step()

    def set_rate(self, rate: float) -> None:
        """See ``processors.Server``."""
        now_ns = self._queue.now_ns
        if self.is_running:
            self.advance()
            self._left_ns = max(0, self._left_ns - round((now_ns - self._since_ns) * self._rate))
        self._rate, self._together = rate, self._processors.together
        if self.is_running:
            self._since_ns, self._end_ns = now_ns, now_ns + round(self._left_ns / rate)
            self._set_pace()
            self._schedule()

    # ---------------------------------------------------------------------------------------------------------- steps

    def _stop_after_step(self) -> None:
        """Look at messages and members at the end of the step under way; at once if there is none."""
        if not self.is_running:
            self._look()
            return
        self.advance()
        if self._num_planned > 1:
            self._num_planned = 1
            self._schedule()

    def advance(self) -> None:
        """Commit the steps that are over, and begin the next."""
        if self._commit():
            self._begin_step()

    def _commit(self) -> bool:
        """Commit the steps that are over. Returns whether there are any."""
        over_ns = self._queue.now_ns - self._end_ns
        if over_ns < 0 or not self.is_running:
            return False
        self._gap_counts[bucket_of(self._end_ns - self.log.last_ns)] += self._num_active - self._num_fresh
        num_steps = 1 + (self._commit_equal(over_ns) if self._times is None else self._commit_each(self._times, over_ns))
        self._num_fresh = 0
        self._num_planned -= num_steps
        self._context += num_steps * self._num_sequences
        self._since_ns = self.log.last_ns
        return True

    def _commit_equal(self, over_ns: int) -> int:
        """Commit the step under way, and those that ended within ``over_ns`` after it. Returns how many these are."""
        gap_ns = self._gap_ns
        num_more = min(over_ns // gap_ns, self._num_planned - 1)
        self._gap_counts[bucket_of(gap_ns)] += num_more * self._num_active
        self.log.add(self._end_ns, num_more, gap_ns)
        return num_more

    def _commit_each(self, times: StepTimes, over_ns: int) -> int:
        """As ``_commit_equal``, of steps that vary."""
        gaps_ns = times.gaps_after(self.log.num_steps, self._num_planned - 1, over_ns)
        for gap_ns in gaps_ns:
            self._gap_counts[bucket_of(gap_ns)] += self._num_active
        self.log.add(self._end_ns)
        self.log.add_each(gaps_ns)
        return len(gaps_ns)

    def _set_pace(self) -> None:
        """Find how long steps over the active members take at this rate."""
        if self._jitter.has_steps:
            self._times = self._jitter.step_times(self._together, self._cost_ns(), self._rate)
        else:
            self._gap_ns = max(1, round(self._cost_ns() / self._rate))

    def _cost_ns(self) -> int:
        """Of a step over the active members, alone."""
        key = self._num_sequences, self._context // CONTEXT_QUANTUM
        if key not in self._step_ns:
            self._step_ns[key] = max(1, to_ns(step_seconds(self._costs, self._num_sequences, self._context)))
        return self._step_ns[key]

    def _begin_step(self) -> None:
        self._set_pace()
        wake_ns, self._is_awake = 0 if self._is_awake else self._wake_ns, True
        if self._times is None:
            self._left_ns = self._cost_ns() + wake_ns
            span_ns = max(1, round(self._left_ns / self._rate))
        else:
            span_ns = self._times.of(self.log.num_steps) + round(wake_ns / self._rate)
            self._left_ns = round(span_ns * self._rate)
        self._end_ns = self._since_ns + span_ns

    def _schedule(self) -> None:
        """Look again after the planned steps."""
        self._version += 1
        num_more = self._num_planned - 1
        more_ns = num_more * self._gap_ns if self._times is None else self._times.after(self.log.num_steps, num_more)
        self._queue.at(self._end_ns + more_ns, self._planned, self._version)

    def _planned(self, version: int) -> None:
        if version == self._version:
            self._commit()
            self._look()

    def _look(self) -> None:
        """At the end of a step, or while there is none: end members, let them join and leave, and go on."""
        self._leave_due()
        inbox, self._inbox = self._inbox, []
        for message in inbox:
            if isinstance(message, Admit):
                self._join(message)
            else:
                self._drop(message)
        for member in self._members.values() if len(self._members) > self._num_active else ():
            if not member.active and min(member.end, member.room) > member.count:
                self._activate(member)
        if not self._num_sequences:
            self._is_awake = False
            self._idle()
            return
        if self._turns is not None and not self._take_turn(self._turns):
            return
        if not self.is_running:
            self._processors.start(self)
            self.is_running, self._since_ns = True, self._queue.now_ns
        self._begin_step()
        self._num_planned = self._num_steps()
        self._schedule()

    def _num_steps(self) -> int:
        """Return the number of steps that are equal and need no look between them."""
        while (due := self._due[0])[2].due != due[0] or not due[2].active:  # it has got pages, or has left
            heappop(self._due)
            if due[2].active:
                self._push(due[2])
        same_cost = -(-(CONTEXT_QUANTUM - self._context % CONTEXT_QUANTUM) // self._num_sequences)
        return min(due[0] - self.log.num_steps, same_cost)

    def _idle(self) -> None:
        if self.is_running:
            self.is_running = False
            self._version += 1
            self._processors.stop(self)
        if self._turns is not None and self._has_turn:
            self._has_turn = False
            self._turns.end()

    def _take_turn(self, turns: Turns) -> bool:
        """Return whether the next step may begin now. If others wait for the turn, they go first."""
        if self._has_turn and turns.is_wanted:
            self._idle()
        if not self._has_turn and not self._has_asked:
            self._has_turn = turns.ask(self._turn_given, self._stop_after_step)
            self._has_asked = not self._has_turn
        return self._has_turn

    def _turn_given(self) -> None:
        self._has_turn, self._has_asked = True, False
        self._look()

    # -------------------------------------------------------------------------------------------------------- members

    def _join(self, message: Admit) -> None:
        request = self._rows.request(message.row, message.row_generation)
        known = self._members.get(message.row)
        if (
            request is None
            or request.ownership.decode != self.name
            or request.phase != Phase.DECODE
            or self._rows.end_codes[message.row]
        ):
            return
        if known is not None and known.generation == message.row_generation:
            return
        member = Member(request, message.row, message.row_generation, self.log, request.record.max_new_tokens)
        member.count, member.room = self._rows.committed[message.row], self._room(request)
        self._members[message.row] = self._rows.members[message.row] = member

    def _drop(self, message: Drop) -> None:
        member = self._members.get(message.row)
        if member is not None and member.generation == message.row_generation:
            self._deactivate(member)
            self._forget(member)
        self._post(self.name, Dropped(1, message.row, message.row_generation, message.ticket))

    def _forget(self, member: Member) -> None:
        del self._members[member.row]
        self._rows.members[member.row] = None

    def _room(self, request: Request) -> int:
        """The count at which the row lacks a page: with as many tokens, the next one has no place."""
        page_tokens = self._rows.page_tokens
        return min(
            [len(table) * page_tokens - length + 1 for table, length in zip(request.kv.tables, request.kv.lengths, strict=False)]
        )

    def _activate(self, member: Member) -> None:
        member.active, member.since = True, self.log.num_steps
        member.lag = member.since - member.count
        self._num_active += 1
        self._num_fresh += 1
        self._num_sequences += len(member.request.kv.lengths)
        self._context += self._tokens(member)
        self._push(member)

    def _deactivate(self, member: Member) -> None:
        """The member takes no part in the next step."""
        if not member.active:
            return
        first, last = member.since, self.log.num_steps - 1
        member.count += last + 1 - first
        member.active = False
        self._num_active -= 1
        self._num_sequences -= len(member.request.kv.lengths)
        self._context -= self._tokens(member)
        self._rows.committed[member.row] = member.count
        if last >= first:
            self._on_stretch(member.request.key, first, last)
        else:
            self._num_fresh -= 1

    def _tokens(self, member: Member) -> int:
        """In its KV cache, all sequences together, once the next step has read its input."""
        return sum(member.request.kv.lengths) + len(member.request.kv.lengths) * member.count

    def _push(self, member: Member) -> None:
        self._number += 1
        heappush(self._due, (member.due, self._number, member))

    def _leave_due(self) -> None:
        """Members that have ended leave; those without pages wait."""
        while self._due and self._due[0][0] <= self.log.num_steps:
            member = heappop(self._due)[2]
            if not member.active:
                continue
            if member.due > self.log.num_steps:
                self._push(member)
                continue
            self._deactivate(member)
            if member.count >= member.end:
                self._forget(member)
                self._rows.end_codes[member.row] = EndCode.LENGTH
                self._post(self.name, SequenceEnded(1, member.row, member.generation))
                self._on_end(member.request.key)
