"""The front's page: that of a run, for each model in turn. The front decides who may see and command a run, and asks the run then."""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from ..actors.gateway.page.files import HEADERS, read_files
from ..actors.gateway.page.guard import Access, check_command, check_reader
from ..actors.gateway.page.peers import is_own
from ..runtime.config.sections import ServerSection
from ..runtime.process.page_token import page_token
from .fleet import Fleet, Member
from .residency import State

_PRIVATE = {name: value for name, value in HEADERS.items() if name != "Content-Security-Policy"} | {"Cache-Control": "no-store"}

PassOn = Callable[[web.Request, Member], Awaitable[web.StreamResponse]]
"""Answers a request from the run of a model."""


class FrontPage:
    """The routes of the page. Each that is about a run says of which model: ``?model=NAME``; without, it is the first."""

    def __init__(self, fleet: Fleet, server: ServerSection, run: Path, pass_on: PassOn) -> None:
        self._fleet = fleet
        self._server = server
        self._access = Access(server.needs_key, page_token(run), is_own)
        self._files = read_files()
        self._pass_on = pass_on

    @property
    def open_routes(self) -> frozenset[str]:
        """The routes that need no key: those of the files."""
        return frozenset(self._files)

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and handler of each."""
        read, command = partial(self.of_run, check=check_reader), partial(self.of_run, check=check_command)
        return [
            *(("GET", route, file.serve) for route, file in self._files.items()),
            ("GET", "/page/limits", self.limits),
            ("GET", "/page/state", self.state),
            ("GET", "/page/trace/{key}", read),
            ("POST", "/page/restart/{actor}", command),
            ("POST", "/page/kill/{actor}", command),
        ]

    async def limits(self, http: web.Request) -> web.Response:
        """Answer with what a model takes, loaded or not."""
        member = self._fleet.find(http.query.get("model"))
        kinds = member.card.kinds if member.card is not None else ()
        return _told({"max_body_bytes": self._server.max_body_mib << 20, "kinds": kinds})

    async def state(self, http: web.Request) -> web.StreamResponse:
        """Answer with the state of a model's run, or with why it has none: ``unloaded``."""
        check_reader(http, self._access)
        member = self._fleet.find(http.query.get("model"))
        if member.residence.state is not State.READY:
            return _told({"unloaded": member.problem or self._fleet.describe(member)})
        return await self._pass_on(http, member)

    async def of_run(self, http: web.Request, check: Callable[[web.Request, Access], None]) -> web.StreamResponse:
        check(http, self._access)
        return await self._pass_on(http, self._fleet.loaded(http.query.get("model")))


def _told(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", headers=_PRIVATE)
