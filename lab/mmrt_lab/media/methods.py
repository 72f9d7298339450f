"""One way to decode one file, timed in a process of its own: what ``mmrt bench media`` compares.

usage: python -m mmrt_lab.media.methods METHOD NUM_FRAMES FILE …; NUM_FRAMES 0 decodes all of them. Prints a ``Trial`` as JSON.
Every library gets all processors that this process may use. Sampled frames are scaled to 224 x 224 RGB by each library's own means.
"""

import importlib
import importlib.util
import io
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mmrt.media.decoding import DecodingPool, analyse_bitstream
from mmrt.media.engines import Output

SIDE = 224

Method = Callable[[list[Path], int], int]
"""(files, frames to take, 0 for all) -> frames that came out."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """``peak_bytes`` is how much the resident memory grew at most while it ran."""

    wall_s: float
    cpu_s: float
    num_frames: int
    peak_bytes: int


def sample(num_frames: int, num_wanted: int) -> list[int]:
    """Evenly spaced indices, first and last included; all of them for 0."""
    if num_wanted == 0:
        return list(range(num_frames))
    return [int(index) for index in np.linspace(0, num_frames - 1, num_wanted).round()]


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


def scaled(frame: Any, reformatter: Any) -> Output:
    """As a small RGB picture: what most models see."""
    small = reformatter.reformat(frame, SIDE, SIDE, "rgb24", interpolation="BILINEAR", threads=1)
    return np.asarray(small.to_ndarray())


def _decoded_only(frame: Any, reformatter: Any) -> Output:
    return np.empty(0, np.uint8)


def _take(pool: DecodingPool, file: Path, num_wanted: int) -> int:
    with file.open("rb", buffering=0) as reader:
        bitstream = analyse_bitstream(reader)
        wanted = sample(bitstream.info.num_frames, num_wanted)
        request = pool.add_decoding_request(bitstream, wanted, scaled if num_wanted else _decoded_only)
        num_frames = 0
        while pool.get_decoding_output(request) is not None:
            num_frames += 1
    return num_frames


def _mmrt(files: list[Path], num_wanted: int) -> int:
    with DecodingPool() as pool:
        return sum(_take(pool, file, num_wanted) for file in files)


def _mmrt_at_once(files: list[Path], num_wanted: int) -> int:
    counts: list[int] = []
    with DecodingPool() as pool:
        takers = [threading.Thread(target=lambda file=file: counts.append(_take(pool, file, num_wanted))) for file in files]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join()
    return sum(counts)


def _pyav(files: list[Path], num_wanted: int) -> int:
    import av
    from av.video.reformatter import VideoReformatter

    reformatter = VideoReformatter()
    num_frames = 0
    for file in files:
        with av.open(file) as container:
            stream: Any = container.streams.video[0]
            stream.thread_type, stream.thread_count = "AUTO", _num_cpus()
            wanted = set(sample(stream.frames or _count_packets(file), num_wanted))
            last = max(wanted)
            for index, frame in enumerate(container.decode(stream)):
                if index in wanted:
                    num_frames += 1
                    if num_wanted:
                        scaled(frame, reformatter)
                if index == last:
                    break
    return num_frames


def _count_packets(file: Path) -> int:
    import av

    with av.open(file) as container:
        return sum(1 for packet in container.demux(video=0) if packet.size)


def _opencv(files: list[Path], num_wanted: int) -> int:
    cv2: Any = importlib.import_module("cv2")
    num_frames = 0
    for file in files:
        capture = cv2.VideoCapture(str(file), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, _num_cpus()])
        wanted = set(sample(int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), num_wanted))
        last, index = max(wanted), 0
        while index <= last and capture.grab():
            if index in wanted:
                num_frames += 1
                if num_wanted:
                    cv2.cvtColor(cv2.resize(capture.retrieve()[1], (SIDE, SIDE)), cv2.COLOR_BGR2RGB)
            index += 1
    return num_frames


def _torchcodec(files: list[Path], num_wanted: int) -> int:
    decoders: Any = importlib.import_module("torchcodec.decoders")
    transforms: Any = importlib.import_module("torchcodec.transforms")
    num_frames = 0
    for file in files:
        decoder = decoders.VideoDecoder(str(file), num_ffmpeg_threads=_num_cpus(), transforms=[transforms.Resize((SIDE, SIDE))])
        total = decoder.metadata.num_frames
        if num_wanted:
            num_frames += len(decoder.get_frames_at(sample(total, num_wanted)).data)
        else:
            for start in range(0, total, 50):
                num_frames += len(decoder.get_frames_in_range(start, min(total, start + 50)).data)
    return num_frames


def _ffmpeg(files: list[Path], num_wanted: int) -> int:
    for file in files:
        command = ["ffmpeg", "-nostdin", "-v", "error", "-threads", "1", "-i", str(file), "-map", "0:v:0", "-f", "null", "-"]
        subprocess.run(command, check=True)
    return 0


def _pyav_single(files: list[Path], num_wanted: int) -> int:
    """As ffmpeg -f null, with the libraries of PyAV: decode everything on one thread."""
    import av

    num_frames = 0
    for file in files:
        with av.open(file) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            num_frames += sum(1 for _ in container.decode(stream))
    return num_frames


METHODS: dict[str, Method] = {
    "mmrt": _mmrt,
    "mmrt at once": _mmrt_at_once,
    "pyav": _pyav,
    "opencv": _opencv,
    "torchcodec": _torchcodec,
    "ffmpeg": _ffmpeg,
    "pyav single": _pyav_single,
}
_MODULES = {"opencv": ("cv2",), "torchcodec": ("torchcodec", "torchcodec.transforms")}


def is_available(method: str) -> bool:
    """True if the method can run here."""
    if method == "ffmpeg":
        return shutil.which("ffmpeg") is not None
    return all(importlib.util.find_spec(module) is not None for module in _MODULES.get(method, ())[:1])


def _warm_up(method: str) -> None:
    for module in _MODULES.get(method, ("av.video.reformatter",)):
        importlib.import_module(module)


def _cpu_s() -> float:
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    return 0


def run_trial(method: str, num_wanted: int, files: list[Path]) -> Trial:
    """Time it in this process, without its imports."""
    _warm_up(method)
    before_bytes, cpu_s, wall_s = _resident_bytes("VmRSS"), _cpu_s(), time.perf_counter()
    num_frames = METHODS[method](files, num_wanted)
    wall_s, cpu_s = time.perf_counter() - wall_s, _cpu_s() - cpu_s
    return Trial(wall_s=wall_s, cpu_s=cpu_s, num_frames=num_frames, peak_bytes=_resident_bytes("VmHWM") - before_bytes)


def jpeg_decoders(data: bytes) -> dict[str, Callable[[], object]]:
    """Ways to make RGB pixels of a JPEG file."""
    from PIL import Image

    from mmrt.media.image import decode_image
    from mmrt.media.limits import MediaLimits

    limits = MediaLimits()
    decoders: dict[str, Callable[[], object]] = {
        "mmrt": lambda: decode_image(io.BytesIO(data), limits),
        "pillow": lambda: np.asarray(Image.open(io.BytesIO(data)).convert("RGB")),
    }
    if importlib.util.find_spec("simplejpeg") is not None:
        simplejpeg: Any = importlib.import_module("simplejpeg")
        decoders["simplejpeg"] = lambda: simplejpeg.decode_jpeg(data)
    if importlib.util.find_spec("cv2") is not None:
        cv2: Any = importlib.import_module("cv2")
        encoded = np.frombuffer(data, np.uint8)
        decoders["opencv"] = lambda: cv2.cvtColor(cv2.imdecode(encoded, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
    return decoders


def main(argv: list[str]) -> int:
    method, num_wanted, *files = argv
    print(msgspec.json.encode(run_trial(method, int(num_wanted), [Path(file) for file in files])).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
