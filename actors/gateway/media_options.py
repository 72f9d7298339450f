"""Options of media: fields of a content part, or of ``mm_processor_kwargs`` for all media of the request. A part's own go first.

Pure. They are named as vLLM and Qwen's clients name them. Numbers only lower a limit: a value above that of the run or the model
is refused, never cut down in silence, and so is an unknown name.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ...models.architecture import VisionRules
from ...schema.media import MediaKind, MediaOptions
from ..host.media_rules import Range, option_ranges
from .fields import Fields, refuse

FOR_ALL = "mm_processor_kwargs"
_SOUND = "use_audio_in_video"
_ANY = Range(-(1 << 63), 1 << 63)


class OptionReader:
    """Reads the options of one request's media. ``kinds`` are the media that the model takes, ``rules`` the run's for pictures."""

    def __init__(self, for_all: Any, kinds: tuple[MediaKind, ...], rules: VisionRules | None) -> None:
        """``for_all`` is the value of mm_processor_kwargs. Its ranges are checked for each medium that it counts for.

        Raises: RequestError, 400 for unknown names and values of a wrong type.
        """
        self._takes_sound = "audio" in kinds
        self._ranges = option_ranges(rules) if rules is not None else {}
        fields = Fields({} if for_all is None else for_all, FOR_ALL)
        self._for_all = dict(fields.leftover)
        known = dict.fromkeys(name for kind in ("video", "image") for name in self._names(kind))
        self._read(fields, known, {})
        fields.refuse_leftover(_listed("media", known))

    def read(self, kind: MediaKind, part: Fields, most_pixels: int | None = None) -> MediaOptions:
        """Read the options of a medium; take its own out of the content part's fields, which must then be empty. ``most_pixels`` is
        the default where neither says how many, as far as other limits allow it.

        Raises: RequestError, 400 for unknown names, wrong types, and values out of range.
        """
        names, ranges = self._names(kind), self._ranges.get(kind, {})
        own = self._read(part, names, ranges)
        part.refuse_leftover(_listed(kind, names))
        others = Fields({name: self._for_all.get(name) for name in names if name not in own}, FOR_ALL)
        values = self._read(others, names, ranges) | own
        for low, high in (("min_frames", "max_frames"), ("min_pixels", "max_pixels")):
            if low in values and high in values and values[low] > values[high]:
                path = (part if low in own else others).path(low)
                raise refuse(path, f"is {values[low]}, more than {high}, which is {values[high]}")
        if most_pixels is not None and "max_pixels" in ranges and "max_pixels" not in values:
            least, most = ranges["max_pixels"]
            values["max_pixels"] = max(int(least), values.get("min_pixels", 0), min(most_pixels, int(most)))
        return MediaOptions(**values)

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
            elif name == "fps":
                values[name] = fields.take_float(name, least, most)
            else:
                values[name] = fields.take_int(name, int(least), int(most))
        values = {name: value for name, value in values.items() if value is not None}
        if values.get(_SOUND) and not self._takes_sound:
            raise refuse(fields.path(_SOUND), "is true, but the model takes no audio")
        return values


def _listed(owner: str, names: Iterable[str]) -> str:
    return f"options of {owner} are {', '.join(names)}" if names else f"there are no options of {owner}"
