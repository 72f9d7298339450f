"""systemd units for a run: one service per process, the gateway's socket, and a target over them, as text. ``mmrt units`` writes them.

Under systemd there is no supervisor: ``memory`` makes the run directory, the others wait for it; systemd restarts, watches and
shares the processor by CPUWeight as well as by Nice. Services are meant for ``systemctl --user``, and work as system units with
User= added.
"""

import ipaddress
from collections.abc import Mapping
from pathlib import Path

from ..config.runtime_config import RuntimeConfig
from ..process.listening import BACKLOG, EXTRA_CONNECTIONS, MAX_CONNECTIONS
from ..stage_table import STAGES, InstanceId, stage_of, starts_after
from .specs import ONEDNN_PRIMITIVES

TARGET = "mmrt.target"
SOCKET = "mmrt-gateway.socket"


def service_name(actor: str) -> str:
    return f"mmrt-{actor}.service"


def unit_files(config: RuntimeConfig, program: str, environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return file name -> contents. ``program`` is the absolute path of the mmrt command, ``environment`` that of every actor.

    ``directory`` is the actors' working directory: relative paths in the configuration start from it.

    ``environment`` must name MMRT_RUN_DIR, since all actors must find the same one.
    """
    assert "MMRT_RUN_DIR" in environment, "units need a fixed run directory"
    services = {service_name(process): _service(config, process, program, environment, directory) for process in config.processes}
    socket = _socket(config)
    sockets = {SOCKET: socket} if socket else {}
    return {TARGET: _target([*sockets, *services]), **sockets, **services}


def _socket(config: RuntimeConfig) -> str:
    """Return the socket unit for the gateway, so that connections wait rather than fail while it restarts.

    "" if systemd cannot know the address: a name that must be resolved, or any free port. The gateway then listens itself.
    """
    host, port = config.server.host, config.server.port
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    if port == 0:
        return ""
    return f"""[Unit]
Description=mmrt endpoint
PartOf={TARGET}

[Socket]
ListenStream={f"[{address}]" if address.version == 6 else address}:{port}
BindIPv6Only=ipv6-only
Backlog={BACKLOG}

[Install]
WantedBy={TARGET}
"""


def _target(units: list[str]) -> str:
    services = " ".join(units)
    return f"""[Unit]
Description=mmrt: multimodal inference
Wants={services}

[Install]
WantedBy=default.target
"""


def _service(config: RuntimeConfig, actor: InstanceId, program: str, environment: Mapping[str, str], directory: Path) -> str:
    settings = config.supervisor
    section, together = config.actor(actor), config.processes[actor]
    stages = [STAGES[stage_of(one)] for one in together]
    variables = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(section.threads),
        "OMP_WAIT_POLICY": "passive",
        "OPENBLAS_NUM_THREADS": "1",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": ONEDNN_PRIMITIVES,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **environment,
    }
    lines = "\n".join(f"Environment={_quote(f'{key}={value}')}" for key, value in variables.items())
    stop_s = settings.drain_s + 10 if stages[-1].listens else 10
    return f"""[Unit]
Description=mmrt {", ".join(together)}
PartOf={TARGET}
{_order(config, actor)}StartLimitIntervalSec={settings.restart_window_s:g}
StartLimitBurst={settings.restart_limit}

[Service]
Type=notify
NotifyAccess=main
ExecStart={_quote(program.replace("$", "$$"))} actor {actor}
{lines}
WorkingDirectory={str(directory).replace("%", "%%")}
Restart=on-failure
RestartSec={max(0.1, settings.backoff_s):g}
RestartPreventExitStatus=2
TimeoutStartSec={settings.ready_timeout_s:g}
TimeoutStopSec={stop_s:g}
WatchdogSec={settings.watchdog_s + max(map(config.step_limit_s, together)):g}
WatchdogSignal=SIGKILL
KillMode=mixed
Nice={0 if len(together) > 1 else config.actor(actor).nice}
CPUWeight={_cpu_weight(min(config.actor(one).nice for one in together))}
UMask=0077
NoNewPrivileges=yes
{_store(config) if stages[-1].listens else ""}
[Install]
WantedBy={TARGET}
"""


def _store(config: RuntimeConfig) -> str:
    """Return what makes systemd keep the gateway's connections, its records and its kept answers while it is started again. FDSTORE:
    systemd says so itself from 254 on."""
    number = (config.server.max_connections or MAX_CONNECTIONS) + EXTRA_CONNECTIONS + 2
    return f"FileDescriptorStoreMax={number}\nEnvironment=FDSTORE={number}\n"


def _cpu_weight(nice: int) -> int:
    """Return the share of the processors, of 100, that Linux gives this niceness: between services it counts in place of niceness."""
    return max(1, round(100 * 1.25**-nice))


def _order(config: RuntimeConfig, actor: InstanceId) -> str:
    """Order units to stop as a run does: systemd stops units in reverse of After=, at the cost of starting them in that order."""
    stages = starts_after(stage_of(actor))
    others = [other for stage in stages for other in config.instances if stage_of(other) == stage]
    after = {service_name(config.process_of(other)): None for other in others}
    return f"After={' '.join(after)}\n" if after else ""


def _quote(text: str) -> str:
    """Quote one word of a unit file, to be taken literally."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
