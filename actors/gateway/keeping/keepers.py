"""The keeper of a gateway's connections: the supervisor, or the gateway itself with systemd's descriptor store.

Called when a gateway starts.
"""

import contextlib
import logging
import socket
from collections.abc import Sequence

from ....runtime.config.sections import ServerSection
from ....runtime.errors import ConfigError
from ....runtime.process.descriptor_store import DescriptorStore
from ....runtime.process.kept_connections import record_sizes, served_connections, why_unkept
from ....runtime.process.listening import EXTRA_CONNECTIONS, connection_limit
from ....runtime.stage_table import number_of
from ....runtime.supervisor.connection_keeper import ConnectionKeeper
from ....shm.connection_records import RecordSizes
from ....shm.kept_records import KeptRecords
from ...host.actor import Actor

log = logging.getLogger(__name__)

FILES_EACH = 2  # of a connection: its transport's, and the keeper's


def own_sizes(server: ServerSection) -> RecordSizes:
    """Return the sizes of the records. Raises: ConfigError where connections cannot be kept."""
    if server.scheme == "https":
        raise ConfigError("TLS ends in it")
    sizes = record_sizes(server.max_connections, server.max_body_mib << 20, FILES_EACH)
    if fault := why_unkept(sizes):
        raise ConfigError(fault)
    return sizes


def own_keeper(store: DescriptorStore, listeners: Sequence[socket.socket], server: ServerSection) -> ConnectionKeeper | None:
    """Return what keeps the connections, None where they end with this gateway. In its event loop."""
    try:
        return ConnectionKeeper(listeners, own_sizes(server), store)
    except (OSError, ConfigError) as error:
        log.warning("connections end with their gateway: %s", error)
    store.drop_connections()
    return None


def most_connections(actor: Actor) -> int:
    """Return how many connections are served at a time. Raises: ConfigError, as ``connection_limit``."""
    server = actor.config.server
    with contextlib.suppress(ConfigError):
        if actor.store is not None:
            return own_sizes(server).number - EXTRA_CONNECTIONS
    if actor.keeper_fd is None:
        return connection_limit(server.max_connections)
    num_gateways = actor.config.num_gateways
    sizes = record_sizes(server.max_connections, server.max_body_mib << 20, num_gateways=num_gateways)
    return served_connections(sizes.number, num_gateways, number_of(actor.name))


def kept_records(actor: Actor) -> KeptRecords:
    """Return the records of kept answers: the supervisor's, systemd's, or such as end with this process. Raises: OSError."""
    if actor.store is not None:
        return actor.store.answers()
    return KeptRecords.own() if actor.answers_fd is None else KeptRecords(actor.answers_fd)
