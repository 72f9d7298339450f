"""The order in which rows, or columns, of a tensor lie in a GGUF file, where it is another than a checkpoint's. ``places`` of an order
are the file's places of a checkpoint's first, second and so on.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...schema.quantization import GgufQuantization
from ..architecture import LanguageConfig

_VALUES = ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias")  # of a DeltaNet: a row, or several, for each value head
_TOWER = "vision."  # in front of its names
_PATCHES = "vision.patch_embedder.input_proj.weight"  # of Gemma 4
_MIXED = ("in_proj_qkv", "conv1d")  # queries and keys, then values


class Turned(NamedTuple):
    """Rows of queries or keys of architecture "llama": row i of half j of a head stands at 2 i + j in it."""

    heads: int

    def places(self, length: int) -> Tensor:
        return torch.arange(length).view(self.heads, -1, 2).transpose(1, 2).reshape(-1)


class Halved(NamedTuple):
    """Rows of queries or keys of GLM's models that see: of the first ``turning`` of a head the even ones, then the odd ones."""

    heads: int
    turning: int

    def places(self, length: int) -> Tensor:
        heads = torch.arange(length).view(self.heads, -1)
        pairs = heads[:, : self.turning].reshape(self.heads, 2, -1).transpose(1, 2)
        return torch.cat([pairs.reshape(self.heads, -1), heads[:, self.turning :]], 1).reshape(-1)


class Tiled(NamedTuple):
    """Value heads of a DeltaNet, behind ``first`` rows of others: the first head of each key head, then the second ones and so on. A
    checkpoint has all of the first key head, then those of the second."""

    first: int
    key_heads: int
    value_heads: int

    def num_groups(self, columns: int) -> int:
        """Of columns that move together."""
        return self.value_heads

    def places(self, length: int) -> Tensor:
        heads = torch.arange(self.first, length).view(self.value_heads // self.key_heads, self.key_heads, -1)
        return torch.cat([torch.arange(self.first), heads.transpose(0, 1).flatten()])


class ByColours(NamedTuple):
    """Pixels of a patch, one colour behind the other. A checkpoint has the three values of each pixel together."""

    def num_groups(self, columns: int) -> int:
        return columns

    def places(self, length: int) -> Tensor:
        return torch.arange(length).view(3, -1).t().flatten()


class Orders(NamedTuple):
    """None: as a checkpoint's."""

    rows: Turned | Halved | Tiled | None = None
    columns: Tiled | ByColours | None = None


def orders_of(name: str, how: GgufQuantization, language: LanguageConfig) -> Orders:
    """Of the tensor that a source names."""
    if name == _PATCHES:
        return Orders(columns=ByColours())
    parts, in_tower = {*name.split(".")[-2:]}, name.startswith(_TOWER)
    if how.tower_heads if in_tower else how.permuted or how.halved:
        own = (how.tower_heads,) * 2 if in_tower else (language.heads.num_heads, language.heads.num_kv_heads)
        heads = next((number for part, number in zip(("q_proj", "k_proj"), own, strict=True) if part in parts), 0)
        halved = Halved(heads, how.halved) if how.halved and not in_tower else Turned(heads)
        return Orders(halved if heads else None)
    delta = language.delta
    if delta is None or delta.num_key_heads == delta.num_value_heads:
        return Orders()
    tiled = Tiled(0, delta.num_key_heads, delta.num_value_heads)
    if parts & {"out_proj"}:
        return Orders(columns=tiled)
    if parts & {*_MIXED}:
        return Orders(tiled._replace(first=2 * delta.num_key_heads * delta.key_dim))
    return Orders(tiled) if parts & {*_VALUES} else Orders()
