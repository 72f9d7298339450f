"""``mmrt chaos``: prepares a private file system that can be filled and removed, runs the storm in it, and shows its findings.

Runs in its own process, without threads until it enters the file system: it leaves the machine's mount namespace.
"""

import asyncio
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mmrt.bench.output import open_console, write_json
from mmrt.bench.own_run import OwnRun, OwnRunError
from mmrt.runtime.bus.faults import FaultFile
from mmrt.shm.run_directory import RunDirectory

from .options import ChaosOptions, parse_options
from .private_tmpfs import PrivateTmpfs, enter

_TMPFS_BYTES = 2 << 30  # only what is used of it exists


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    options = parse_options(argv)
    if importlib.util.find_spec("openai") is None:
        print(
            f"mmrt chaos: OpenAI's client makes the load, and is not installed: {sys.executable} -m pip install openai", file=sys.stderr
        )
        return 1
    home = Path(tempfile.mkdtemp(prefix="mmrt-chaos-"))
    has_failed = True
    try:
        has_failed = _run(options, home)
    except OwnRunError as error:
        print(f"mmrt chaos: {error}", file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"mmrt chaos: {error}", file=sys.stderr)
    finally:
        _clean_up(home, options.out if has_failed else None, has_failed)
    return 1 if has_failed else 0


def _run(options: ChaosOptions, home: Path) -> bool:
    """Run the storm in its file system. Returns True if a promise was broken."""
    shm = home / "shm"
    shm.mkdir(mode=0o700)
    note = ""
    tmpfs: PrivateTmpfs | None = None
    path = shm / "run"
    try:
        tmpfs = enter(shm, _TMPFS_BYTES)
    except OSError as error:
        note = f"no ENOSPC in this storm, since this system lets us have no file system of our own: {error}"
        path = RunDirectory.default_path().parent / f"chaos-{home.name.rpartition('-')[2]}"
    # numpy and the client start threads, after which no namespace can be entered
    from .report import show
    from .storm import Storm

    console = open_console(options.json)
    fault_file = FaultFile(home / "faults")
    run = OwnRun(home, path, {"MMRT_FAULTS": str(fault_file.path)})
    try:
        model = _model(options, home)
        storm = Storm(
            options, run, model, fault_file, tmpfs, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
        )
        report = asyncio.run(storm.run())
    finally:
        if RunDirectory.is_alive(path):
            run.down()
        fault_file.close()
        if tmpfs is not None:
            tmpfs.close()
    if note:
        report.notes.append(note)
    show(console, report, len(options.storm_cells) + len(options.drain_cells))
    write_json(options.json, report)
    return not report.is_clean


def _model(options: ChaosOptions, home: Path) -> Path:
    """The checkpoint to storm: the requested one, or a tiny one. Raises: ValueError."""
    if options.model:
        model = Path(options.model).absolute()
        if not (model / "config.json").is_file():
            raise ValueError(f"--model {options.model} is no checkpoint: it has no config.json")
        return model
    from mmrt.models.make.checkpoint import make_checkpoint

    make_checkpoint("tiny", home / "tiny", "qwen2_5_omni")
    return home / "tiny"


def _clean_up(home: Path, out: Path | None, has_failed: bool) -> None:
    """Remove the storm's directory, but keep the logs of a failed storm."""
    logs = home / "state"
    if has_failed and any(logs.rglob("*.log")):
        if out is None:
            for path in home.iterdir():
                if path != logs:
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
            print(f"the logs are in {logs}", file=sys.stderr)
            return
        shutil.copytree(logs, out, dirs_exist_ok=True)
        print(f"the logs are in {out}", file=sys.stderr)
    shutil.rmtree(home, ignore_errors=True)
