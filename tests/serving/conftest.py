"""A front before runs that are servers of these tests, on real sockets: what is tried is the front, and no model."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mmrt.actors.gateway.connections import Connections
from mmrt.actors.gateway.keys.api_keys import ApiKeys
from mmrt.runtime.errors import RunError
from mmrt.runtime.process.page_token import page_token
from mmrt.serving import fleet as fleets
from mmrt.serving.card import Card
from mmrt.serving.fleet import Fleet, Member
from mmrt.serving.front import Front, build_front_app
from mmrt.serving.models_file import ServedModel, load_models
from mmrt.serving.page import FrontPage

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
NEEDS = 1 << 30


class Run:
    """In place of ``ModelRun``: a server that starts when ``may_start`` is set. ``problem``: why it does not."""

    def __init__(self, model: ServedModel, path: Path, _: object) -> None:
        self.name, self.path, self.url, self.pid = model.name, path, "", 1
        self.handler: Handler = echo
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.problem = ""
        self.num_starts = 0
        self.num_unattended = 0
        self._ended = asyncio.Event()
        self._ended.set()
        self._runner: web.ServerRunner | None = None

    def is_there(self) -> bool:
        return not self.has_ended

    def is_mine(self) -> bool:
        return True

    async def start(self) -> None:
        self.num_starts += 1
        await self.may_start.wait()
        if self.problem:
            raise RunError(self.problem)
        self._runner = web.ServerRunner(web.Server(self._handle, handler_cancellation=True), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._ended.clear()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self.handler(request)  # type: ignore[arg-type]

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def num_requests(self) -> int:
        return self.num_unattended

    async def ended(self) -> None:
        await self._ended.wait()

    async def die(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._ended.set()

    async def end(self, drain_s: float | None = None) -> None:
        await self.die()

    async def gone(self) -> None:
        await self.ended()


async def echo(request: web.Request) -> web.StreamResponse:
    headers = {name.lower(): value for name, value in request.headers.items()}
    return web.json_response({"path": request.path, "headers": headers, "body": (await request.read()).decode()})


class Tried:
    """The front, and what tests look at."""

    def __init__(self, fleet: Fleet, url: str, session: aiohttp.ClientSession, token: str) -> None:
        self.token = token
        self.fleet = fleet
        self.url = url
        self.session = session

    def run(self, name: str) -> Run:
        return self.member(name).run  # type: ignore[return-value]

    def member(self, name: str) -> Member:
        return self.fleet.members[name]

    async def post(self, path: str, headers: dict[str, str] | None = None, **fields: Any) -> aiohttp.ClientResponse:
        response = await self.session.post(self.url + path, json=fields, headers=headers)
        await response.read()
        return response

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Any:
        response = await self.session.get(self.url + path, headers=headers)
        return await response.json() if "json" in response.content_type else await response.text()

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it did not come true")


@pytest.fixture
def front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a test with a front of models "a" and "b", with memory for one of them; ``settings`` stand above them in the file, ``of_a``
    in the first."""
    cards: dict[str, Card] = {}

    async def look_at(model: ServedModel, memory_bytes: int) -> Card:
        return cards.get(model.name, Card(family="qwen3", kinds=("image",), max_context=100, needs_bytes=NEEDS))

    monkeypatch.setattr(fleets, "ModelRun", Run)
    monkeypatch.setattr(fleets, "look_at", look_at)
    monkeypatch.setattr(fleets, "TICK_S", 0.01)

    @asynccontextmanager
    async def trying(settings: str, of_a: str) -> AsyncIterator[Tried]:
        file = tmp_path / "models.toml"
        memory = "" if "memory" in settings else 'memory = "1.5 GiB"\n'
        table = settings if "[front]" in settings else f"{settings}\n[front]\n"
        file.write_text(f'{table}{memory}[[model]]\nname = "a"\n{of_a}[[model]]\nname = "b"\n')
        models = load_models(file, {})
        fleet = Fleet(models, tmp_path / "front", lambda text: None)
        app_of = Front(models, fleet)
        keys = ApiKeys(models.server, tmp_path, lambda: None, of_front=True)
        page = FrontPage(fleet, models.server, tmp_path, app_of.pass_on)
        app = build_front_app(app_of, models, keys, Connections(100), lambda: False, page)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await fleet.begin()
        async with aiohttp.ClientSession() as session:
            try:
                yield Tried(fleet, f"http://127.0.0.1:{runner.addresses[0][1]}", session, page_token(tmp_path))
            finally:
                await fleet.close(0.0)
                await runner.cleanup()
                await app_of.close()

    def run(test: Callable[[Tried], Awaitable[None]], settings: str = "", of_a: str = "", **of_models: Card) -> None:
        cards.update(of_models)

        async def whole() -> None:
            async with asyncio.timeout(60), trying(settings, of_a) as tried:
                await test(tried)

        asyncio.run(whole())

    return run
