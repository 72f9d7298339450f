"""The video actor: media pages in, patch pages out. It alone parses images, videos and sound (``media/``).

Whatever a medium holds, its plan ends in a result: bad media are an ``ItemError`` that says what is wrong and no more.
"""

import ctypes
import logging
import resource
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ..media.errors import MediaError
from ..media.limits import MediaLimits, TimeBudget
from ..models.config import Item, ModelConfig
from ..models.errors import UnsupportedMediaError
from ..runtime.config import MediaSection
from ..runtime.messages import Analyse, Analysed, DecodeSegment, Done, ItemError, ItemShape, Plan, Result, SegmentShape
from ..shm.pool import PagePool
from ..shm.sequence_table import SequenceTable
from .base import Actor
from .media_items import OpenItem, open_item
from .plans import serve_plans

log = logging.getLogger(__name__)

CACHE_BYTES = 256 << 20
PR_SET_NO_NEW_PRIVS = 38

R = TypeVar("R", Analysed, Done)

Key = tuple[int, int, int]  # row, row generation, item


def main(actor: Actor) -> None:
    """Entry of the video process."""
    renounce_privileges()
    actor.wait_for_layout()
    media, patches = PagePool.attach(actor.run, "media"), PagePool.attach(actor.run, "patch")
    worker = VideoWorker(media, patches, actor.model, actor.config.media)
    serve_plans(actor, worker.execute, SequenceTable.attach(actor.run, writable=False))


def renounce_privileges() -> None:
    """No core dumps of other people's media, and no program started from here gains rights."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


@dataclass
class _Entry:
    opened: OpenItem
    budget: TimeBudget


class VideoWorker:
    """Does the plans, and keeps items open between them, least recently used ones first to go.

    Nothing depends on the cache: an item that is not open is analysed again, with the same outcome.
    """

    def __init__(
        self,
        media_pool: PagePool,
        patch_pool: PagePool,
        model_config: ModelConfig,
        media_config: MediaSection,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._media = media_pool
        self._patches = patch_pool
        self._model = _with_sampling(model_config, media_config)
        self._limits = _limits(model_config, media_config)
        self._timeout_s = media_config.item_timeout_s
        self._cache_bytes = cache_bytes
        self._open: OrderedDict[Key, _Entry] = OrderedDict()

    def execute(self, plan: Plan) -> Result:
        """Analyse or decode. Never raises because of a medium."""
        if isinstance(plan, Analyse):
            return self.analyse(plan)
        assert isinstance(plan, DecodeSegment)
        return self.decode_segment(plan)

    def analyse(self, plan: Analyse) -> Analysed | ItemError:
        """Find the item's shape."""
        return self._guarded(plan, lambda: Analysed(_shape(self._entry(plan).opened.item)))

    def decode_segment(self, plan: DecodeSegment) -> Done | ItemError:
        """Write one segment's rows into its patch pages."""
        return self._guarded(plan, lambda: self._decode_segment(plan))

    def _decode_segment(self, plan: DecodeSegment) -> Done:
        self._patches.check(plan.target.pages, plan.target.generations)
        entry = self._entry(plan)
        if _shape(entry.opened.item) != plan.shape:
            raise MediaError("the medium was analysed differently before; send the request again", 500)
        num_rows = 0
        with entry.budget.running():
            for rows in entry.opened.rows(plan.segment):
                self._patches.scatter_rows(plan.target.pages, rows, num_rows)
                num_rows += len(rows)
        assert num_rows == plan.shape.segments[plan.segment].num_rows
        if plan.segment == len(plan.shape.segments) - 1:
            self._close(_key(plan))
        return Done()

    def _entry(self, plan: Analyse | DecodeSegment) -> _Entry:
        key = _key(plan)
        entry = self._open.get(key)
        if entry is None:
            self._forget_earlier_requests(plan.row, plan.row_generation)
            self._media.check(plan.source.pages, plan.source.generations)
            reader = self._media.reader(plan.source.pages, plan.media.num_bytes)
            budget = TimeBudget(self._timeout_s)
            with budget.running():
                entry = _Entry(open_item(plan.media.kind, reader, self._model, self._limits, budget), budget)
            self._open[key] = entry
        self._open.move_to_end(key)
        while len(self._open) > 1 and sum(held.opened.num_bytes for held in self._open.values()) > self._cache_bytes:
            self._close(next(iter(self._open)))
        return entry

    def _forget_earlier_requests(self, row: int, row_generation: int) -> None:
        for key in [key for key in self._open if key[0] == row and key[1] != row_generation]:
            self._close(key)

    def _close(self, key: Key) -> None:
        entry = self._open.pop(key, None)
        if entry is not None:
            entry.opened.close()

    def _guarded(self, plan: Analyse | DecodeSegment, work: Callable[[], R]) -> R | ItemError:
        try:
            return work()
        except MemoryError:
            raise  # this process ends: see ``plans``
        except MediaError as error:
            failure = ItemError(error.status, f"media item {plan.item + 1}: {error.message}")
        except UnsupportedMediaError as error:
            failure = ItemError(400, f"media item {plan.item + 1}: {error}")
        except Exception:
            log.exception("cannot decode item %d of row %d (%s)", plan.item, plan.row, plan.media.kind)
            failure = ItemError(422, f"media item {plan.item + 1}: the {plan.media.kind} cannot be decoded")
        self._close(_key(plan))
        return failure


def _key(plan: Analyse | DecodeSegment) -> Key:
    return plan.row, plan.row_generation, plan.item


def _shape(item: Item) -> ItemShape:
    segments = [SegmentShape(part.grid, part.num_rows, part.row_bytes, part.num_tokens) for part in item.segments]
    return ItemShape(item.kind, item.grid, item.num_tokens, segments, item.second_per_grid_s)


def _with_sampling(model: ModelConfig, media: MediaSection) -> ModelConfig:
    """The model's rules with the frame rate of the run's configuration, and its limit of frames."""
    rules = model.vision_rules
    if rules is None:
        return model
    max_frames = min(rules.max_frames, media.max_frames)
    return msgspec.structs.replace(model, vision_rules=msgspec.structs.replace(rules, fps=media.fps, max_frames=max_frames))


def _limits(model: ModelConfig, media: MediaSection) -> MediaLimits:
    max_audio_s = media.max_audio_s if model.audio_rules is None else min(media.max_audio_s, model.audio_rules.max_s)
    return MediaLimits(
        max_pixels=media.max_pixels,
        max_frame_pixels=min(media.max_pixels, MediaLimits.max_frame_pixels),
        max_video_s=media.max_video_s,
        max_audio_s=max_audio_s,
    )
