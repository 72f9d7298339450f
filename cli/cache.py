"""``mmrt cache show`` and ``mmrt cache clear``: what a run remembers of earlier requests.

``show`` reads the controller's counts in shared memory. ``clear`` asks the controller over the bus, as a peer that is no actor.
"""

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ..runtime.bus.messages import ClearCaches, Cleared
from ..runtime.bus.transport import ActorSocket
from ..runtime.errors import RunError
from ..runtime.process.memory_layout import EMBEDDING_PAGE_TOKENS, read_layout
from ..shm.controller_stats import ControllerStats, StatsSnapshot
from ..shm.errors import MissingError
from ..shm.run_directory import RunDirectory
from .options import RunName, model_run_path
from .terminal import print_columns

_PEER = "cache"
_RESEND_S = 0.2
_TIMEOUT_S = 10.0


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """One of the caches. ``queries`` and ``hits`` are tokens of prompts, or segments of media, since the run began; those of prompts
    stand at ``prefix`` alone. ``page_tokens``: 0 where a page has no tokens of its own."""

    name: str
    pool: str
    pages: int
    used_pages: int
    cached_pages: int
    evictable_pages: int
    page_tokens: int
    queries: int
    hits: int

    @property
    def hit_rate(self) -> str:
        return f"{self.hits / self.queries:.1%}" if self.queries else "-"


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Show or clear what is kept of earlier requests.")
    app.add_typer(group, name="cache")

    @group.command()
    def show(
        json: Annotated[bool, typer.Option("--json", help="One JSON array instead of a table.")] = False, run: RunName = None
    ) -> None:
        """Show pages, tokens, queries and hits of the caches. Exits with 1 if no run is up."""
        reports = read_caches(model_run_path(run))
        print(msgspec.json.encode(reports).decode()) if json else _print(reports)

    @group.command()
    def clear(run: RunName = None) -> None:
        """Forget everything that no running request holds."""
        for pool in clear_caches(model_run_path(run)).pools:
            if pool.num_forgotten or pool.num_held:
                kept = f", {pool.num_held} kept for running requests" if pool.num_held else ""
                print(f"{pool.pool}: {pool.num_forgotten} pages forgotten{kept}")


def read_caches(path: Path) -> list[CacheReport]:
    """Return the caches of the run in ``path``. Raises: RunError when none is up."""
    _expect_run(path)
    try:
        with RunDirectory.attach(path) as directory:
            segment = ControllerStats.attach(directory)
            stats, layout = segment.read(), read_layout(path)
            segment.close()
    except MissingError as error:
        raise RunError(f"the run in {path} is only just starting, or ending ({error})") from None
    kv_page_tokens = layout.kv_page_tokens if layout is not None else 0
    beside = (("windows", "window", kv_page_tokens), ("states", "state", 0))  # without which a prefix is not found
    return [
        _report("prefix", "kv", kv_page_tokens, stats, stats.looked_up_tokens_total, stats.cached_tokens_total),
        *(_report(name, pool, tokens, stats, 0, 0) for name, pool, tokens in beside if pool in stats.pools),
        _report("media", "embedding", EMBEDDING_PAGE_TOKENS, stats, stats.media_queries_total, stats.media_hits_total),
    ]


def clear_caches(path: Path) -> Cleared:
    """Have the controller clear its caches. Raises: RunError when no run is up, or the controller does not answer."""
    _expect_run(path)
    socket = ActorSocket(path, _PEER, os.getpid())
    try:
        give_up_s = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < give_up_s:
            socket.send(ClearCaches())
            socket.poll(_RESEND_S)
            for message in socket.receive():
                if isinstance(message, Cleared):
                    return message
    finally:
        socket.close()
    raise RunError(f"the controller of the run in {path} did not answer within {_TIMEOUT_S:g} s (mmrt status)")


def _expect_run(path: Path) -> None:
    if not RunDirectory.is_alive(path):
        raise RunError(f"no run is up in {path} (mmrt up)")


def _report(name: str, pool: str, page_tokens: int, stats: StatsSnapshot, queries: int, hits: int) -> CacheReport:
    uses = [use for name, use in stats.pools.items() if name.partition(".")[0] == pool]  # of all devices
    return CacheReport(
        name=name,
        pool=pool,
        pages=sum(use.pages for use in uses),
        used_pages=sum(use.used for use in uses),
        cached_pages=sum(use.cached for use in uses),
        evictable_pages=sum(use.evictable for use in uses),
        page_tokens=page_tokens,
        queries=queries,
        hits=hits,
    )


def _print(reports: list[CacheReport]) -> None:
    rows = [["CACHE", "POOL", "PAGES", "USED", "CACHED", "EVICTABLE", "TOKENS", "QUERIES", "HITS", "HIT RATE"]]
    for report in reports:
        counts = (report.pages, report.used_pages, report.cached_pages, report.evictable_pages)
        tokens = report.cached_pages * report.page_tokens if report.page_tokens else "-"
        rows.append([report.name, report.pool, *map(str, (*counts, tokens, report.queries, report.hits)), report.hit_rate])
    print_columns(rows, left=(0, 1))
    print("queries and hits: of prefix in tokens of prompts, of media in segments", file=sys.stderr)
