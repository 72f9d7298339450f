"""A checkpoint directory made of GGUF files: config.json, tokenizer and template of their metadata, and links to the files.

All of mmrt then reads it as any checkpoint; the tensors stay where they are (``checkpoint/gguf_files``).
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.files import GGUF_SUFFIX, gguf_shards, model_stem, move_directory
from ..checkpoint.gguf_files import GgufFile, read_gguf
from ..checkpoint.weights import check_weights
from ..config import load_model_config
from ..errors import CheckpointError
from .fields import ROPE_FACTORS, Contents, check_rope, config_fields, generation_fields
from .made import digest_of
from .tokenizer import make_tokenizer

_FORMAT = 4  # of the directories: another number makes all anew


def gguf_directory(path: Path, home: Path) -> Path:
    """Return the directory of the model whose file, or first shard, is ``path``; it is made below ``home`` if it is not there yet.

    Raises: CheckpointError for files that cannot be read, and models that are not served.
    """
    shards = gguf_shards(path)
    try:
        made = home / digest_of(shards) / model_stem(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    if not (made / "config.json").is_file():
        files = [read_gguf(shard) for shard in shards]
        _write(made, files)
    return made


def _write(made: Path, files: list[GgufFile]) -> None:
    """Write a directory beside its place, and move it there."""
    contents = _contents(files)
    metadata, config = contents.metadata, config_fields(contents)
    tokenizer, names = make_tokenizer(metadata, contents.where)
    texts = {
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps(generation_fields(contents), indent=2),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": json.dumps(names, indent=2, ensure_ascii=False),
    }
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        texts["chat_template.jinja"] = template
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent, ignore_cleanup_errors=True) as folder:
            draft = Path(folder) / made.name
            draft.mkdir()
            for name, text in texts.items():
                (draft / name).write_text(text, encoding="utf-8")
            for file in files:
                name = file.path.name if file.path.suffix == GGUF_SUFFIX else f"{file.path.name}{GGUF_SUFFIX}"
                (draft / name).symlink_to(file.path.resolve())
            _check(draft, contents)
            move_directory(draft, made)
    except OSError as error:
        raise CheckpointError(f"{made}: cannot be written: {error.strerror}") from None


def _check(draft: Path, contents: Contents) -> None:
    """Check what the draft of a directory says. Raises: CheckpointError."""
    try:
        config = load_model_config(draft)
        check_rope(contents, config.language.ropes[0].stretch)
        found = check_weights(draft, config)
    except CheckpointError as error:
        place = contents.where
        raise CheckpointError(str(error).replace(f"{draft}/config.json", place).replace(str(draft), place)) from None
    if not found.problems and (unread := [name for name in found.unread if name != ROPE_FACTORS]):
        more = f", and {len(unread) - 1} others" * (len(unread) > 1)
        raise CheckpointError(f"{contents.where}: tensor {unread[0]!r} is none of this model's{more}")


def _contents(files: list[GgufFile]) -> Contents:
    """Of all shards; the first has the metadata."""
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    metadata: Mapping[str, Any] = files[0].metadata
    count = metadata.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise CheckpointError(f"{files[0].path}: split.tensors.count is {count}, its {len(files)} shards have {len(tensors)}")
    factors: tuple[float, ...] = ()
    for file in files:
        rope = file.tensors.get(ROPE_FACTORS)
        if rope is not None and rope.dtype != "F32":
            raise CheckpointError(f"{file.path}: tensor {ROPE_FACTORS!r} is of type {rope.dtype}, expected F32")
        if rope is not None:
            factors = tuple(np.frombuffer(file.mapped, np.float32, rope.num_bytes // 4, rope.start).tolist())
    return Contents(
        where=str(files[0].path),
        metadata=metadata,
        types={name: tensor.dtype for name, tensor in tensors.items()},
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        rope_factors=factors,
    )
