"""Decoding videos on all engines at once: ``analyse_bitstream``, ``add_decoding_request``, ``get_decoding_output`` (FC10). For the
video actor.

One thread per engine. ``dispatch`` makes all decisions under one lock, which is never held while anything is demuxed, decoded
or converted. One video is decoded by all engines together (FC1); frames come in order as they become ready, and match
a single engine's bit for bit.
"""

import itertools
import logging
import threading
import time
from collections.abc import Sequence

from .decoding_job import Job, Outputs
from .dispatch import Absent, Dispatch, Request, Run, State, is_next
from .engines import CPU, Convert, Engine, EngineError, FrameNotDelivered, Output, choose_kind, cpu_engines, decoder_bytes, upright_rgb
from .errors import MediaError
from .limits import UNLIMITED, MediaLimits, Reader, TimeBudget
from .packets import Bitstream
from .segments import Segment
from .video_info import VideoInfo, analyse

log = logging.getLogger(__name__)

PACKETS_PER_SEGMENT = 64
BYTES_AHEAD = 128 << 20
DECODER_BYTES = 2 << 30


def analyse_bitstream(reader: Reader, limits: MediaLimits | None = None, budget: TimeBudget = UNLIMITED) -> Bitstream:
    """Analyse a video: demux it and decode one frame. The engines use the reader until its requests have ended.

    Raises: MediaError, 422 for files that are not videos or hold no frame, 400 for limits.
    """
    limits = limits or MediaLimits()
    return Bitstream(reader, analyse(reader, limits, budget), limits, budget)


