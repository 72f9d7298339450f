"""Checkpoint reading shared by families with experts."""

from ..architecture import FeedForwardConfig, MoeConfig
from ..checkpoint.json_fields import JsonObject
from .fields import parse_mlps

_SHARED_SIZE = "shared_expert_intermediate_size"
# Fields by which routers of other models differ from softmax over all experts, and what they say where nothing differs.
_OTHER_ROUTERS: dict[str, tuple[object, ...]] = {
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "n_group": (0, 1),
    "topk_group": (0, 1),
    "routed_scaling_factor": (1,),
    "n_shared_experts": (0,),
    _SHARED_SIZE: (0,),
    "use_expert_bias": (False,),
}


def parse_experts(text: JsonObject, num_layers: int) -> list[FeedForwardConfig]:
    """``fields.FeedForwards`` of a decoder some of whose layers have experts, the others an MLP. Raises CheckpointError, also for a
    router of another kind."""
    return place_experts(text, num_layers, parse_router(text, renormalise=text.boolean("norm_topk_prob", default=False)))


def parse_router(text: JsonObject, renormalise: bool, has_shared: bool = False) -> MoeConfig:
    """The experts of a layer. Raises CheckpointError for a router of another kind."""
    for field, neutral in _OTHER_ROUTERS.items():
        if field == _SHARED_SIZE and has_shared:
            continue
        if text.has(field) and text.data[field] not in neutral:
            raise text.error(field, f"is {text.data[field]!r}, expected {neutral[-1]!r}; other routers are not supported")
    num_experts = text.integer("num_experts", "num_local_experts", most=1 << 16)
    return MoeConfig(
        num_experts=num_experts,
        top_k=text.integer("num_experts_per_tok", most=num_experts),
        expert_size=text.integer("moe_intermediate_size"),
        shared_size=text.integer(_SHARED_SIZE) if has_shared else 0,
        renormalise=renormalise,
    )


def place_experts(text: JsonObject, num_layers: int, experts: MoeConfig) -> list[FeedForwardConfig]:
    """Those of each layer, or its MLP. Raises CheckpointError."""
    step, without = text.integer("decoder_sparse_step", default=1), text.integers("mlp_only_layers", default=())
    has_experts = [index not in without and (index + 1) % step == 0 for index in range(num_layers)]
    if all(has_experts):
        return [experts] * num_layers
    return [experts if has else mlp for has, mlp in zip(has_experts, parse_mlps(text, num_layers), strict=True)]
