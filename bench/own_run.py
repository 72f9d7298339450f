"""A run of mmrt that a bench starts itself, through the command line as a user would, in a run directory and home of its own.

For the benches that measure whole runs. Whatever happens, the run is down at the end.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ..runtime.config.runtime_config import RuntimeConfig, to_data
from ..runtime.config.toml_text import toml_table
from ..runtime.errors import ConfigError
from ..runtime.stage_table import check_layout
from ..runtime.supervisor.run_report import RunReport
from ..shm.run_directory import RunDirectory
from .processes import descendants

_decode_report = msgspec.json.Decoder(RunReport).decode
_COMMAND_TIMEOUT_S = 600.0
_MAX_MESSAGE_CHARS = 2000


def layout_argument(text: str, devices: Sequence[str] = ()) -> str:
    """Check a layout on the command line, for argparse. ``devices``: of the run."""
    try:
        check_layout(text, devices)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


class OwnRunError(Exception):
    """A command failed; the message holds what it printed."""


class OwnRun:
    """``mmrt`` commands on one run directory. ``home`` holds its configuration and logs; ``extra`` is for its environment.

    ``config``: of the run that ``up`` has started; None once it is down. ``python``: of the environment whose mmrt is run.
    """

    def __init__(self, home: Path, run: Path, extra: Mapping[str, str] | None = None) -> None:
        self.home = home
        self.run = run
        self.python = sys.executable
        self.config: RuntimeConfig | None = None
        state = home / "state"
        state.mkdir(exist_ok=True)
        own = {"MMRT_RUN_DIR": str(run), "XDG_STATE_HOME": str(state), **(extra or {})}
        inherited = {name: value for name, value in os.environ.items() if name not in ("MMRT_CONFIG", "NOTIFY_SOCKET")}
        self._environment = {**inherited, **own}

    def command(self, *arguments: str) -> tuple[float, str]:
        """Run ``mmrt ARGUMENTS``: (seconds it took, its standard output). Raises: OwnRunError."""
        line = f"mmrt {' '.join(arguments)}"
        with tempfile.TemporaryFile(dir=self.home) as output, tempfile.TemporaryFile(dir=self.home) as errors:
            # Files, not pipes: a daemon that kept a pipe open would keep us waiting.
            start_s = time.perf_counter()
            try:
                done = subprocess.run(
                    [self.python, "-P", "-m", "mmrt.cli.main", *arguments],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    timeout=_COMMAND_TIMEOUT_S,
                )
            except subprocess.TimeoutExpired:
                raise OwnRunError(f"{line} took more than {_COMMAND_TIMEOUT_S:g} s") from None
            elapsed_s = time.perf_counter() - start_s
            output.seek(0)
            errors.seek(0)
            printed, complained = output.read().decode(errors="replace"), errors.read().decode(errors="replace")
        if done.returncode != 0:
            text = (printed + complained).strip()[-_MAX_MESSAGE_CHARS:]
            raise OwnRunError(f"{line} ended with status {done.returncode}: {text}")
        return elapsed_s, printed

    def up(self, config: RuntimeConfig) -> float:
        """Start the run with this configuration; seconds until it is ready. Raises: OwnRunError."""
        file = self.home / "config.toml"
        changed = _changed(to_data(config), to_data(RuntimeConfig()))  # another version may not have the other keys
        file.write_text("\n".join(toml_table(changed, "")).lstrip("\n") + "\n")
        ready_s = self.command("up", "--detach", "--config", str(file))[0]
        self.config = config
        return ready_s

    def down(self) -> float:
        """End it at once; seconds. Raises: OwnRunError if anything of it is left."""
        self.config = None
        return self.command("down", "--drain", "0")[0]

    def report(self) -> RunReport:
        """The output of ``mmrt status --json``. Raises: OwnRunError."""
        printed = self.command("status", "--json")[1]
        try:
            return _decode_report(printed)
        except msgspec.DecodeError as error:
            raise OwnRunError(f"mmrt status --json: {error}") from None


def _changed(data: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The keys, in tables too, whose values are other than usual."""
    return {
        key: _changed(value, usual[key]) if isinstance(value, dict) and isinstance(usual.get(key), dict) else value
        for key, value in data.items()
        if value != usual.get(key)
    }


@contextmanager
def exit_at_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process as an exception within, unless it does something else already: what was begun is then ended."""
    before = signal.getsignal(signal.SIGTERM)
    if before == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def own_run(name: str = "", *, is_new: bool = False) -> Iterator[OwnRun]:
    """A place for runs; down and removed at the end, also at SIGTERM. ``name`` tells those of one process apart. ``is_new``: its first
    run finds no kernels, as after an install.

    Raises: OwnRunError if a run does not go down.
    """
    home = Path(tempfile.mkdtemp(prefix="mmrt-bench-"))
    path = RunDirectory.default_path().parent / f"bench-{os.getpid()}{'-' if name else ''}{name}"
    run = OwnRun(home, path, {"XDG_CACHE_HOME": str(home / "cache")} if is_new else None)
    try:
        with exit_at_sigterm():
            yield run
    finally:
        if RunDirectory.is_alive(path):
            run.down()
        shutil.rmtree(home, ignore_errors=True)


def processes_of(report: RunReport) -> dict[int, str]:
    """pid -> name of every process of a run: actors, supervisor, and what else descends from it."""
    if report.supervisor_pid is None:
        raise OwnRunError("the run has no supervisor")
    return descendants(report.supervisor_pid) | {actor.pid: actor.name for actor in report.actors if actor.pid}


def timed(action: Callable[[], object]) -> float:
    """Seconds that it took."""
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s