class DecodingPool:
    """The engines, each with a thread from the first request on, and the requests. Any thread may call any method.

    A segment holds about ``packets_per_segment`` packets, or one group of pictures if that is more: short, so that the first frames
    come soon and the engines end together. A request keeps at most ``max_bytes_ahead`` bytes of frames for its taker, and one frame
    more per engine; it has as many engines as its decoders take ``max_decoder_bytes`` together, or one.
    """

    def __init__(
        self,
        engines: Sequence[Engine] | None = None,
        *,
        packets_per_segment: int = PACKETS_PER_SEGMENT,
        max_bytes_ahead: int = BYTES_AHEAD,
        max_decoder_bytes: int = DECODER_BYTES,
    ) -> None:
        self._engines = list(engines) if engines is not None else cpu_engines()
        self._kinds = list(dict.fromkeys(engine.kind for engine in self._engines))
        self._packets_per_segment = packets_per_segment
        self._max_bytes_ahead = max_bytes_ahead
        self._max_decoder_bytes = max_decoder_bytes
        self._dispatch = Dispatch(2 * len(self._engines), max_bytes_ahead)
        self._jobs: dict[Request, Job] = {}
        self._parked: dict[Run, Outputs] = {}
        self._is_closing = False
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._has_output = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []

    def max_bytes(self, info: VideoInfo) -> int:
        """Approximate most memory of a request for such a video: frames for its taker, and decoders."""
        return self._max_bytes_ahead + self._max_running(info, choose_kind(info, self._kinds)) * decoder_bytes(info)

    def _max_running(self, info: VideoInfo, kind: str) -> int:
        num_engines = sum(engine.kind == kind for engine in self._engines)
        return min(num_engines, max(1, self._max_decoder_bytes // decoder_bytes(info)))

    def __enter__(self) -> "DecodingPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def add_decoding_request(
        self, bitstream: Bitstream, wanted: Sequence[int], convert: Convert | None = None, temporal_patch_size: int = 1
    ) -> Request:
        """Begin to decode the frames with these ascending indices, repetitions allowed. Returns what ``get_decoding_output`` takes.

        Each frame goes through ``convert`` in an engine's thread and comes out as an array, by default RGB uint8 [height, width, 3],
        upright.

        Raises: ValueError for indices out of order or range, and once the pool is closed; MemoryError without memory for a thread.
        """
        info = bitstream.info
        if any(a > b for a, b in itertools.pairwise(wanted)):
            raise ValueError("wanted frame indices must ascend")
        if wanted and not 0 <= wanted[0] <= wanted[-1] < info.num_frames:
            raise ValueError(f"wanted frames {wanted[0]}..{wanted[-1]} outside 0..{info.num_frames - 1}")
        repeats = {index: len(list(same)) for index, same in itertools.groupby(wanted)}
        kind = choose_kind(info, self._kinds)
        num_engines = self._max_running(info, kind)
        convert = convert or upright_rgb(bitstream.limits)
        job = Job(bitstream, list(repeats), convert, temporal_patch_size, self._packets_per_segment)
        segments = job.plan(0, num_engines)
        with self._lock:
            if self._is_closing:
                raise ValueError("the decoding pool is closed")
            self._start()
            request = self._dispatch.add(segments, list(repeats.values()), kind, num_engines)
            self._jobs[request] = job
            self._has_work.notify_all()
        return request

    def _start(self) -> None:
        """Start a thread for every engine that has none. Raises: MemoryError if there is no memory for a thread's stack."""
        for engine in self._engines[len(self._threads) :]:
            thread = threading.Thread(target=self._serve, args=(engine,), name=f"decode {len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise MemoryError(f"no memory for a thread that decodes: {error}") from None
            self._threads.append(thread)

    def get_decoding_output(self, request: Request, timeout_s: float | None = None) -> Output | None:
        """The next frame in order, as soon as it is there; None after the last one. Waits without the GIL. One taker per request.

        A frame that the decoder does not deliver (broken data) is replaced by the one before it, or by the first that follows.

        A request is released at its end; cancel one that fails or is not taken to its end.

        Raises: MediaError (422) if nothing at all can be decoded, 400 for limits, including time spent
        while all engines decode other videos; ValueError once cancelled; TimeoutError.
        """
        until_s = time.monotonic() + (threading.TIMEOUT_MAX if timeout_s is None else timeout_s)
        with self._lock:
            while (frame := self._dispatch.take(request)) is Absent.PENDING:
                budget = self._jobs[request].bitstream.budget
                budget.check()
                if (left_s := until_s - time.monotonic()) <= 0:
                    raise TimeoutError(f"no frame within {timeout_s} s")
                self._has_output.wait(min(left_s, max(budget.left_s, 0)))
            self._has_work.notify_all()
        if not isinstance(frame, Absent):
            return frame
        self.cancel(request)
        return None

    def cancel(self, request: Request) -> None:
        """End a request at any point. When this returns no engine works on it, and its reader is used no more."""
        with self._lock:
            dropped = self._dispatch.cancel(request)
            job = self._jobs.get(request)
            self._has_output.notify_all()
        if job is None:
            return
        self._release(job, dropped)
        with self._lock:
            while request.num_running:
                self._has_output.wait()
            job = self._jobs.pop(request, None)
        if job is not None:
            job.close()

    def close(self) -> None:
        """Cancel everything and end the threads. Takes as long as an engine is busy with one packet."""
        with self._lock:
            self._is_closing = True
            requests = self._dispatch.requests
            self._has_work.notify_all()
        for request in requests:
            self.cancel(request)
        for thread in self._threads:
            thread.join()
        for engine in self._engines:
            engine.close()

    def _serve(self, engine: Engine) -> None:
        """Run an engine's thread."""
        while self._serve_next(engine):
            pass

    def _serve_next(self, engine: Engine) -> bool:
        """Wait for a segment and decode what is possible of it; nothing is held between two. Returns False once the pool closes."""
        with self._lock:
            run = self._next_run(engine)
            if run is None:
                return False
            job = self._jobs[run.request]
            outputs = self._parked.pop(run, None)
        try:
            self._advance(engine, job, run, outputs if outputs is not None else job.outputs(engine, run.segment))
        except Exception as error:  # the taker gets any error, and this thread continues
            with self._lock:
                dropped = self._dispatch.fail(run, error)
            self._release(job, dropped)
        finally:
            with self._lock:
                self._dispatch.leave(run)
                self._has_work.notify_all()
                self._has_output.notify_all()
        return True

    def _next_run(self, engine: Engine) -> Run | None:
        """Wait for the next run, with the lock held. None once the pool closes."""
        while not self._is_closing:
            if (run := self._dispatch.next_run(engine.kind)) is not None:
                return run
            self._has_work.wait()
        return None

    def _advance(self, engine: Engine, job: Job, run: Run, outputs: Outputs) -> None:
        """Decode a segment until it is done, parked or dropped. Raises: the decoder's error, if no other engine can do better."""
        is_parked = False
        try:
            for position, frame in outputs:
                with self._lock:
                    goes_on = self._dispatch.deliver(run, position, frame)
                    is_parked = run.state is State.PARKED
                    if is_parked:
                        self._parked[run] = outputs
                    if is_next(run):
                        self._has_output.notify_all()
                if not goes_on:
                    break
            else:
                with self._lock:
                    self._dispatch.finish(run)
        except FrameNotDelivered:
            if run.state is not State.RUNNING:
                return
            self._replan(job, run, job.plan_in_full(run.due), run.request.kind, run.request.max_running)
        except MediaError:
            raise
        except Exception as error:
            is_hardware = engine.kind != CPU or isinstance(error, EngineError)  # a processor may go on with hardware's decoder
            if CPU not in self._kinds or not is_hardware:
                raise
            log.warning("decoding on %s failed, going on with the processor: %s", engine.kind, error)
            num_engines = self._max_running(job.bitstream.info, CPU)
            self._replan(job, run, job.plan(run.due, num_engines), CPU, num_engines)
        finally:
            if not is_parked:
                outputs.close()
                job.forget(run.segment)

    def _replan(self, job: Job, run: Run, segments: Sequence[Segment], kind: str, num_engines: int) -> None:
        with self._lock:
            dropped = self._dispatch.replan(run, segments, kind, num_engines)
        self._release(job, dropped)

    def _release(self, job: Job, dropped: Sequence[Run]) -> None:
        """Release the resources of dropped runs. Running ones find no more packets, and end."""
        with self._lock:
            parked = [outputs for run in dropped if (outputs := self._parked.pop(run, None)) is not None]
        for outputs in parked:
            outputs.close()
        for run in dropped:
            job.forget(run.segment)
