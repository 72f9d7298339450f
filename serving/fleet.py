"""The models of a front: what ``residency`` decides is done here, and requests wait here for their model. Runs in the front's loop."""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..runtime.errors import RequestError, RunError
from ..runtime.process.host_room import read_host_room
from ..runtime.supervisor.ask_supervisor import ask
from ..runtime.supervisor.control import DownRequest
from ..shm.errors import ShmError
from .card import Card
from .left_runs import runs_beside
from .models_file import ModelsFile, ServedModel
from .relay import no_room
from .residency import Residence, Rules, State, decide, fits
from .runs import ModelRun, configuration_file

TICK_S = 0.5
RETRY_S = 60.0  # after which a model that could not be loaded is tried again
MEMORY_SHARE = 0.8  # of what is available, where the file does not say
log = logging.getLogger(__name__)
_decode_card = msgspec.json.Decoder(Card).decode


class Member:
    """A model. ``problem``: why it cannot be had, until ``residence.retry_s``. ``num_starts`` of its runs."""

    def __init__(self, model: ServedModel, run: ModelRun) -> None:
        self.model = model
        self.run = run
        self.card: Card | None = None
        self.problem = ""
        self.num_starts = 0
        self.num_waiting = 0
        self.residence = Residence(name=model.name, pinned=model.pinned, waiting_since_s=0.0 if model.pinned else None)
        self.drained = asyncio.Event()  # asked for
        self.changed = asyncio.Event()  # replaced by another at each change

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def is_asked_for(self) -> bool:
        return self.residence.waiting_since_s is not None

    def tell(self) -> None:
        """Wake whoever waits for a change."""
        self.changed.set()
        self.changed = asyncio.Event()


