"""Check of /health and /ready: both are polled ten times a second, and the answers compared with shared memory.

The truth of /ready at an instant: of every stage some actor's words say active, and its role lock is held. An answer is a lie if it
differs from what was true both right before the question and right after the answer, with the same generations: what changes in
between may be seen either way. A hung process counts as serving until its watchdog ends it. The truth of /health: a gateway that
serves answers 200. While a fault of the gateway's own is felt its connections may fail. In a drain /ready says 503.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Literal
from urllib.parse import urlsplit

from mmrt.runtime.stage_table import stage_of

from .run_view import RunView, Serving

INTERVAL_S = 0.1
_TIMEOUT_S = 5.0
GatewayMood = Literal["up", "disturbed", "draining"]


class TruthTeller:
    """Asks until cancelled. ``lies`` are for people; ``mood`` says what may be expected of the gateway at this time."""

    def __init__(self, mood: Callable[[float, float], GatewayMood], on_lie: Callable[[str], None]) -> None:
        self.num_polls = 0
        self.num_unready = 0
        self._mood = mood
        self._on_lie = on_lie

    async def watch(self, url: str, view: RunView) -> None:
        """Poll in turn, until cancelled."""
        while True:
            for route in ("/health", "/ready"):
                await self._poll(url, route, view)
                await asyncio.sleep(INTERVAL_S / 2)

    async def _poll(self, url: str, route: str, view: RunView) -> None:
        began_s, before = time.monotonic(), view.serving()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                status, reason = await ask(url, route), ""
        except TimeoutError:
            status, reason = 0, f"no answer within {_TIMEOUT_S:g} s"
        except (OSError, ValueError) as error:
            status, reason = 0, f"{type(error).__name__}: {error}"
        after, ended_s = view.serving(), time.monotonic()
        self.num_polls += 1
        self.num_unready += route == "/ready" and status != 200
        lie = judge_answer(route, status, reason, before, after, self._mood(began_s, ended_s))
        if lie:
            self._on_lie(f"{lie} (asked {ended_s - began_s:.2f} s)")


def judge_answer(route: str, status: int, reason: str, before: Serving, after: Serving, mood: GatewayMood) -> str:
    """The fault of the answer, "" if there is none. ``status`` 0: no answer, for ``reason``."""
    if status == 0:
        excused = mood != "up" or "gateway" in map(stage_of, before.missing | after.missing)
        return "" if excused else f"{route} got no answer from a gateway that serves: {reason}"
    if route == "/health":
        return "" if status == 200 or mood == "draining" else f"/health says {status}"
    if mood == "draining":
        return ""
    if before.generations == after.generations:
        if not before.lacking and status != 200 and mood == "up":
            return f"/ready says {status} although every stage serves"
        if before.lacking and status != 503:
            return f"/ready says {status} although {', '.join(sorted(before.lacking))} does not serve"
    return ""


async def ask(url: str, route: str) -> int:
    """The status of a GET on a connection of its own. Raises: OSError, ValueError for an invalid answer."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(f"GET {route} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
        line = await reader.readline()
        fields = line.split()
        if len(fields) < 2 or not fields[0].startswith(b"HTTP/1.") or not fields[1].isdigit():
            raise ConnectionResetError(f"the answer begins with {line[:40]!r}")
        return int(fields[1])
    finally:
        writer.close()
