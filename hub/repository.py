"""What a hub says of a repository, and which of its files a model takes (pure).

Every name, size and digest is checked before it is used: an answer may come from anybody.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..models.checkpoint.files import ADAPTER_FILES, GGUF_SUFFIX, INDEX, TOKENIZER, best_tower, is_first_shard, is_tower, model_stem
from .errors import HubError, ModelNotFoundError
from .names import HubName

MAX_ANSWER_BYTES = 32 << 20
_MAX_SMALL_BYTES = 256 << 20  # of all files beside the weights
_MAX_FILE_BYTES = 1 << 44
_MAX_WEIGHT_FILES = 1000  # large models have some 200
_MAX_NAME = 400
_SMALL = (".json", ".jinja", ".model", ".txt")  # configuration, tokenizer, template; never programs or pickles
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGESTS = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_QUANTIZATION = re.compile(r"(?:UD-)?(?:I?Q[1-8]_[0-9A-Z]+(?:_[0-9A-Z]+)*|TQ[12]_0|BF16|FP?16|FP?32|MXFP4(?:_MOE)?)", re.IGNORECASE)
_USUAL = ("q4_k_m", "q8_0")  # taken where no tag says otherwise
_OTHER_MODELS = ("adapter_", "consolidated")  # how weights begin that are another form, or a part, of the model
_SHOWN = 12  # of the tags that a message lists


class RemoteFile(NamedTuple):
    """``digest``: SHA-256 of a large file, git's SHA-1 of a small one, the name of its blob in the cache; empty: not told."""

    name: str
    num_bytes: int
    digest: str


class Repository(NamedTuple):
    """A model at a commit."""

    name: str
    commit: str
    files: tuple[RemoteFile, ...]


class _Lfs(msgspec.Struct):
    sha256: str
    size: int


class _Sibling(msgspec.Struct):
    rfilename: str
    size: int | None = None
    blobId: str | None = None
    lfs: _Lfs | None = None


class _Answer(msgspec.Struct):
    sha: str
    siblings: list[_Sibling]


def parse_repository(name: str, body: bytes) -> Repository:
    """Read the hub's answer about a model. Raises: HubError naming what is wrong with it."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HubError(f"{name}: the hub's answer is not about a model: {error}") from None
    if not _COMMIT.fullmatch(answer.sha):
        raise HubError(f"{name}: the hub tells of commit {answer.sha[:60]!r}, expected 40 hexadecimal digits")
    files = {sibling.rfilename: _file(name, sibling) for sibling in answer.siblings}
    if len(files) < len(answer.siblings):
        raise HubError(f"{name}: the hub lists a file twice")
    return Repository(name, answer.sha, tuple(files[file] for file in sorted(files)))


def _file(name: str, sibling: _Sibling) -> RemoteFile:
    file = sibling.rfilename
    parts = file.split("/")
    if not 0 < len(file) <= _MAX_NAME or not file.isprintable() or "\\" in file or any(part in ("", ".", "..") for part in parts):
        raise HubError(f"{name}: the hub lists a file {file[:60]!r}, which is no name within a directory")
    size = sibling.size if sibling.lfs is None else sibling.lfs.size
    if size is None or not 0 <= size <= _MAX_FILE_BYTES:
        raise HubError(f"{name}: the hub tells of {size} bytes for {file}, expected 0 to {_MAX_FILE_BYTES}")
    digest = (sibling.blobId or "") if sibling.lfs is None else sibling.lfs.sha256
    if digest and not _DIGESTS.fullmatch(digest):
        raise HubError(f"{name}: the hub tells of digest {digest[:80]!r} for {file}, expected 40 or 64 hexadecimal digits")
    return RemoteFile(file, size, digest)


def is_gguf(name: HubName, files: Sequence[str]) -> bool:
    """Whether a model of these files is one of GGUF: a repository with a configuration and a tokenizer is a checkpoint, unless a tag
    asks for GGUF."""
    has_gguf = any(file.endswith(GGUF_SUFFIX) for file in files)
    if name.tag and not has_gguf:
        raise ModelNotFoundError(f"{name}: {name.repo} has no GGUF files, which tags choose from; leave :{name.tag} out")
    return has_gguf and (bool(name.tag) or not {"config.json", TOKENIZER} <= set(files))


def small_files(repository: Repository) -> list[RemoteFile]:
    """Configuration, tokenizer, template and the index of weights. Raises: HubError."""
    found = [file for file in repository.files if "/" not in file.name and file.name.endswith(_SMALL)]
    if (total := sum(file.num_bytes for file in found)) > _MAX_SMALL_BYTES:
        raise HubError(f"{repository.name}: has {total} bytes beside its weights, expected at most {_MAX_SMALL_BYTES}")
    return _with_digests(repository, found)


def safetensors_files(repository: Repository, index: bytes | None) -> list[RemoteFile]:
    """The files of weights: those that the index names. ``index``: its contents, if there is one. Raises: HubError."""
    files = {file.name: file for file in repository.files if "/" not in file.name and file.name.endswith(".safetensors")}
    if index is not None:
        try:
            names = sorted(set(msgspec.json.decode(index)["weight_map"].values()))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise HubError(f"{repository.name}: {INDEX} is not an index of safetensors files: {error!r}") from None
        if absent := [name for name in names if name not in files]:
            raise HubError(f"{repository.name}: {INDEX} names {str(absent[0])[:80]!r}, which the repository does not have")
        return _with_digests(repository, [files[name] for name in names])
    if "model.safetensors" in files:
        return _with_digests(repository, [files["model.safetensors"]])
    found = [file for name, file in files.items() if not name.startswith(_OTHER_MODELS)]
    if not found:
        others = sorted({Path(file.name).suffix for file in repository.files} & {".bin", ".pt", ".pth", ".ckpt", ".onnx"})
        more = f"; mmrt does not read its {', '.join(others)} files" if others else ""
        raise ModelNotFoundError(f"{repository.name}: has neither *.safetensors nor *{GGUF_SUFFIX} files{more}")
    return _with_digests(repository, found)


def is_adapter(files: Collection[str]) -> bool:
    """Whether a repository of these files has an adapter alone."""
    return ADAPTER_FILES[0] in files and "config.json" not in files


def adapter_files(repository: Repository) -> list[RemoteFile]:
    """Those of an adapter that peft has written. Raises: HubError."""
    found = [file for file in repository.files if file.name in ADAPTER_FILES]
    if absent := [name for name in ADAPTER_FILES if name not in {file.name for file in found}]:
        raise ModelNotFoundError(f"{repository.name}: is no LoRA adapter that mmrt reads: it has no {absent[0]}")
    return _with_digests(repository, found)


def gguf_files(name: HubName, repository: Repository) -> list[RemoteFile]:
    """The shards of the model that a name's tag chooses, or the usual one; then the file of its part that sees. Raises: HubError."""
    files = {file.name: file for file in repository.files}
    first = choose_gguf(name, list(files))
    shards = [file for file in files if file.endswith(GGUF_SUFFIX) and _place(file) == _place(first)]
    return _with_digests(repository, [files[file] for file in (*shards, *_tower_of(first, files))])


