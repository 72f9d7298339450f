"""The counts of all gateways of a run, where it has several: whichever is asked for ``/metrics`` asks the others. Each series then has
the label ``gateway``. Runs in the gateway's event loop.

A gateway answers on a Unix socket in the run directory. One that does not answer is left out: it is dead, and its counts begin anew.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ....runtime.stage_table import stage_of
from ....shm.named_socket import bind_in_place
from ....shm.run_directory import RunDirectory
from ...host.actor import Actor
from .metrics import Family, Metrics

log = logging.getLogger(__name__)

ANSWER_S = 2.0
_decode = msgspec.msgpack.Decoder(list[Family]).decode


def siblings_of(actor: Actor, present: Sequence[str], metrics: Metrics) -> "Siblings | None":
    """Return the gateways of a run, None where there is one. ``present``: all actors."""
    gateways = [name for name in present if stage_of(name) == "gateway"]
    return Siblings(actor.run, actor.name, gateways, metrics.families) if len(gateways) > 1 else None


class Siblings:
    """The gateways of a run. ``own``: the name of this one; ``families``: its metrics."""

    def __init__(self, run: RunDirectory, own: str, gateways: Sequence[str], families: Callable[[], list[Family]]) -> None:
        self._run = run
        self._own = own
        self._gateways = gateways
        self._families = families
        self._server: asyncio.Server | None = None

    async def answer(self) -> None:
        """Answer others from now on."""
        listener = bind_in_place(self._path(self._own), socket.SOCK_STREAM, backlog=16)
        self._server = await asyncio.start_unix_server(self._tell, sock=listener)

    async def _tell(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(msgspec.msgpack.encode(self._families()))
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(writer.drain(), ANSWER_S)
        writer.close()

    def close(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()

    async def read(self) -> dict[str, list[Family]]:
        """Return the metrics of each gateway that lives."""
        found = await asyncio.gather(*map(self._ask, self._gateways))
        return {name: families for name, families in zip(self._gateways, found, strict=True) if families is not None}

    async def _ask(self, name: str) -> list[Family] | None:
        if name == self._own:
            return self._families()
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._path(name))
                try:
                    return _decode(await reader.read(-1))
                finally:
                    writer.close()
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            log.info("/metrics is without %s, which does not answer: %s", name, error or "too late")
            return None

    def _path(self, name: str) -> Path:
        return self._run.segment_path(f"metrics-{name}")
