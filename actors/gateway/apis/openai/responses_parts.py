"""Content of messages and of results of calls in OpenAI's Responses API: text and media. Pure."""

from typing import Any

from ...reading.content import TEXT_PARTS, MediaPart, read_text_part
from ...reading.field_rules import passes_over
from ...reading.field_table.responses import PARTS
from ...reading.fields import Fields, kind_of, refuse
from ...reading.media import INLINE_PARTS, MediaIntake


def read_content(value: Any, path: str, role: str, intake: MediaIntake) -> str | tuple[str | MediaPart, ...]:
    """Read a text or a list of parts; "" if there is nothing in it. Raises: RequestError."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise refuse(path, f"expected a string or an array of parts, got {kind_of(value)}")
    parts = [_read_part(part, f"{path}[{at}]", role, intake) for at, part in enumerate(value)]
    return tuple(part for part in parts if part is not None) or ""


def _read_part(value: Any, path: str, role: str, intake: MediaIntake) -> str | MediaPart | None:
    """Read a part; None if it is passed over."""
    part = Fields(value, path)
    kind = part.take_required("type")
    if passes_over(PARTS, kind, path, f"input_text, output_text, input_image, {', '.join(INLINE_PARTS)}"):
        return None
    if kind in TEXT_PARTS:
        return read_text_part(kind, part)
    if kind == "input_image":
        intake.read_image_url(part, path, role)
        return MediaPart("image")
    return MediaPart(intake.read(kind, part, path, role))
