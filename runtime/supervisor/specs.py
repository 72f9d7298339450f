"""Settings to start and stop every actor, from the configuration: values for the supervisor, made by ``mmrt up``."""

import signal
from collections.abc import Mapping, Sequence

from ..config.runtime_config import RuntimeConfig
from ..environment import SERVER_KEY
from ..stage_table import STAGES, stage_of
from .launcher import ACTOR_ENTRY, BASE_STAGE, TORCH_STAGE, actor_command
from .managed_actor import ActorSpec

STOP_GRACE_S = 5.0
HURRY_GRACE_S = 3.0  # for a gateway told to stop draining


def actor_specs(config: RuntimeConfig, commands: Mapping[str, Sequence[str]] | None = None) -> list[ActorSpec]:
    """Make the specs of all processes. ``commands`` (for tests) names all actors of the run and their programs instead."""
    specs = []
    processes = config.processes if commands is None else {name: (name,) for name in commands}
    for name, actors in processes.items():
        section, stages = config.actor(name), [STAGES[stage_of(actor)] for actor in actors]
        listens = any(stage.listens for stage in stages)
        grace_s = config.supervisor.drain_s + HURRY_GRACE_S if listens else STOP_GRACE_S
        needs = TORCH_STAGE if any(stage.imports_torch for stage in stages) else BASE_STAGE
        can_be_forked = commands is None and not listens  # a fork cannot be given sockets
        specs.append(
            ActorSpec(
                name=name,
                others=actors[:-1],
                command=tuple(actor_command(name) if commands is None else commands[name]),
                needs=needs if can_be_forked else None,
                entry=ACTOR_ENTRY,
                requires=frozenset({"memory"}) - {name},
                threads=section.threads,
                nice=0 if len(actors) > 1 else section.nice,
                stop_grace_s=grace_s,
                handover_grace_s=grace_s + max(config.step_limit_s(actor) for actor in actors),
                ready_timeout_s=config.supervisor.ready_timeout_s,
                watchdog_s=config.supervisor.watchdog_s,
                is_essential=any(stage.is_essential for stage in stages),
                stop_rank=min(stage.stop_rank for stage in stages),
                listens=listens,
                handover_signal=signal.SIGUSR1 if listens and commands is None else signal.SIGTERM,
            )
        )
    return specs


def stop_order(specs: Sequence[ActorSpec]) -> list[list[ActorSpec]]:
    """Return all specs, in the groups that a run stops one after another."""
    ranks = sorted({spec.stop_rank for spec in specs})
    return [[spec for spec in specs if spec.stop_rank == rank] for rank in ranks]


ONEDNN_PRIMITIVES = "128"
"""Products that oneDNN keeps compiled in a process: one for each size. Its own limit is 1024, of 0.7 MB each."""


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the actors' environment: all variables except those for this process alone and secrets, plus settings common to all."""
    own = (
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
        "WATCHDOG_PID",
        "LISTEN_FDS",
        "LISTEN_PID",
        "MMRT_LIFELINE_FD",
        "MMRT_LISTEN_FDS",
        "MMRT_KEEPER_FD",
        "MMRT_KEY_FD",
        SERVER_KEY,
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
    )
    inherited = {key: value for key, value in environ.items() if key not in own}
    return inherited | {
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": "passive",
        "OPENBLAS_NUM_THREADS": "1",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": ONEDNN_PRIMITIVES,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # GPU checks in the zygote must not initialise CUDA: forks could not use it
    }
