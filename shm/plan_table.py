"""Plan records: contents of live plans, written by the controller before it sends their names, read by the actors that do them.

A new controller finds here every plan that its predecessor may have sent. One writer: the controller.
"""

import struct
import zlib
from typing import NamedTuple, Self

import numpy as np

from .fence import fence
from .run_directory import RunDirectory
from .segment import LINE_BYTES, Layout, Segment

_KIND = "plans"
_HEAD = struct.Struct("=QQII")  # plan_id (published last, as a word), actor index, length, crc32
_PLAN_BYTES = 8


class PlanRecord(NamedTuple):
    """A live plan."""

    slot: int
    plan_id: int
    actor: int  # index of the actor in the layout
    payload: bytes


class PlanTable:
    """``num_slots`` records of up to ``slot_bytes`` bytes of payload. Slot word = plan id, 0 for a free slot; written last."""

    def __init__(self, segment: Segment) -> None:
        """Use ``create`` or ``attach``."""
        self.num_slots, self.slot_bytes, *_ = segment.geometry
        self._segment = segment
        self._stride = _stride(self.slot_bytes)
        layout = Layout()
        self._offset = layout.add(self.num_slots * self._stride, np.uint8).offset
        segment.expect_bytes(layout.num_bytes)

    @classmethod
    def create(cls, run: RunDirectory, num_slots: int = 64, slot_bytes: int = 131072) -> Self:
        """Make the table. Raises: SpaceError, FileExistsError."""
        layout = Layout()
        layout.add(num_slots * _stride(slot_bytes), np.uint8)
        path = run.segment_path("plans")
        return cls(Segment.create(path, layout.num_bytes, kind=_KIND, geometry=(num_slots, slot_bytes)))

    @classmethod
    def attach(cls, run: RunDirectory, writable: bool = True) -> Self:
        """Map the table. Raises: MissingError, SegmentError."""
        return cls(Segment.attach(run.segment_path("plans"), kind=_KIND, writable=writable))

    def close(self) -> None:
        """Unmap."""
        self._segment.close()

    def write(self, slot: int, plan_id: int, actor: int, payload: bytes) -> None:
        """Put a plan into a slot, over its old contents. A reader of the old plan finds nothing from now on.

        Raises: ValueError if the payload is longer than a slot.
        """
        if len(payload) > self.slot_bytes:
            raise ValueError(f"plan {plan_id} of {len(payload)} bytes exceeds a slot's {self.slot_bytes}")
        assert plan_id > 0
        start = self._start(slot)
        words, buf = self._segment.words, self._segment.buf
        words[start // 8] = 0
        fence()
        body = start + _HEAD.size
        buf[body : body + len(payload)] = payload
        head = _HEAD.pack(plan_id, actor, len(payload), zlib.crc32(payload))
        buf[start + _PLAN_BYTES : body] = head[_PLAN_BYTES:]
        fence()
        words[start // 8] = plan_id

    def read(self, slot: int, plan_id: int) -> bytes | None:
        """The payload of a plan; None if the slot holds another plan, none, or a torn one."""
        record = self._read(slot)
        return record.payload if record is not None and record.plan_id == plan_id else None

    def holds(self, slot: int, plan_id: int) -> bool:
        """Return whether a slot holds this plan."""
        return bool(self._segment.words[self._start(slot) // 8] == plan_id)

    def clear(self, slot: int) -> None:
        """Free a slot."""
        self._segment.words[self._start(slot) // 8] = 0

    def live(self) -> list[PlanRecord]:
        """Every whole plan in the table."""
        records = (self._read(slot) for slot in range(self.num_slots))
        return [record for record in records if record is not None]

    def _start(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} is outside the plan table ({self.num_slots} slots)")
        return self._offset + slot * self._stride

    def _read(self, slot: int) -> PlanRecord | None:
        start = self._start(slot)
        words, buf = self._segment.words, self._segment.buf
        plan_id = words[start // 8]
        if plan_id == 0:
            return None
        fence()
        _, actor, length, crc = _HEAD.unpack_from(buf, start)
        if length > self.slot_bytes:
            return None
        body = start + _HEAD.size
        payload = bytes(buf[body : body + length])
        fence()
        if words[start // 8] != plan_id or zlib.crc32(payload) != crc:
            return None
        return PlanRecord(slot, plan_id, actor, payload)


def _stride(slot_bytes: int) -> int:
    return -(-(_HEAD.size + slot_bytes) // LINE_BYTES) * LINE_BYTES
