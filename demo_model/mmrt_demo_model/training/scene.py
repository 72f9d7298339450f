"""What a row's words name, and what lies under its media tokens: what grounding.py decides from."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mmrt.models.architecture import ModelConfig
from mmrt.models.text.tokenizer import Tokenizer

from ..data.kinds import NUMBERS
from ..data.phrases import ORDERS, REFERENCES, plural
from .hints import INKS, LABELS, Prepared
from .prompts import TokenRow

Ints = npt.NDArray[np.int64]


class Vocabulary:
    """Which token names what: class of shape or digit, and of colour; 0 for nothing. ``number``: from two on, which it is in words;
    ``orders``: whether it says which of several; ``refers``: whether what comes first behind it is what the other is seen from."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        words = [text.decode(errors="replace").strip().lower() for text in tokenizer.token_bytes]
        labels = {form: number for number, name in enumerate(LABELS) for form in (name, plural(name))}
        inks = {name: number for number, name in enumerate(INKS)}
        self.label = np.array([labels.get(word, 0) for word in words])
        self.ink = np.array([inks.get(word, 0) for word in words])
        numbers = {name: number for number, name in enumerate(NUMBERS) if number > 1}
        self.number = np.array([numbers.get(word, 0) for word in words])
        self.orders = np.array([word in ORDERS for word in words])
        self.refers = np.array([word in REFERENCES for word in words])


class Scene(NamedTuple):
    """What lies under each token of a row, 0 where it is no medium.

    label, ink, first, last, pace [length, 4] per patch, digit [length, 4] per digit of a number: hints.SEEN; place [length, 2],
    view, new, onset [length]: hints.PLACES and HEARD; spot [length]: which token of its view it is.
    """

    label: Ints
    ink: Ints
    first: Ints
    last: Ints
    pace: Ints
    digit: Ints
    place: Ints
    view: Ints
    new: Ints
    spot: Ints
    onset: Ints
    is_video: bool


def scenes_of(row: TokenRow, config: ModelConfig, media: Sequence[Prepared]) -> list[Scene]:
    """For each answer of a row: of the media that it is about."""
    found: dict[tuple[int, int], Scene] = {}
    for first, end in row.about:
        if (first, end) not in found:
            ids = row.ids.copy()
            for span in (*row.spans[:first], *row.spans[end:]):
                ids[span.start : span.start + span.shape.num_tokens] = 0
            found[first, end] = scene_of(ids, config, media[first:end])
    return [found[about] for about in row.about]


def scene_of(ids: Ints, config: ModelConfig, media: Sequence[Prepared]) -> Scene:
    """Of one row and its media, in the order of their tokens."""
    label, ink, first, last, pace, digit = (np.zeros((len(ids), 4), np.int64) for _ in range(6))
    view, new, spot, onset = (np.zeros(len(ids), np.int64) for _ in range(4))
    place = np.zeros((len(ids), 2), np.int64)
    where = np.flatnonzero((ids == config.image_token_id) | (ids == config.video_token_id))
    if len(where):
        hints = torch.cat([one.hints for one in media if one.places is not None]).numpy()
        places = torch.cat([one.places for one in media if one.places is not None]).numpy()
        label[where], ink[where] = hints[..., 0], hints[..., 1]
        first[where], last[where], pace[where], digit[where] = hints[..., 3], hints[..., 4], hints[..., 7], hints[..., 8]
        place[where], view[where], new[where] = places[:, :2], places[:, 2], places[:, 3]
        spot[where] = np.arange(len(where)) - np.searchsorted(places[:, 2], places[:, 2])
    if sounds := [one.hints for one in media if one.places is None]:
        onset[ids == config.audio_token_id] = torch.cat(sounds).numpy()[:, 0, 2]
    return Scene(label, ink, first, last, pace, digit, place, view, new, spot, onset, bool((ids == config.video_token_id).any()))
