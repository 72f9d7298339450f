"""How every actor is started and stopped, as the configuration says: values for the supervisor, made by ``mmrt up``."""

import signal
from collections.abc import Mapping, Sequence

from ..config import TORCH_ACTORS, RuntimeConfig
from .launcher import ACTOR_ENTRY, BASE_STAGE, TORCH_STAGE, TOWER_STAGE, actor_command
from .managed_actor import ActorSpec

ESSENTIAL = ("controller", "memory")  # without them nothing goes on, and nothing that they hold can be waited for
STOP_GRACE_S = 5.0
HURRY_GRACE_S = 3.0  # for a gateway that was told to drain no longer


def actor_specs(config: RuntimeConfig, commands: Mapping[str, Sequence[str]] | None = None) -> list[ActorSpec]:
    """How to start every process. ``commands`` (for tests) names all actors of the run and their programs instead."""
    specs = []
    processes = config.processes if commands is None else {name: (name,) for name in commands}
    for name, actors in processes.items():
        section = config.actor(name)
        grace_s = config.supervisor.drain_s + HURRY_GRACE_S if name == "gateway" else STOP_GRACE_S
        stage = TOWER_STAGE if "encoder" in actors else TORCH_STAGE if name in TORCH_ACTORS else BASE_STAGE
        can_be_forked = commands is None and name != "gateway"  # a fork cannot be given sockets
        specs.append(
            ActorSpec(
                name=name,
                others=actors[:-1],
                command=tuple(actor_command(name) if commands is None else commands[name]),
                needs=stage if can_be_forked else None,
                entry=ACTOR_ENTRY,
                requires=frozenset({"memory"}) - {name},
                threads=section.threads,
                nice=min(config.actor(actor).nice for actor in actors),
                stop_grace_s=grace_s,
                handover_grace_s=grace_s + max(config.step_limit_s(actor) for actor in actors),
                ready_timeout_s=config.supervisor.ready_timeout_s,
                watchdog_s=config.supervisor.watchdog_s,
                is_essential=name in ESSENTIAL,
                listens=name == "gateway",
                handover_signal=signal.SIGUSR1 if name == "gateway" and commands is None else signal.SIGTERM,
            )
        )
    return specs


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What actors inherit: everything but what concerns this process alone, and settings that all of them share."""
    own = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "MMRT_LIFELINE_FD", "MMRT_LISTEN_FDS")
    inherited = {key: value for key, value in environ.items() if key not in own}
    return inherited | {
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": "passive",
        "OPENBLAS_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # whoever asks for a GPU in the zygote must not initialise CUDA: forks could not use it
    }
