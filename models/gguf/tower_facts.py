"""What files with towers (mmproj) of all kinds say. Pure."""

from pathlib import Path

from ..checkpoint.json_fields import JsonObject
from ..errors import CheckpointError
from .contents import Contents

_VISION = "clip.vision."


def facts_of(tower: Contents) -> JsonObject:
    """Of its part that sees, by keys without the beginning that they share."""
    own = {key.removeprefix(_VISION): value for key, value in tower.metadata.items() if key.startswith(_VISION)}
    return JsonObject(own, tower.where, _VISION.removesuffix("."))


def shape_of(tower: Contents, name: str) -> tuple[int, ...]:
    """Of a matrix. Raises: CheckpointError."""
    found = tower.shapes.get(name, ())
    if len(found) != 2:
        raise CheckpointError(f"{tower.where}: tensor {name!r} is missing, or has not 2 axes")
    return found


def check_width(contents: Contents, tower: Contents, rows: int) -> None:
    """Raises: CheckpointError unless the rows that the tower makes are as wide as the decoder."""
    if rows != (hidden := contents.shapes["token_embd.weight"][1]):
        raise CheckpointError(
            f"{tower.where}: makes rows of {rows} values, {Path(contents.where).name} has {hidden}: it is of another model"
        )
