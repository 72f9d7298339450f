"""Which stages share a device, in a simulation (pure)."""

from collections.abc import Collection

import msgspec

from ...runtime.config import RuntimeConfig
from ...runtime.errors import ConfigError
from ...runtime.stage_table import stage_of
from ..sim.costs import Costs, Line
from ..sim.interference import stage_set, stage_sets

_NUM_DEVICES = 64  # at most: instances of all stages


def costs_of(config: RuntimeConfig, costs: Costs, *, apart: bool = False) -> Costs:
    """The costs in a run of this configuration.

    With the preset ``split`` on a GPU, encode and prefill have one half of it and decode the other (US12): each takes twice as long,
    and neither slows the other. On a CPU the stages have as many cores as was measured. ``apart``: each process has a device of its own
    (RS1, TI1), and its stages share it by time slices; but for presets. Raises: ConfigError for a layout with several processes of
    several stages, for rates are those of stages, not of processes.
    """
    if config.scheduling.preset == "split" and costs.device != "cpu":
        return msgspec.structs.replace(
            costs,
            note=f"{costs.note} Split: encode and prefill on one half of the device, decode on the other.",
            encode={kind: _twice(line) for kind, line in costs.encode.items()},
            prefill=_twice(costs.prefill),
            decode=_twice(costs.decode),
            decode_context_s=2 * costs.decode_context_s,
            interference=_interference({"encoder", "prefill"}),
        )
    if not apart or config.scheduling.preset:
        return costs
    shared = [{stage_of(actor) for actor in actors} for actors in config.processes.values() if len(actors) > 1]
    if len(shared) > 1:
        raise ConfigError(f"{config.actors.layout} cannot be simulated with --apart: it has {len(shared)} processes of several stages")
    return msgspec.structs.replace(costs, interference=_interference(*shared), num_cores=_NUM_DEVICES)


def _interference(side: Collection[str] = ()) -> dict[str, dict[str, float]]:
    """Stages of this side share its time; the others have a device each."""
    rates = {}
    for together in stage_sets(("decode", "encoder", "prefill", "video")):
        num_sharing = max(1, len({*together} & {*side}))
        rates[stage_set(together)] = {stage: 1 / num_sharing if stage in side else 1.0 for stage in together}
    return rates


def _twice(line: Line) -> Line:
    return Line(**{field: 2 * value for field, value in msgspec.structs.asdict(line).items()})
