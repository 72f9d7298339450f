"""Injection of a fault, and the wait for its end. Runs in the storm's event loop.

A fault is over when the processes that had to die are dead, lasting effects are undone, and every actor serves again. Exceeding
a limit is a finding; the wait then ends.
"""

import asyncio
import os
import resource
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from mmrt.bench.processes import descendants, is_gone, send_signal
from mmrt.runtime.bus.faults import EXIT_SIGNAL, FaultFile
from mmrt.runtime.bus.line_faults import LINE_SIGNAL
from mmrt.runtime.stage_table import stage_of

from .faults import EVERYBODY, LINE, Fault
from .lines import LineOrders
from .private_tmpfs import PrivateTmpfs
from .run_view import RunView

_POLL_S = 0.002
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "exit": EXIT_SIGNAL}
_MAX_DELAY_S = 0.5
_LINE_S = 2.0  # for a process to come to a line that none has died at
_START_S = 10.0  # the same from the start of the next process on
_OOM_SPARE_BYTES = 1 << 20


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits, in seconds."""

    end_s: float = 15.0  # a process that was killed or asked to end; for a gateway its drain comes on top
    hang_s: float = 20.0  # a stopped process until its watchdog has found it, beyond the deadline of its step: processors are shared
    zygote_hang_s: float = 160.0  # a hung zygote is found when it must fork
    back_s: float = 60.0  # from a death until the next generation serves: processors are shared


class Injector:
    """Injects into one run."""

    def __init__(
        self,
        view: RunView,
        faults: FaultFile,
        tmpfs: PrivateTmpfs | None,
        limits: Limits,
        drain_s: float,
        command: Callable[..., Awaitable[str]],
        layout: str,
        lines: LineOrders,
    ) -> None:
        """``command`` runs ``mmrt ARGUMENTS`` on the run as a user would, and returns the problem. ``layout``: of the run."""
        self.lines = lines
        self._view = view
        self._faults = faults
        self._tmpfs = tmpfs
        self._limits = limits
        self._drain_s = drain_s
        self._command = command
        self._layout = layout
        self.died_at: list[str] = []  # lines of the source, by the last fault

    async def strike(self, fault: Fault) -> str:
        """Inject the fault and wait until its cause is over. Returns the problem, "" if there was none."""
        self.died_at = []
        if not fault.second:
            return await self._strike(fault)
        first, _ = await asyncio.gather(self._strike(fault), self._kill_second(fault))
        return first

    async def _kill_second(self, fault: Fault) -> None:
        await asyncio.sleep(fault.second_delay_s)
        if fault.cell.kind == LINE:
            await self._kill_at_a_line(fault.second, fault.num_lines, False)
        elif (pid := self._view.pid(fault.second)) is not None:
            send_signal(pid, signal.SIGKILL)
            await until(lambda: is_gone(pid), self._limits.end_s)

    async def _strike(self, fault: Fault) -> str:
        cell = fault.cell
        if cell.kind == "restart":
            problem = await self._command("restart", cell.target)
            return "" if fault.second else problem  # with a second fault it may be refused
        if cell.kind in ("scale", "layout"):
            return await self._change(fault)
        if cell.kind == "enospc":
            return await self._fill(fault)
        if cell.kind in ("lost", "late"):
            return await self._disturb_bus(fault)
        if cell.kind == LINE:
            return await self._kill_at_a_line(cell.target, fault.num_lines, fault.is_at_start)
        pid = self._view.pid(cell.target)
        if pid is None:
            return ""  # it is dead already, from the fault before: the next generation is being waited for anyway
        if cell.kind == "oom":
            return await self._starve(pid, fault)
        if cell.kind == "pause":
            send_signal(pid, signal.SIGSTOP)
            await asyncio.sleep(fault.length_s)
            send_signal(pid, signal.SIGCONT)
            return ""
        send_signal(pid, _SIGNALS[cell.kind])
        limit_s = self._limits.end_s
        if cell.kind == "stop":
            is_zygote = cell.target == "zygote"
            limit_s = self._limits.zygote_hang_s if is_zygote else self._limits.hang_s + self._view.step_left_s(pid)
        if stage_of(cell.target) == "gateway" and cell.kind == "term":
            limit_s += self._drain_s
        if not await until(lambda: is_gone(pid), limit_s):
            send_signal(pid, signal.SIGKILL)
            await until(lambda: is_gone(pid), self._limits.end_s)
            what = "its watchdog did not find it" if cell.kind == "stop" else "it did not end"
            return f"{cell.target} (pid {pid}) was sent {cell.kind}, and {what} within {limit_s:g} s"
        return ""

    async def _kill_at_a_line(self, name: str, num_lines: int, is_at_start: bool) -> str:
        """Let a process die at a line; one that comes to none in time, anywhere."""
        pid = self._view.pid(name)
        if pid is None:
            return ""
        self.lines.order(name, num_lines, is_at_start)
        try:
            if is_at_start:  # the next one
                send_signal(pid, signal.SIGKILL)
                await until(lambda: bool(self.lines.found(name)), _START_S)
                pid = next((pid for pid, kind in descendants(self._view.supervisor_pid).items() if kind == name), pid)
            else:
                send_signal(pid, LINE_SIGNAL)
                await until(lambda: bool(self.lines.found(name)) or is_gone(pid), _LINE_S)
            if not is_at_start or self.lines.found(name):  # and for one that may not kill itself
                send_signal(pid, signal.SIGKILL)
            if not await until(lambda: is_gone(pid), self._limits.end_s):
                return f"{name} (pid {pid}) was killed, and did not end within {self._limits.end_s:g} s"
        finally:
            self.died_at += filter(None, [self.lines.take_back(name)])
        return ""

    async def all_serve(self) -> str:
        """Wait until every actor serves and the zygote exists. Returns those that do not."""
        if await until(lambda: not self._view.serving().missing and self._view.pid("zygote") is not None, self._limits.back_s):
            return ""
        missing = ", ".join(sorted(self._view.serving().missing)) or "the zygote"
        return f"{missing} did not come back within {self._limits.back_s:g} s"

    async def _change(self, fault: Fault) -> str:
        """Have one more of the stage, or another layout, and then the first again. Beside a second fault both may be refused first."""
        if fault.layout:
            there: tuple[str, ...] = ("layout", "set", fault.layout)
            back: tuple[str, ...] = ("layout", "set", self._layout)
        else:
            stage = stage_of(fault.cell.target)
            count = sum(stage_of(actor) == stage for actor in self._view.actors)
            there, back = ("scale", f"{stage}={count + 1}"), ("scale", f"{stage}={count}")
        problem = await self._command(*there)
        await asyncio.sleep(fault.length_s)
        end_s = time.monotonic() + self._limits.back_s
        while refusal := await self._command(*back):
            problem = problem or refusal
            if time.monotonic() > end_s:
                return refusal
        return "" if fault.second else problem

    async def _disturb_bus(self, fault: Fault) -> str:
        self._faults.begin(fault.cell.target, seed=fault.seed + fault.index, lost=fault.lost, late=fault.late, max_delay_s=_MAX_DELAY_S)
        await asyncio.sleep(fault.length_s)
        self._faults.end()
        return ""

    async def _fill(self, fault: Fault) -> str:
        assert self._tmpfs is not None and fault.cell.target == EVERYBODY
        end_s = time.monotonic() + fault.length_s
        try:
            while time.monotonic() < end_s:  # what is freed meanwhile is taken too
                self._tmpfs.fill()
                await asyncio.sleep(0.02)
        finally:
            self._tmpfs.free()
        return ""

    async def _starve(self, pid: int, fault: Fault) -> str:
        """Allow the process no new mapping; it keeps its heap."""
        try:
            before = resource.prlimit(pid, resource.RLIMIT_AS)
            resource.prlimit(pid, resource.RLIMIT_AS, (_mapped_bytes(pid) + _OOM_SPARE_BYTES, before[1]))
        except (ProcessLookupError, FileNotFoundError):
            return ""
        await until(lambda: is_gone(pid), fault.length_s)
        try:
            resource.prlimit(pid, resource.RLIMIT_AS, before)
        except ProcessLookupError:
            pass
        return ""


async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll every few milliseconds. Returns False when the time is over."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def _mapped_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
