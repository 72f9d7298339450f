"""The life of an actor's process, from its first import to its exit status.

``run_actor(NAME)`` is what ``mmrt actor NAME`` and the zygote call. Where a layout lets actors share a process, each is in a thread of
its own (``shared_process``).
"""

import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ...models.errors import CheckpointError
from ...runtime.bus.faults import exit_when_told
from ...runtime.bus.line_faults import die_at_lines
from ...runtime.environment import Environment, read_environment
from ...runtime.errors import ConfigError, RunError, UserError
from ...runtime.process.descriptor_store import DescriptorStore
from ...runtime.process.json_log import log_as_json
from ...runtime.process.lifeline import Lifeline
from ...runtime.process.processors import keep_to
from ...runtime.process.run import join_run
from ...runtime.process.server_key import read_key
from ...runtime.stage_table import STAGES, InstanceId, parse_instance, stage_of
from ...shm.errors import ShmError
from .actor import Actor, Ending, name_thread

if TYPE_CHECKING:  # pdb takes its time to import, and only terminals need it
    from ...runtime.observe.debugger import DebugSession

log = logging.getLogger(__name__)

_THREADS = threading.Lock()
_ALONE = "mmrt debug would stop there in a process that is not shared (actors.layout)"


def run_actor(name: str, session: "DebugSession | None" = None) -> int:
    """Run an actor process from start to end, in a terminal if there is a ``session``.

    Returns its exit status: 0 only when it was told to end.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True)
    faulthandler.enable(all_threads=False)  # the source of a crash; of several actors, which one
    os.umask(0o077)
    name_thread(name)
    if session is None and not sys.stdin.isatty():
        sys.breakpointhook = _passing_by(f"mmrt debug {name} stops there")
    environment = read_environment()
    exit_when_told(environment)
    die_at_lines(name, environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to order
    lifeline = Lifeline(environment.lifeline_fd)
    try:
        identity = parse_instance(name)
        actor = Actor(
            identity,
            join_run(name, environment),
            lifeline,
            environment.notify_socket,
            environment.listen_fds,
            environment.keeper_fd,
            environment.answers_fd,
            _store_of(environment) if STAGES[stage_of(identity)].listens else None,
            lambda info: read_key(info, environment),
        )
        together = actor.config.processes.get(identity)
        if identity not in actor.config.instances:
            raise ConfigError(f"no actor {name!r} in this run; there are {', '.join(actor.config.instances)}")
        if together is None:
            layout, process = actor.config.actors.layout, actor.config.process_of(name)
            raise ConfigError(f"{name} lives in the process of {process}: actors.layout = {layout!r}")
        if session is not None and len(together) > 1:
            raise ConfigError(
                f"{name} cannot be debugged in a process that is {', '.join(together)}: actors.layout can give it its own"
            )
        keep_to(actor.config, identity)
        others = [Actor(other, join_run(other, environment), Lifeline(lifeline.fd), None) for other in together if other != name]
    except (UserError, CheckpointError, ShmError) as error:
        return _complain(error)
    if actor.config.logging.is_json and session is None:
        log_as_json(name, Generations([*others, actor]))
    if others:
        sys.breakpointhook = _passing_by(_ALONE)
        for one in together:
            _entry(one)
        # By its name, like an actor's own module: who is alone in a process does not depend on it (runtime/supervisor/reload.py).
        run_together = importlib.import_module(f"{__package__}.shared_process").run_together
        status: int = run_together([*others, actor], Lifeline(lifeline.fd), _live)
        return status
    actor.catch_signals()
    return _live(actor, session)


def _store_of(environment: Environment) -> DescriptorStore | None:
    """Return systemd's store of this process's descriptors, None with a supervisor or where systemd has none."""
    if environment.lifeline_fd is not None or not environment.has_store or environment.notify_socket is None:
        return None
    return DescriptorStore(environment.notify_socket, environment.stored_fds)


class Generations(Mapping[str, int]):
    """The generations of a process's actors, as they are now: a standby may get another one."""

    def __init__(self, actors: Sequence[Actor]) -> None:
        self._actors = {actor.name: actor for actor in actors}

    def __getitem__(self, name: str) -> int:
        return self._actors[InstanceId(name)].generation

    def __iter__(self) -> Iterator[str]:
        return iter(self._actors)

    def __len__(self) -> int:
        return len(self._actors)


def _live(actor: Actor, session: "DebugSession | None" = None) -> int:
    """Run from the actor's first import to its last word. Returns the exit status."""
    name = actor.name
    if STAGES[stage_of(name)].imports_torch:
        import torch

        with _THREADS:  # torch has one number for the process; a thread keeps what it finds when it first asks
            torch.set_num_threads(actor.config.actor(name).threads)
            torch.get_num_threads()
        torch.set_grad_enabled(False)
    main = _entry(name)
    status = 0
    try:
        if session is None:
            main(actor)
        else:
            actor.session = session
            session.run(main, actor)
        status = 0 if actor.ending else 1
    except Ending:
        pass
    except (UserError, CheckpointError, ShmError) as error:
        status = _complain(error)
    except Exception as error:
        log.exception("%s failed", name)
        actor.failure = error
        status = 1
    finally:
        actor.close()
    return status


def _entry(name: InstanceId) -> Callable[[Actor], None]:
    """Return ``main`` of an actor's module."""
    main: Callable[[Actor], None] = importlib.import_module(f"...{STAGES[stage_of(name)].module}", __name__).main
    return main


def _passing_by(advice: str) -> Callable[..., None]:
    """Stand in for ``breakpoint()`` without a terminal: say once for each place that it was passed."""
    places: set[tuple[str, int]] = set()

    def hook(*_: object, **__: object) -> None:
        frame = sys._getframe(1)
        place = frame.f_code.co_filename, frame.f_lineno
        if place not in places:
            places.add(place)
            log.warning("ignored breakpoint() at %s:%d: %s", *place, advice)

    return hook


def _complain(error: Exception) -> int:
    """Log a failure explained by its message. Returns the exit status: 2, never tried again, where a new start cannot help."""
    log.error("%s", error)
    return 1 if isinstance(error, RunError | ShmError) else 2
