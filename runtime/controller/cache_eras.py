"""Eras of the caches: what they held before the present one is outdated (pure).

An era is a part of every key of a page, so no request finds pages of an earlier one. ``mmrt cache clear`` begins a new one, as does an
actor that fills pages with other code than before. The era is journaled.
"""

from hashlib import blake2b

from ...schema.page_key import KEY_BYTES
from ..bus.messages import ClearedPool
from ..stage_table import InstanceId
from .effects import SetPageGenerations
from .known_media import KnownMedia
from .records import CacheEra
from .state import ControllerState


def note_code(state: ControllerState, actor: InstanceId, code: int) -> None:
    """Note the code of an actor that fills pages. When it is other code than before, what the caches hold is outdated."""
    known = state.codes.get(actor)
    if code in (0, known):
        return
    state.codes[actor] = code
    if known is None:
        state.journal(CacheEra(state.era, dict(state.codes)))
    else:
        clear_caches(state)


def clear_caches(state: ControllerState) -> list[ClearedPool]:
    """Forget analyses of media, and the contents of pages that the cache alone holds. The pages get new generations, so later
    controllers find no keys of theirs either. A new era begins."""
    cleared = []
    for pool, ledger in state.pools.items():
        run = ledger.forget_idle()
        if run.pages:
            state.emit(SetPageGenerations(pool, run))
        cleared.append(ClearedPool(pool, len(run.pages), len(ledger.cache)))
    state.known_media = KnownMedia()
    _begin_era(state)
    return cleared


def _begin_era(state: ControllerState) -> None:
    """Give pages other keys from now on. Requests in rows stay in their era: they go on to name their pages, which no later request
    finds."""
    state.era = blake2b(f"{state.now!r} {state.number()}".encode(), digest_size=KEY_BYTES, key=state.era).digest()
    state.journal(CacheEra(state.era, dict(state.codes)))
    for request in state.waiting.values():
        request.admission_need, request.keys = None, ()
