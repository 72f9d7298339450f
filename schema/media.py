"""Media of a request, as models and messages describe them: kinds, shapes, places in the prompt, options.

Records are positional, as on the wire (``runtime.bus.messages``): they evolve by appending fields with defaults.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MediaKind = Literal["image", "video", "audio"]
AUTO_SHARE = 0.0
_Count = Annotated[int, Meta(ge=0, le=1 << 31)]
_Level = Annotated[int, Meta(ge=0, le=255)]
Part = tuple[int, int, _Count, _Count]
"""Of a picture: x, y, width and height."""


class MediaOptions(msgspec.Struct, frozen=True, array_like=True):
    """A request's options for one medium, within the limits of the run and the model; None takes their values.

    ``fps`` is the rate at which frames are sampled, ``min_frames`` and ``max_frames`` bound how many; ``min_pixels`` and
    ``max_pixels`` bound the area that a picture or each frame is resized to. ``use_audio_in_video``: the sound track counts, too.
    ``token_share``: of the tokens that a picture or video would have, so many at most (VL9); AUTO_SHARE: as the load says.
    ``is_among_others``: the request has more pictures, and the model cuts only one that is alone into tiles.
    """

    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    use_audio_in_video: bool = False
    token_share: float = 1.0
    is_among_others: bool = False

    @property
    def known_share(self) -> float:
        """``token_share``, 1 while the load has not been asked."""
        return self.token_share or 1.0


class View(msgspec.Struct, frozen=True, array_like=True):
    """A part of a picture as a tower gets it: of the picture ``source`` (x, y, width, height) is resized to each of ``sizes`` (height,
    width) in turn, then cut to ``window``. What lies outside of the picture has the colour ``fill``. Without a source or a window it is
    all."""

    sizes: tuple[tuple[_Count, _Count], ...]
    window: Part | None = None
    source: Part | None = None
    fill: tuple[_Level, _Level, _Level] = (0, 0, 0)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.sizes[-1] if self.window is None else (self.window[3], self.window[2])


class SegmentShape(msgspec.Struct, frozen=True, array_like=True):
    """A separately decodable and encodable part of an item: whole temporal patches of a video, windows of an audio, an image or
    some views of it.

    ``kind`` is the item's own, except "audio" for the sound track of a video. ``grid`` is (t, h, w) in patches for vision and
    (num_mel_frames, 0, 0) for audio; ``num_rows`` patch or mel rows of ``row_bytes`` each go to patch pages; ``num_tokens`` embedding
    rows come out of the encoder. ``lead`` and ``trail``: ids of text that the prompt has before and behind them, as a frame's time.

    ``ids``: those of the embedding rows' tokens, as runs (id, count); empty: the placeholder, ``num_tokens`` times. Each token has a
    row: those of placeholders come out of the tower, those of text from the decoder's table. ``views``: of an image, t in number;
    empty: all of it in one size. ``details`` are for the family's tower; they begin with the picture's own height and width, of sound
    with the first mel frame: of a run of a sound track (first mel frame of the segment, first and last + 1 of its tokens), the segments
    of one window having the same mel frames.
    """

    kind: MediaKind
    grid: tuple[_Count, _Count, _Count]
    num_rows: _Count
    row_bytes: Annotated[int, Meta(ge=1, le=1 << 31)]
    num_tokens: _Count
    lead: tuple[int, ...] = ()
    trail: tuple[int, ...] = ()
    ids: tuple[tuple[int, _Count], ...] = ()
    views: tuple[View, ...] = ()
    details: tuple[int, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens with the text around them."""
        return len(self.lead) + self.num_tokens + len(self.trail)


class ItemShape(msgspec.Struct, frozen=True, array_like=True):
    """The result of analysis without decoding: the item's whole grid, prompt tokens (text of its segments included) and segments, in
    order."""

    kind: MediaKind
    grid: tuple[_Count, _Count, _Count]
    num_tokens: _Count
    segments: list[SegmentShape]
    second_per_grid_s: float = 0.0  # seconds of video per temporal patch, for M-RoPE


class MediaSpan(msgspec.Struct, frozen=True, array_like=True):
    """The place of an item's tokens in the expanded prompt: [start, start + shape.num_tokens). ``num_behind``: of the prompt's next
    tokens, so many are text that the family places with the item."""

    start: int
    shape: ItemShape
    num_behind: _Count = 0
