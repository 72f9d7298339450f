"""``mmrt bench media --corpus``: sampled decoding of every video of a corpus beside PyAV and torchcodec, with a check of the frames.

All ways take turns in this process, file by file, each with all processors, from opening the file to the last frame scaled to
224 x 224. The reference is plain PyAV, which decodes the whole file in sequence on one thread: the number of frames, and every wanted
frame bit by bit. Called by ``lab/mmrt_lab/media/command``.
"""

import hashlib
import importlib
import statistics
import time
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
from rich.console import Console

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import Tell, progress
from mmrt.bench.render import show_table
from mmrt.media.decoding import DecodingPool, analyse_bitstream
from mmrt.media.engines import Output

from .corpus import Recipe, make_corpus, recipes
from .methods import METHODS, sample

PEERS = ("pyav", "torchcodec")
MAX_WANTED = 64  # frames of one video, at one a second
_SHOWN = 20
_TENTHS = {"P10": 0, "P50": 4, "P90": 8}


class FileResult(msgspec.Struct, frozen=True, kw_only=True):
    """One video. ``seconds``: of each way that could decode it, the median; ``failures``: of the others, why. ``num_frames``: of mmrt,
    and ``num_sequential`` of plain PyAV; ``num_different``: wanted frames that are others than these."""

    name: str
    codec: str
    num_wanted: int
    num_frames: int
    num_sequential: int
    num_different: int
    seconds: dict[str, float]
    failures: dict[str, str]

    @property
    def is_right(self) -> bool:
        return "mmrt" not in self.failures and self.num_different == 0 and self.num_frames == self.num_sequential


class CorpusBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    seed: int
    rounds: int
    absent: dict[str, str]  # peer -> why it cannot be compared with
    files: list[FileResult]

    @property
    def is_right(self) -> bool:
        return all(file.is_right for file in self.files)


def measure_corpus(console: Console, directory: Path, seed: int, num_files: int, longest_s: float, rounds: int) -> CorpusBench:
    """Make the missing files of the corpus, and decode it. Raises: OSError."""
    wanted = recipes(seed, num_files, longest_s)
    absent = {peer: why for peer in PEERS if (why := why_absent(peer))}
    ways = ["mmrt", *(peer for peer in PEERS if peer not in absent)]
    with progress(console) as tell:
        paths = make_corpus(directory, wanted, tell)
        _measure(wanted[0], paths[0], ways, 1)  # imports, and what else comes first
        files = [_told(tell, recipe, path, ways, rounds, num_files) for recipe, path in zip(wanted, paths, strict=True)]
    return CorpusBench(environment=read_environment(), seed=seed, rounds=rounds, absent=absent, files=files)


def _told(tell: Tell, recipe: Recipe, path: Path, ways: list[str], rounds: int, num_files: int) -> FileResult:
    tell(f"decoding {recipe.number + 1} of {num_files}: {path.name}")
    return _measure(recipe, path, ways, rounds)


def why_absent(peer: str) -> str:
    """The reason why the peer cannot be tried, "" if it can: torchcodec may be installed without its libraries."""
    try:
        importlib.import_module({"pyav": "av", "torchcodec": "torchcodec.decoders"}[peer])
    except ModuleNotFoundError:
        return "is not installed"
    except Exception as error:  # a foreign library's failure to load
        return f"cannot be imported: {next(iter(str(error).splitlines()), type(error).__name__)}"
    return ""