class Fleet:
    """``say`` gets what happens, for users. ``directory``: the front's run directory; those of its runs lie beside it."""

    def __init__(self, file: ModelsFile, directory: Path, say: Callable[[str], None]) -> None:
        self._say = say
        self._file = file
        self._directory = directory
        self.members = {model.name: Member(model, ModelRun(model, run_path(directory, model), os.environ)) for model in file.models}
        self.is_closing = False
        self._rules = Rules(budget_bytes=0, idle_s=file.front.idle_s, turn_s=file.front.turn_s)
        self._stirred = asyncio.Event()
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def budget_bytes(self) -> int:
        """Memory of all runs together."""
        return self._rules.budget_bytes

    # -------------------------------------------------------------------------------------------------- begin and end

    async def begin(self) -> None:
        """Find the runs of an earlier front, and begin to decide."""
        held = sum(_size_of(member.run.path) for member in self.members.values() if member.run.is_there())
        room = read_host_room(self._directory).num_bytes
        budget = self._file.memory_bytes or int(MEMORY_SHARE * (room + held))
        self._rules = msgspec.structs.replace(self._rules, budget_bytes=budget)
        self._say(f"{len(self.members)} models share {budget / 2**30:.1f} GiB")
        self._find_left()
        for path in set(runs_beside(self._directory)) - {member.run.path for member in self.members.values()}:
            self._say(f"{path.name}: the file has no such model any more, its run is ended")
            self._tasks.append(asyncio.create_task(_end(path)))
        self._tasks += [asyncio.create_task(self._decide_always()), asyncio.create_task(self._look_always())]

    async def close(self, drain_s: float | None) -> None:
        """End all runs. Requests that wait are refused, and those that run get ``drain_s`` seconds (None: as configured)."""
        self.is_closing = True
        for task in self._tasks:
            task.cancel()
        for member in self.members.values():
            member.tell()
        await asyncio.gather(*(self._close(member, drain_s) for member in self.members.values()))
        await asyncio.gather(*self._tasks, *self._lives.values(), return_exceptions=True)

    async def _close(self, member: Member, drain_s: float | None) -> None:
        if member.residence.state is State.LOADING:
            self._lives[member.name].cancel()
            await asyncio.gather(self._lives[member.name], return_exceptions=True)
        with contextlib.suppress(RunError, ShmError):  # of nobody's front, or not to be looked at
            if member.run.is_there():
                await asyncio.to_thread(member.run.is_mine)
                await member.run.end(drain_s)

    # --------------------------------------------------------------------------------------------------- for requests

    def find(self, name: str | None, is_ollamas: bool = False) -> Member:
        """Return the model of this name, the first without one. Raises: RequestError 404."""
        if name is None:
            return next(iter(self.members.values()))
        member = self.members.get(name) or (self.members.get(name.removesuffix(":latest")) if is_ollamas else None)
        if member is None:
            names = ", ".join(self.members)
            message = f"model: {name[:100]!r} does not exist, this server has {names}"
            raise RequestError(message, status=404, type="not_found_error", param="model", code="model_not_found")
        return member

    def loaded(self, name: str | None) -> Member:
        """Return a model that is loaded. Raises: RequestError."""
        member = self.find(name)
        if member.residence.state is not State.READY:
            raise no_room(f"model {member.name!r} is not loaded: {self.describe(member)}")
        return member

    @contextlib.asynccontextmanager
    async def use(self, member: Member, timeout_s: float, keep_s: float | None = None) -> AsyncIterator[str]:
        """Have the model loaded and use its run, at this URL. ``keep_s``: idle time that its client asks for.

        Raises: RequestError 503 if it cannot be loaded, or not in time.
        """
        residence = member.residence
        await self._wait_until_ready(member, timeout_s)
        residence.num_running += 1
        try:
            yield member.run.url
        finally:
            residence.num_running -= 1
            residence.last_used_s = time.monotonic()
            residence.keep_s = keep_s
            member.tell()
            self._stirred.set()

    def unload(self, member: Member) -> None:
        """Let the model go as soon as it is idle, until it is asked for again."""
        member.residence.keep_s = 0.0
        self._stirred.set()

    async def _wait_until_ready(self, member: Member, timeout_s: float) -> None:
        residence = member.residence
        member.num_waiting += 1
        if residence.waiting_since_s is None:
            residence.waiting_since_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_ready(member):
                    self._stirred.set()
                    await member.changed.wait()
        except TimeoutError:
            raise no_room(f"model {member.name!r} was not loaded within {timeout_s:g} s: {self.describe(member)}") from None
        finally:
            member.num_waiting -= 1
            if not member.num_waiting:
                residence.waiting_since_s = None

    def _is_ready(self, member: Member) -> bool:
        """Return whether the model is served. Raises: RequestError if it will not be."""
        if self.is_closing:
            raise RequestError("the server is shutting down", status=503, type="overloaded_error", retry_after_s=1)
        if member.residence.state is State.READY and not member.run.has_ended:
            return True
        left_s = member.residence.retry_s - time.monotonic()
        if member.problem and left_s > 0 and member.residence.state is State.ABSENT:
            problem = f"model {member.name!r} cannot be loaded: {member.problem}"
            raise RequestError(problem, status=503, type="overloaded_error", retry_after_s=max(1, round(left_s)))
        return False

    def describe(self, member: Member) -> str:
        """Return what a model that is not ready waits for, or is doing."""
        residence = member.residence
        if residence.state is not State.ABSENT:
            return f"it is {residence.state}"
        if member.card is None:
            return "its checkpoint is being looked at"
        holders = [other.name for other in self.members.values() if other.residence.is_held]
        return f"it waits for memory that {', '.join(holders)} has" if holders and member.is_asked_for else "it is absent"

    # ----------------------------------------------------------------------------------------------------- decisions

    async def _decide_always(self) -> None:
        while True:
            self._find_left()
            self._want_pinned()
            self._count_unattended()
            residences = [member.residence for member in self.members.values()]
            if all(residence.needs_bytes is not None for residence in residences if residence.is_held):
                self._carry_out(residences)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._stirred.wait()
            self._stirred.clear()

    def _carry_out(self, residences: Sequence[Residence]) -> None:
        decision = decide(residences, self._rules, time.monotonic())
        for name in decision.start:
            self._live(self.members[name], self._start)
        for name in decision.drain:
            self.members[name].residence.state = State.DRAINING
            self.members[name].drained.set()

    def _count_unattended(self) -> None:
        """Note which models work though no client waits: on answers in the background, and streams that can be read again."""
        for member in self.members.values():
            residence = member.residence
            is_there = residence.state in (State.READY, State.DRAINING) and not member.run.has_ended
            residence.num_unattended = member.run.num_requests() if is_there and not residence.num_running else 0
            if residence.num_unattended:
                residence.last_used_s = time.monotonic()

    def _find_left(self) -> None:
        """Find runs of an earlier front: those that it was starting come up after its end."""
        now_s = time.monotonic()
        for member in self.members.values():
            if member.residence.state is not State.ABSENT or now_s < member.residence.retry_s:
                continue
            try:
                if member.run.is_there():
                    self._live(member, self._take_over)
            except ShmError as error:
                self._fail(member, str(error))

    def _want_pinned(self) -> None:
        for member in self.members.values():
            if member.model.pinned and member.residence.state is State.ABSENT and not member.is_asked_for:
                member.residence.waiting_since_s = time.monotonic()

    # --------------------------------------------------------------------------------------------- the life of a run

    def _live(self, member: Member, begin: Callable[[Member], Awaitable[bool]]) -> None:
        member.residence.state = State.LOADING
        member.drained.clear()
        self._lives[member.name] = asyncio.create_task(self._life(member, begin))

    async def _life(self, member: Member, begin: Callable[[Member], Awaitable[bool]]) -> None:
        """From the start of a run, or from when it is found, until it is gone."""
        residence = member.residence
        try:
            if not await begin(member):
                return
            residence.state, member.problem = State.READY, ""
            residence.ready_since_s = residence.last_used_s = time.monotonic()
            if not member.num_waiting:
                residence.waiting_since_s = None
            member.tell()
            await self._until_drained(member)
            residence.state = State.DRAINING
            if member.run.has_ended and not self.is_closing:
                self._say(f"{member.name}: its run has ended by itself")
            await member.run.end()
        except Exception as error:  # of one model: the others are served on
            if not isinstance(error, RunError | ShmError | OSError):
                log.exception("%s", member.name)
            self._fail(member, str(error) or type(error).__name__)
        finally:
            residence.state = State.ABSENT
            if member.card is None:
                residence.needs_bytes = None
            member.tell()
            self._stirred.set()

    async def _start(self, member: Member) -> bool:
        """Raises: RunError with the reason."""
        began_s = time.monotonic()
        self._say(f"{member.name}: loading")
        try:
            await member.run.start()
        except RunError:
            # One that an earlier front was starting may have come first.
            if member.run.is_there() and await self._take_over(member):
                return True
            raise
        member.num_starts += 1
        self._say(f"{member.name}: ready after {time.monotonic() - began_s:.1f} s at {member.run.url} (run {member.run.path.name})")
        return True

    async def _take_over(self, member: Member) -> bool:
        """Take over the run of an earlier front; return whether it serves. One of another configuration is ended. Raises: RunError."""
        if not await asyncio.to_thread(member.run.is_mine):
            self._say(f"{member.name}: its run has another configuration, and is ended")
            await member.run.end()
            return False
        if not await member.run.find():
            return False
        self._say(f"{member.name}: found its run, at {member.run.url}")
        return True

    async def _until_drained(self, member: Member) -> None:
        """Wait until the run has ended, or is asked to drain and has no requests."""
        await _first_of(member.run.ended(), member.drained.wait())
        if not member.run.has_ended:
            self._say(f"{member.name}: ending its run")
        while (member.residence.num_running or member.residence.num_unattended) and not member.run.has_ended:
            await _first_of(member.run.ended(), member.changed.wait(), asyncio.sleep(TICK_S))

    def _fail(self, member: Member, problem: str) -> None:
        member.problem = problem
        member.residence.retry_s = time.monotonic() + RETRY_S
        self._say(f"{member.name}: cannot be loaded: {problem}")
        member.tell()

    # --------------------------------------------------------------------------------------------------------- cards

    async def _look_always(self) -> None:
        """Look at checkpoints, one after another, those first that somebody waits for."""
        while True:
            unknown = [member for member in self.members.values() if self._is_to_be_looked_at(member)]
            if not unknown:
                await asyncio.sleep(TICK_S)
                continue
            member = max(unknown, key=lambda member: (member.residence.is_held, member.is_asked_for))
            self._judge(member, await look_at(member.model, self._rules.budget_bytes))
            self._stirred.set()

    def _judge(self, member: Member, card: Card) -> None:
        residence, problem = member.residence, card.problems[0] if card.problems else ""
        if not problem:
            residence.needs_bytes = card.needs_bytes
            if not fits(residence, [other.residence for other in self.members.values()], self._rules.budget_bytes):
                problem = f"it takes {card.needs_bytes / 2**30:.1f} GiB, which the pinned models do not leave (front.memory)"
        if not problem:
            member.card = card
        elif residence.is_held:  # a run of an earlier front, which has its memory
            residence.needs_bytes, residence.retry_s = _size_of(member.run.path), time.monotonic() + RETRY_S
            self._say(f"{member.name}: could not be loaded again: {problem}")
        else:
            self._fail(member, problem)

    def _is_to_be_looked_at(self, member: Member) -> bool:
        return member.card is None and time.monotonic() >= member.residence.retry_s and (not member.problem or member.is_asked_for)


