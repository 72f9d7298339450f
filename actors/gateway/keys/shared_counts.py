"""The API keys of a gateway, and their counts, which several gateways share. Called when a gateway starts, and when a key comes."""

import logging
from collections.abc import Callable

from ....runtime.stage_table import number_of
from ....shm.key_use import KeyUse
from ...host.actor import Actor
from .api_keys import ApiKeys
from .quotas import Counts, own_counts

log = logging.getLogger(__name__)


class SharedCounts:
    """The table of a run with several gateways, in one of them; in a run with one there is none."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._number = number_of(actor.name)
        self._use = KeyUse.attach(actor.run) if actor.config.num_gateways > 1 else None

    def keys(self, report: Callable[[], None]) -> ApiKeys:
        """Return the keys that open the server. Raises: ConfigError, as ``ApiKeys``."""
        counts_of = own_counts if self._use is None else counts_in(self._use, self._number)
        return ApiKeys(self._actor.config.server, self._actor.run.path, report, counts_of=counts_of)

    def take(self) -> None:
        """Begin with nothing under way, once this gateway has its role."""
        if self._use is not None:
            self._use.begin(self._number)


def counts_in(use: KeyUse, gateway: int) -> Callable[[str], Counts]:
    """Return what finds the counts of a key by its name, for the gateway of this number."""

    def counts_of(name: str) -> Counts:
        if (row := use.row(name)) is None:
            log.warning("the limits of the API key %s count at each gateway for itself: too many names have come", name)
            return Counts()
        return Counts(gateway, row.open, row.requests, row.tokens, use.locked)

    return counts_of
