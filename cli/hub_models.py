"""Models and adapters by their names on a hub, for the commands: where they are in the cache. ``fetching`` brings what is not there."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..hub.cache import Cached, find_adapter, find_cached
from ..hub.names import HubName, parse_name
from ..runtime.config.runtime_config import RuntimeConfig
from ..runtime.environment import Environment
from ..runtime.errors import ConfigError

if TYPE_CHECKING:
    from ..runtime.supervisor.supervisor import Reporter


def hub_name(config: RuntimeConfig) -> HubName | None:
    """The name of a model on a hub, if the configuration has one. What is there as a path is no such name."""
    return _name_of(config.model.path)


def _name_of(text: str) -> HubName | None:
    try:
        is_path = not text or Path(text).expanduser().exists()
    except (OSError, RuntimeError):  # it cannot be read, or has no home: told where it is used
        is_path = True
    return None if is_path else parse_name(text)


def with_cached_adapter(config: RuntimeConfig) -> RuntimeConfig:
    """The configuration with the path of its adapter, if that is a hub's, in the cache. Raises: ConfigError if it is not there."""
    name = _name_of(config.model.adapter)
    if name is None:
        return config
    found = find_adapter(name)
    if found is None:
        raise ConfigError(f"model.adapter = {config.model.adapter!r} is neither a path nor in the cache: mmrt pull {name} fetches it")
    return _with_adapter(config, found)


def with_cached(config: RuntimeConfig) -> RuntimeConfig:
    """The configuration with the paths of its model and adapter, if they are a hub's, in the cache. Raises: ConfigError if one is not
    there."""
    config = with_cached_adapter(config)
    name = hub_name(config)
    if name is None:
        return config
    found = find_cached(name)
    if found is None:
        raise ConfigError(f"model.path = {config.model.path!r} is neither a path nor in the cache: mmrt pull {name} fetches it")
    return _placed(config, name, found)


def with_fetched(config: RuntimeConfig, environment: Environment, reporter: "Reporter", *, yes: bool) -> RuntimeConfig:
    """As ``with_cached``; what is not in the cache is fetched, if its user agrees: the adapter first, with which the model is judged.
    ``yes``: unasked.

    Raises: ConfigError, HubError.
    """
    may = yes or config.model.download
    if (adapter := _name_of(config.model.adapter)) is not None:
        there = find_adapter(adapter)
        if there is None:
            _expect_consent(f"model.adapter = {config.model.adapter!r}", adapter, may)
            from .fetching import agree, ask, fetch_adapter

            there = fetch_adapter(adapter, reporter, agree if may else ask)
        else:
            _say_taken(reporter, adapter, there)
        config = _with_adapter(config, there)
    name = hub_name(config)
    if name is None:
        return config
    found = find_cached(name)
    if found is None:
        _expect_consent(f"model.path = {config.model.path!r}", name, may)
        from .draft_check import judge_of
        from .fetching import agree, ask, fetch_model  # with torch and aiohttp, which other starts do without here

        found = fetch_model(name, judge_of(config, environment, reporter, is_for_now=True), reporter, agree if may else ask)
    else:
        _say_taken(reporter, name, found)
    return _placed(config, name, found)


def _expect_consent(what: str, name: HubName, may: bool) -> None:
    """Raise ConfigError where nobody has agreed to fetch, or can be asked."""
    if not (may or sys.stdin.isatty()):
        advice = f"mmrt pull {name} fetches it, as do --yes and model.download = true"
        raise ConfigError(f"{what} is neither a path nor in the cache: {advice}")


def _say_taken(reporter: "Reporter", name: HubName, found: Cached) -> None:
    reporter.message(f"{name} is taken as it was fetched, at commit {found.commit[:12]}: mmrt pull {name} asks for a newer one")


def _with_adapter(config: RuntimeConfig, found: Cached) -> RuntimeConfig:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, adapter=str(found.path)))


def _placed(config: RuntimeConfig, name: HubName, found: Cached) -> RuntimeConfig:
    model = msgspec.structs.replace(config.model, path=str(found.path), name=config.model.name or name.served)
    return msgspec.structs.replace(config, model=model)
