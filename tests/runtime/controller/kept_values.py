"""Whatever the controller's state keeps is what would be computed anew: lists by phase, views, when to look again, what has changed."""

from collections import Counter

from mmrt.runtime.controller.plans.planner import view_request
from mmrt.runtime.controller.rows.kv_manager import wanted_kv
from mmrt.runtime.controller.scheduling.types import SegmentStage
from mmrt.runtime.controller.state.inflight_plan import LONG_AGO_S
from mmrt.runtime.controller.state.state import ControllerState
from mmrt.runtime.pools import state_pool
from mmrt.schema.rows import Phase


def check_kept(state: ControllerState) -> None:
    """Call it between two ticks. Raises AssertionError."""
    live = [request for request in state.rows if request is not None and not request.ending]
    preparing = [request for request in live if request.phase == Phase.PREPARE]
    assert state.live() == live and state.preparing() == preparing
    assert state.decoding() == [request for request in live if request.phase == Phase.DECODE and not request.is_finished]
    assert state.num_decode_tokens == sum(len(request.kv.lengths) for request in state.decoding())
    assert state.watched() == [(r.row, r.row_generation) for r in live if r.phase == Phase.DECODE or not r.answer.counts_known]
    assert state.drops == {r.row: r for r in state.rows if r is not None and r.ownership.drop_ticket}
    for request in live:
        if request.phase == Phase.DECODE and not request.is_finished and state.windows_s > LONG_AGO_S:
            assert request.answer.window is not None and state.windows_s <= request.answer.window[0], (
                f"nobody looks at the rate of {request}"
            )
        if request.derived.view is not None:
            assert request.derived.view == view_request(state, request), f"an old view of {request}"
        if request.phase == Phase.DECODE and request.answer.committed < request.derived.grow_at:
            wanted = wanted_kv(state, request.kv.lengths, request.answer.committed, request.record.max_new_tokens, request.answer.rate)
            have = [len(table) for table in request.kv.tables]
            assert all(count <= held for count, held in zip(wanted, have, strict=False)), f"nobody looks whether {request} grows"
        segments = list(request.record.segments()) if request.record.prepared else []
        assert list(request.open_segments()) == [s for s in segments if s[1].stage < SegmentStage.ENCODED]
    assert {actor: number for actor, number in state.num_plans.items() if number} == Counter(p.actor for p in state.plans.values())
    check_touched(state)
    check_keys(state)
    for request in state.requests.values():
        assert request.last_heard_s >= state.heard_s
        assert request.failure is not None or request.is_finished or not 0 < request.spec.generation.deadline_s < state.deadline_s


def check_touched(state: ControllerState) -> None:
    """A row for which there is something to do has been touched."""
    touched = set(map(id, state.touched()))
    for request in state.preparing():
        record = request.record
        is_analysed = record.filled and all(item.shape is not None for item in record.items)
        has_ended = request.is_finished and not record.evicting
        is_ready = request.has_kv and not request.plans and request.answer.counts_known and request.is_prefilled
        goes_to_decode = is_ready and not request.spec.is_prefill_only and not record.source_pool
        to_do = has_ended or goes_to_decode or is_analysed and not record.prepared and request.failure is None
        assert not to_do or id(request) in touched, f"nobody looks at {request}"


def check_keys(state: ControllerState) -> None:
    """A page with a key stands in a block table only in its place: after the same tokens, and before the last one."""
    for request in state.live():
        for pool, tables in ((request.kv_pool, request.kv.tables), (request.prefill_pool, request.prefill_tables)):
            cache = state.pools[pool].cache
            for table, keys in zip(tables, request.caches.keys, strict=False):
                names = keys.up_to(keys.num_tokens)
                for index, page in enumerate(table):
                    key = cache.key_of(page)
                    assert key is None or names[index : index + 1] == [key], f"page {page} is the wrong one for {request}"
        both = ((request.kv_pool, request.kv.states), (request.prefill_pool, request.kv.prefill_states))
        keyed = [
            page
            for pool, members in both
            for pages in members
            for page in pages.bases
            if page >= 0 and state.pools[state_pool(pool)].cache.key_of(page) is not None
        ]
        assert not keyed or request.record.evicting or request.is_finished, f"states {keyed} have keys, and will be written"
