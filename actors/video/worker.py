"""The video actor: media pages in, patch pages out. It alone parses images, videos and sound (``media/``).

Every plan ends in a result, whatever its medium holds: bad media give an ``ItemError`` that names the fault and no more. Any
other exception is an error of ours, answered with a 500 (``plan_loop``).
"""

import io
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from traceback import clear_frames
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.ma  # noqa: F401  (numpy imports it at the first percentile)
from numpy.typing import NDArray
from PIL import Image

from ...media.decoding import DECODER_BYTES, DecodingPool
from ...media.engines import Engine, cpu_engines
from ...media.errors import MediaError, OutOfTime
from ...media.image import JpegDecoder
from ...media.limits import MediaLimits, Reader, TimeBudget
from ...media.preprocess import resize
from ...media.segments import MAX_THREADS
from ...models.architecture import ModelConfig
from ...models.errors import UnsupportedMediaError
from ...models.families.registry import family_of
from ...runtime.bus.media_work import SMALL_WORK
from ...runtime.bus.messages import Analysed, Done, ItemError, MediaItem, Overran, PageRun, Result
from ...runtime.bus.plans import Analyse, Plan, PreprocessSegment
from ...runtime.config.runtime_config import RuntimeConfig
from ...runtime.config.sections import MediaSection
from ...schema.media import MediaKind
from ...shm.pool import PagePool
from ...shm.sequence_table import SequenceTable
from ..host.actor import Actor
from ..host.media_rules import for_medium, for_run
from ..host.plan_checks import still_wanted
from ..host.plan_loop import PlanLoop
from .isolated import MAX_KEPT, IsolatedWorker, ItemBytes, Key, NoRows, key_of, serve_item
from .items import OpenItem, open_item
from .sandbox import MAX_THREADS as OWN_THREADS
from .sandbox import allow_cpu_time, enter_sandbox, memory_left
from .template import Template

log = logging.getLogger(__name__)

CACHE_BYTES = 128 << 20  # of open items, for each engine
BYTES_AHEAD = 16 << 20  # of frames that a video has decoded ahead, for each engine
THREAD_BYTES = 16 << 20  # of an engine: its stack and what it allocates in passing
STACK_BYTES = 8 << 20  # of a decoder's thread
BYTES_PER_PIXEL = 32  # of the largest picture (measured: 18 of a PNG that is turned upright; libwebp has canvases besides)
SMALL_S = 2.0  # of a processor, that what should be small work may take: several times what it does
SPARE_BYTES = 1 << 30  # spectrograms, resizing, threads, modules that are imported late
CUDA_BYTES = 8 << 30  # of the driver, and of its engines, where videos are decoded by GPUs; not measured
ROOM_BYTES = 64 << 20  # with less than that left it is not the item that takes too much
CAUTIOUS_PLANS = 256  # after a death, each done alone: the one that dies then is the cause, and nothing is ahead of its plan
PATIENCE = 0.9  # of a step's limit, with a process that decodes for this one: it is ended before the watchdog ends this one
RECORDING_BYTES = 16 << 20  # of all flight recorders; a captured plan has its pages before and after

R = TypeVar("R", Analysed, Done)


