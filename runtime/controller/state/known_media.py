"""Analyses of media, remembered by tenant and content (pure; controller process).

A medium that was analysed once is not analysed again for the same tenant, unless it could not be decoded afterwards. A new
controller begins with the analyses of the rows that it takes over; all others are lost and made again.
"""

from collections import OrderedDict
from typing import NamedTuple

from ....schema.media import ItemShape
from ...bus.messages import RequestSpec

MediaKey = tuple[bytes, bytes, bytes]
"""(era, salt, content): equal keys mean equal media of one tenant, worked on by equal code."""

_MAX_SEGMENTS = 1 << 16  # of all shapes together: they take the memory


def media_key(spec: RequestSpec, era: bytes, item: int) -> MediaKey | None:
    """Return the key of a request's medium; None where its content is not known."""
    content = spec.items[item].content
    return (era, spec.salt, content) if content else None


class KnownMedium(NamedTuple):
    """``shape``: once analysed. ``is_large``: its work was found larger than estimated (``Overran``)."""

    shape: ItemShape | None = None
    is_large: bool = False

    @property
    def num_segments(self) -> int:
        return 1 if self.shape is None else 1 + len(self.shape.segments)


class KnownMedia:
    """The analyses used last, bounded by their segments."""

    def __init__(self, max_segments: int = _MAX_SEGMENTS) -> None:
        self._media: OrderedDict[MediaKey, KnownMedium] = OrderedDict()
        self._num_segments = 0
        self._max_segments = max_segments

    def find(self, key: MediaKey) -> KnownMedium:
        """Return all that is known of a medium, which counts as used."""
        if key not in self._media:
            return KnownMedium()
        self._media.move_to_end(key)
        return self._media[key]

    def learn_shape(self, key: MediaKey, shape: ItemShape) -> None:
        self._learn(key, self.find(key)._replace(shape=shape))

    def learn_large(self, key: MediaKey) -> None:
        self._learn(key, self.find(key)._replace(is_large=True))

    def forget_shape(self, key: MediaKey) -> None:
        """Forget a medium's analysis: the next request has it analysed again."""
        if key in self._media:
            self._learn(key, self._media[key]._replace(shape=None))

    def _learn(self, key: MediaKey, known: KnownMedium) -> None:
        self._num_segments += known.num_segments - (self._media[key].num_segments if key in self._media else 0)
        self._media[key] = known
        while self._num_segments > self._max_segments and len(self._media) > 1:
            self._num_segments -= self._media.popitem(last=False)[1].num_segments