def _tower_of(model: str, files: Iterable[str]) -> list[str]:
    """The file of the part of a model that sees, if there is one: beside it, or at the repository's top."""
    near = {Path(model).parent, Path()}
    found = best_tower(Path(model), (path for path in map(Path, files) if path.parent in near and is_tower(path)))
    return [] if found is None else [str(found)]


def choose_gguf(name: HubName, files: Sequence[str]) -> str:
    """The GGUF file, or first shard, that a name's tag chooses; without one Q4_K_M, or else Q8_0, or else the first.

    Raises: ModelNotFoundError if it chooses none, or several.
    """
    models = [file for file in sorted(files) if _is_model(file)]
    if not models:
        raise ModelNotFoundError(f"{name.repo}: has no GGUF file of a model")
    tags = {file: _tag(file) for file in models}
    if not name.tag:
        usual = next((tag for tag in _USUAL if tag in tags.values()), tags[models[0]])
        found = [file for file in models if tags[file] == usual]
    else:
        wanted = name.tag.lower().removesuffix(GGUF_SUFFIX)
        found = [file for file in models if wanted in (tags[file], Path(file).stem.lower(), _stem(file).lower())]
        found = found or [file for file in models if tags[file].removeprefix("ud-").startswith(wanted)]
    if len(found) == 1:
        return found[0]
    chosen = f"several of its files are :{name.tag}" if name.tag else "several of its files are alike"
    choice = f"{chosen}: {_listed(_stem(file) for file in found)}" if found else f"it has {_listed(tags[file] for file in models)}"
    raise ModelNotFoundError(f"{name}: {choice}; name one as {name.repo}:NAME")


def gguf_places(files: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF files of models, all shards of each, by the stems that name them."""
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        if _is_model(file):
            place = _place(file)
            found[_stem(file)] = [other for other in files if other.endswith(GGUF_SUFFIX) and _place(other) == place]
    return found


def _is_model(file: str) -> bool:
    name = Path(file).name
    return (
        name.endswith(GGUF_SUFFIX)
        and is_first_shard(Path(file))
        and not is_tower(Path(name))
        and not name.lower().startswith("imatrix")
    )


def _stem(file: str) -> str:
    return model_stem(Path(file))


def _place(file: str) -> str:
    """A model's folder and name, alike for all of its shards."""
    return str(Path(file).with_name(_stem(file)))


def _tag(file: str) -> str:
    """The quantization that a file's name ends with, or else that of its folder, in small letters; else its stem."""
    path = Path(file)
    for text in (_stem(file), path.parent.name):
        ends = [found[0] for found in _QUANTIZATION.finditer(text) if _stands_alone(text, found)]
        if ends:
            return ends[-1].lower()
    return _stem(file).lower()


def _stands_alone(text: str, found: re.Match[str]) -> bool:
    before, after = text[: found.start()][-1:], text[found.end() :][:1]
    return not before.isalnum() and not after.isalnum()


def _listed(names: Iterable[str]) -> str:
    found = list(dict.fromkeys(names))
    return ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} others" if len(found) > _SHOWN else "")


def _with_digests(repository: Repository, files: list[RemoteFile]) -> list[RemoteFile]:
    """Raise HubError for a file whose contents could not be checked, and for more than a model has."""
    if len(files) > _MAX_WEIGHT_FILES:
        raise HubError(f"{repository.name}: the model has {len(files)} files there, expected at most {_MAX_WEIGHT_FILES}")
    if unknown := next((file.name for file in files if not file.digest), None):
        raise HubError(f"{repository.name}: the hub tells no digest of {unknown}, by which it would be checked")
    return files
