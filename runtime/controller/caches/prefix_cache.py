"""Hits of the prefix cache: pages that a row need not compute, and names for those that it has computed (pure; rules over
``ControllerState``).

A row is given the leading pages of its members that the cache knows, at the grant of its KV pages. Only pages wholly before the last
token are given: decode feeds that token, and a page with a key is never written. A page gets its key when no plan writes it any
more and all its tokens are in it: after the plan that filled it is cleared, or when decode has gone beyond it.
"""

from collections.abc import Callable, Sequence
from functools import partial

from ....schema.media import MediaSpan
from ....schema.rows import Phase
from ...bus.copy_plans import Load, LoadChunk, LoadedState, LoadedWindows
from ...bus.messages import RequestSpec
from ...pools import PoolName, state_pool, window_pool
from ..scheduling.page_keys import Medium, PageKeys, content_digest, root_key
from ..scheduling.types import Rank
from ..state.effects import AppendPages, AppendSourcePages, SetPrefilled
from ..state.request import Request
from ..state.state import ControllerState, owner
from .embedding_cache import give_back_read
from .snapshots import Border, announced, cut_to_snapshot, has_states
from .window_pages import check_windows_unnamed, cut_to_copies, cut_to_windows, first_live, has_windows, name_windows

PAGES_AT_ONCE = 1024  # of a member, in a plan to load them

Hits = list[list[int]]
"""Pages per member."""
FindLeading = Callable[[list[bytes]], list[int]]
"""Return where the pages of the leading keys are, up to the first that is nowhere."""
FindBeside = Callable[[bytes], int | None]
"""Return where the recurrent state at the end of the page with this key is, or what it has of layers with a window, if anywhere."""


def set_keys(state: ControllerState, request: Request, prompts: Sequence[Sequence[int]], spans: Sequence[MediaSpan] = ()) -> None:
    """Prepare the names of the row's pages. ``prompts``: expanded ids per member; ``spans``: of the first one's media."""
    if not state.limits.prefix_cache or request.caches.keys:
        return
    first, *others = prompts
    era, salt, page_tokens = request.record.era, request.spec.salt, state.limits.kv_page_tokens
    root = root_key(state.secret, era, salt)
    keys = keys_of(state, era, request.spec, first, spans)
    request.caches.set_keys((keys, *[PageKeys(root, prompt, page_tokens) for prompt in others]))
    request.caches.learn(request.answer.ids)


def keys_of(state: ControllerState, era: bytes, spec: RequestSpec, prompt: Sequence[int], spans: Sequence[MediaSpan]) -> PageKeys:
    """Return the names of the pages of an expanded prompt, or of its beginning. ``spans``: of its media, the leading items of
    ``spec``."""
    media = [
        Medium(s.start, s.start + s.shape.num_tokens, content_digest(item.content, s.shape))
        for s, item in zip(spans, spec.items, strict=False)
    ]
    positions = partial(state.limits.positions, len(prompt), spans) if media else None
    return PageKeys(root_key(state.secret, era, spec.salt), prompt, state.limits.kv_page_tokens, media, positions)


def learn_ids(request: Request, ids: Sequence[int]) -> None:
    """Note ids that the row has generated, behind those known."""
    request.answer.learn(ids)
    request.caches.learn(ids)


def find_hits(state: ControllerState, request: Request, pool: PoolName = "kv") -> Hits:
    """Return the pages that a row without KV pages would be given from the cache of a pool."""
    hits = _find_pages(state, request, pool)
    if has_windows(state):
        return [cut_to_windows(state, request, pool, member, pages) for member, pages in enumerate(hits)]
    return [cut_to_snapshot(state, request, pool, member, pages) for member, pages in enumerate(hits)] if has_states(state) else hits


def _find_pages(state: ControllerState, request: Request, pool: PoolName) -> Hits:
    """Return the leading pages that the cache of a pool has, whether or not it has the states at their ends."""
    cache = state.pools[pool].cache
    return [cache.find_leading(keys.leading(_num_reusable(state, request, member))) for member, keys in enumerate(request.caches.keys)]


def _num_reusable(state: ControllerState, request: Request, member: int) -> int:
    """Return how many of a member's leading tokens need not be computed: all but the last, except those from which log-probabilities
    of the prompt or the mean of its hidden states are to come. With recurrent states one more is prefilled: the row's first chunk takes
    it from the snapshot to states of its own."""
    keys, sampling = request.caches.keys[member], request.spec.generation.sampling
    if member == 0 and request.spec.generation.pooling == "mean":
        return 0
    if member == 0 and sampling.prompt_logprobs is not None:
        return max(0, keys.num_prompt_tokens - 1 - sampling.prompt_logprobs_last) if sampling.prompt_logprobs_last else 0
    is_read_by_decode = request.spec.generation.pooling is None
    return max(0, keys.num_tokens - 1 - (has_states(state) and is_read_by_decode))


