"""``mmrt model list`` and ``rm``: models that were fetched, and directories that were made of GGUF files."""

import shutil
import sys
import time
from pathlib import Path

from ..hub.cache import RepositoryCache, cache_root, find_cached
from ..hub.errors import ModelNotFoundError
from ..hub.names import HubName, parse_name
from ..hub.stored import remove_model, stored_models
from ..models.gguf.made import Made, made_directories
from ..runtime.environment import Environment
from ..runtime.errors import RunError, UserError
from .checkpoints import is_in_use
from .terminal import print_columns, size


def print_models(environment: Environment) -> None:
    """Print a table. Raises: UserError."""
    rows = []
    for model in stored_models(cache_root()):
        used = time.strftime("%Y-%m-%d", time.localtime(model.used_s))
        rows.append([model.label, size(model.num_bytes), "yes" if model.is_whole else "no", used, model.name.revision])
    for made in _made(environment):
        rows.append([made.path.name, size(made.num_bytes), "yes" if not made.is_stale else "no", "", _file(made)])
    if rows:
        print_columns([["MODEL", "SIZE", "WHOLE", "USED", "FROM"], *rows], left=(0, 2, 3, 4))
    else:
        print(f"no models in {cache_root()}: mmrt pull ORG/REPO fetches one")


def remove(given: str, environment: Environment, *, yes: bool) -> None:
    """Remove what ``given`` names, if its user agrees. Raises: UserError."""
    made = [one for one in _made(environment) if given in (one.path.name, _file(one))]
    name = parse_name(given)
    folders = [one.path for one in made] if made else [_place(name)] if name else []
    if not folders:
        raise ModelNotFoundError(f"{given!r} is neither a name on a hub nor a GGUF file of mmrt model list")
    for folder in folders:
        if run := is_in_use(folder):
            raise RunError(f"the run {run} serves {given}: end it with `mmrt down`, then remove the model")
    if not yes and not _agrees(given):
        raise UserError(f"{given} is not removed (--yes)")
    if made:
        freed = sum(one.num_bytes for one in made)
        for one in made:
            shutil.rmtree(one.path.parent, ignore_errors=True)
    else:
        freed = _removed(name)
    print(f"{given} is removed: {size(freed)} are free")


def _place(name: HubName) -> Path:
    """Return the path that a run of the model has open: one GGUF file, or the folder of the repository."""
    found = find_cached(name) if name.tag else None
    return RepositoryCache(name.repo).folder if found is None else found.path


def _removed(name: HubName | None) -> int:
    assert name is not None
    return remove_model(name, cache_root())


def _agrees(given: str) -> bool:
    if not sys.stdin.isatty():
        return False
    try:
        return input(f"Remove {given}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _made(environment: Environment) -> list[Made]:
    try:
        return made_directories(environment.state_home / "gguf")
    except OSError as error:
        raise RunError(f"{environment.state_home} cannot be read: {error.strerror}") from None


def _file(made: Made) -> str:
    return str(made.files[0]) if made.files else ""
