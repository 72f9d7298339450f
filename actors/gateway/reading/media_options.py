"""Options of media: fields of a content part, or of ``mm_processor_kwargs`` or ``media_io_kwargs`` for all media of the request. A
part's own go first.

Pure. They are named as vLLM and Qwen's clients name them. Numbers only lower a limit: a value above that of the run or the model
is refused, never cut down in silence. Of a video that comes as frames ``fps`` and ``sample_fps`` say at what rate these were taken.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ....models.media_config import VisionRules
from ....runtime.config.sections import AUTO, MAX_FPS, MIN_FPS
from ....schema.media import AUTO_SHARE, MediaKind, MediaOptions
from ...host.media_rules import SHARES, Range, option_ranges
from .field_rules import settle
from .field_table import media as table
from .fields import Fields, Schema, refuse, show

FOR_ALL = "mm_processor_kwargs"
FOR_READING = "media_io_kwargs"
FRAMES_FPS = 2.0  # of frames whose rate nobody says, as with Qwen's tools and processors
_SOUND = "use_audio_in_video"
_SHARE = "token_share"
_SAMPLED = "do_sample_frames"
_FRAME_COUNT = "num_frames"
_RATES = ("sample_fps", "fps", "raw_fps")  # of frames; the last, of the video that they were taken from, says nothing about them
_NUMBER: Schema = {"type": "number"}
_FPS: Schema = {"anyOf": [_NUMBER, {"type": "array", "items": _NUMBER, "minItems": 1}]}  # a list: of each video, as Qwen's tools say it
_ANY = Range(-(1 << 63), 1 << 63)
_RATE_RANGE = Range(MIN_FPS, MAX_FPS)


class OptionReader:
    """Reads the options of one request's media. ``kinds`` are the media that the model takes, ``rules`` the run's for pictures."""

    def __init__(self, for_all: Any, kinds: tuple[MediaKind, ...], rules: VisionRules | None, for_reading: Any = None) -> None:
        """``for_all`` is the value of mm_processor_kwargs, ``for_reading`` that of media_io_kwargs. Their ranges are checked for each
        medium that they count for.

        Raises: RequestError, 400 for unknown names and values of a wrong type.
        """
        self._takes_sound = "audio" in kinds
        self._ranges = option_ranges(rules) if rules is not None else {}
        self._num_videos = 0
        fields = Fields({} if for_all is None else for_all, FOR_ALL)
        self._for_all = dict(fields.leftover)
        known = dict.fromkeys(name for kind in ("video", "image") for name in self._names(kind))
        self._for_video = _read_for_reading(for_reading) if "fps" in known else {}
        rates = fields.take("fps", _FPS) if "fps" in known else None
        for rate in (rates or [None]) if isinstance(rates, list) else [rates]:
            of_one = Fields({"fps": rate}, FOR_ALL)
            if isinstance(rates, list):
                of_one.require("fps")
            of_one.take_float("fps", *_ANY)
        self._read(fields, known, {})
        if known:
            fields.take_flag(_SAMPLED)
        settle(fields, table.KWARGS._replace(known=_listed("media", known)))

    def read(self, kind: MediaKind, part: Fields, most_pixels: int | None = None, share: float = 1.0) -> MediaOptions:
        """Read the options of a medium; take its own out of the content part's fields, which must then be empty. ``most_pixels`` is
        the default where neither says how many, as far as other limits allow it; ``share`` that of ``token_share``.

        Raises: RequestError, 400 for unknown names, wrong types, and values out of range.
        """
        if kind == "video" and self._for_all.get(_SAMPLED) is False:
            raise refuse(
                f"{FOR_ALL}.{_SAMPLED}", "is false, but of a video that is one file frames are sampled; send its frames instead"
            )
        values = self._values(kind, part, self._names(kind), self._ranges.get(kind, {}))
        ranges = self._ranges.get(kind, {})
        if most_pixels is not None and "max_pixels" in ranges and "max_pixels" not in values:
            least, most = ranges["max_pixels"]
            values["max_pixels"] = max(int(least), values.get("min_pixels", 0), min(most_pixels, int(most)))
        return MediaOptions(**({_SHARE: share} if _SHARE in ranges else {}) | values)

    def read_frames(self, part: Fields, share: float = 1.0) -> tuple[float, MediaOptions]:
        """Read the options of a video that comes as frames, and return with them the rate at which these were taken. ``share``: as of
        ``read``. Raises: RequestError, as ``read``."""
        ranges = {**self._ranges.get("video", {}), **dict.fromkeys(_RATES, _RATE_RANGE)}
        values = self._values("video", part, (*(name for name in ranges if name not in _RATES), *_RATES), ranges)
        rates = [values.pop(name, None) for name in _RATES]
        return rates[0] or rates[1] or FRAMES_FPS, MediaOptions(**({_SHARE: share} if _SHARE in ranges else {}) | values)

    def _values(self, kind: MediaKind, part: Fields, names: tuple[str, ...], ranges: Mapping[str, Range]) -> dict[str, Any]:
        """Return the values of these names, of the part and of the request."""
        values = self._read(part, names, ranges)
        settle(part, table.PART._replace(known=_listed(kind, names)))
        places = dict.fromkeys(values, part)
        for given, path in ((self._shared(kind), FOR_ALL), (self._for_video if kind == "video" else {}, f"{FOR_READING}.video")):
            others = Fields({name: given.get(name) for name in names if name not in values}, path)
            found = self._read(others, names, ranges)
            places |= dict.fromkeys(found, others)
            values |= found
        for low, high in (("min_frames", "max_frames"), ("min_pixels", "max_pixels")):
            if low in values and high in values and values[low] > values[high]:
                raise refuse(places[low].path(low), f"is {values[low]}, more than {high}, which is {values[high]}")
        return values

    def _shared(self, kind: MediaKind) -> Mapping[str, Any]:
        """Return mm_processor_kwargs for the next medium of this kind: its ``fps`` may be a list, with one for each video."""
        if kind != "video":
            return self._for_all
        number, rates = self._num_videos, self._for_all.get("fps")
        self._num_videos += 1
        if not isinstance(rates, list):
            return self._for_all
        if len(rates) > 1 and number >= len(rates):
            raise refuse(f"{FOR_ALL}.fps", f"has {len(rates)} entries, the request has more videos")
        return {**self._for_all, "fps": rates[min(number, len(rates) - 1)]}

    def _names(self, kind: MediaKind) -> tuple[str, ...]:
        ranges = self._ranges.get(kind, {})
        return (*ranges, _SOUND) if ranges and kind == "video" else tuple(ranges)

    def _read(self, fields: Fields, names: Iterable[str], ranges: Mapping[str, Range]) -> dict[str, Any]:
        """Read the options of these names that are there."""
        values: dict[str, Any] = {}
        for name in names:
            least, most = ranges.get(name, _ANY)
            if name == _SOUND:
                values[name] = fields.take_flag(name)
            elif name == _SHARE:
                values[name] = _take_share(fields)
            elif name in _RATES:
                values[name] = fields.take_float(name, least, most)
            else:
                values[name] = fields.take_int(name, int(least), int(most))
        values = {name: value for name, value in values.items() if value is not None}
        if values.get(_SOUND) and not self._takes_sound:
            raise refuse(fields.path(_SOUND), "is true, but the model takes no audio")
        return values


def _take_share(fields: Fields) -> float | None:
    """Take a share of tokens, or "auto"."""
    value = fields.take(_SHARE, {"anyOf": [{**_NUMBER, "minimum": SHARES.least, "maximum": SHARES.most}, {"const": AUTO}]})
    if value is None or value == AUTO:
        return None if value is None else AUTO_SHARE
    if type(value) not in (int, float):
        raise refuse(fields.path(_SHARE), f'expected a number or "{AUTO}", got {show(value)}')
    if not SHARES.least <= value <= SHARES.most:
        raise refuse(fields.path(_SHARE), f'is {show(value)}, allowed are {SHARES.least:g} to {SHARES.most:g} and "{AUTO}"')
    return float(value)


def _listed(owner: str, names: Iterable[str]) -> str:
    return f"options of {owner} are {', '.join(names)}" if names else f"there are no options of {owner}"


def _read_for_reading(value: Any) -> dict[str, Any]:
    """Return the options of videos in media_io_kwargs, as vLLM has them. Raises: RequestError for others."""
    fields = Fields({} if value is None else value, FOR_READING)
    video = fields.take("video")
    given = Fields({} if video is None else video, f"{FOR_READING}.video")
    settle(fields, table.READING)
    found: dict[str, Any] = {"fps": given.take_float("fps", *_RATE_RANGE), "max_frames": given.take_int(_FRAME_COUNT, -1, 1 << 31)}
    settle(given, table.READING_VIDEO)
    if found["max_frames"] in (-1, 0):  # all
        found["max_frames"] = None
    return found