def main(actor: Actor) -> None:
    """Entry of the video process. Everything from ``enter_sandbox`` on happens within its bounds, in every thread."""
    num_engines = len(os.sched_getaffinity(0))
    load(actor.model)
    memory_bytes = _memory_bytes(actor.config, num_engines)
    template = _begin_template(actor, memory_bytes)
    actor.wait_for_layout()
    media, patches = PagePool.attach(actor.run, "media", "read"), PagePool.attach(actor.run, "patch", "fill")
    rows = SequenceTable.attach(actor.run, writable=False)
    plans = PlanLoop(actor, rows)
    plans.prepare_captures(("media", "patch"))
    actor.share_cores()
    actor.hold_connections()
    reads_code = _uses_gpu(actor.config) or actor.session is not None
    problem = enter_sandbox(
        memory_bytes=memory_bytes,
        file_bytes=RECORDING_BYTES + media.data.nbytes + 2 * patches.data.nbytes,
        reads_code=reads_code,
        cuda=_uses_gpu(actor.config),
    )
    if problem:
        log.info("this process has no namespaces of its own: %s", problem)

    num_threads = 2 * actor.config.actor(actor.name).threads + num_engines  # engines decode beside the steps' own work
    step_cpu_s = actor.config.step_limit_s(actor.name) * num_threads

    def worker(cache_bytes: int, yields: bool) -> VideoWorker | IsolatedWorker:
        if template is not None:
            limit_s = PATIENCE * actor.config.step_limit_s(actor.name)
            return IsolatedWorker(template, media, patches, cache_bytes, yields, limit_s, step_cpu_s, _max_kept(num_threads))
        engines = None if yields else _engines(actor.config)
        jpegs = _jpeg_decoder(actor.config)
        return VideoWorker(media, patches, actor.model, actor.config.media, cache_bytes, engines, jpegs, yields)

    small, large = worker(CACHE_BYTES, True), worker(num_engines * CACHE_BYTES, False)
    num_begun = 0

    def is_cautious() -> bool:
        return actor.follows_a_death and num_begun <= CAUTIOUS_PLANS

    def is_aside(plan: Plan) -> bool:
        return plan.is_large and not is_cautious()

    def execute(plan: Plan) -> Result:
        nonlocal num_begun
        num_begun += 1
        allow_cpu_time(step_cpu_s)
        worker = large if plan.is_large else small
        worker.close_unwanted(lambda plan: still_wanted(plan, rows) is None)
        return worker.execute(plan, alone=is_cautious())

    with ExitStack() as stack:
        if template is not None:
            stack.callback(template.close)
            template.watch()
        for one in (small, large):  # one for each thread that does plans; an item is always the same one's
            stack.callback(one.close)
        plans.serve(execute, is_aside)


def _memory_bytes(config: RuntimeConfig, num_engines: int) -> int:
    """Return what decoding may take beyond what the process has."""
    return (
        num_engines * (CACHE_BYTES + THREAD_BYTES + min(num_engines, MAX_THREADS) * STACK_BYTES)
        + CACHE_BYTES
        + THREAD_BYTES
        + DECODER_BYTES
        + SPARE_BYTES
        + BYTES_PER_PIXEL * (config.media.max_pixels + SMALL_WORK)
        + (CUDA_BYTES if _uses_gpu(config) else 0)
    )


