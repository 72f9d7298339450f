"""``mmrt model make``: a random-weight checkpoint of a given shape, which transformers loads too.

Nothing is downloaded. The command line, ``mmrt up`` without a configured model, and tests call it. Uses torch, not transformers.
"""

import json
import math
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from ..architecture import ModelConfig
from ..checkpoint.weight_specs import Shape, Source
from ..config import load_model_config
from ..families.family import CheckpointRecipe
from ..families.registry import FAMILIES, family_named, family_of
from .tokenizer import write_tokenizer

_SHARD_BYTES = 2_000_000_000
_REPEATED_FROM = 1 << 30  # values: of so many, a block is repeated, since drawing 8 billion takes minutes
_BLOCK = (1 << 24) - 3  # values; a prime: no row of a matrix begins where another does
_LOGIT_STD = 3.0  # of the language model's logits: near-ties are rare
_TIED_EMBEDDING_STD = 0.05  # small, or a tied model repeats its input: the residual stream begins with it
_SHARP = 1.5  # gain of projections that make attention choose and the MLP weigh; more of it, and bfloat16 errors grow


def make_checkpoint(
    shape: str,
    out: Path | str,
    family: str = "qwen2_5_omni",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a checkpoint directory ``out``; it appears complete or not at all. ``progress(done_bytes, total_bytes)``.

    Raises: ValueError for an unknown family or shape; FileExistsError if ``out`` already exists.
    """
    if family not in FAMILIES:
        raise ValueError(f"no family {family!r}; there are {', '.join(FAMILIES)}")
    recipes = family_named(family).recipes()
    if shape not in recipes:
        raise ValueError(f"no shape {shape!r} of {family}; there are {', '.join(recipes)}")
    write_checkpoint(recipes[shape], Path(out), seed, progress)


def write_checkpoint(recipe: CheckpointRecipe, out: Path, seed: int = 0, progress: Callable[[int, int], None] | None = None) -> None:
    """As ``make_checkpoint``, of any recipe. Raises: FileExistsError if ``out`` already exists; CheckpointError."""
    if out.exists():
        raise FileExistsError(f"{out} exists already")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    ids = write_tokenizer(partial, recipe)
    write_configs(partial, recipe, ids)
    config = load_model_config(partial)
    _write_weights(partial, config, recipe.are_stacked, sorted(ids.values()), seed, progress)
    partial.rename(out)


def write_configs(out: Path, recipe: CheckpointRecipe, ids: Mapping[str, int]) -> None:
    """Write the recipe's JSON files; ``ids`` are those of the added tokens."""
    for name, data in recipe.files(ids).items():
        write_json(out / name, data)


def write_json(file: Path, data: dict[str, object]) -> None:
    """Write an object as readable JSON."""
    file.write_text(json.dumps(data, indent=2) + "\n")


class _Tensor(NamedTuple):
    """A tensor of the files. Its values are as those of ``source``, which is all of it or a part."""

    name: str
    shape: Shape
    source: Source


def _tensors(config: ModelConfig, are_stacked: bool) -> list[_Tensor]:
    found = dict[str, _Tensor]()
    for source in (source for spec in family_of(config).tensor_specs(config) for source in spec.sources):
        whole = source.part if are_stacked and source.part is not None else source
        found.setdefault(whole.name, _Tensor(whole.name, whole.shape, source))
    return list(found.values())


def _write_weights(
    out: Path,
    config: ModelConfig,
    are_stacked: bool,
    control_ids: list[int],
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    family, made = family_of(config), _tensors(config, are_stacked)
    if not made:
        return
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    num_values = sum(math.prod(tensor.shape) for tensor in made)
    total = num_values * dtype.itemsize
    shards = list(_shards(made, dtype.itemsize))
    normals = _Normals(seed, dtype, repeated=num_values >= _REPEATED_FROM)
    weight_map: dict[str, str] = {}
    mode = stat.S_IMODE((out / "config.json").stat().st_mode)  # the umask's; safetensors keeps a file for its owner alone
    done = 0
    for number, shard in enumerate(shards, 1):
        tensors: dict[str, torch.Tensor] = {}
        for tensor in shard:
            tensors[family.checkpoint_name(tensor.name)] = _random(tensor, config, control_ids, normals)
            done += math.prod(tensor.shape) * dtype.itemsize
            if progress is not None:
                progress(done, total)
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, out / file, metadata={"format": "pt"})
        (out / file).chmod(mode)
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(tensors: list[_Tensor], itemsize: int) -> Iterator[list[_Tensor]]:
    shard: list[_Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        size = math.prod(tensor.shape) * itemsize
        if shard and num_bytes + size > _SHARD_BYTES:
            yield shard
            shard, num_bytes = [], 0
        shard.append(tensor)
        num_bytes += size
    yield shard


class _Normals:
    """Normal values, one tensor's after another's; ``repeated``: pieces of one block, used cyclically."""

    def __init__(self, seed: int, dtype: torch.dtype, repeated: bool) -> None:
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)
        self._block = torch.empty(_BLOCK, dtype=dtype).normal_(generator=self._generator) if repeated else None
        self._place = 0

    def draw(self, shape: Sequence[int], mean: float, std: float) -> torch.Tensor:
        values = torch.empty(shape, dtype=self._dtype)
        if self._block is None:
            return values.normal_(mean, std, generator=self._generator)
        rest = values.view(-1)
        while len(rest):
            piece = self._block[self._place : self._place + len(rest)]
            torch.mul(piece, std, out=rest[: len(piece)])
            rest = rest[len(piece) :]
            self._place = (self._place + len(piece)) % len(self._block)
        return values.add_(mean) if mean else values


def _random(tensor: _Tensor, config: ModelConfig, control_ids: list[int], normals: _Normals) -> torch.Tensor:
    """Values under which a random model's text depends on all of its prompt and does not fall into one token."""
    mean, std = _distribution(tensor.source, config)
    values = normals.draw(tensor.shape, mean, std)
    last = tensor.name == "lm_head.weight" or (tensor.name == "language.embed_tokens.weight" and config.language.tie_embeddings)
    if last:  # control tokens other than the two that end a turn are never said: their logits are 0 among many random ones
        values[[token for token in control_ids if token not in config.eos_token_ids]] = 0
    return values


def _distribution(source: Source, config: ModelConfig) -> tuple[float, float]:
    hidden = config.language.hidden_size
    name = source.name
    fan_in = math.prod(source.shape[1:])
    if name == "language.embed_tokens.weight":
        return 0.0, _TIED_EMBEDDING_STD if config.language.tie_embeddings else 1.0
    if name == "lm_head.weight":
        return 0.0, _LOGIT_STD / math.sqrt(hidden)
    offset = config.language.norm_offset if name.endswith("norm.weight") and ".linear_attn." not in name else 0.0
    if name == "language.norm.weight":
        scale = _LOGIT_STD / (_TIED_EMBEDDING_STD * math.sqrt(hidden)) if config.language.tie_embeddings else 1.0
        return scale - offset, 0.05 * scale
    if name.endswith(("_min", "_max")):  # of a tower's products: they cut off a few of the values
        return (-2.0, 0.2) if name.endswith("_min") else (2.0, 0.2)
    if name.endswith(("position_embedding_table", "pos_embedding")):
        return 0.0, 0.5
    if name.endswith((".A_log", ".dt_bias")):  # most heads remember some tens of tokens, as trained ones do
        return (-1.0, 1.5) if name.endswith(".A_log") else (-3.0, 1.0)
    if name.endswith(("q_norm.weight", "k_norm.weight")) and (scale := config.language.heads.scale):
        size = (source.shape[0] ** -0.5 / scale) ** 0.5  # scores are as large as with a scale of 1 / sqrt(head_dim)
        return size - offset, 0.1 * size
    if offset:
        return 1.0 - offset, 0.1
    if len(source.shape) == 1:
        return (0.0, 0.1) if name.endswith("bias") else (1.0, 0.1)
    sharp = any(part in name for part in (".q_proj.", ".k_proj.", ".down_proj."))
    return 0.0, (_SHARP if sharp else 1.0) / math.sqrt(fan_in)
