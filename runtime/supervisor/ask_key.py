"""``server.api_key`` of a run that is up, for commands of its user: the supervisor tells it, over the socket that checks who asks."""

from pathlib import Path

from ..config.runtime_config import load_config
from ..environment import read_environment
from ..process.run import RunInfo
from .control import SOCKET_NAME, KeyReply, KeyRequest, call


def server_key(run: Path, info: RunInfo) -> str:
    """Return the key; without a supervisor that of the configuration that the run was begun with. "" if there is none.

    Raises: RunError if the supervisor does not tell it; ConfigError.
    """
    if not info.has_api_key:
        return ""
    if not (run / SOCKET_NAME).exists():
        return load_config(Path(info.config_file) if info.config_file else None, read_environment().server_key).server.api_key
    reply = call(run, KeyRequest())
    assert isinstance(reply, KeyReply)
    return reply.key
