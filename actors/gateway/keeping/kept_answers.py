"""Answers that are kept for their clients, in records that outlive the gateway: by tenant and id, for a time, up to a number of bytes.

What has ended is forgotten once its time is over, or where there is no room: then the tenant that has the most loses its oldest. What
is still under way stays. Runs in the gateway's event loop; threads may share it.
"""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ....shm.kept_records import MAX_BODY_BYTES, MAX_LOG_BYTES, NUM_RECORDS, KeptRecords, pages_of
from ....shm.workplace import Workplace

log = logging.getLogger(__name__)

MAX_KEPT_BYTES = 64 << 20
KEPT_S = 3600.0
MAX_ANSWERS = NUM_RECORDS - 1  # one is free for what takes another's place
_HEAD_BYTES = 8192  # of memory, of both copies, which are seldom longer
_FORMAT = 1


class _Head(msgspec.Struct, array_like=True):
    format: int
    tenant: bytes
    id: str
    order: int
    expires_s: float
    is_open: bool
    num_body_bytes: int
    num_log_bytes: int
    state: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Head).decode


class KeptAnswer:
    """One answer. ``state`` is its owner's; ``expires_s`` (monotonic seconds) counts once it is not ``is_open``, under way."""

    def __init__(self, number: int, head: _Head) -> None:
        self.number = number
        self._head = head

    @property
    def tenant(self) -> bytes:
        return self._head.tenant

    @property
    def id(self) -> str:
        return self._head.id

    @property
    def is_open(self) -> bool:
        return self._head.is_open

    @property
    def order(self) -> int:
        """Return when it was kept, beside others."""
        return self._head.order

    @property
    def expires_s(self) -> float:
        return self._head.expires_s

    @property
    def num_log_bytes(self) -> int:
        return self._head.num_log_bytes

    @property
    def state(self) -> bytes:
        return self._head.state

    @property
    def num_bytes(self) -> int:
        """Of memory."""
        return _HEAD_BYTES + pages_of(self._head.num_body_bytes) + pages_of(self._head.num_log_bytes)


class Marks(NamedTuple):
    """Of an answer under way: the places where it is worked on (``at_work``)."""

    records: KeptRecords
    number: int

    def set_at_work(self, place: Workplace, is_at_work: bool) -> None:
        self.records.set_at_work(self.number, place, is_at_work)

    def is_at_work(self, place: Workplace) -> bool:
        return self.records.is_at_work(self.number, place)