class PagesToCome:
    """The pages that rows in preparation are about to fill, for one round of grants.

    A row waits for a page that a row ahead of it is about to fill, rather than computing it as well: of equal prompts that come
    together one is prefilled. Rows wait only for rows ahead that have all their KV pages, so never for each other; when such a
    row fails or is preempted, they wait no longer. A row whose media are still to be encoded may itself wait for long: it keeps only
    those from their pages whose media are to be encoded as well. Nothing of this is stored: a new controller finds it in the rows.
    """

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._page_tokens = state.limits.kv_page_tokens
        self._has_states = has_states(state)
        self._snapshots: dict[bool, dict[Border, Rank]] = {}  # for whom, and where: the first of the rows that leave it
        self._ranks: dict[tuple[int, bool], dict[bytes, Rank]] = {}  # by place, for whom, and key: the first of the rows that fill it

    def add(self, request: Request) -> None:
        """Note a row that has got its KV pages."""
        for (place, has_media), ranks in self._ranks.items():
            self._note(ranks, place, has_media, request)
        for has_media, snapshots in self._snapshots.items():
            self._note_snapshots(snapshots, has_media, request)

    def have_next_of(self, request: Request, hits: Hits) -> bool:
        """Return whether a row ahead is about to fill the page behind these hits, of some member."""
        for member, (keys, pages) in enumerate(zip(request.caches.keys, hits, strict=True)):
            place, num_reusable = len(pages), _num_reusable(self._state, request, member)
            if self._has_states:
                if self._has_snapshot(request, member, place * self._page_tokens, num_reusable):
                    return True
                continue
            if (place + 1) * self._page_tokens > num_reusable:
                continue
            key = keys.at(place)
            rank = None if key is None else self._filled_at(place, awaits_media(request)).get(key)
            if rank is not None and rank < request.rank:
                return True
        return False

    def _has_snapshot(self, request: Request, member: int, start: int, end: int) -> bool:
        """Return whether a row ahead is about to leave a snapshot of these tokens."""
        has_media, keys = awaits_media(request), request.caches.keys[member]
        snapshots = self._snapshots.get(has_media)
        if snapshots is None:
            snapshots = self._snapshots[has_media] = {}
            for row in self._state.preparing():
                self._note_snapshots(snapshots, has_media, row)
        for (border, key), rank in snapshots.items():
            if start < border <= end and rank < request.rank and keys.at(border // self._page_tokens - 1) == key:
                return True
        return False

    def _note_snapshots(self, snapshots: dict[Border, Rank], has_media: bool, row: Request) -> None:
        if row.can_prefill and row.caches.keys and (has_media or not awaits_media(row)):
            for border in announced(self._state, row):
                snapshots[border] = min(row.rank, snapshots.get(border, row.rank))

    def _filled_at(self, place: int, has_media: bool) -> dict[bytes, Rank]:
        """Return the keys of the pages at this place that are to be filled, for a row that awaits media or not."""
        ranks = self._ranks.get((place, has_media))
        if ranks is None:
            ranks = self._ranks[place, has_media] = {}
            for row in self._state.preparing():
                self._note(ranks, place, has_media, row)
        return ranks

    def _note(self, ranks: dict[bytes, Rank], place: int, has_media: bool, row: Request) -> None:
        for member, keys in enumerate(row.caches.keys):
            if row.caches.num_named[member] > place or not row.can_prefill or not has_media and awaits_media(row):
                continue
            if place < row.targets[member] // self._page_tokens and (key := keys.at(place)) is not None:
                ranks[key] = min(row.rank, ranks.get(key, row.rank))


def awaits_media(request: Request) -> bool:
    """Return whether some of its media are to be encoded before all of its prompt can be prefilled."""
    return request.media.tracker is not None and not request.media.tracker.is_ready


def num_saved(state: ControllerState, hits: Hits, pool: PoolName = "kv") -> int:
    """Return by how much these hits lower the number of free pages that a grant takes. Idle ones are free before the grant."""
    cache = state.pools[pool].cache
    return sum(map(len, hits)) - len({page for pages in hits for page in pages if cache.is_idle(page)})


def find_home_hits(state: ControllerState, request: Request, pool: PoolName, targets: Sequence[int]) -> Hits:
    """Return the pages that the cache of ``pool`` has of a row that would be decoded there and prefilled on another device: they need
    not be copied. At least one token of each member is: the copy of the last ones ends the row's stay elsewhere."""
    page_tokens = state.limits.kv_page_tokens
    found = _find_pages(state, request, pool)
    hits = [pages[: max(0, target - 1) // page_tokens] for pages, target in zip(found, targets, strict=False)]
    if not has_windows(state):
        return hits
    return [cut_to_copies(state, request, pool, member, pages, targets[member]) for member, pages in enumerate(hits)]


def share_hits(state: ControllerState, request: Request, hits: Hits, pool: PoolName) -> None:
    """Make the row an owner of these pages before any are allocated for it, which may evict idle ones."""
    for pages in hits:
        if pages:
            state.pools[pool].share(owner(request), pages)


def append_home_hits(state: ControllerState, request: Request, member: int, pages: list[int]) -> None:
    """Begin the table in which a member is decoded with pages from the cache: they are not copied."""
    if pages:
        state.emit(AppendPages(request.row, member, pages))
        request.kv.append(member, pages)
        request.kv.copy(member, 0, len(pages) * state.limits.kv_page_tokens)


def append_hits(state: ControllerState, request: Request, member: int, pages: list[int]) -> None:
    """Begin the table in which a member is prefilled with pages from the cache: their tokens are prefilled."""
    if not pages:
        return
    num_tokens = len(pages) * state.limits.kv_page_tokens
    append_to_prefill(state, request, member, pages)
    if has_states(state):
        request.kv.begin_from_snapshot(member)
    state.emit(SetPrefilled(request.row, member, num_tokens, request.kv.slots[member]))
    request.kv.advance(member, 0, num_tokens)
    request.caches.hit(member, len(pages), num_tokens)


def append_to_prefill(state: ControllerState, request: Request, member: int, pages: list[int]) -> None:
    """Append pages to the table in which a member is prefilled."""
    if request.record.source_pool is None:
        state.emit(AppendPages(request.row, member, pages))
        request.kv.append(member, pages)
    else:
        state.emit(AppendSourcePages(request.row, member, pages))
        request.kv.append_source(member, pages)


def note_hits(state: ControllerState, request: Request) -> None:
    """After a grant: media that the hits cover are not needed, and the gateway learns how many tokens of the prompt they saved: once no
    more pages may be loaded."""
    skipped = skip_media(state, request)
    is_first = request.record.num_cached_tokens is None and not request.caches.may_load
    if is_first:
        num_cached = min(request.caches.num_cached[0], request.kv.lengths[0])  # more if the row has generated tokens
        request.record.num_cached_tokens = num_cached
        state.totals.looked_up_tokens += request.kv.lengths[0]
        state.totals.cached_tokens += num_cached
        state.ask(request.key, request.gateway_generation)
    if skipped or is_first:
        state.save(request)


def load_plan(state: ControllerState, request: Request) -> Load | None:
    """Return a plan to load the row's next pages: from the pool of another device where its cache has as many of them as the file, such
    as those of an answer that was decoded there; None if nobody has any."""
    caches = {pool: state.pools[pool].cache for pool in state.kv_pools if pool != request.prefill_pool}
    beside = state_pool if has_states(state) else window_pool if has_windows(state) else None
    find_beside = {pool: state.pools[beside(pool)].cache.find for pool in caches if beside is not None}
    plans = [Load(chunks_to_load(state, request, caches[pool].find_leading, find_beside.get(pool)), pool) for pool in caches]
    if not state.saved["kv"].is_empty:
        find = state.saved[beside("kv")].find if beside is not None else None
        plans.append(Load(chunks_to_load(state, request, state.saved["kv"].find_leading, find)))
    best = max(plans, key=lambda plan: plan.units, default=None)
    return best if best is not None and best.chunks else None


def chunks_to_load(
    state: ControllerState, request: Request, find: FindLeading, find_beside: FindBeside | None = None
) -> list[LoadChunk]:
    """Return the whole pages behind those that have keys, as far as ``find`` has them, nothing of them is prefilled and decode writes
    none of them. ``find_beside``: of a model with recurrent states, or with windows apart; nothing is loaded behind the last tokens at
    whose end it has what is needed."""
    page_tokens = state.limits.kv_page_tokens
    chunks = []
    for member, keys in enumerate(request.caches.keys):
        first = request.caches.num_named[member]
        if request.kv.prefilled[member] != first * page_tokens:
            continue
        names = keys.up_to(_num_reusable(state, request, member), first)
        slots = find(names if find_beside is not None else names[:PAGES_AT_ONCE])
        begin, end, loaded, windows = 0, len(slots), None, None
        if find_beside is not None and has_windows(state):
            begin, end, windows = _up_to_window(state, request, member, names[: len(slots)], find_beside)
        elif find_beside is not None:
            begin, end, loaded = _up_to_state(request, member, names[: len(slots)], find_beside)
        if begin < end:
            tokens = (first + begin) * page_tokens, (first + end) * page_tokens
            chunks.append(LoadChunk(*request.key_in_table, member, *tokens, names[begin:end], slots[begin:end], loaded, windows))
    return chunks


def _up_to_window(
    state: ControllerState, request: Request, member: int, names: list[bytes], find: FindBeside
) -> tuple[int, int, LoadedWindows | None]:
    """As ``_up_to_state``, to reach the last tokens whose window ``find`` has, but for what the row has of it."""
    first, page_tokens = request.caches.num_named[member], state.limits.kv_page_tokens
    count, place, slots = len(names), len(names) - 1, [find(name) for name in names]
    while place >= max(0, first_live(state, (first + count) * page_tokens) - first) and count:
        if slots[place] is None:
            count = place
        place -= 1
    begin = max(0, min(request.caches.num_waiting[member], count - 1))
    end = min(count, begin + PAGES_AT_ONCE)
    if not count or end < count:
        return begin, end, None
    live = max(0, first_live(state, (first + count) * page_tokens) - first)
    return begin, end, LoadedWindows(names[live:count], [slot for slot in slots[live:count] if slot is not None])


def _up_to_state(request: Request, member: int, names: list[bytes], find_state: FindBeside) -> tuple[int, int, LoadedState | None]:
    """Return which of these pages are to be loaded next, as (first, last + 1), to reach the last one at whose end there is a state; and
    with the last pages this state. Pages that have been loaded already wait for it."""
    last = next((number for number in range(len(names) - 1, -1, -1) if find_state(names[number]) is not None), -1)
    begin = min(request.caches.num_waiting[member], last)
    end = min(last + 1, begin + PAGES_AT_ONCE)
    if last < 0 or end <= last:
        return max(0, begin), end, None
    slot = find_state(names[last])
    assert slot is not None
    return begin, end, LoadedState(names[last], slot, request.kv.prefill_states[member].at(request.kv.next_slot(member)))


def skip_media(state: ControllerState, request: Request) -> bool:
    """Mark segments as encoded and consumed whose tokens are all prefilled: no plan need work on them. Returns whether any were."""
    if request.media.tracker is None:
        return False
    skipped = []
    for part in request.media.tracker.overlapping(0, request.kv.prefilled[0]):
        segment = request.record.items[part.item].segments[part.segment]
        if part.end <= request.kv.prefilled[0] and (segment.stage != segment.stage.ENCODED or segment.embedding is not None):
            place = part.item, part.segment
            state.pools["patch"].retire(owner(request), segment.patch.pages if segment.patch is not None else ())
            pages = request.media.unread(place, segment.embedding.pages) if segment.embedding is not None else []
            segment.skip()
            request.media.skip(place)
            give_back_read(state, request, pages)
            skipped.append(place)
    request.record.forgive(skipped)
    return bool(skipped)


def name_pages(state: ControllerState, request: Request) -> None:
    """Give keys to the pages that the row has filled. No plan may be writing them."""
    if request.caches.keys and not request.ending and not request.record.evicting:
        name_filled(state, request)


def name_filled(state: ControllerState, request: Request) -> None:
    """The same for a row that may be giving up its pages: decode, which is about to drop it, still holds them."""
    for member, keys in enumerate(request.caches.keys):
        num_written = request.kv.prefilled[member]
        if request.phase == Phase.DECODE or request.record.member_of is not None:
            num_written = max(num_written, request.kv.lengths[member] + request.answer.committed - 1)
        first = request.caches.num_named[member]
        if names := keys.up_to(num_written, first):
            request.caches.name(member, len(names))
            pages = request.prefill_tables[member][first : first + len(names)]
            state.name_pages(request.prefill_pool, pages, names, first)
            name_windows(state, request, member, first, names)


def check_unnamed(state: ControllerState, request: Request) -> None:
    """Assert that decode will write no page that has a key: its first token is the last one known. It may have no page yet."""
    for table, length in zip(request.kv.tables, request.kv.lengths, strict=False):
        first = (length + request.answer.committed - 1) // state.limits.kv_page_tokens
        for page in table[first : first + 1]:
            assert state.pools[request.kv_pool].cache.key_of(page) is None, f"decode would write page {page}, which has a key"
    if has_windows(state):
        check_windows_unnamed(state, request)
    for page in request.kv.bases(request.kv.states):
        cache = state.pools[state_pool(request.kv_pool)].cache
        assert cache.key_of(page) is None, f"decode would write state {page}, which has a key"
