"""What files with towers (mmproj) of all kinds say. Pure."""

from collections.abc import Collection
from pathlib import Path

from ..checkpoint.gguf_towers import has_swapped_names
from ..checkpoint.json_fields import JsonObject
from ..errors import CheckpointError
from .contents import Contents, strings_of

_CONTROL = 3  # a kind of tokens


def facts_of(tower: Contents, part: str = "clip.vision.") -> JsonObject:
    """Of its part that sees, or another, by keys without the beginning that they share."""
    own = {key.removeprefix(part): value for key, value in tower.metadata.items() if key.startswith(part)}
    return JsonObject(own, tower.where, part.removesuffix("."))


def shape_of(contents: Contents, name: str, axes: int = 2) -> tuple[int, ...]:
    """Of a matrix, or a tensor of so many axes. Raises: CheckpointError."""
    found = contents.shapes.get(name, ())
    if len(found) != axes:
        raise CheckpointError(f"{contents.where}: tensor {name!r} is missing, or has not {axes} axes")
    return found


def check_activation(tower: Contents, *choices: str) -> str:
    """The activation that a tower's flags tell, one of ``choices``. Raises: CheckpointError for another."""
    told = JsonObject(tower.metadata, tower.where)
    found = " and ".join(name for name in ("gelu", "silu") if told.boolean(f"clip.use_{name}", default=False)) or "quick_gelu"
    if found not in choices:
        raise told.error("clip.use_gelu and clip.use_silu", f"tell of {found}, expected {' or '.join(choices)}")
    return found


def inner_width(tower: Contents) -> int:
    """Of a layer's feed-forward, as its matrices tell: older files say another, and have the two by each other's names. Raises:
    CheckpointError."""
    return shape_of(tower, f"v.blk.0.ffn_{'down' if has_swapped_names(tower.shapes) else 'up'}.weight")[0]


def tokens_of(contents: Contents) -> list[str]:
    """A model's vocabulary. Raises: CheckpointError."""
    return strings_of(contents.metadata, "tokenizer.ggml.tokens", contents.where)


def with_controls(contents: Contents, names: Collection[str]) -> Contents:
    """A model's file in which tokens of these names are control tokens. Raises: CheckpointError if it lacks one."""
    tokens = tokens_of(contents)
    if absent := [name for name in names if name not in tokens]:
        raise CheckpointError(f"{contents.where}: tokenizer.ggml.tokens has no {absent[0]!r}, which stands at media")
    kinds = contents.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        return contents  # the tokenizer says so
    kinds = [_CONTROL if token in names else kind for token, kind in zip(tokens, kinds, strict=True)]
    return contents._replace(metadata={**contents.metadata, "tokenizer.ggml.token_type": kinds})


def check_width(contents: Contents, tower: Contents, rows: int) -> None:
    """Raises: CheckpointError unless the rows that the tower makes are as wide as the decoder."""
    if rows != (hidden := contents.shapes["token_embd.weight"][1]):
        raise CheckpointError(
            f"{tower.where}: makes rows of {rows} values, {Path(contents.where).name} has {hidden}: it is of another model"
        )
