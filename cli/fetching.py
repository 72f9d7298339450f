"""Fetch a model from a hub for a command: configuration and headers first, which are judged, then the weights."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..hub.cache import Cached, RepositoryCache, find_adapter, find_cached
from ..hub.client import Hub
from ..hub.errors import HubError, ModelNotFoundError
from ..hub.fetch import check_disk, fetch_files
from ..hub.headers import draft_checkpoint, draft_gguf
from ..hub.names import HubName
from ..hub.repository import RemoteFile, Repository, adapter_files, gguf_files, is_adapter, is_gguf, safetensors_files, small_files
from ..models.checkpoint.files import ADAPTER_FILES, INDEX
from ..models.errors import CheckpointError
from ..runtime.errors import ConfigError
from ..runtime.supervisor.supervisor import Reporter
from .terminal import JsonReporter, size

_PLACE = "hub"  # in the lines of progress
_UNASKED_BYTES = 1_000_000_000  # fetched on a terminal without a question
_PROGRESS_S = 1.0

T = TypeVar("T")
Judge = Callable[[Path, str], list[str]]
"""Given a draft of a model, and its name: why it is not served."""


class Examined(NamedTuple):
    """A model before it is fetched. ``draft``: a checkpoint directory, or a GGUF file, with headers alone."""

    repository: Repository
    small: list[RemoteFile]
    weights: list[RemoteFile]
    cache: RepositoryCache
    draft: Path

    @property
    def missing_bytes(self) -> int:
        return self.cache.missing_bytes(self.weights)


def agree(name: HubName, num_bytes: int) -> None:
    pass


def ask(name: HubName, num_bytes: int) -> None:
    """Ask on the terminal. Raises: ConfigError if its user does not agree."""
    if num_bytes <= _UNASKED_BYTES:
        return
    try:
        answer = input(f"Fetch {size(num_bytes)} of {name}? [Y/n] ")
    except EOFError:
        answer = "n"
    if answer.strip().lower() not in ("", "y", "yes"):
        raise ConfigError(f"{name} is not fetched")


def fetch_model(name: HubName, judge: Judge, reporter: Reporter | None, agree: Callable[[HubName, int], None] = agree) -> Cached:
    """Fetch what is missing of a model's newest commit: configuration, then headers, which are judged, and then the weights.

    ``reporter`` is told how it goes on. Raises: HubError.
    """
    try:
        return asyncio.run(_fetch_model(name, judge, reporter, agree))
    except KeyboardInterrupt:
        if reporter is not None:
            reporter.message(f"what has come of {name} stays: the same command goes on")
        raise


async def _fetch_model(name: HubName, judge: Judge, reporter: Reporter | None, agree: Callable[[HubName, int], None]) -> Cached:
    async with Hub() as hub:
        if reporter is not None:
            reporter.progress(_PLACE, "asking", f"asking {hub.shown} about {name}, and reading its headers")
        repository = await hub.repository(name)
        if is_adapter([file.name for file in repository.files]):
            return await _fetch_adapter(hub, name, repository, reporter, agree)
        with tempfile.TemporaryDirectory(prefix="mmrt-pull-") as folder:
            found = await _examine(hub, repository, name, Path(folder))
            if problems := judge(found.draft, str(name)):
                more = f", and {len(problems) - 1} others" * (len(problems) > 1)
                raise HubError(f"{name} is not fetched, as it would not be served: {problems[0]}{more} (mmrt model check {name})")
        await _bring(hub, name, repository, found.weights, reporter, agree)
    return _expect_whole(name, repository, find_cached)


def fetch_adapter(name: HubName, reporter: Reporter, agree: Callable[[HubName, int], None]) -> Cached:
    """Fetch what is missing of a LoRA adapter's newest commit. Raises: HubError."""

    async def fetch() -> Cached:
        async with Hub() as hub:
            return await _fetch_adapter(hub, name, await hub.repository(name), reporter, agree)

    return asyncio.run(fetch())


