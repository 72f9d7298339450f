"""``mmrt up --reload``: edited code is picked up by the actors that import it, each by a hot restart. Runs in the supervisor.

Whatever does not come up, be it for a syntax error or an exception at import, leaves the old process serving; what was missed then is
made up for at the next edit.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ..errors import RunError
from ..stage_table import STAGES, stage_of
from .handover import drop_standby, restart
from .import_graph import closure
from .managed_actor import SupervisedActor
from .source_tree import SourceTree

PACKAGE = "mmrt"
POLL_S = 0.2
SETTLE_S = 0.1  # an edit is over when nothing has changed for so long
MAX_SETTLE_S = 2.0
RETRY_S = 0.2  # while somebody else restarts the actor
SUPERVISOR_ROOTS = (f"{PACKAGE}.runtime.supervisor.supervisor", f"{PACKAGE}.cli.up", f"{PACKAGE}.runtime.supervisor.zygote")


def actor_roots(names: Sequence[str], is_forked: bool, known: Iterable[str]) -> tuple[str, ...]:
    """The modules that a process of these actors imports by their names: those that it starts from, and families' towers.

    ``known`` are all modules of the package.
    """
    entry = () if is_forked else (f"{PACKAGE}.cli.main",)
    shared = ("host.shared_process",) if len(names) > 1 else ()
    stages = [STAGES[stage_of(name)] for name in names]
    modules = ("host.process", *shared, *(stage.module for stage in stages))
    families = f"{PACKAGE}.models.families."
    builds_towers = any(stage.builds_towers for stage in stages)
    towers = [name for name in known if builds_towers and name.startswith(families) and name.endswith(".towers")]
    return (*entry, *(f"{PACKAGE}.actors.{module}" for module in modules), *towers)


class Reloader:
    """Watches ``root``, the directory of the package, and restarts ``actors``; ``say`` tells people."""

    def __init__(self, root: Path, actors: Mapping[str, SupervisedActor], say: Callable[[str], None]) -> None:
        self._tree = SourceTree(root, PACKAGE)
        self._actors = actors
        self._say = say
        self._unread: set[str] = set()  # changed modules that nobody could load yet
        self._outdated: set[str] = set()  # actors whose process is older than the source
        self._failed: set[str] = set()  # those whose new process did not come up: worth another try at the next edit
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def watch(self) -> None:
        """Until cancelled."""
        for _ in self._tree.load():
            await asyncio.sleep(0)
        try:
            while True:
                await asyncio.sleep(POLL_S)
                if changed := self._tree.scan():
                    await self._settle(changed)
                    self.apply(changed)
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _settle(self, changed: set[str]) -> None:
        """Wait for the rest of the edit: an editor saves several files, each in several steps."""
        for _ in range(int(MAX_SETTLE_S / SETTLE_S)):
            await asyncio.sleep(SETTLE_S)
            more = self._tree.scan()
            if not more:
                return
            changed |= more

    def apply(self, changed: set[str]) -> None:
        """Restart whoever imports one of the changed modules, unless one of them does not compile."""
        self._unread |= changed
        for module in changed:
            self._tree.forget_bytecode(module)
        errors = self._tree.errors
        broken = sorted(module for module in self._unread if module in errors)
        if broken:
            for module in broken:
                self._say(f"reload: {self._tree.label(module)} does not compile: the old code keeps serving\n{errors[module]}")
            return
        imports = self._tree.imports
        names = ", ".join(sorted(self._tree.label(module) for module in self._unread))
        affected = {
            name
            for name, actor in self._actors.items()
            if self._unread & closure(actor_roots(actor.spec.roles, actor.spec.needs is not None, imports), imports)
        }
        if self._unread & closure(SUPERVISOR_ROOTS, imports):
            self._say(f"reload: the supervisor uses {names}, too, and keeps the old code until the next mmrt up")
        self._unread.clear()
        if again := self._failed - affected:
            self._say(f"reload: {', '.join(sorted(again))}: another try")
        if affected:
            self._say(f"reload: {names}: restarting {', '.join(name for name in self._actors if name in affected)}")
        self._outdated |= affected | self._failed
        self._failed.clear()
        self._outdated &= self._actors.keys()  # some may have left the run
        for name in self._outdated:
            if name not in self._tasks or self._tasks[name].done():
                self._tasks[name] = asyncio.create_task(self._renew(self._actors[name]))

    async def _renew(self, actor: SupervisedActor) -> None:
        """Restart until the process is as new as the source, or has failed, or is in a debugger's hands."""
        name = actor.name
        while name in self._outdated and not actor.stopping.is_set():
            self._outdated.discard(name)
            try:
                reply = await restart(actor)
            except RunError as error:
                if actor.debugger is not None:
                    drop_standby(actor)
                    self._say(f"reload: {error}, which keeps the code that it has loaded")
                    return
                self._outdated.add(name)
                await asyncio.sleep(RETRY_S)
                continue
            except OSError as error:
                self._say(f"reload: {name} cannot be started: {error.strerror}")
                self._failed.add(name)
                return
            self._say(f"reload: {reply.message}")
            if not reply.ok:
                self._failed.add(name)
