"""One row for each family beside llama.cpp's server: a picture's or clip's TTFT, a text's, and one stream's tokens per second.

``python -m mmrt_lab.peers.rows LLAMA_CPP DIR [FAMILY ...]``. LLAMA_CPP: its source, with ``build/bin/llama-server``. For each family a
checkpoint with random weights is made in DIR and converted, unless it is there already; both servers are started on it and measured by
``mmrt bench sides``, unless DIR has its row; once they are, checkpoint and files are removed. At the end the table of all rows is
printed and written to DIR/table.md. A family that fails has the reason in its row, and the next one begins. mmrt serves without guesses
(``scheduling.prompt_lookup``): in random texts they come true for some models. llama.cpp's server has none by default.
"""

import argparse
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from mmrt.bench.own_run import OwnRun, OwnRunError, exit_at_sigterm, own_run
from mmrt.bench.serve.errors import BenchError
from mmrt.models.make.checkpoint import write_checkpoint
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ModelSection, SchedulingSection, ServerSection

from ..micro.sides import SidesBench, loads_of
from ..micro.sides import measure as measure_sides
from .convert import SCRATCH
from .llama_server import llama_server
from .rows_table import TEXT_TOKENS, Row, table
from .shapes import SHAPES, Shape, recipe_of, text_of

_CONTEXT = 8192  # tokens of llama.cpp's KV cache, which is as long as the model's own limit by default
_SECONDS = 600  # for a conversion
_REQUEST_S = 60  # of a request at most
_PROMPT = "the house by the river was old and the people in it"
_GREEDY_TOKENS = 8
_LOADS = {"image": "picture", "audio": "clip"}


class Place(NamedTuple):
    """A family's files. ``refused``: what the converter said of what it did not convert; it is there once the rest is ready."""

    folder: Path
    checkpoint: Path
    model: Path
    mmproj: Path
    refused: Path
    row: Path

    def clear(self) -> None:
        """Remove what can be made again, and is large."""
        shutil.rmtree(self.checkpoint)
        for file in (self.model, self.mmproj, self.refused):
            file.unlink(missing_ok=True)


