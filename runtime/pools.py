"""The names of a run's page pools (pure)."""

PoolName = str
"""One of ``pools_of``."""

SEQUENCE_POOLS = "kv", "window", "state", "log"
"""Kinds of pools whose pages a sequence has while it runs; a run has those that its model needs."""


def kv_pool(device: int) -> PoolName:
    """Return the name of the KV pool of the device with this number: "kv" for the first, then "kv.1" and so on."""
    return f"kv.{device}" if device else "kv"


def state_pool(kv: PoolName) -> PoolName:
    """Return the name of the pool of recurrent states beside a KV pool."""
    return kv.replace("kv", "state", 1)


def log_pool(kv: PoolName) -> PoolName:
    """Return the name of the pool of their logs beside a KV pool."""
    return kv.replace("kv", "log", 1)


def window_pool(kv: PoolName) -> PoolName:
    """Return the name of the pool beside a KV pool with the pages of layers that attend to a window."""
    return kv.replace("kv", "window", 1)


def kind_of_pool(name: PoolName) -> PoolName:
    """Return what a pool's pages hold, as the name of the first such pool: "kv" for that of every device."""
    return name.partition(".")[0]


def is_kv_pool(name: PoolName) -> bool:
    """Return whether a pool is the KV pool of some device."""
    return kind_of_pool(name) == "kv"


def pools_of(num_devices: int, has_states: bool = False, has_windows: bool = False) -> tuple[PoolName, ...]:
    """Return all pools of a run. ``has_states``: its model has recurrent states. ``has_windows``: layers with a window have pages of
    their own."""
    kv = tuple(map(kv_pool, range(num_devices)))
    beside = (*((state_pool, log_pool) if has_states else ()), *((window_pool,) if has_windows else ()))
    return "media", "patch", "embedding", *kv, *(name(pool) for name in beside for pool in kv)


def packed_pool(pool: PoolName) -> str:
    """Return the name of the segment with the packed pages of a KV pool. It is no pool of the controller's."""
    return pool.replace("kv", "packed", 1)
