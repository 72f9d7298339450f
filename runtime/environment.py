"""The environment variables that mmrt reads: no other module reads os.environ."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from .errors import ConfigError

CHILD_LISTEN_FD = 4  # first of the supervisor's listening sockets in a gateway; the others follow
SERVER_KEY = "MMRT_API_KEY"
SYSTEMD_LISTEN_FD = 3  # SD_LISTEN_FDS_START
STORED = "kept-"  # begins the names of descriptors that a gateway has stored, and of no listening socket
_MOST_FILES = 1 << 20  # that a process may open, as a kernel is usually set
_MOST_PID = 1 << 22
MPS_PIPE = Path("/tmp/nvidia-mps")


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The settings from this process's environment. Made by ``read_environment``; no other code reads os.environ."""

    run_dir: Path | None = None  # MMRT_RUN_DIR: the run directory to use, for actors the one to attach to
    config_file: Path | None = None  # MMRT_CONFIG: what --config is when it is not given
    checkpoint: Path | None = None  # MMRT_CHECKPOINT: the directory that `mmrt units` has made of model.path and model.adapter
    model_name: str = ""  # MMRT_MODEL_NAME: beside it, what model.name is if it is empty
    server_key: str = ""  # MMRT_API_KEY: the key of a server that is started, in place of server.api_key
    notify_socket: str | None = None  # NOTIFY_SOCKET: where sd_notify goes
    lifeline_fd: int | None = None  # MMRT_LIFELINE_FD: see runtime/process/lifeline.py
    listen_fds: tuple[int, ...] = ()  # sockets to serve on: MMRT_LISTEN_FDS of them from a supervisor, LISTEN_FDS from systemd
    keeper_fd: int | None = None  # MMRT_KEEPER_FD: a gateway's channel to the supervisor's keeper of connections
    stored_fds: Mapping[str, int] = {}  # LISTEN_FDNAMES, FDSTORE: what systemd has kept of a gateway, by names without their prefix
    has_store: bool = False  # FDSTORE: systemd keeps descriptors of this process
    key_fd: int | None = None  # MMRT_KEY_FD: a gateway's memory with server.api_key
    answers_fd: int | None = None  # MMRT_ANSWERS_FD: a gateway's memory of answers that are kept (shm/kept_records)
    fault_file: Path | None = None  # MMRT_FAULTS: see runtime/bus/faults.py
    state_home: Path = Path()  # XDG_STATE_HOME/mmrt: logs
    cache_home: Path = Path()  # XDG_CACHE_HOME/mmrt: what can be made again
    mps_pipe: Path = MPS_PIPE  # CUDA_MPS_PIPE_DIRECTORY: where CUDA's multi-process service takes clients
    api_key: str = ""  # OPENAI_API_KEY: of other servers that `mmrt ask --url` asks
    cpu_capability: str = ""  # ATEN_CPU_CAPABILITY: torch uses no newer instructions than these
    plain_output: bool = False  # NO_COLOR is set, or TERM is "dumb": no escape sequences


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read the variables above. Raises ConfigError for a malformed number."""
    environ = os.environ if environ is None else environ

    def path(name: str) -> Path | None:
        value = environ.get(name)
        return Path(value).absolute() if value else None

    def number(name: str, most: int = _MOST_FILES) -> int | None:
        value = environ.get(name)
        if not value:
            return None
        if not (value.isascii() and value.isdigit() and len(value) <= len(str(most)) and int(value) <= most):
            raise ConfigError(f"environment variable {name} = {value[:40]!r} is not a number up to {most}")
        return int(value)

    def home(variable: str, default: str) -> Path:
        return (path(variable) or (path("HOME") or Path("/")) / default) / "mmrt"

    inherited = number("MMRT_LISTEN_FDS"), number("LISTEN_FDS"), number("LISTEN_PID", _MOST_PID)
    given = _given_fds(*inherited, environ.get("LISTEN_FDNAMES", ""))
    return Environment(
        run_dir=path("MMRT_RUN_DIR"),
        config_file=path("MMRT_CONFIG"),
        checkpoint=path("MMRT_CHECKPOINT"),
        model_name=environ.get("MMRT_MODEL_NAME", ""),
        server_key=environ.get(SERVER_KEY, ""),
        notify_socket=environ.get("NOTIFY_SOCKET") or None,
        lifeline_fd=number("MMRT_LIFELINE_FD"),
        listen_fds=tuple(fd for fd, name in given.items() if not name.startswith(STORED)),
        stored_fds={name.removeprefix(STORED): fd for fd, name in given.items() if name.startswith(STORED)},
        has_store=bool(number("FDSTORE")),
        keeper_fd=number("MMRT_KEEPER_FD"),
        answers_fd=number("MMRT_ANSWERS_FD"),
        key_fd=number("MMRT_KEY_FD"),
        fault_file=path("MMRT_FAULTS"),
        api_key=environ.get("OPENAI_API_KEY", ""),
        cpu_capability=environ.get("ATEN_CPU_CAPABILITY", ""),
        plain_output=bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb",
        state_home=home("XDG_STATE_HOME", ".local/state"),
        cache_home=home("XDG_CACHE_HOME", ".cache"),
        mps_pipe=path("CUDA_MPS_PIPE_DIRECTORY") or MPS_PIPE,
    )


def _given_fds(from_supervisor: int | None, from_systemd: int | None, systemd_pid: int | None, names: str) -> dict[int, str]:
    """Inherited descriptors and their names; systemd's count only in the process that it started (sd_listen_fds)."""
    if from_supervisor:
        return dict.fromkeys(range(CHILD_LISTEN_FD, CHILD_LISTEN_FD + from_supervisor), "")
    if from_systemd and systemd_pid == os.getpid():
        fds = range(SYSTEMD_LISTEN_FD, SYSTEMD_LISTEN_FD + from_systemd)
        return dict(zip(fds, [*names.split(":"), *[""] * from_systemd], strict=False))
    return {}
