"""``server.api_key`` on its way to the gateway: in memory behind a descriptor, so that no file of the run and no environment has it.

Clients ask the supervisor (``supervisor/ask_key``).
"""

import fcntl
import os

from ..config.runtime_config import load_config
from ..environment import Environment
from ..errors import ConfigError
from .run import RunInfo

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def store_key(key: str) -> int:
    """Return the descriptor of a memfd with the key, which nobody can change. Raises: OSError."""
    fd = os.memfd_create("mmrt-key", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, key.encode())
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def read_key(info: RunInfo, environment: Environment) -> str:
    """Return the key for the gateway of a run: of the descriptor from its supervisor, else of the configuration.

    Raises: ConfigError, also where the run was begun with a key and none is here: the server would be open.
    """
    if environment.key_fd is not None:
        key = os.pread(environment.key_fd, os.fstat(environment.key_fd).st_size, 0).decode()
        os.close(environment.key_fd)
    else:
        key = load_config(environment.config_file, environment.server_key).server.api_key
    if info.has_api_key and not key:
        raise ConfigError("memory has been given server.api_key, and the gateway not: give MMRT_CONFIG or MMRT_API_KEY to both")
    return key
