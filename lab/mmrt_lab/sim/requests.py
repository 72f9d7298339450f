"""From planned requests (``serve.workload``) to the controller's: prompt ids, media of the sizes that ``bench serve`` sends, and what
video finds in them. Nothing is decoded; one medium of each kind is made, to know its bytes.
"""

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

import msgspec

from mmrt.actors.host.media_rules import for_medium, for_run, image_of_share
from mmrt.bench.serve.samples import make_audio, make_image, make_video
from mmrt.bench.serve.workload import MediaShapes, RequestPlan, media_seed, shapes_of
from mmrt.media.header import decoding_work, num_pixels
from mmrt.models.architecture import ModelConfig
from mmrt.models.errors import UnsupportedMediaError
from mmrt.models.families.registry import family_of
from mmrt.runtime.bus.messages import Generation, MediaItem, RequestSpec
from mmrt.runtime.bus.sampling import Sampling
from mmrt.runtime.config.sections import MediaSection
from mmrt.schema.media import ItemShape, MediaKind, MediaOptions

from .costs import Costs

_GREEDY = Sampling(temperature=0.0)
_AROUND = 2  # tokens that enclose a medium
_FIRST_ID, _ANSWER_ID, _AGAIN_ID, _BLOCK_ID, _NUM_IDS = (
    1 << 20,
    1 << 29,
    3 << 28,
    1 << 30,
    1 << 28,
)  # above any placeholder; 32 bits hold them
_STRIDE = 16_411  # between the first ids of two prompts: a prime, longer than most


class Turn(msgspec.Struct, frozen=True):
    """What a conversation has said so far: ids of prompts and answers, and media."""

    ids: tuple[int, ...] = ()
    items: tuple[MediaItem, ...] = ()
    shapes: tuple[ItemShape, ...] = ()


NOTHING_SAID = Turn()


class Asked(msgspec.Struct, frozen=True):
    """A request as it is submitted, and what video will find in its media."""

    spec: RequestSpec
    shapes: tuple[ItemShape, ...]

    @property
    def num_bytes(self) -> int:
        """Of its media."""
        return sum(item.num_bytes for item in self.spec.items)


class Requests:
    """Makes requests for the model of the costs with media of these sizes. ``media``: the configuration of the run."""

    def __init__(self, costs: Costs, shapes: MediaShapes, media: MediaSection) -> None:
        self._model, self._shapes, self._max_items = for_run(costs.model, media), shapes, media.max_items
        self._answers = costs.answers
        self._known: dict[tuple[str, MediaShapes], tuple[MediaItem, ItemShape]] = {}

    def check(self, plans: Sequence[RequestPlan]) -> None:
        """Raises: ValueError for a kind of medium, or a size, that the model does not take, and for more media in a request than a run
        takes."""
        if (most := max((len(plan.media) for plan in plans), default=0)) > self._max_items:
            raise ValueError(f"a request has {most} media, media.max_items is {self._max_items}")
        for plan in plans:
            for at, kind in enumerate(plan.media):
                if kind not in self._model.media_kinds:
                    raise ValueError(f"the model takes no {kind}; it takes {', '.join(('text', *self._model.media_kinds))}")
                self._sample(plan, at)

    def ask(self, plan: RequestPlan, request_id: str, before: Turn = NOTHING_SAID) -> Asked:
        """A request; in a conversation, after what was said ``before``."""
        samples = [self._sample(plan, at) for at in range(len(plan.media))]
        items = [msgspec.structs.replace(item, content=_content(plan, at)) for at, (item, _) in enumerate(samples)]
        ids = list(before.ids)
        start = _FIRST_ID + plan.index * _STRIDE % _NUM_IDS
        for item in items:
            ids += [start, self._model.placeholder_id(item.kind), start + 1]
        if plan.blocks:
            for seed, count in plan.text_blocks():
                ids += _block_ids(seed, count)
        else:
            ids += range(start + _AROUND, start + _AROUND + plan.num_input_tokens)
        spec = RequestSpec(Generation(request_id, _GREEDY, ignore_eos=True), ids, [*before.items, *items], plan.max_tokens)
        return Asked(spec, (*before.shapes, *(shape for _, shape in samples)))

    def after(self, plan: RequestPlan, asked: Asked, key: int, num_tokens: int) -> Turn:
        """The conversation after an answer of ``num_tokens`` to this request. ``key``: the controller's number of the request."""
        kept = self._answers.kept
        drawn = kept[int.from_bytes(_content(plan, -1)) % len(kept)] if kept else None
        num_kept = num_tokens if drawn is None else min(drawn, num_tokens)
        num_new = round(self._answers.growth * (num_tokens - num_kept))
        ids = (*asked.spec.prompt_ids, *answer_ids(key, 0, num_kept), *_ids(_AGAIN_ID, key, 0, num_new))
        return Turn(ids, tuple(asked.spec.items), asked.shapes)

    def _sample(self, plan: RequestPlan, at: int) -> tuple[MediaItem, ItemShape]:
        kind, shapes = plan.media[at], shapes_of(plan, at, self._shapes)
        if (kind, shapes) not in self._known:
            try:
                self._known[kind, shapes] = make_sample(self._model, kind, shapes)
            except UnsupportedMediaError as error:
                raise ValueError(str(error)) from None
        return self._known[kind, shapes]


def answer_ids(key: int, first: int, last: int) -> range:
    """Generated ids [first, last) of the request with this key."""
    return _ids(_ANSWER_ID, key, first, last)


def _ids(base: int, key: int, first: int, last: int) -> range:
    start = base + key * _STRIDE % _NUM_IDS
    return range(start + first, start + last)


def _content(plan: RequestPlan, number: int) -> bytes:
    name = f"{plan.seed}/{number}" if number < 0 else str(media_seed(plan, number))
    return blake2b(name.encode(), digest_size=32).digest()


def _block_ids(seed: str, num_tokens: int) -> range:
    start = _BLOCK_ID + int.from_bytes(blake2b(seed.encode(), digest_size=4).digest()) % _NUM_IDS
    return range(start, start + num_tokens)


@cache
def make_sample(model: ModelConfig, kind: MediaKind, shapes: MediaShapes) -> tuple[MediaItem, ItemShape]:
    """A medium of a kind with these sizes, and its analysis. Raises: UnsupportedMediaError, ValueError."""
    family = family_of(model)
    if kind == "image":
        width, height = shapes.image_size
        data = make_image(0, width, height, shapes.image_format)
        item = MediaItem(kind, len(data), num_pixels=num_pixels(data), work=decoding_work(data))
        return item, image_of_share(model, height, width, shapes.token_share)
    if kind == "video":
        model = for_medium(model, MediaOptions(token_share=shapes.token_share))
        width, height = shapes.video_size
        total = max(1, round(shapes.video_s * shapes.video_fps))
        data = make_video(0, width, height, total, shapes.video_fps)
        num_frames = len(family.sample_frames(model, total, shapes.video_fps))
        return MediaItem(kind, len(data)), family.video_item(model, num_frames, height, width, num_frames / total * shapes.video_fps)
    data = make_audio(0, shapes.audio_s)
    assert model.audio_rules is not None
    num_samples = round(shapes.audio_s * model.audio_rules.sample_rate)
    return MediaItem(kind, len(data)), family.audio_item(model, model.audio_rules.num_frames(num_samples))
