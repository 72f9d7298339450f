"""The names of a run's page pools (pure)."""

PoolName = str
"""One of ``pools_of``."""


def kv_pool(device: int) -> PoolName:
    """Return the name of the KV pool of the device with this number: "kv" for the first, then "kv.1" and so on."""
    return f"kv.{device}" if device else "kv"


def kind_of_pool(name: PoolName) -> PoolName:
    """Return what a pool's pages hold, as the name of the first such pool: "kv" for that of every device."""
    return name.partition(".")[0]


def is_kv_pool(name: PoolName) -> bool:
    """Return whether a pool is the KV pool of some device."""
    return kind_of_pool(name) == "kv"


def pools_of(num_devices: int) -> tuple[PoolName, ...]:
    """Return all pools of a run. Their places are their numbers in flight records."""
    return "media", "patch", "embedding", *map(kv_pool, range(num_devices))


def packed_pool(pool: PoolName) -> str:
    """Return the name of the segment with the packed pages of a KV pool. It is no pool of the controller's."""
    return pool.replace("kv", "packed", 1)