async def _fetch_adapter(
    hub: Hub, name: HubName, repository: Repository, reporter: Reporter | None, agree: Callable[[HubName, int], None]
) -> Cached:
    """Its configuration first: what mmrt does not merge is not fetched."""
    from ..models.checkpoint.adapter import read_config  # with torch, which other commands do without

    files, cache = adapter_files(repository), RepositoryCache(name.repo)
    config = next(file for file in files if file.name == ADAPTER_FILES[0])
    await fetch_files(hub, repository, [config], cache, lambda _: None)
    try:
        read_config(cache.blob(config))
    except CheckpointError as error:
        raise HubError(f"{name} is not fetched: {str(error).replace(str(cache.blob(config)), config.name)}") from None
    await _bring(hub, name, repository, files, reporter, agree)
    return _expect_whole(name, repository, find_adapter)


async def _bring(
    hub: Hub,
    name: HubName,
    repository: Repository,
    files: list[RemoteFile],
    reporter: Reporter | None,
    agree: Callable[[HubName, int], None],
) -> None:
    cache = RepositoryCache(name.repo)
    check_disk(cache, files)
    missing = cache.missing_bytes(files)
    agree(name, missing)
    if reporter is not None and missing:
        reporter.message(f"fetching {size(missing)} of {name} at {repository.commit[:12]} into {cache.folder}")
    await fetch_files(hub, repository, files, cache, _Show(sum(file.num_bytes for file in files), missing, reporter))
    cache.note(name.revision, repository.commit)


def _expect_whole(name: HubName, repository: Repository, find: Callable[[HubName], Cached | None]) -> Cached:
    cached = find(HubName(name.repo, name.tag, repository.commit))
    if cached is None:  # nobody should see this; files that another program has put there may lead to it
        place = RepositoryCache(name.repo).snapshot(repository.commit)
        raise HubError(f"{name}: {place} is not whole after all; remove it (mmrt model rm)")
    return cached


def examine_model(name: HubName, folder: Path) -> Examined:
    """Fetch configuration and headers of a model; its draft is made in ``folder``. Raises: HubError."""

    async def examine() -> Examined:
        async with Hub() as hub:
            return await _examine(hub, await hub.repository(name), name, folder)

    return asyncio.run(examine())


async def _examine(hub: Hub, repository: Repository, name: HubName, folder: Path) -> Examined:
    cache = RepositoryCache(name.repo)
    names = [file.name for file in repository.files]
    if is_gguf(name, names):
        weights = gguf_files(name, repository)
        weights = await _drafted(draft_gguf(hub, repository, weights, cache, folder), folder)
        return Examined(repository, [], weights, cache, folder / Path(weights[0].name).name)
    if "config.json" not in names:
        what = "is a LoRA adapter: give it to --adapter, beside its model" if is_adapter(names) else "has no config.json"
        raise ModelNotFoundError(f"{name.repo} {what}")
    small = small_files(repository)
    check_disk(cache, small)
    await fetch_files(hub, repository, small, cache, lambda _: None)
    index = next((cache.blob(file).read_bytes() for file in small if file.name == INDEX), None)
    weights = safetensors_files(repository, index)
    draft = await _drafted(draft_checkpoint(hub, repository, small, weights, cache, folder), folder)
    return Examined(repository, small, weights, cache, draft)


async def _drafted(draft: Awaitable[T], folder: Path) -> T:
    try:
        return await draft
    except OSError as error:
        raise HubError(f"{folder}: a draft of the model cannot be written: {error.strerror} (TMPDIR)") from None


class _Show:
    """Tells how far a fetch is. Called with the bytes that came, and with those that were there, ``missing`` of ``total`` not being."""

    def __init__(self, total: int, missing: int, reporter: Reporter | None) -> None:
        self._total, self._reporter = total, reporter
        self._there = total - missing  # the rate leaves these out: they are read again, or not at all
        self._done, self._shown_s = 0, time.monotonic()
        self._recent = self._there, self._shown_s

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        now_s = time.monotonic()
        if self._reporter is None or now_s - self._shown_s < _PROGRESS_S:
            return
        text = f"{size(self._done)} of {size(self._total)}"
        done, since_s = self._recent
        if self._done > done:
            rate = (self._done - done) / (now_s - since_s)
            text += f", {size(rate)}/s, {_duration((self._total - self._done) / rate)} left"
        elif self._done <= self._there:
            text += ", read again"
        if isinstance(self._reporter, JsonReporter):  # which has no line to overwrite
            self._reporter.message(f"fetched {text}")
        else:
            self._reporter.progress(_PLACE, "fetching", text)
        self._shown_s = now_s
        if now_s - since_s > 10 * _PROGRESS_S:
            self._recent = max(self._there, self._done), now_s


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
