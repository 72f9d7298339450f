"""Which files a checkpoint directory has: the shards of its weights, its tokenizer, its chat template; and GGUF's. Without torch.

``SafetensorsFiles`` and ``ChatTemplate`` read what is found here; ``mmrt up`` and ``mmrt doctor`` ask beforehand what is missing.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
VOCABULARY, MERGES = "vocab.json", "merges.txt"  # of a tokenizer without tokenizer.json
GGUF_SUFFIX = ".gguf"
GGUF_MAGIC = b"GGUF"
_OTHER_FORM = "consolidated"  # how names of files begin that hold the same weights under other names
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # of a directory that peft has written
ADAPTER = "mmrt-adapter"  # in a directory that was made for it: a link to an adapter's directory
_SHARD = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
_WEIGHTS = re.compile(r"I?Q[1-8](_[0-9A-Z]+)*|B?F16|F32", re.IGNORECASE)  # formats in files' names
_TOWER_FORMATS = ("f16", "bf16", "f32")  # the one that is taken first in front
_POINTER = b"version https://git-lfs"  # how a file begins that Git LFS has not fetched


def missing_files(path: Path, has_weights: bool = True) -> list[str]:
    """Say of each kind of file that a run needs what is missing; nothing of a whole checkpoint. ``config.json`` is not looked for.
    ``has_weights``: false of the null model."""
    said = []
    for look in (*((weight_files,) if has_weights else ()), tokenizer_file, template_source):
        try:
            look(path)
        except CheckpointError as error:
            said.append(str(error).removeprefix(f"{path}: ").replace(f"{path}/", ""))
    return said


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files: those that the index names, or all; where there are none, GGUF files. Raises: CheckpointError if
    there are none, or not all."""
    index = path / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: not an index of safetensors shards: {error!r}") from None
        files = [path / name for name in names if isinstance(name, str) and Path(name).name == name]
        if len(files) != len(names):
            raise CheckpointError(f"{index}: names a shard outside of the model directory")
    else:
        found = sorted(path.glob("*.safetensors"))
        files = [file for file in found if not file.name.startswith(_OTHER_FORM)]
        if found and not files:
            raise CheckpointError(f"{found[0]}: is in Mistral's own form; expected model.safetensors, in that of transformers")
        files = files or sorted(path.glob(f"*{GGUF_SUFFIX}"))
    if not files:
        raise CheckpointError(f"{path}: holds no *.safetensors file")
    if absent := [file for file in files if not file.is_file()]:
        others = f", and {len(absent) - 1} of the others" if len(absent) > 1 else ""
        raise CheckpointError(f"{absent[0]}: missing, though {INDEX} names it{others}")
    for file in files:
        _expect_contents(file)
    return files


def files_of_tensors(path: Path) -> list[Path]:
    """Return all files of tensors that a directory has, its adapter's too; none of the null model."""
    return sorted(file for file in (*path.iterdir(), *path.glob(f"{ADAPTER}/*")) if file.suffix in (".safetensors", GGUF_SUFFIX))


def adapted_directory(checkpoint: Path, adapter: Path, home: Path) -> Path:
    """Return a directory of links to a checkpoint's files and to an adapter's directory, made below ``home`` if it is not there yet.

    Raises: CheckpointError.
    """
    if (checkpoint / ADAPTER).is_symlink():
        raise CheckpointError(f"{checkpoint} has an adapter already: name the checkpoint that it was made of")
    if not adapter.is_dir():
        raise CheckpointError(f"{adapter} is not a directory: expected an adapter that peft has written")
    links = {file.name: file.resolve() for file in sorted(checkpoint.iterdir()) if file.is_file()} | {ADAPTER: adapter.resolve()}
    digest = hashlib.sha256(repr(sorted(links.items())).encode()).hexdigest()[:16]
    made = home / digest / f"{checkpoint.name}+{adapter.resolve().name}"
    if not made.is_dir():
        made.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=made.parent))
        for name, target in links.items():
            (draft / name).symlink_to(target)
        move_directory(draft, made)
    return made


