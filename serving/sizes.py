"""Sizes of memory as people write them (pure)."""

import re

from ..runtime.config.toml_text import show
from ..runtime.errors import ConfigError

_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) ?([KMGT]i?B)")
_UNITS = {unit: factor for at, sign in enumerate("KMGT", 1) for unit, factor in ((f"{sign}iB", 1 << 10 * at), (f"{sign}B", 1000**at))}


def read_size(text: str, key: str) -> int:
    """Return the bytes of a size such as "20 GiB", "1.5 GB" or "512MiB". Raises: ConfigError naming the key."""
    found = _SIZE.fullmatch(text)
    if found is None or not (num_bytes := int(float(found[1]) * _UNITS[found[2]])):
        raise ConfigError(f'{key} = {show(text)}: expected a size above 0, such as "20 GiB" or "512 MiB"')
    return num_bytes
