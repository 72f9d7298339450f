"""Which stages share a device, in a simulation (pure)."""

import msgspec

from mmrt.runtime.config.runtime_config import RuntimeConfig

from ..sim.costs import Costs
from ..sim.interference import stage_set, stage_sets
from ..sim.links import Link

_SIDES = ({"encoder", "prefill"}, {"decode"}, {"video"})


def costs_of(config: RuntimeConfig, costs: Costs) -> Costs:
    """The costs in a run of this configuration.

    With the preset ``split`` on a GPU, encode and prefill have one half of it and decode the other (US12): each takes twice as long,
    and neither slows the other. On a CPU the stages have as many cores as was measured.
    """
    if config.scheduling.preset != "split" or costs.device == "cpu":
        return costs
    return msgspec.structs.replace(
        costs,
        note=f"{costs.note} Split: encode and prefill on one half of the device, decode on the other.",
        encode={kind: line.times(2) for kind, line in costs.encode.items()},
        prefill=costs.prefill.times(2),
        decode=costs.decode.times(2),
        decode_context_s=2 * costs.decode_context_s,
        decode_wake_s=2 * costs.decode_wake_s,
        interference=_halves(),
    )


def link_of(config: RuntimeConfig, *, apart: bool) -> Link | None:
    """The link between devices, at no cost, where each process has one (RS1, TI1); presets stay on one device."""
    return Link() if apart and not config.scheduling.preset else None


def _halves() -> dict[str, dict[str, float]]:
    """Stages of one side share its time; sides do not slow each other."""
    rates = {}
    for together in stage_sets(("decode", "encoder", "prefill", "video")):
        sharing = {stage: len({*together} & side) for side in _SIDES for stage in side}
        rates[stage_set(together)] = {stage: 1 / sharing[stage] for stage in together}
    return rates
