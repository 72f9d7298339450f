"""A checkpoint directory made of GGUF files: config.json, tokenizer and template of their metadata, and links to the files.

All of mmrt then reads it as any checkpoint; the tensors stay where they are (``checkpoint/gguf_files``).
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..architecture import AttentionConfig, LanguageConfig
from ..checkpoint import gguf_towers
from ..checkpoint.files import GGUF_SUFFIX, gguf_shards, model_stem, move_directory
from ..checkpoint.gguf_files import GgufFile, read_gguf
from ..checkpoint.gguf_names import layer_of
from ..checkpoint.weights import check_weights
from ..config import load_model_config
from ..errors import CheckpointError
from .contents import FACTORS, Contents, Fields
from .fields import check_rope, config_fields, generation_fields, number_of_blocks
from .made import MADE_OF, UNUSED, digest_of
from .tokenizer import make_tokenizer
from .towers import choose_tower, contents_with, tower_fields


def gguf_directory(path: Path, home: Path, towers: Sequence[Path] = (), tower: Path | None = None) -> Path:
    """Return the directory of the model whose file, or first shard, is ``path``; it is made below ``home`` if it is not there yet.
    ``tower``: the file of the part that sees; without one that of ``towers`` that fits, if any does.

    Raises: CheckpointError for files that cannot be read, and models that are not served.
    """
    shards = gguf_shards(path)
    others = list(towers) if tower is None else [tower]
    try:
        made = home / digest_of([*shards, *others]) / model_stem(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror}") from None
    if not (made / "config.json").is_file():
        contents = _contents([read_gguf(shard) for shard in shards])
        config = config_fields(contents)
        chosen, unused = _tower_beside(contents, others, config) if tower is None else (_contents([read_gguf(tower)]), [])
        _write(made, contents, config, chosen, {MADE_OF: [str(file.resolve()) for file in (*shards, *others)], UNUSED: unused}, shards)
    return made


def _tower_beside(contents: Contents, files: Sequence[Path], config: Fields) -> tuple[Contents | None, list[str]]:
    """``choose_tower`` of files, some of which may not be read."""
    towers, said = list[Contents](), list[str]()
    for file in files:
        try:
            towers.append(_contents([read_gguf(file)]))
        except CheckpointError as error:
            said.append(str(error))
    chosen, misfits = choose_tower(contents, towers, config)
    return chosen, [] if chosen else said + misfits


def _write(
    made: Path, contents: Contents, config: Fields, tower: Contents | None, notes: Mapping[str, list[str]], shards: list[Path]
) -> None:
    """Write a directory beside its place, and move it there. ``notes``: lists by the names of their files."""
    contents = contents_with(contents, tower)
    metadata = contents.metadata
    tokenizer, names = make_tokenizer(metadata, contents.where)
    fields = {
        "config.json": config,
        "generation_config.json": generation_fields(contents),
        "tokenizer_config.json": names,
        **notes,
        **({} if tower is None else tower_fields(contents, tower, config)),
    }
    texts = {name: json.dumps(value, indent=2, ensure_ascii=False) for name, value in fields.items()} | {"tokenizer.json": tokenizer}
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        texts["chat_template.jinja"] = template
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent, ignore_cleanup_errors=True) as folder:
            draft = Path(folder) / made.name
            draft.mkdir()
            for name, text in texts.items():
                (draft / name).write_text(text, encoding="utf-8")
            for file in shards:
                _link(draft, file, file.name)
            if tower is not None:
                _link(draft, Path(tower.where), f"mmproj-{Path(tower.where).name}")  # another name than any of the model's
            _check(draft, contents)
            move_directory(draft, made)
    except OSError as error:
        raise CheckpointError(f"{made}: cannot be written: {error.strerror}") from None


def _link(folder: Path, file: Path, name: str) -> None:
    (folder / (name if name.endswith(GGUF_SUFFIX) else f"{name}{GGUF_SUFFIX}")).symlink_to(file.resolve())


def _check(draft: Path, contents: Contents) -> None:
    """Check what the draft of a directory says. Raises: CheckpointError."""
    try:
        config = load_model_config(draft)
        check_rope(contents, [rope.stretch for rope in config.language.ropes])
        found = check_weights(draft, config)
    except CheckpointError as error:
        place = contents.where
        raise CheckpointError(str(error).replace(f"{draft}/config.json", place).replace(str(draft), place)) from None
    unused = {*FACTORS, *gguf_towers.UNUSED, *_shared(config.language)}
    guessing = range(config.language.num_layers, number_of_blocks(contents))  # layers of which mmrt has no use
    if not found.problems and (unread := [name for name in found.unread if name not in unused and layer_of(name) not in guessing]):
        more = f", and {len(unread) - 1} others" * (len(unread) > 1)
        raise CheckpointError(f"{contents.where}: tensor {unread[0]!r} is none of this model's{more}")


def _shared(language: LanguageConfig) -> Iterator[str]:
    """Tensors that a file may have of layers that see the keys and values of earlier ones, by their names in a checkpoint."""
    for number, layer in enumerate(language.layers):
        if isinstance(layer.mixer, AttentionConfig) and layer.mixer.owner >= 0:
            yield from (f"model.layers.{number}.self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm"))


def _contents(files: list[GgufFile]) -> Contents:
    """Of all shards; the first has the metadata."""
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    metadata: Mapping[str, Any] = files[0].metadata
    count = metadata.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise CheckpointError(f"{files[0].path}: split.tensors.count is {count}, its {len(files)} shards have {len(tensors)}")
    factors: dict[str, tuple[float, ...]] = {}
    for file in files:
        for name in FACTORS & file.tensors.keys():
            rope = file.tensors[name]
            if rope.dtype != "F32":
                raise CheckpointError(f"{file.path}: tensor {name!r} is of type {rope.dtype}, expected F32")
            factors[name] = tuple(np.frombuffer(file.mapped, np.float32, rope.num_bytes // 4, rope.start).tolist())
    return Contents(
        where=str(files[0].path),
        metadata=metadata,
        types={name: tensor.dtype for name, tensor in tensors.items()},
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        factors=factors,
    )