def _max_kept(num_threads: int) -> int:
    """Return how many decoders each worker keeps, so that all decoders together have not more threads than one user may."""
    return max(1, min(MAX_KEPT, OWN_THREADS // (4 * num_threads)))


def _begin_template(actor: Actor, memory_bytes: int) -> Template | None:
    """Begin what forks a decoder for each item, if the configuration asks for it. A debugger needs the decoder in its own process."""
    if actor.config.media.isolation == "shared":
        return None
    if actor.session is not None:
        log.info("media are decoded in this process, which is being debugged, not each in one of its own (media.isolation)")
        return None
    media = actor.config.media

    def make_worker(item: Source, rows: Sink, yields: bool) -> VideoWorker:
        return VideoWorker(item, rows, actor.model, media, yields=yields)

    def rehearse() -> None:
        if "image" in actor.model.media_kinds:
            with closing(VideoWorker(ItemBytes(picture), NoRows(), actor.model, media)) as worker:
                item, nowhere = MediaItem("image", len(picture)), PageRun([], [])
                found = worker.execute(Analyse(0, 1, 0, item, nowhere))
                if isinstance(found, Analysed):
                    worker.execute(PreprocessSegment(0, 1, 0, 0, item, found.shape, nowhere, nowhere))

    picture = _small_picture()
    item_bytes = 2 * (media.max_item_mib << 20)  # as it comes, and in one piece
    return Template.begin(lambda channel: serve_item(channel, make_worker, rehearse), memory_bytes=memory_bytes + item_bytes)


def _small_picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG")
    return file.getvalue()


def load(model: ModelConfig) -> None:
    """Load what decoding would load late: modules, and what libraries find out about the processor. Nothing can be opened later."""
    family_of(model)
    resize(np.zeros((2, 2, 3), np.uint8), 1, 1)


def _uses_gpu(config: RuntimeConfig) -> bool:
    """Return whether GPU units decode videos or JPEGs."""
    return config.model.on_cuda and config.media.decodes_on_gpu


def _engines(config: RuntimeConfig) -> list[Engine]:
    """The engines: first the video units of all visible GPUs, then all processors."""
    if not (config.model.on_cuda and config.media.gpu_decoding):
        return cpu_engines()
    from ...media.nvdec import nvdec_engines

    units = nvdec_engines()
    if not units:
        log.warning("media.gpu_decoding is set, and no GPU's video units can be used: the processor decodes")
    return [*units, *cpu_engines()]


def _jpeg_decoder(config: RuntimeConfig) -> JpegDecoder | None:
    """The decoder on the GPU's JPEG units, if the configuration asks for it."""
    if not (config.model.on_cuda and config.media.gpu_jpegs):
        return None
    from ...media.nvjpg import nvjpg_decoder

    decoder = nvjpg_decoder()
    if decoder is None:
        log.warning("media.gpu_jpegs is set, and no GPU's JPEG units can be used: the processor decodes")
    return decoder


class Source(Protocol):
    """Compressed media: a ``PagePool``, or the bytes of one item."""

    def check(self, pages: Sequence[int], generations: Sequence[int]) -> None: ...
    def reader(self, pages: Sequence[int], num_bytes: int) -> Reader: ...


class Sink(Protocol):
    """Takes patches: a ``PagePool``, or what sends them."""

    def check(self, pages: Sequence[int], generations: Sequence[int]) -> None: ...
    def scatter_rows(self, pages: Sequence[int], rows: NDArray[Any], first_row: int = 0) -> None: ...


@dataclass
class _Entry:
    opened: OpenItem
    budget: TimeBudget
    plan: Analyse | PreprocessSegment  # the first that named it
    due: int = 0  # the segment that comes next


class VideoWorker:
    """Does the plans, and keeps items open between them; evicts the least recently used first.

    Nothing depends on the cache: an item that is not open is analysed again, with the same outcome.
    """

    def __init__(
        self,
        media_pool: Source,
        patch_pool: Sink,
        model_config: ModelConfig,
        media_config: MediaSection,
        cache_bytes: int = CACHE_BYTES,
        engines: Sequence[Engine] | None = None,
        jpeg_decoder: JpegDecoder | None = None,
        yields: bool = False,
    ) -> None:
        """``yields``: give up, with Overran, work that takes more than ``SMALL_S`` of this thread's processor time."""
        self._yields = yields
        self._media = media_pool
        self._patches = patch_pool
        self._model = for_run(model_config, media_config)
        self._limits = _limits(model_config, media_config)
        self._timeout_s = media_config.item_timeout_s
        self._cache_bytes = cache_bytes
        self._open: OrderedDict[Key, _Entry] = OrderedDict()
        self._ahead = True
        self._jpeg_decoder = jpeg_decoder
        engines = engines or cpu_engines()
        self._pool = DecodingPool(engines, max_bytes_ahead=len(engines) * BYTES_AHEAD)

    def close(self) -> None:
        """End the decoding threads, wherever they are. The worker is unusable afterwards."""
        self._pool.close()
        self._open.clear()

    @property
    def num_bytes(self) -> int:
        """The approximate memory of all items that are open."""
        return sum(held.opened.num_bytes for held in self._open.values())

    def close_unwanted(self, is_unwanted: Callable[[Plan], bool]) -> None:
        """Close items whose plans are no longer wanted: engines would go on with the oldest of them first."""
        for key in [key for key, entry in self._open.items() if is_unwanted(entry.plan)]:
            self._close(key)

    def execute(self, plan: Plan, alone: bool = False) -> Result:
        """Analyse or decode. ``alone``: nothing else is decoded meanwhile, nor afterwards.

        Raises: any error that is not the medium's fault, with the item closed; MemoryError where this process has too little left.
        """
        assert isinstance(plan, Analyse | PreprocessSegment)
        self._ahead = not alone
        try:
            return self.analyse(plan) if isinstance(plan, Analyse) else self.decode_segment(plan)
        finally:
            if alone:
                self._close(key_of(plan))

    def analyse(self, plan: Analyse) -> Analysed | ItemError | Overran:
        """Find the item's shape."""
        return self._guarded(plan, lambda: Analysed(self._entry(plan).opened.item))

    def decode_segment(self, plan: PreprocessSegment) -> Done | ItemError | Overran:
        """Write one segment's rows into its patch pages."""
        return self._guarded(plan, lambda: self._decode_segment(plan))

    def _decode_segment(self, plan: PreprocessSegment) -> Done:
        self._patches.check(plan.target.pages, plan.target.generations)
        held = self._open.get(key_of(plan))
        if held is not None and plan.segment < held.due:
            self._close(key_of(plan))  # it is decoded again, and its time counts anew
        entry = self._entry(plan)
        if entry.opened.item != plan.shape:
            raise MediaError("the medium was analysed differently before; send the request again", 500)
        num_rows = 0
        with entry.budget.running():
            for rows in entry.opened.rows(plan.segment):
                self._patches.scatter_rows(plan.target.pages, rows, num_rows)
                num_rows += len(rows)
        assert num_rows == plan.shape.segments[plan.segment].num_rows
        entry.due = plan.segment + 1
        if plan.segment == len(plan.shape.segments) - 1:
            self._close(key_of(plan))
        return Done()

    def _entry(self, plan: Analyse | PreprocessSegment) -> _Entry:
        key = key_of(plan)
        entry = self._open.get(key)
        if entry is None:
            self._media.check(plan.source.pages, plan.source.generations)
            reader = self._media.reader(plan.source.pages, plan.media.num_bytes)
            options = plan.media.options
            model = for_medium(self._model, options)
            budget = TimeBudget(SMALL_S, time.thread_time) if self._yields else TimeBudget(self._timeout_s)
            with budget.running():
                limits = replace(self._limits, said_pixels=plan.media.num_pixels)
                opened = open_item(plan.media.kind, reader, model, limits, budget, self._pool, options, self._ahead, self._jpeg_decoder)
            entry = _Entry(opened, budget, plan)
            self._open[key] = entry
        self._open.move_to_end(key)
        while len(self._open) > 1 and self.num_bytes > self._cache_bytes:
            self._close(next(iter(self._open)))
        return entry

    def _close(self, key: Key) -> None:
        entry = self._open.pop(key, None)
        if entry is not None:
            entry.opened.close()

    def _guarded(self, plan: Analyse | PreprocessSegment, work: Callable[[], R]) -> R | ItemError | Overran:
        try:
            return work()
        except Exception as error:
            self._close(key_of(plan))
            if self._yields and isinstance(error, OutOfTime | MemoryError):  # the other thread's item may be what takes the memory
                _let_go(error)
                return Overran()
            status, message = _explain(error, plan.media.kind)
        return ItemError(status, f"{plan.media.path}: {message}")


def _explain(error: Exception, kind: MediaKind) -> tuple[int, str]:
    """The status and message for an item's failure.

    Raises: MemoryError where this process, not the item, takes too much memory: it ends, see ``plan_loop``; any error that is
    not the item's.
    """
    if isinstance(error, MemoryError) or "allocate memory" in str(error):  # torch's words for it
        _let_go(error)
        if (left := memory_left()) < ROOM_BYTES:
            raise MemoryError from None
        return 400, f"decoding the {kind} takes more memory than the limit of {left >> 20} MiB"
    if isinstance(error, MediaError):
        return error.status, error.message
    if isinstance(error, UnsupportedMediaError):
        return 400, str(error)
    raise error


def _let_go(error: BaseException | None) -> None:
    """Free the locals of the functions that an exception passed through."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__context__


def _limits(model: ModelConfig, media: MediaSection) -> MediaLimits:
    bounds = [media.max_audio_s] if model.audio_rules is None else [media.max_audio_s, model.audio_rules.max_s]
    return MediaLimits(
        max_pixels=media.max_pixels,
        max_frame_pixels=min(media.max_pixels, MediaLimits.max_frame_pixels),
        max_video_s=media.max_video_s,
        max_audio_s=min(bound for bound in bounds if bound),
    )