def place_of(folder: Path) -> Place:
    """In the directory of one family."""
    names = ("checkpoint", "model.gguf", "mmproj.gguf", "refused.txt", "row.json")
    return Place(folder, *(folder / name for name in names))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m mmrt_lab.peers.rows", description="One row of each family beside llama.cpp.")
    add = parser.add_argument
    add("source", type=Path, metavar="LLAMA_CPP", help="its source, with build/bin/llama-server")
    add("folder", type=Path, metavar="DIR", help="for checkpoints, converted files and rows")
    add("families", nargs="*", metavar="FAMILY", help=f"default: all of {', '.join(SHAPES)}")
    add("--prepare", action="store_true", help="make and convert, measure nothing")
    add("--again", action="store_true", help="measure what has a row already")
    add("--keep", action="store_true", help="keep a family's checkpoint and files when it is measured, one to four GB")
    add("--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="of llama.cpp (%(default)s)")
    options = parser.parse_intermixed_args(argv)
    if unknown := set(options.families) - set(SHAPES):
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    with exit_at_sigterm():
        _make_rows(options)
    return 0


def _make_rows(options: argparse.Namespace) -> None:
    for family in options.families or SHAPES:
        place = place_of(options.folder / family)
        if place.row.exists() and not options.again and not options.prepare:
            continue
        print(f"{family}: {text_of(SHAPES[family])}", flush=True)
        prepare(family, SHAPES[family], options.source, place)
        if not options.prepare:
            row = row_of(family, SHAPES[family], options.source, place, options.threads)
            place.row.write_bytes(msgspec.json.format(msgspec.json.encode(row)))
            print(table([row]), flush=True)
            if row.values and not options.keep:
                place.clear()
    if not options.prepare:
        found = [place_of(options.folder / family).row for family in SHAPES]
        text = table([msgspec.json.decode(file.read_bytes(), type=Row) for file in found if file.exists()])
        (options.folder / "table.md").write_text(text)
        print(text)


def prepare(family: str, shape: Shape, source: Path, place: Place) -> None:
    """Make and convert what is not there yet. Of a model that llama.cpp does not take nothing is kept but the reason."""
    if place.refused.exists():
        return
    place.folder.mkdir(parents=True, exist_ok=True)
    for file in (place.model, place.mmproj):
        file.unlink(missing_ok=True)  # what a run that was ended has left of it
    if not place.checkpoint.exists():
        write_checkpoint(recipe_of(family, shape), place.checkpoint)
    command = [sys.executable, "-m", "mmrt_lab.peers.convert", str(source), str(place.checkpoint), str(place.folder)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_SECONDS, check=False)
        refused = "" if done.returncode == 0 else complaint(done.stdout.decode(errors="replace"))
    except subprocess.TimeoutExpired:
        refused = f"it took more than {_SECONDS} s"
        place.model.unlink(missing_ok=True)  # which may be a part of the file
    finally:
        for scratch in place.folder.glob(f"{SCRATCH}*"):  # of a converter that was killed
            shutil.rmtree(scratch)
    if refused:
        place.mmproj.unlink(missing_ok=True)
    if refused and not place.model.exists():
        shutil.rmtree(place.checkpoint)
    place.refused.write_text(refused)


def complaint(output: str) -> str:
    """Return the last line that a program wrote before it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR:hf-to-gguf:") if lines else "it said nothing"


def row_of(family: str, shape: Shape, source: Path, place: Place, num_threads: int) -> Row:
    """Both sides, measured; or the reason why not."""
    reasons = [f"the converter: {refused}"] if (refused := place.refused.read_text()) else []
    if not place.model.exists():
        return Row(family=family, shape=text_of(shape), reasons=reasons)
    try:
        same, bench = _measure(shape, source, place, num_threads)
    except (BenchError, OwnRunError, OSError, http.client.HTTPException, ValueError) as error:
        return Row(family=family, shape=text_of(shape), reasons=[*reasons, str(error).replace(f"{place.folder}/", "")])
    medians = {
        figure: tuple(statistics.median(sides[side]) if sides[side] else None for side in ("mmrt", "llama"))
        for figure, sides in bench.values.items()
    }
    reasons += [f"{what}: {complaint(why)}" for what, why in bench.failures.items()]
    values = msgspec.convert(medians, dict[str, tuple[float | None, float | None]])
    return Row(family=family, shape=text_of(shape), values=values, same=same, reasons=reasons, load=max(bench.loads))


def _measure(shape: Shape, source: Path, place: Place, num_threads: int) -> tuple[str, SidesBench]:
    config = RuntimeConfig(
        model=ModelSection(path=str(place.checkpoint.resolve())),
        server=ServerSection(port=0),
        scheduling=SchedulingSection(prompt_lookup=False),
    )
    threads = ["-t", str(num_threads), "-tb", str(num_threads), "-c", str(_CONTEXT)]
    program, mmproj = source / "build" / "bin" / "llama-server", place.mmproj if place.mmproj.exists() else None
    loads = loads_of(["one", *(_LOADS[medium] for medium in shape.media)], [TEXT_TOKENS], 0.0)
    with own_run() as run, tempfile.TemporaryDirectory(prefix="mmrt-rows-") as home:
        run.up(config)
        with llama_server(program, place.model, mmproj, threads, place.folder / "llama.log") as peer:
            urls = {"mmrt": run.report().endpoint, "llama": peer}
            same = compared(*(greedy(url) for url in urls.values()))
            client = OwnRun(Path(home), Path(home) / "run")
            more = ["--new-connections", "--timeout", str(_REQUEST_S)]
            return same, measure_sides(client, urls, loads, more, 1, lambda words: None)


def greedy(url: str) -> str:
    """The most likely answer to a prompt of text. Raises: BenchError, OSError, HTTPException; ValueError for what is no JSON."""
    body = {"prompt": _PROMPT, "max_tokens": _GREEDY_TOKENS, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_REQUEST_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise BenchError(f"{url} answered {answer.status}: {data[:200].decode(errors='replace')}")
    return str(json.loads(data)["choices"][0]["text"])


def compared(own: str, peer: str) -> str:
    """Compare two answers: "yes" if they are equal, else how many characters their beginnings share."""
    if own == peer:
        return "yes"
    common = os.path.commonprefix([own, peer])
    return f"{len(common)} of {max(len(own), len(peer))} characters"


if __name__ == "__main__":
    raise SystemExit(main())
