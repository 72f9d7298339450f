"""The KV pools of rows: where a row's prompt is prefilled, and where it is decoded (pure; rules over ``ControllerState``; MS2, TI7).

Each device has a pool, and an actor works in that of its device. A row's own pool is that of the decode actors that may run it. Where
its device has a prefill, the prompt is prefilled there, and nothing is copied. Otherwise a prefill of another device fills pages of
its own pool, the row's *source*, and ``transfer`` has them copied. So a prompt leaves a device that has both stages only for one that
has decode alone.

Pages of both pools are granted at once, all or none, so no row keeps pages of one while it waits for the other (TI6): rows cannot wait
for each other in a circle. The first in order may take both from all that come later. A model with recurrent states has pools of them
beside each KV pool: each member of a row gets two, and a log if it is to decode, for as long as it has KV pages there.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ...pools import PoolName, log_pool, state_pool
from ...stage_table import stage_of
from ..caches.prefix_cache import Hits, find_hits, find_home_hits, num_saved
from ..caches.snapshots import has_states, num_waking, snapshots_at
from ..scheduling.admission import ResourceGate
from ..scheduling.guidance import Lengths, num_pages, prefill_targets
from ..state.request import Request
from ..state.state import ControllerState
from .lifecycle import preempt
from .windows import window_needs

FETCH_SHARE = 1 / 8  # of a page's tokens: the work to have it from another pool. It is less, but then both caches have the page


class Placement(NamedTuple):
    """The pools of a row. ``source``: None where it is prefilled in its own pool. ``needs``: free pages that the grant takes, by pool.
    ``hits``: pages that the cache has where the row is prefilled. ``at_home``: the same where it is decoded, if that is another pool.
    The grant shares both: they are valid until a pool changes. ``most_hits``: those of the pool where they are most."""

    pool: PoolName
    source: PoolName | None
    needs: dict[PoolName, int]
    hits: Hits
    at_home: Hits
    most_hits: Hits

    @property
    def name(self) -> str:
        """The pools, as one word for ``Routes``."""
        return f"{self.source or self.pool} {self.pool}"


def choose_pools(state: ControllerState, request: Request, lengths: Lengths, wanted: Lengths, gate: ResourceGate) -> Placement:
    """Choose the pools of a row without KV pages: those with the least work until its first token, of those that ``gate`` has room in;
    if it has none, of all. A ``scheduling.routing`` other than ``least_load`` says which are tried before these. ``lengths``: tokens of
    its prompts; ``wanted``: pages per member for decode."""
    targets = lengths if request.spec.generation.pooling is not None else prefill_targets(lengths, request.answer.committed)
    if len(state.kv_pools) == 1:
        pool = state.kv_pools[0]
        return _placement(state, request, targets, wanted, pool, pool, find_hits(state, request, pool), [])
    homes = able_pools(state, "prefill" if request.spec.is_prefill_only else "decode")
    sources = able_pools(state, "prefill") if any(targets) else homes
    options: list[Placement] = []
    at_home = {pool: find_home_hits(state, request, pool, targets) for pool in {*homes, *sources}}
    for source in sources:
        hits = find_hits(state, request, source)
        pools = [source, *(home for home in homes if home not in sources)] if source in homes else homes
        options += [_placement(state, request, targets, wanted, source, pool, hits, at_home[pool]) for pool in pools]
    most = max((option.hits for option in options), key=_num_pages)
    num_anywhere = max(_num_pages(find_hits(state, request, pool)) for pool in state.kv_pools)
    options.sort(key=lambda option: _work(state, option, targets, num_anywhere))
    if state.limits.routing != "least_load":
        chosen = state.routes.choose({option.name: () for option in options})
        options.sort(key=lambda option: option.name != chosen)
    return next((option for option in options if gate.has(option.needs)), options[0])._replace(most_hits=most)


def able_pools(state: ControllerState, stage: str) -> Sequence[PoolName]:
    """Return the pools of devices with an actor of the stage that gets work: one that is not lost, where there is any."""
    if len(state.kv_pools) == 1:
        return state.kv_pools
    actors = [actor for actor in state.staying if stage_of(actor) == stage]
    unbroken = [actor for actor in actors if not state.is_lost(actor)] or actors
    return sorted({state.pool_of(actor) for actor in unbroken}, key=state.kv_pools.index)


def leave_pools(state: ControllerState) -> None:
    """Preempt the rows in preparation whose pools can no longer serve them, while others can: they are prefilled again there."""
    if len(state.kv_pools) == 1:
        return
    homes, sources = able_pools(state, "decode"), able_pools(state, "prefill")
    for request in list(state.preparing()):
        if request.has_kv and not request.is_finished:
            has_lost_decode = request.kv_pool not in homes and not request.spec.is_prefill_only
            if has_lost_decode or not request.is_prefilled and request.prefill_pool not in sources:
                preempt(state, request)


def _placement(
    state: ControllerState,
    request: Request,
    targets: Lengths,
    wanted: Lengths,
    source: PoolName,
    pool: PoolName,
    hits: Hits,
    at_home: Hits,
) -> Placement:
    """Return the placement of a row that is prefilled in ``source``, where the cache has ``hits``, and decoded in ``pool``, where the
    cache has ``at_home`` if that is another one."""
    num_new = -num_saved(state, hits, source)
    states = _state_needs(state, request, source, len(wanted), hits)
    if source == pool:
        needs = {pool: num_new + sum(wanted), **states, **window_needs(state, request, pool, targets, wanted, hits)}
        return Placement(pool, None, needs, hits, [], hits)
    at_source = tuple([num_pages(target, state.limits.kv_page_tokens) for target in targets])
    num_new += sum(at_source)
    needs = {pool: sum(wanted) - num_saved(state, at_home, pool), source: num_new}
    states |= _state_needs(state, request, pool, len(wanted), [])
    windows = window_needs(state, request, source, targets, at_source, hits)
    windows |= window_needs(state, request, pool, targets, wanted, at_home, are_copied=True)
    return Placement(pool, source, needs | states | windows, hits, at_home, hits)


def _state_needs(state: ControllerState, request: Request, pool: PoolName, num_members: int, hits: Hits) -> dict[PoolName, int]:
    """Return the pages of recurrent states that a row takes in a pool: two and a log of each member, and those at the end of its hits.
    A log is for decode."""
    if not has_states(state):
        return {}
    num_snapshots = num_waking(state, pool, snapshots_at(state, request, pool, list(map(len, hits)))) if hits else 0
    return {state_pool(pool): 2 * num_members + num_snapshots, log_pool(pool): 0 if request.spec.is_prefill_only else num_members}


def _work(state: ControllerState, option: Placement, targets: Lengths, num_anywhere: int) -> float:
    """Return the tokens to be prefilled in the option's pool up to the row's last, and a page of tokens for each sequence of decode.
    ``num_anywhere``: pages that the cache of some pool has, which can be fetched."""
    source, page_tokens = option.source or option.pool, state.limits.kv_page_tokens
    before = sum([other.tokens_left for other in state.preparing() if other.has_kv and other.prefill_pool == source])
    num_found = _num_pages(option.hits)
    num_saved_pages = num_found + (1 - FETCH_SHARE) * max(0, num_anywhere - num_found)
    return before + sum(targets) + page_tokens * (_num_sequences(state, option.pool) - num_saved_pages)


def _num_pages(hits: Hits) -> int:
    return sum(map(len, hits))


def _num_sequences(state: ControllerState, pool: PoolName) -> int:
    return sum([len(other.kv.lengths) for other in state.live() if other.has_kv and other.kv_pool == pool])