class KeptAnswers:
    """All of a run. The oldest come first."""

    _records: KeptRecords

    def __init__(
        self,
        records: KeptRecords | None = None,
        max_bytes: int = MAX_KEPT_BYTES,
        kept_s: float = KEPT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without ``records`` they are to be opened."""
        self.max_bytes = max_bytes
        self.kept_s = kept_s
        self._clock = clock
        self._lock = threading.RLock()
        self._answers: dict[tuple[bytes, str], KeptAnswer] = {}  # those that are not open in the order of their ends
        self._bytes: Counter[bytes] = Counter()  # by tenant
        self._order = 0
        if records is not None:
            self.open_records(records)

    def open_records(self, records: KeptRecords) -> None:
        """Go on with what is in the records, which no other process uses any more."""
        self._records = records
        found = []
        for number in records.used():
            try:
                head = _decode(records.head(number))
                if head.format != _FORMAT:
                    raise ValueError(f"its format is {head.format}, this gateway's is {_FORMAT}")
                found.append(KeptAnswer(number, head))
            except (ValueError, OSError, msgspec.DecodeError) as error:
                log.warning("a kept answer is dropped: %s", error)
                self._clear(number)
        for answer in sorted(found, key=lambda answer: answer.order):
            self._order = answer.order
            self._replace(answer)

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def num_bytes(self) -> int:
        return self._bytes.total()

    def open_ones(self, tenant: bytes | None = None) -> list[KeptAnswer]:
        """Return those that are under way, of one tenant or of all."""
        with self._lock:
            return [one for one in self._answers.values() if one.is_open and tenant in (None, one.tenant)]

    def put(self, tenant: bytes, id: str, body: bytes, state: bytes = b"") -> bool:
        """Keep an answer that has ended, in place of what is kept of it so far. Returns whether there was room."""
        return self._begin(tenant, id, body, is_open=False, state=state) is not None

    def open(self, tenant: bytes, id: str, body: bytes, state: bytes) -> KeptAnswer | None:
        """Keep one that is under way; None if there is no room."""
        return self._begin(tenant, id, body, is_open=True, state=state)

    def _begin(self, tenant: bytes, id: str, body: bytes, is_open: bool, state: bytes) -> KeptAnswer | None:
        with self._lock:
            num_bytes, before = _HEAD_BYTES + pages_of(len(body)), self._answers.get((tenant, id))
            if len(body) > MAX_BODY_BYTES or not self._make_room(num_bytes - (0 if before is None else before.num_bytes), before):
                return None
            number = self._records.free()
            if number is None:
                return None
            self._order += 1
            head = _Head(_FORMAT, tenant, id, self._order, self._clock() + self.kept_s, is_open, len(body), 0, state)
            try:
                self._records.write_body(number, body)
                self._records.commit(number, _encode(head))
            except OSError as error:
                log.warning("%s is not kept: %s", id, error)
                self._clear(number)
                return None
            answer = KeptAnswer(number, head)
            self._replace(answer)
            return answer

    def append(self, answer: KeptAnswer, data: bytes, state: bytes) -> bool:
        """Add to the log of an answer under way, and replace its state. Returns whether there was room: else nothing has changed."""
        with self._lock:
            head = answer._head
            num_log_bytes = head.num_log_bytes + len(data)
            more = pages_of(num_log_bytes) - pages_of(head.num_log_bytes)
            if not self.has(answer) or num_log_bytes > MAX_LOG_BYTES or (more and not self._make_room(more, None)):
                return False
            changed = msgspec.structs.replace(head, num_log_bytes=num_log_bytes, state=state)
            try:
                self._records.write_log(answer.number, head.num_log_bytes, data)
                self._records.commit(answer.number, _encode(changed))
            except OSError as error:
                log.warning("%s cannot be kept any further: %s", answer.id, error)
                return False
            answer._head = changed
            self._bytes[answer.tenant] += more
            return True

    def marks(self, answer: KeptAnswer) -> Marks:
        """Return the marks of an answer, until it is removed, or put anew."""
        return Marks(self._records, answer.number)

    def has(self, answer: KeptAnswer) -> bool:
        """Return whether it is still kept."""
        return self._answers.get((answer.tenant, answer.id)) is answer

    def get(self, tenant: bytes, id: str) -> KeptAnswer | None:
        """Return an answer, None if it is not there."""
        with self._lock:
            found = self._answers.get((tenant, id))
            return None if found is None or self._is_over(found) else found

    def body(self, answer: KeptAnswer) -> bytes | None:
        """Return the body of an answer, None if it has been forgotten meanwhile."""
        data = self._records.body(answer.number, answer._head.num_body_bytes)
        return data if self.has(answer) else None

    def log(self, answer: KeptAnswer, start: int, end: int) -> bytes | None:
        """Return the bytes of [start, end) of its log, None if it has been forgotten meanwhile."""
        data = self._records.log(answer.number, start, end)
        return data if self.has(answer) else None

    def remove(self, tenant: bytes, id: str) -> bool:
        """Forget an answer. Returns whether it was there."""
        with self._lock:
            is_there = self.get(tenant, id) is not None
            if (tenant, id) in self._answers:
                self._drop(self._answers[tenant, id])
            return is_there

    def expire(self) -> None:
        """Forget those whose time is over."""
        with self._lock:
            for answer in [one for one in self._answers.values() if self._is_over(one)]:
                self._drop(answer)

    def _is_over(self, answer: KeptAnswer) -> bool:
        return not answer.is_open and self._clock() >= answer.expires_s

    def _make_room(self, num_bytes: int, spared: KeptAnswer | None) -> bool:
        """Make room for more bytes, and for one more record, without the loss of ``spared``."""
        if num_bytes > self.max_bytes:
            return False
        while self.num_bytes + num_bytes > self.max_bytes or len(self._answers) >= MAX_ANSWERS:
            if (victim := self._victim(spared)) is None:
                return False
            self._drop(victim)
        return True

    def _victim(self, spared: KeptAnswer | None) -> KeptAnswer | None:
        """Return the oldest of the tenant that has the most bytes, of those that have any that may be forgotten."""
        oldest: dict[bytes, KeptAnswer] = {}
        for answer in self._answers.values():
            if not answer.is_open and answer is not spared:
                oldest.setdefault(answer.tenant, answer)
        return max(oldest.values(), key=lambda answer: self._bytes[answer.tenant], default=None)

    def _replace(self, answer: KeptAnswer) -> None:
        """Add an answer, in place of what was kept of it before."""
        before = self._answers.get((answer.tenant, answer.id))
        if before is not None:
            self._drop(before)
        self._answers[answer.tenant, answer.id] = answer
        self._bytes[answer.tenant] += answer.num_bytes

    def _drop(self, answer: KeptAnswer) -> None:
        del self._answers[answer.tenant, answer.id]
        self._bytes[answer.tenant] -= answer.num_bytes
        if not self._bytes[answer.tenant]:
            del self._bytes[answer.tenant]
        self._clear(answer.number)

    def _clear(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._records.clear(number)