async def _first_of(*ends: Coroutine[Any, Any, object]) -> None:
    """Wait for the first of them, and give up the others."""
    waits = [asyncio.ensure_future(end) for end in ends]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _end(path: Path) -> None:
    with contextlib.suppress(RunError):
        await ask(path, DownRequest())


def run_path(directory: Path, model: ServedModel) -> Path:
    """Return the run directory of a model: its name is the front's and the model's."""
    return directory.with_name(f"{directory.name}.{model.run_suffix}")


def _size_of(run: Path) -> int:
    """Return the shared memory that a run takes."""
    num_bytes = 0
    for file in run.glob("*"):
        with contextlib.suppress(OSError):  # the run may be ending
            num_bytes += 512 * file.stat().st_blocks
    return num_bytes


async def look_at(model: ServedModel, memory_bytes: int) -> Card:
    """Look at a checkpoint in a process of its own, which loads no weights: ``mmrt model check``."""
    arguments = ["model", "check", model.config.model.path, "--json", "--memory", f"{max(1, memory_bytes // 10**6)} MB"]
    command = [sys.executable, "-P", "-m", "mmrt", *arguments, "--config", "/dev/stdin"]
    pipe = asyncio.subprocess.PIPE
    try:
        with configuration_file(model) as file:
            process = await asyncio.create_subprocess_exec(*command, stdin=file, stdout=pipe, stderr=pipe, start_new_session=True)
    except OSError as error:
        return Card(problems=(f"mmrt model check cannot be started: {error.strerror}",))
    try:
        output, errors = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.communicate()
        raise
    try:
        return _decode_card(output)
    except msgspec.MsgspecError:
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("error: ")
        return Card(problems=(reason or f"mmrt model check ended with status {process.returncode}",))
