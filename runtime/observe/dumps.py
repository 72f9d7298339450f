"""Recordings: the contents of all flight recorders of a run, taken from a live run or from a file saved at a crash.

The supervisor saves one whenever an actor ends unexpectedly; actors whose supervisor is gone save one when the last of them
ends; ``mmrt up`` saves one of a run whose processes were all killed. ``mmrt trace`` reads live runs and files.

File: magic, length of the header (u32), header (JSON), and the records of each recorder, 64 bytes each, as in memory.
"""

import asyncio
import datetime
import os
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...shm.errors import ShmError
from ...shm.flight_recorder import DTYPE, RECORD_BYTES, FlightRecorder, FlightWriter, read_recorders
from ...shm.run_directory import RunDirectory
from ...shm.status import ActorTable
from ..errors import UserError
from ..stage_table import ACTORS, SUPERVISOR
from .flight import Kind, unsigned

SUFFIX = ".flight"
NUM_KEPT = 10  # files of one run's name
SAVED_RECORDS = 8192  # of each recorder

_MAGIC = b"mmrtflt1"
_LENGTH = struct.Struct("=I")
_MAX_HEADER_BYTES = 1 << 20


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The run of a recording, and its time: on the wall clock and on CLOCK_MONOTONIC, the clock of the records."""

    run_id: str
    model_path: str
    reason: str  # why it was saved; "" for a live run
    taken_s: float
    taken_ns: int
    records: dict[str, int]  # recorder -> how many records follow
    actors: tuple[str, ...] = ACTORS  # of the run, in the order of their numbers in records


_decode_facts = msgspec.json.Decoder(Facts).decode


class Recording(msgspec.Struct, frozen=True):
    """Copies of the records of every recorder, by name."""

    facts: Facts
    recorders: dict[str, NDArray[Any]]

    @classmethod
    def take(cls, run: RunDirectory, reason: str = "", limit: int | None = None) -> Self:
        """Copy the recorders of a run, live or dead."""
        actors = actors_of_run(run)
        recorders = read_recorders(run, (*actors, SUPERVISOR), limit)
        facts = Facts(
            run_id=run.run_id,
            model_path=str(run.info.get("model_path", "")),
            reason=reason,
            taken_s=time.time(),
            taken_ns=time.monotonic_ns(),
            records={name: len(records) for name, records in recorders.items()},
            actors=actors,
        )
        return cls(facts, recorders)

    def between(self, begin_ns: int, end_ns: int) -> Self:
        """Return the part of it from ``begin_ns`` to ``end_ns``: records that overlap with that time."""
        cut = {}
        for name, records in self.recorders.items():
            begins, ends = records["time_ns"], records["time_ns"] + records["duration_ns"]
            cut[name] = records[(ends >= np.uint64(begin_ns)) & (begins <= np.uint64(end_ns))]
        counts = {name: len(records) for name, records in cut.items()}
        return type(self)(msgspec.structs.replace(self.facts, taken_ns=min(end_ns, self.facts.taken_ns), records=counts), cut)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a saved recording. Raises UserError if the file is not a recording or is truncated."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        start = len(_MAGIC) + _LENGTH.size
        if not data.startswith(_MAGIC) or len(data) < start:
            raise UserError(f"{path} is no flight recording (it does not begin with {_MAGIC!r})")
        (length,) = _LENGTH.unpack_from(data, len(_MAGIC))
        if length > min(_MAX_HEADER_BYTES, len(data) - start):
            raise UserError(f"{path} has {len(data)} bytes, too few for its header of {length}")
        try:
            facts = _decode_facts(data[start : start + length])
        except msgspec.DecodeError as error:
            raise UserError(f"{path}: its header cannot be read: {error}") from None
        offset, recorders = start + length, {}
        wanted = offset + RECORD_BYTES * sum(facts.records.values())
        if any(count < 0 for count in facts.records.values()) or wanted != len(data):
            raise UserError(f"{path} has {len(data)} bytes, its header asks for {wanted}")
        for name, count in facts.records.items():
            recorders[name] = np.frombuffer(data, DTYPE, count, offset)
            offset += RECORD_BYTES * count
        return cls(facts, recorders)

    def save(self, path: Path) -> None:
        """Write it atomically. Raises OSError."""
        header = msgspec.json.encode(self.facts)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(_MAGIC + _LENGTH.pack(len(header)) + header)
                for records in self.recorders.values():
                    file.write(records.tobytes())
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def actors_of_run(run: RunDirectory) -> tuple[str, ...]:
    """Return the actors of a run, live or dead, in the order of their numbers in records; the default ones before it has any."""
    try:
        with closing(ActorTable.attach(run, writable=False)) as table:
            return table.actors
    except ShmError:
        return ACTORS


def saved_recordings(directory: Path) -> list[Path]:
    """Return the saved recordings of a run's name, the newest last."""
    return sorted(directory.glob(f"*{SUFFIX}"))


