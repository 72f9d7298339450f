"""Content of messages and of results of calls in OpenAI's Responses API: text and media. Pure."""

from collections.abc import Mapping
from typing import Any

from ..content import TEXT_PARTS, MediaPart
from ..fields import Fields, kind_of, refuse, show
from ..harmless import NOTHING, OBJECT, Harmless, refuse_others
from ..media import INLINE_PARTS, MediaIntake

_CACHING = "prompt_cache_breakpoint"  # whatever fits is cached
_IGNORED_OF_TEXTS: Mapping[str, Harmless] = {"annotations": NOTHING, "logprobs": NOTHING, _CACHING: OBJECT}


def read_content(value: Any, path: str, role: str, intake: MediaIntake) -> str | tuple[str | MediaPart, ...]:
    """Read a text or a list of parts. Raises: RequestError."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse(path, f"expected a string or an array of parts, got {kind_of(value)}")
    return tuple(_read_part(part, f"{path}[{at}]", role, intake) for at, part in enumerate(value))


def _read_part(value: Any, path: str, role: str, intake: MediaIntake) -> str | MediaPart:
    part = Fields(value, path)
    kind = part.take_required("type")
    if kind in TEXT_PARTS:
        text = part.take_required_str("text")
        refuse_others(part, _IGNORED_OF_TEXTS)
        return text
    if isinstance(part.leftover.get(_CACHING), dict):
        part.take(_CACHING)
    if kind == "input_image":
        intake.read_image_url(part, path, role)
        return MediaPart("image")
    if not isinstance(kind, str) or kind not in INLINE_PARTS:
        raise refuse(f"{path}.type", f"is {show(kind)}, allowed are input_text, output_text, input_image, {', '.join(INLINE_PARTS)}")
    return MediaPart(intake.read(kind, part, path, role))
