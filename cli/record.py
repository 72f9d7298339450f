"""``mmrt record``: what the requests of a live run ask for, as a trace that benches, planner and simulator read."""

import sys
import time
from collections.abc import Iterable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

import msgspec
import typer

from ..models.config import load_model_config
from ..runtime.errors import RunError, UserError
from ..runtime.observe.flight import Kind
from ..runtime.observe.live import SETTLE_NS, RecordFollower
from ..runtime.observe.traffic import WANTED, Traffic, TrafficRow
from ..runtime.process.run import read_run_info
from ..runtime.stage_table import stage_of
from ..shm.errors import MissingError
from ..shm.run_directory import RunDirectory
from .options import RunName, model_run_path

_LOOK_S = 0.25
_WRITERS = ("gateway", "controller")


def register(app: typer.Typer) -> None:
    @app.command()
    def record(
        out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write it; - is standard output.")] = Path(
            "mmrt-trace.jsonl"
        ),
        seconds: Annotated[
            float | None, typer.Option("--for", metavar="SECONDS", help="End after so long; default: at Ctrl-C.")
        ] = None,
        run: RunName = None,
    ) -> None:
        """Record when requests come and what they ask for: no contents.

        A line for each: arrival, lengths, media, and which prompts and media were alike. mmrt bench serve --trace sends the like again.
        """
        if seconds is not None and not 0 < seconds <= 1e9:
            raise typer.BadParameter(f"{seconds:g} is not a number of seconds above 0", param_hint="--for")
        path = model_run_path(run)
        try:
            with RunDirectory.attach(path, timeout_s=0.5) as directory:
                # It belongs to the run no longer than it takes to open its recorders: nothing waits for whoever only looks.
                writers = [actor for actor in read_run_info(directory).config.instances if stage_of(actor) in _WRITERS]
                follower = RecordFollower(directory, writers, [kind for kind in Kind if kind not in WANTED], num_first=1)
                follower.take()
                traffic = _traffic_of(directory)
        except MissingError:
            raise RunError(f"no run is up in {path} (mmrt up)") from None
        with closing(follower):
            said = _to_file(out, _Recording(path, follower, traffic, seconds))
        print(f"{out}: {said}", file=sys.stderr)


def _traffic_of(run: RunDirectory) -> Traffic:
    info = read_run_info(run)
    model = load_model_config(info.model_path)
    vision, audio = model.vision_rules, model.audio_rules
    return Traffic(time.monotonic_ns(), vision.patch_size if vision else 0, audio.sample_rate / audio.hop if audio else 0.0)


class _Recording(NamedTuple):
    path: Path
    follower: RecordFollower
    traffic: Traffic
    seconds: float | None


def _to_file(out: Path, recording: _Recording) -> str:
    is_standard = str(out) == "-"
    try:
        with nullcontext(sys.stdout.buffer) if is_standard else out.open("wb") as file:
            until = "Ctrl-C" if recording.seconds is None else f"{recording.seconds:g} s are over"
            print(f"{out}: recording until {until}", file=sys.stderr)
            return _record(recording, file)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None


def _record(recording: _Recording, file: BinaryIO) -> str:
    """Write a line for each request, until time, run or user ends it. Return what was written, in words."""
    path, follower, traffic, seconds = recording
    began_s, num_written = time.monotonic(), 0

    def look() -> int:
        num_gaps = follower.num_gaps
        for record in follower.take():
            traffic.add(record)
        written = _write(file, traffic.rows(time.monotonic_ns()))
        if follower.num_gaps > num_gaps:
            written += _write(file, traffic.rest())
            traffic.forget()
        return written

    try:
        while (seconds is None or time.monotonic() - began_s < seconds) and RunDirectory.is_alive(path):
            time.sleep(_LOOK_S)
            num_written += look()
    except KeyboardInterrupt:
        pass
    time.sleep(2 * SETTLE_NS / 1e9)  # until what was written last can be read
    num_written += look() + _write(file, traffic.rest())
    said = [f"{num_written} requests"]
    if traffic.num_unread:
        said.append(f"{traffic.num_unread} were over before their prompt was read")
    if traffic.num_open:
        said.append(f"{traffic.num_open} are not over yet")
    if follower.num_gaps:
        said.append("some are missing: they came faster than they could be read")
    return "; ".join(said)


def _write(file: BinaryIO, rows: Iterable[TrafficRow]) -> int:
    lines = [msgspec.json.encode(row) + b"\n" for row in rows]
    file.writelines(lines)
    file.flush()
    return len(lines)