def save_crash(run: RunDirectory, directory: Path, who: str, reason: str) -> Path | None:
    """Save the recorders of ``run`` and delete the oldest such files. Returns None if there was nothing to save.

    Raises: OSError.
    """
    recording = Recording.take(run, reason, SAVED_RECORDS)
    if not any(recording.facts.records.values()):
        return None
    stamp = datetime.datetime.fromtimestamp(recording.facts.taken_s, datetime.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / f"{stamp}-{who}{SUFFIX}"
    recording.save(path)
    for old in saved_recordings(directory)[:-NUM_KEPT]:
        old.unlink(missing_ok=True)
    return path


def salvage(path: Path, directory: Path) -> Path | None:
    """Save the records of a run whose processes are all dead, before its directory is swept. Best effort."""
    if not path.exists() or RunDirectory.is_alive(path):
        return None
    with suppress(ShmError, OSError, KeyError, ValueError), RunDirectory.attach(path, timeout_s=0.0) as run:
        return save_crash(run, directory, "run", "every process of the run was killed")
    return None


class BlackBox:
    """The supervisor's recorder: records ends of processes, and saves all recorders when one was unexpected. That is done in a thread:
    meanwhile the supervisor gives the successor what it needs."""

    def __init__(
        self, run: RunDirectory, directory: Path, on_saved: Callable[[Path], None], on_error: Callable[[OSError], None]
    ) -> None:
        """``on_saved``, ``on_error``: are called in the running event loop."""
        self._run = run
        self._directory = directory
        self._on_saved, self._on_error = on_saved, on_error
        self._saving: set[asyncio.Task[None]] = set()
        self._flight: FlightWriter | None = None
        self._actors: tuple[str, ...] = ()

    def ended(self, process: str, generations: Mapping[str, int], pid: int, status: int, reason: str) -> None:
        """Record the end of a process with these generations of actors; ``reason`` is "" if the end was expected. Else begin to save:
        the file is named after the process."""
        if self._flight is None:
            try:
                self._flight = FlightRecorder.attach(self._run, SUPERVISOR).writer(1)
            except ShmError:
                return  # memory has not created it yet
        if not self._actors or not generations.keys() <= {*self._actors}:
            self._actors = actors_of_run(self._run)  # more may have come
        for actor, generation in generations.items():
            index = self._actors.index(actor) if actor in self._actors else len(self._actors)
            self._flight.event(Kind.EXIT, pid, index, generation, unsigned(status))
        if reason:
            saving = asyncio.get_running_loop().create_task(self._save(process, reason))
            self._saving.add(saving)
            saving.add_done_callback(self._saving.discard)

    async def close(self) -> None:
        """Wait until all is saved."""
        if self._saving:
            await asyncio.wait(self._saving)

    async def _save(self, process: str, reason: str) -> None:
        try:
            saved = await asyncio.to_thread(save_crash, self._run, self._directory, process, reason)
        except OSError as error:
            self._on_error(error)
        else:
            if saved is not None:
                self._on_saved(saved)
