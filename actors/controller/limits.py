"""The limits of the machine, and the objectives that it keeps, as derived from a run's configuration, memory and model. Pure."""

from collections.abc import Sequence
from functools import partial

from ...models.architecture import ModelConfig
from ...models.families.item_check import fault_of
from ...models.families.registry import family_of
from ...models.media_config import VisionRules
from ...models.state_layout import state_layout
from ...runtime.config.runtime_config import RuntimeConfig, is_policy_file
from ...runtime.config.sections import ObjectiveSection
from ...runtime.controller.scheduling.budgets import tbt_rule
from ...runtime.controller.scheduling.facts import KINDS, Objective, RequestKind
from ...runtime.controller.scheduling.types import Limits
from ...runtime.process.memory_layout import (
    EMBEDDING_PAGE_TOKENS,
    PLAN_SLOTS,
    ROW_DEFINITION_BYTES,
    ROW_STATE_BYTES,
    MemoryLayout,
)
from ...runtime.stage_table import stage_of
from ...schema.media import MediaSpan
from ..host.breaks import has_breaks


def limits_of(config: RuntimeConfig, layout: MemoryLayout, model: ModelConfig) -> Limits:
    """Derive the machine's limits from the layout of this run's memory, the model and the configuration."""
    policy = config.scheduling.policy
    rules = model.vision_rules or VisionRules()
    stages = [frozenset(map(stage_of, together)) for together in config.processes.values()]
    return Limits(
        policy="unified" if is_policy_file(policy) else policy,  # until the file is loaded
        actors=config.instances,
        num_devices=config.num_kv_pools,
        devices=config.actor_devices,
        with_decode=frozenset().union(*(process for process in stages if "decode" in process)),
        num_rows=layout.num_rows,
        max_context=layout.max_context,
        kv_page_tokens=layout.kv_page_tokens,
        num_kv_pages=layout.pools["kv"].num_pages,
        media_page_bytes=layout.pools["media"].page_bytes,
        num_media_pages=layout.pools["media"].num_pages,
        patch_page_bytes=layout.pools["patch"].page_bytes,
        num_patch_pages=layout.pools["patch"].num_pages,
        embedding_page_tokens=EMBEDDING_PAGE_TOKENS,
        num_embedding_pages=layout.pools["embedding"].num_pages,
        num_state_pages=layout.pools["state"].num_pages if layout.has_states else 0,
        num_log_pages=layout.pools["log"].num_pages if layout.has_states else 0,
        num_window_pages=layout.pools["window"].num_pages if layout.has_windows else 0,
        window_tokens=model.language.window,
        window_chunk=model.language.window_chunk,
        placeholder_ids={kind: model.placeholder_id(kind) for kind in model.media_kinds},
        behind_ids=frozenset(model.behind_ids),
        sees_pictures=model.language.sees_pictures,
        max_items=config.media.max_items,
        max_request_pixels=config.media.max_request_pixels,
        max_waiting=config.server.max_waiting,
        max_spec_bytes=ROW_DEFINITION_BYTES,
        max_state_bytes=ROW_STATE_BYTES,
        num_plan_slots=PLAN_SLOTS,
        routing=config.scheduling.routing,
        prefill_ranks=config.prefill_ranks,
        **tbt_rule(config)._asdict(),
        objectives={kind: objective_of(config, kind) for kind in KINDS},
        prefill_budget=config.scheduling.prefill_budget_tokens,
        encode_budget=config.scheduling.encode_budget_tokens,
        rows_per_token=model.rows_per_token(),
        row_pixels=rules.patch_size**2,
        most_pixels=rules.max_pixels if model.vision_rules is not None else 0,
        embedding_cache=config.memory.embedding_cache,
        prefix_cache=config.memory.prefix_cache,
        has_breaks=has_breaks(config, model),
        first_tokens=draws_first_tokens(config, model),
        positions=partial(_positions, model),
        fault_of=partial(fault_of, model),
    )


def draws_first_tokens(config: RuntimeConfig, model: ModelConfig) -> bool:
    """Return whether prefill draws the first tokens of answers, which then wait for no step: not on a device, where prefill has no
    sampler; nor with recurrent states, whose log begins behind the prompt; nor with a model that computes nothing."""
    on_one_cpu = not config.model.on_cuda and config.num_kv_pools == 1
    return on_one_cpu and state_layout(model) is None and model.null is None


def objective_of(config: RuntimeConfig, kind: RequestKind) -> Objective:
    """Return the objective of a kind of request."""
    section: ObjectiveSection = getattr(config.slo, kind)
    return Objective(section.ttft_ms / 1000, section.tbt_ms / 1000)


def _positions(model: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[bytes, int]:
    """See ``page_keys.Positions``."""
    positions, delta = family_of(model).positions(model, num_tokens, spans)
    return positions.T.tobytes(), delta