def _measure(recipe: Recipe, path: Path, ways: list[str], rounds: int) -> FileResult:
    num_wanted = max(1, min(MAX_WANTED, round(recipe.seconds)))
    times: dict[str, list[float]] = {way: [] for way in ways}
    failures: dict[str, str] = {}
    for way in ways * rounds:
        if way in failures:
            continue
        start_s = time.perf_counter()
        try:
            METHODS[way]([path], num_wanted)
        except Exception as error:  # any error of a library is a result
            failures[way] = f"{type(error).__name__}: {error}"
        times[way].append(time.perf_counter() - start_s)
    right = _sequential(path)
    num_frames, taken = (0, {}) if "mmrt" in failures else _sampled(path, num_wanted)
    return FileResult(
        name=path.name,
        codec=recipe.codec,
        num_wanted=num_wanted,
        num_frames=num_frames,
        num_sequential=len(right),
        num_different=sum(index >= len(right) or digest != right[index] for index, digest in taken.items()),
        seconds={way: statistics.median(of) for way, of in times.items() if way not in failures},
        failures=failures,
    )


def _digest(frame: Any) -> bytes:
    return hashlib.blake2b(frame.to_ndarray().tobytes(), digest_size=16).digest()


def _sequential(path: Path) -> list[bytes]:
    """A digest of every frame that plain PyAV decodes, as far as it comes."""
    digests: list[bytes] = []
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        try:
            digests.extend(map(_digest, container.decode(stream)))
        except av.error.InvalidDataError:
            pass
    return digests


def _sampled(path: Path, num_wanted: int) -> tuple[int, dict[int, bytes]]:
    """The number of frames that mmrt finds, and a digest of each wanted one by its number."""

    def convert(frame: Any, _: Any) -> Output:
        return np.frombuffer(_digest(frame), np.uint8)

    with DecodingPool() as pool, path.open("rb", buffering=0) as reader:
        bitstream = analyse_bitstream(reader)
        wanted = sample(bitstream.info.num_frames, num_wanted)
        request = pool.add_decoding_request(bitstream, wanted, convert)
        digests = []
        while (output := pool.get_decoding_output(request)) is not None:
            digests.append(output.tobytes())
        return bitstream.info.num_frames, dict(zip(wanted, digests, strict=True))


def show_corpus(console: Console, bench: CorpusBench) -> None:
    """Speed by codec, then what is wrong."""
    for peer, why in bench.absent.items():
        console.print(f"{peer} {why}; it is not compared with", style="yellow", highlight=False)
    rows = [
        row for peer in PEERS for codec in ("", *dict.fromkeys(file.codec for file in bench.files)) for row in _rows(bench, peer, codec)
    ]
    title = f"{len(bench.files)} videos of seed {bench.seed}, {sum(file.num_wanted for file in bench.files)} frames sampled"
    show_table(console, title, ["times as fast as", "codec", "files", *_TENTHS], rows)
    wrong = [file for file in bench.files if not file.is_right]
    num_different = sum(file.num_different for file in bench.files)
    num_counts = sum(file.num_frames != file.num_sequential for file in wrong)
    console.print(
        f"{num_different} frames differ from those of PyAV in sequence; the number of frames does in {num_counts} files",
        style="red" if wrong else "green",
        highlight=False,
        soft_wrap=True,
    )
    for file in wrong[:_SHOWN]:
        counts = f"{file.num_different} of {file.num_wanted} differ, {file.num_frames} frames of {file.num_sequential}"
        console.print(f"{file.name}: {file.failures.get('mmrt', counts)}", highlight=False, soft_wrap=True)
    for peer in PEERS:
        if num_failed := sum(peer in file.failures for file in bench.files):
            console.print(f"{peer} failed on {num_failed} files", style="yellow", highlight=False)


def _rows(bench: CorpusBench, peer: str, codec: str) -> list[list[str]]:
    """Row of deciles of mmrt's speed relative to the peer on files of the codec, "" for all; no row without a comparison."""
    files = [file for file in bench.files if codec in ("", file.codec) and {"mmrt", peer} <= file.seconds.keys()]
    ratios = [file.seconds[peer] / file.seconds["mmrt"] for file in files]
    if not ratios:
        return []
    tenths = statistics.quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios * 9
    return [[peer, codec or "all", str(len(ratios)), *(f"{tenths[index]:.2f}" for index in _TENTHS.values())]]