def move_directory(draft: Path, made: Path) -> None:
    """Move a directory to its place, unless another process has been first, with the same."""
    try:
        os.replace(draft, made)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not made.is_dir():
            raise


def begins_as_gguf(path: Path) -> bool:
    """Whether a file is GGUF, whatever its name: Ollama's have digests as names. Raises: OSError."""
    with path.open("rb") as stream:
        return stream.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def gguf_shards(path: Path) -> list[Path]:
    """All files of a model of which ``path`` is one, in order. Raises: CheckpointError for missing ones."""
    found = _SHARD.fullmatch(path.name)
    if found is None:
        return [path]
    stem, count = found[1], int(found[3])
    if not 1 <= int(found[2]) <= count:
        raise CheckpointError(f"{path}: its name tells of shard {int(found[2])} of {count}")
    shards = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if absent := [shard.name for shard in shards if not shard.is_file()]:
        raise CheckpointError(f"{path}: {len(absent)} of {count} shards are missing, {absent[0]} among them")
    return shards


def model_stem(path: Path) -> str:
    """The name of a model by one of its files."""
    found = _SHARD.fullmatch(path.name)
    return path.stem if found is None else found[1]


def is_first_shard(path: Path) -> bool:
    """Whether a model's files begin with this one."""
    found = _SHARD.fullmatch(path.name)
    return found is None or int(found[2]) == 1


def is_tower(path: Path) -> bool:
    """Whether a GGUF file has, by its name, the part of a model that sees."""
    return "mmproj" in path.name.lower() and path.suffix == GGUF_SUFFIX


def best_tower(model: Path, towers: Iterable[Path]) -> Path | None:
    """Of several files that may have a model's part that sees, that whose name has most of the words of the model's; of these the
    nearest, and of these one of 16 bits."""

    def rank(tower: Path) -> tuple[int, bool, int, Path]:
        shared = _words(tower) & _words(model)
        form = next((place for place, form in enumerate(_TOWER_FORMATS) if form in _split(tower.stem)), len(_TOWER_FORMATS))
        return -len(shared), tower.parent != model.parent, form, tower

    return min(towers, key=rank, default=None)


def _words(path: Path) -> set[str]:
    """Those of a file's name, without the format of its weights."""
    return _split(_WEIGHTS.sub("", path.stem))


def _split(name: str) -> set[str]:
    return set(re.findall(r"[^-_. ]+", name.lower()))


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer's file: tokenizer.json, or vocab.json beside merges.txt. Raises: CheckpointError if there is none."""
    file = path / TOKENIZER
    if not file.is_file():
        if not ((path / VOCABULARY).is_file() and (path / MERGES).is_file()):
            raise CheckpointError(f"{file} is missing")
        _expect_contents(path / MERGES)
        file = path / VOCABULARY
    _expect_contents(file)
    return file


def template_source(path: Path) -> str:
    """Return a checkpoint's chat template: of chat_template.jinja, chat_template.json or tokenizer_config.json, in this order.

    Raises: CheckpointError if none of them has one.
    """
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        file = path / name
        if file.is_file():
            try:
                source = _default_template(json.loads(file.read_bytes()))
            except ValueError as error:
                raise CheckpointError(f"{file} is not JSON: {error}") from error
            if source is not None:
                return source
    raise CheckpointError(f"{path}: has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)")


def _default_template(value: Any) -> str | None:
    """``chat_template`` of a JSON file: a string, or a list of named templates from which ``default`` is taken."""
    template = value.get("chat_template") if isinstance(value, dict) else None
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _expect_contents(file: Path) -> None:
    """Raise CheckpointError for a pointer in a file's place."""
    with file.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise CheckpointError(f"{file} is a pointer of Git LFS in place of the file (git lfs pull)")
