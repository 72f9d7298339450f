"""Workloads and objectives of the published designs, by name (pure; US14, US17, TI17, TI18, RS8, RS9, MS4).

The texts name data sets; these are their shapes: kinds, sizes and lengths as far as the texts state them, with generated contents.
``assumed`` says what they do not state. Called by ``load_options`` and ``planned``.
"""

import random
from collections.abc import Mapping

import msgspec

from .slo import Slo
from .workload import Lengths, MediaShapes, Modality, RequestPlan

_PICTURE = MediaShapes(image_size=(672, 672), image_format="jpeg")  # 576 tokens of 28 by 28 pixels, as TI14 has for each picture


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one kind in a workload: their share, the media of each, and the lengths of their text.

    ``counts``: (number of media, weight) of the numbers that a request can have.
    """

    weight: float = 1.0
    kind: Modality = "text"
    counts: tuple[tuple[int, float], ...] = ((1, 1.0),)
    lengths: Lengths


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """``source``: where its sizes are stated. ``assumed``: what is not stated there."""

    source: str
    assumed: str
    parts: tuple[Part, ...]
    shapes: MediaShapes = MediaShapes()

    @property
    def most_media(self) -> int:
        """Of a request."""
        return max(count for part in self.parts for count, _ in part.counts)


def _one(kind: Modality, low: int, high: int, max_tokens: int, count: int = 1) -> tuple[Part, ...]:
    lengths = Lengths(input_low=low, input_high=high, max_tokens=max_tokens)
    return (Part(kind=kind, counts=((count, 1.0),), lengths=lengths),)


def _video(seconds: float) -> MediaShapes:
    return MediaShapes(video_size=(224, 224), video_s=seconds, video_fps=2)


def _picture_set(answer: int, about: str) -> Workload:
    return Workload(
        source="TriInfer, section 5.1 and Figure 3",
        assumed=f"a prompt of 16 to 48 tokens; {about} of {answer} tokens",
        parts=_one("image", 16, 48, answer),
        shapes=_PICTURE,
    )


WORKLOADS: Mapping[str, Workload] = {
    "mlvu": Workload(
        source="UnifiedServe, Table 2 (8 to 10 minutes) and section 6.1 (224x224)",
        assumed="9 minutes, recorded at 2 frames/s; a prompt of 32 to 128 tokens, an answer of 64",
        parts=_one("video", 32, 128, 64),
        shapes=_video(540.0),
    ),
    "egoschema": Workload(
        source="UnifiedServe, Table 2 (3 minutes) and section 6.1 (224x224)",
        assumed="recorded at 2 frames/s; a prompt of 64 to 192 tokens, an answer of 64",
        parts=_one("video", 64, 192, 64),
        shapes=_video(180.0),
    ),
    "visionarena": Workload(
        source="UnifiedServe, Table 2 and section 6.1 (224x224)",
        assumed="a prompt of 32 to 128 tokens, an answer of 128",
        parts=_one("image", 32, 128, 128),
        shapes=MediaShapes(image_size=(224, 224), image_format="jpeg"),
    ),
    "textcaps": _picture_set(64, "a caption"),
    "pope": _picture_set(8, "a yes or no"),
    "mme": _picture_set(2, "a yes or no"),
    "textvqa": _picture_set(16, "an answer"),
    "vizwiz": _picture_set(16, "an answer"),
    "mmmu-1k": Workload(
        source="RServe, section 5.1: 8,000 to 9,000 tokens, over 5,000 of them of media, 1,024 in each",
        assumed="five pictures, an answer of 16 tokens",
        parts=_one("image", 2880, 3880, 16, count=5),
        shapes=MediaShapes(image_size=(896, 896), image_format="jpeg"),
    ),
    "mmmu-2k": Workload(
        source="RServe, section 5.1: 11,000 to 13,000 tokens, 9,000 of them of media, 1,024 in each",
        assumed="nine pictures, an answer of 16 tokens",
        parts=_one("image", 1784, 3784, 16, count=9),
        shapes=MediaShapes(image_size=(896, 896), image_format="jpeg"),
    ),
    "mmmu-32": Workload(
        source="RServe, Figure 16 b: media of 32 tokens each",
        assumed="160 pictures, as many tokens as in mmmu-1k; an answer of 16 tokens",
        parts=_one("image", 2880, 3880, 16, count=160),
        shapes=MediaShapes(image_size=(224, 112), image_format="jpeg"),
    ),
    "modserve": Workload(
        source="the Azure trace that ModServe was made for: half of the requests have pictures, mostly 1, often 4, 9, 16 or 25",
        assumed="pictures of 336x336; the few requests with more than 25 pictures have 25; lengths about the medians of the trace",
        parts=(
            Part(weight=0.5, lengths=Lengths(input_low=366, input_high=1186, max_tokens=141)),
            Part(
                weight=0.5,
                kind="image",
                counts=((1, 0.66), (4, 0.05), (9, 0.15), (16, 0.02), (25, 0.12)),
                lengths=Lengths(input_low=64, input_high=512, max_tokens=79),
            ),
        ),
        shapes=MediaShapes(image_size=(336, 336), image_format="jpeg"),
    ),
}

_TRIINFER = {"llava-1.5-7b": (4.0, 0.08, 0.08), "llava-next-7b": (8.0, 0.60, 0.30), "qwen2-vl-7b": (8.0, 0.60, 0.10)}  # TI18
_UNIFIEDSERVE = {  # US17
    "qwen2.5-vl-32b": {"mlvu": Slo(80.0, 0.7), "egoschema": Slo(80.0, 0.6), "visionarena": Slo(0.25, 0.05)},
    "internvl3-38b": {"mlvu": Slo(140.0, 0.8), "egoschema": Slo(100.0, 0.7), "visionarena": Slo(0.25, 0.05)},
}

OBJECTIVES: Mapping[str, Slo] = {
    **{f"{model}/{name}": slo for model, slos in _UNIFIEDSERVE.items() for name, slo in slos.items()},
    **{f"{model}/{name}": Slo(ttft, tbt) for model, (ttft, tbt, _) in _TRIINFER.items() for name in ("vizwiz", "textvqa", "mme")},
    **{f"{model}/{name}": Slo(ttft, tbt) for model, (ttft, _, tbt) in _TRIINFER.items() for name in ("pope", "textcaps")},
    "qwen2.5-vl-72b/mmmu-1k": Slo(10.0),  # RS9
    "qwen2.5-vl-72b/mmmu-2k": Slo(10.0),
}
"""By the text's model and data set: the objectives that it was judged by."""


def plan_workload(workload: Workload, num_requests: int, seed: int) -> list[RequestPlan]:
    """Requests of a workload, all at time 0. The group of a request is its kind."""
    rng = random.Random(f"{seed}/workload")
    parts = rng.choices(workload.parts, [part.weight for part in workload.parts], k=num_requests)
    return [_plan(index, part, seed) for index, part in enumerate(parts)]


def _plan(index: int, part: Part, seed: int) -> RequestPlan:
    own = f"{seed}/{part.kind}/{index}"
    rng, lengths = random.Random(f"{own}/shape"), part.lengths
    counts, weights = zip(*part.counts, strict=True)
    (count,) = rng.choices(counts, weights)
    return RequestPlan(
        index=index,
        seed=own,
        group=part.kind,
        media=() if part.kind == "text" else (part.kind,) * count,
        num_input_tokens=rng.randint(lengths.input_low, lengths.input_high),
        max_tokens=lengths.max_tokens,
    )
