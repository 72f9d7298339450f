"""Capture plans while they are done. ``mmrt replay --capture`` leaves an order among the run's notes; the actor looks for it.

``PlanCapture`` runs in the actor: the only process that knows that no other process touches a plan's pages. Without an order it
costs one file check per plan. ``capture_live`` is for an actor that hangs or is dead: it copies the data of its live plans from
outside.
"""

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...shm.errors import ShmError
from ...shm.plan_table import PlanTable
from ...shm.pool import PagePool
from ...shm.run_directory import NOTES, RunDirectory
from ...shm.sequence_table import SequenceTable
from ..bus.messages import Result, decode_sequence_spec
from ..bus.plans import Plan, decode_plan
from ..pools import PoolName, kv_pool
from ..process.run import read_run_info
from ..stage_table import InstanceId
from .capture import Capture, CapturedRow, captures_in, make_header
from .capture_spool import CaptureSpool, empty_spool, is_finished, take_out
from .dumps import actors_of_run

log = logging.getLogger(__name__)

NUM_KEPT = 8  # of each actor
_MAX_ORDER_BYTES = 1 << 14

Pages = dict[str, list[int]]
DevicePages = Mapping[str, Callable[[list[int]], NDArray[Any]]]
"""For each pool on a device that the process has mapped, a function that copies pages, uint8 [n, page_bytes]."""


class CaptureOrder(msgspec.Struct, frozen=True):
    """An order to capture the next ``count`` plans into ``directory``. ``number``: no other order has it."""

    directory: str
    count: int
    number: int = msgspec.field(default_factory=time.time_ns)


_decode_order = msgspec.json.Decoder(CaptureOrder).decode


def order_path(run: Path, actor: str) -> Path:
    """Return the path of the order for an actor: a file that stays the same one, since the actor may not open another; empty: none."""
    return run / NOTES / f"capture-{actor}"


def write_order(run: Path, actor: str, order: CaptureOrder) -> None:
    """Write an order in the place of any other. An actor that looks at it too early sees none, or the beginning of one."""
    empty_spool(run, actor)
    fd = os.open(order_path(run, actor), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, msgspec.json.encode(order))
    finally:
        os.close(fd)


def is_ordered(run: Path, actor: str) -> bool:
    """Return whether there is an order that nobody has withdrawn."""
    try:
        return order_path(run, actor).stat().st_size > 0
    except FileNotFoundError:
        return False


def is_carried_out(run: Path, actor: str, order: CaptureOrder) -> bool:
    """Return whether the actor has captured as many plans as it was told to."""
    try:
        with _done_path(order, actor).open("rb") as file:
            if file.read(32) == b"%d" % order.number:
                return True
    except FileNotFoundError:
        pass
    return is_finished(run, actor, order.number)


def withdraw_order(run: Path, actor: str, order: CaptureOrder) -> None:
    """Remove an order, carried out or not."""
    with suppress(FileNotFoundError):
        os.truncate(order_path(run, actor), 0)
    _done_path(order, actor).unlink(missing_ok=True)


def _done_path(order: CaptureOrder, actor: str) -> Path:
    """The file beside the captures with the number of the order that was carried out last."""
    return Path(order.directory) / f"{actor}.done"


