"""Eras of the caches: what they held before the present one is outdated (pure).

An era is a part of every key of a page, so no request finds pages of an earlier one. ``mmrt cache clear`` begins a new one, as does an
actor that fills pages with other code than before. The era is journaled.

A run begins in the era that ``mmrt cache clear`` has begun last in a run with the same files (``cache.dir``). After an edit of the code
it has one of its own: what the edited code fills is not for runs with the code that the files are named after.
"""

from hashlib import blake2b

from ....schema.page_key import KEY_BYTES
from ...bus.messages import ClearedPool
from ...stage_table import InstanceId
from ..state.effects import KeepEra, SetPageGenerations
from ..state.known_media import KnownMedia
from ..state.records import NO_ERA, CacheEra
from ..state.state import ControllerState


def note_code(state: ControllerState, actor: InstanceId, code: int) -> None:
    """Note the code of an actor that fills pages. When it is other code than before, what the caches hold is outdated."""
    known = state.codes.get(actor)
    if code in (0, known):
        return
    state.codes[actor] = code
    if known is None:
        _record(state)
    else:
        state.era = _new_era(state)
        _forget(state)


def clear_caches(state: ControllerState) -> list[ClearedPool]:
    """Forget analyses of media, and the contents of pages that the cache alone holds. A new era begins, also for later runs."""
    is_edited = state.era != state.kept_era
    state.kept_era = state.era = _new_era(state)
    if is_edited:
        state.era = _new_era(state)
    cleared = _forget(state)
    state.emit(KeepEra(state.kept_era))
    return cleared


def restore_era(state: ControllerState, journaled: CacheEra, kept: bytes) -> None:
    """Go on in the journaled era, or begin in the one that is kept."""
    if journaled == NO_ERA:
        journaled = CacheEra(kept, {}, kept)
    state.era, state.codes, state.kept_era = journaled.era, dict(journaled.codes), journaled.kept
    if state.kept_era != kept:
        state.emit(KeepEra(state.kept_era))


def _new_era(state: ControllerState) -> bytes:
    return blake2b(f"{state.now!r} {state.number()}".encode(), digest_size=KEY_BYTES, key=state.era).digest()


def _record(state: ControllerState) -> None:
    state.journal(CacheEra(state.era, dict(state.codes), state.kept_era))


def _forget(state: ControllerState) -> list[ClearedPool]:
    """Forget what the caches have, in a new era. Their pages get new generations, so later controllers find no keys of theirs either.
    Requests in rows stay in their era: they go on to name their pages, which no later request finds."""
    cleared = []
    for pool, ledger in state.pools.items():
        run = ledger.forget_idle()
        if run.pages:
            state.emit(SetPageGenerations(pool, run))
        cleared.append(ClearedPool(pool, len(run.pages), len(ledger.cache)))
    state.known_media = KnownMedia()
    _record(state)
    for request in state.waiting.values():
        request.begin_era()
    return cleared
