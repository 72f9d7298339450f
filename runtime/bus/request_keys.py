"""The keys of requests: a gateway's random names, of 63 bits, of which the first three are its number. So who has a key knows the
gateway that its answers go to, in any process."""

import secrets

from ..stage_table import InstanceId, instance_id, number_of

_RANDOM_BITS = 60


def random_key(gateway: str) -> int:
    """Return a new key of this gateway, which is not 0."""
    return number_of(gateway) << _RANDOM_BITS | (secrets.randbits(_RANDOM_BITS) or 1)


def gateway_of(key: int) -> InstanceId:
    """Return the gateway whose request has this key."""
    return instance_id("gateway", key >> _RANDOM_BITS)


def deltas_of(gateway: str) -> str:
    """Return the name of the ring with the texts for a gateway: "deltas", "deltas.1" and so on."""
    return instance_id("deltas", number_of(gateway))