def _write_whole(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(data)
    os.replace(part, path)


class PlanCapture:
    """The actor's side. Errors here are logged, and the plan is done regardless."""

    def __init__(self, run: RunDirectory, actor: str, page_tokens: int, device_pages: DevicePages) -> None:
        self._run = run
        self._actor = actor
        self._device_pages = device_pages
        self._orders = os.open(order_path(run.path, actor), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._orders)
        self._memory: _Memory | None = None
        self._spool: CaptureSpool | None = None  # in place of the order's directory
        self._page_tokens = page_tokens
        self._began_s: dict[int, float] = {}  # by plan: video does two at once
        self._num_captured: dict[int, int] = {}  # by order

    def prepare(self, pools: Iterable[PoolName]) -> None:
        """Open the pools that its plans use, and where captures go, for a process that soon may open nothing.

        Raises: OSError, ShmError.
        """
        from safetensors import numpy  # noqa: F401

        self._spool = CaptureSpool(self._run.path, self._actor)
        self._memory = _Memory(self._run, self._actor, self._page_tokens, self._device_pages)
        for pool in pools:
            self._memory.open_pool(pool)

    def before(self, plan_id: int, plan: Plan) -> Capture | None:
        """Capture the plan's inputs if there is an order; they are in a file before the plan begins."""
        if not plan.can_replay or not (written := os.pread(self._orders, _MAX_ORDER_BYTES, 0)):
            return None
        try:
            order = _decode_order(written)
            if self._num_captured.get(order.number, 0) >= order.count:
                return None  # nobody has withdrawn it yet
            if self._memory is None:
                self._memory = _Memory(self._run, self._actor, self._page_tokens, self._device_pages)
            capture = self._memory.capture(self._actor, plan_id, plan)
            self._save(order, capture)
        except (OSError, ValueError) as error:
            log.warning("plan %x cannot be captured: %s", plan_id, error)
            return None
        self._began_s[plan_id] = time.monotonic()
        return capture

    def after(self, capture: Capture | None, result: Result) -> None:
        """Add the outputs and the result of the finished plan to the capture."""
        if capture is None or self._memory is None:
            return
        elapsed_s = time.monotonic() - self._began_s.pop(capture.header.plan_id)
        try:
            if not (written := os.pread(self._orders, _MAX_ORDER_BYTES, 0)):
                return  # the order has been withdrawn
            order = _decode_order(written)
            self._save(order, self._memory.finished(capture, result, elapsed_s))
            self._num_captured[order.number] = num_captured = self._num_captured.get(order.number, 0) + 1
            if num_captured == order.count:
                self._finish(order)
        except (OSError, ValueError) as error:
            log.warning("the result of plan %x cannot be captured: %s", capture.header.plan_id, error)

    def _save(self, order: CaptureOrder, capture: Capture) -> None:
        if self._spool is not None:
            self._spool.save(capture)
            return
        directory = Path(order.directory)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        capture.save(directory / capture.file_name)
        keep_newest(directory, self._actor)

    def _finish(self, order: CaptureOrder) -> None:
        if self._spool is not None:
            self._spool.finish(order.number)
        else:
            _write_whole(_done_path(order, self._actor), b"%d" % order.number)


def keep_newest(directory: Path, actor: str) -> None:
    """Remove all captured plans of an actor but the newest."""
    for old in captures_in(directory, actor)[:-NUM_KEPT]:
        old.unlink(missing_ok=True)


def collect(run: Path, actor: str, directory: Path) -> None:
    """Write what an actor that opens no files has captured beside the captures of the others. Raises: OSError."""
    take_out(run, actor, directory)
    keep_newest(directory, actor)


def capture_live(run: RunDirectory, actor: str, page_tokens: int, directory: Path) -> list[Path]:
    """Copy the inputs of ``actor``'s unfinished plans from outside. Raises: OSError, ShmError."""
    memory = _Memory(run, actor, page_tokens, {})
    table = PlanTable.attach(run, writable=False)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    saved = []
    actors = actors_of_run(run)
    for record in table.live():
        plan = decode_plan(record.payload)
        if actors[record.actor] == actor and plan.can_replay:
            capture = memory.capture(actor, record.plan_id, plan)
            saved.append(directory / capture.file_name)
            capture.save(saved[-1])
    table.close()
    return saved


class _Memory:
    """Read access to the pools and rows of a run, as an actor has it: "kv" is the pool of its device."""

    def __init__(self, run: RunDirectory, actor: str, page_tokens: int, device_pages: DevicePages) -> None:
        self._run = run
        self._kv = kv_pool(read_run_info(run).config.actor_devices.get(InstanceId(actor), 0))
        self._page_tokens = page_tokens
        self._device_pages = device_pages
        self._rows_table: SequenceTable | None = None
        self._pools: dict[str, PagePool] = {}

    def capture(self, actor: str, plan_id: int, plan: Plan) -> Capture:
        """Copy everything that the plan reads. Raises ShmError (a ValueError) if a row has been reassigned."""
        read, written = plan.reads(), plan.writes()
        rows: list[CapturedRow] = []
        tensors: dict[str, NDArray[Any]] = {}
        if plan.USES_KV:
            rows = self._rows(plan)
            read["kv"] = _distinct(page for row in rows for table in row.block_tables for page in table)
            written["kv"] = self._written_kv(plan, rows)
            for row in rows:
                lengths = row.spec.num_prompt_tokens, row.spec.num_companion_tokens
                for member, length in enumerate(lengths):
                    tensors[f"prompt.{row.row}.{member}"] = self._table.prompt_ids(row.row, member, length).copy()
                tensors[f"ids.{row.row}"] = self._table.ids[row.row, : row.committed].copy()
        inputs: Pages = {pool: _distinct([*read.get(pool, ()), *written.get(pool, ())]) for pool in {**read, **written}}
        for pool, pages in inputs.items():
            tensors[f"before.{pool}"] = self._copy(pool, pages)
        header = make_header(
            actor=actor,
            plan_id=plan_id,
            plan=plan,
            run_id=self._run.run_id,
            info=read_run_info(self._run),
            page_bytes={pool: self.open_pool(pool).page_bytes for pool in inputs},
            pages=(inputs, dict(written.items())),
            rows=rows,
            max_context=self._table.max_context if rows else 1,
            captured_s=time.time(),
        )
        return Capture(header, tensors)

    def finished(self, capture: Capture, result: Result, elapsed_s: float) -> Capture:
        """Return the capture with the pages that the plan has written."""
        header = msgspec.structs.replace(capture.header, result=result, elapsed_s=elapsed_s)
        after = {f"after.{pool}": self._copy(pool, pages) for pool, pages in header.outputs.items()}
        return Capture(header, {**capture.tensors, **after})

    def _rows(self, plan: Plan) -> list[CapturedRow]:
        found: dict[int, CapturedRow] = {}
        for chunk in plan.chunks:
            if chunk.row in found:
                continue
            spec = decode_sequence_spec(self._table.read_spec(chunk.row, chunk.row_generation))
            found[chunk.row] = CapturedRow(
                row=chunk.row,
                generation=chunk.row_generation,
                spec=spec,
                block_tables=(self._block_table(plan, chunk.row, 0), self._block_table(plan, chunk.row, 1)),
                committed=self._table.committed(chunk.row, chunk.row_generation),
            )
        return list(found.values())

    def _block_table(self, plan: Plan, row: int, member: int) -> list[int]:
        """Return the part of the block table that the plan's chunks use."""
        ends = [chunk.end for chunk in plan.chunks if (chunk.row, chunk.member) == (row, member)]
        pages: list[int] = self._table.prefill_pages(row, member)[: -(-max(ends, default=0) // self._page_tokens)].tolist()
        return pages

    def _written_kv(self, plan: Plan, rows: Sequence[CapturedRow]) -> list[int]:
        tables = {row.row: row.block_tables for row in rows}
        page = self._page_tokens
        return _distinct(
            kv for chunk in plan.chunks for kv in tables[chunk.row][chunk.member][chunk.start // page : -(-chunk.end // page)]
        )

    @property
    def _table(self) -> SequenceTable:
        if self._rows_table is None:
            self._rows_table = SequenceTable.attach(self._run, writable=False)
        return self._rows_table

    def open_pool(self, name: str) -> PagePool:
        """Map a pool for reading, once."""
        if name not in self._pools:
            self._pools[name] = PagePool.attach(self._run, self._kv if name == "kv" else name, "read")
        return self._pools[name]

    def _copy(self, pool: str, pages: list[int]) -> NDArray[Any]:
        num_pages = self.open_pool(pool).num_pages
        if any(not 0 <= page < num_pages for page in pages):
            raise ShmError(f"page {max(pages)} is outside pool {pool!r} ({num_pages} pages)")
        if pool in self._device_pages:
            return self._device_pages[pool](pages)
        if self.open_pool(pool).on_device:
            raise ShmError(f"pages of pool {pool!r} lie on a CUDA device, where only the actor itself can copy them")
        copied: NDArray[Any] = self.open_pool(pool).data[np.array(pages, dtype=np.int64)]
        return copied


def _distinct(pages: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(pages))
