"""Models by their names on a hub, for the commands: where they are in the cache. ``fetching`` brings what is not there."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..hub.cache import Cached, find_cached
from ..hub.names import HubName, parse_name
from ..runtime.config.runtime_config import RuntimeConfig
from ..runtime.environment import Environment
from ..runtime.errors import ConfigError

if TYPE_CHECKING:
    from ..runtime.supervisor.supervisor import Reporter


def hub_name(config: RuntimeConfig) -> HubName | None:
    """The name of a model on a hub, if the configuration has one. What is there as a path is no such name."""
    try:
        is_path = not config.model.path or Path(config.model.path).expanduser().exists()
    except (OSError, RuntimeError):  # it cannot be read, or has no home: told where it is used
        is_path = True
    return None if is_path else parse_name(config.model.path)


def with_cached(config: RuntimeConfig) -> RuntimeConfig:
    """The configuration with the path of its model, if that is a hub's, in the cache. Raises: ConfigError if it is not there."""
    name = hub_name(config)
    if name is None:
        return config
    found = find_cached(name)
    if found is None:
        raise ConfigError(f"model.path = {config.model.path!r} is neither a path nor in the cache: mmrt pull {name} fetches it")
    return _placed(config, name, found)


def with_fetched(config: RuntimeConfig, environment: Environment, reporter: "Reporter", *, yes: bool) -> RuntimeConfig:
    """As ``with_cached``; a model that is not in the cache is fetched, if its user agrees. ``yes``: unasked.

    Raises: ConfigError, HubError.
    """
    name = hub_name(config)
    if name is None:
        return config
    found = find_cached(name)
    if found is None:
        is_terminal = sys.stdin.isatty()
        if not (yes or config.model.download or is_terminal):
            advice = f"mmrt pull {name} fetches it, as do --yes and model.download = true"
            raise ConfigError(f"model.path = {config.model.path!r} is neither a path nor in the cache: {advice}")
        from .draft_check import judge_of
        from .fetching import agree, ask, fetch_model  # with torch and aiohttp, which other starts do without here

        judge = judge_of(config, environment, reporter, is_for_now=True)
        found = fetch_model(name, judge, reporter, agree if yes or config.model.download else ask)
    else:
        reporter.message(f"{name} is taken as it was fetched, at commit {found.commit[:12]}: mmrt pull {name} asks for a newer one")
    return _placed(config, name, found)


def _placed(config: RuntimeConfig, name: HubName, found: Cached) -> RuntimeConfig:
    model = msgspec.structs.replace(config.model, path=str(found.path), name=config.model.name or name.served)
    return msgspec.structs.replace(config, model=model)
