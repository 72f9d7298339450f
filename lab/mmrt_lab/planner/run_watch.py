"""A live run, watched while a load comes: its layouts, what its processes have taken, kills of those that come, and answers that must
not change. Called by ``followed_load``."""

import asyncio
import base64
import json
import signal
import time
import urllib.request
from contextlib import closing
from itertools import count

import msgspec

from mmrt.bench.own_run import OwnRun, OwnRunError
from mmrt.bench.processes import descendants, send_signal
from mmrt.bench.serve.samples import make_image
from mmrt.runtime.process.run import read_run_info
from mmrt.runtime.stage_table import actors_of, expand_layout, number_of
from mmrt.runtime.supervisor.processes import cpu_seconds
from mmrt.shm.run_directory import RunDirectory

_LOOK_S, _ASK_S, _ANSWER_S = 0.25, 2.0, 120.0


class Taken(msgspec.Struct, kw_only=True):
    """``cpu_s``: processor time of all processes of the run. ``process_s``: seconds of all processes that layouts name. ``num_wrong``:
    answers, of ``num_asked``, that are others than before the load; one that does not come is wrong."""

    layouts: list[str] = []
    cpu_s: float = 0.0
    process_s: float = 0.0
    num_kills: int = 0
    num_asked: int = 0
    num_wrong: int = 0


class RunWatch:
    """Watches a run from ``watch`` on until its task is cancelled. ``kills``: each process that comes is killed as it comes."""

    def __init__(self, run: OwnRun, url: str, supervisor_pid: int, kills: bool) -> None:
        self.taken = Taken()
        self._run, self._url, self._pid, self._kills = run, url, supervisor_pid, kills
        self._salts = count()
        self._cpu_s: dict[int, float] = {}
        self._seen: set[int] = set()
        self._killed: set[str] = set()  # each once, until it has left the run
        self._expected = [self._ask(number) for number in (0, 1)]
        self._before_s = self._cpu_now()

    async def watch(self) -> None:
        asking = asyncio.create_task(self._keep_asking())
        at_s = time.monotonic()
        try:
            while True:
                await asyncio.sleep(_LOOK_S)
                now_s = time.monotonic()
                await asyncio.to_thread(self._look, now_s - at_s)
                at_s = now_s
        finally:
            asking.cancel()
            self.taken.cpu_s = self._cpu_now() - self._before_s

    def _look(self, passed_s: float) -> None:
        with closing(RunDirectory.attach(self._run.run, timeout_s=1.0)) as run:
            layout = read_run_info(run).config.actors.layout
        processes = sum(process.count for process in expand_layout(layout))
        taken, pids = self.taken, self._cpu_now_by_pid()
        taken.process_s += processes * passed_s
        if not taken.layouts or layout != taken.layouts[-1]:
            taken.layouts.append(layout)
        if self._kills and (new := [pid for pid, name in pids.items() if number_of(name) and pid not in self._seen]):
            taken.num_kills += sum(send_signal(pid, signal.SIGKILL) for pid in new if pids[pid] not in self._killed)
            self._killed |= {pids[pid] for pid in new}
        self._killed &= {*actors_of(layout), *pids.values()}
        self._seen |= {*pids}

    def _cpu_now_by_pid(self) -> dict[int, str]:
        pids = descendants(self._pid)
        for pid in pids:
            self._cpu_s[pid] = max(self._cpu_s.get(pid, 0.0), cpu_seconds(pid) or 0.0)
        return pids

    def _cpu_now(self) -> float:
        self._cpu_now_by_pid()
        return sum(self._cpu_s.values())

    async def _keep_asking(self) -> None:
        for number in count():
            await asyncio.sleep(_ASK_S)
            try:
                is_right = await asyncio.to_thread(self._ask, number % 2) == self._expected[number % 2]
            except (OSError, ValueError):
                is_right = False
            self.taken.num_asked += 1
            self.taken.num_wrong += not is_right

    def _ask(self, number: int) -> str:
        """Ask for a text, or for a picture; no cache knows it. Raises: OSError, ValueError."""
        content: list[dict[str, object]] = [{"type": "text", "text": "Count from one to nine, and say what you see."}]
        if number:
            url = f"data:image/png;base64,{base64.b64encode(make_image(7, 224, 224)).decode()}"
            content.insert(0, {"type": "image_url", "image_url": {"url": url}})
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0}
        data = json.dumps(body | {"cache_salt": f"watch {next(self._salts)}"}).encode()
        request = urllib.request.Request(f"{self._url}/v1/chat/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            text = json.loads(answer.read())["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise OwnRunError(f"no text in the answer of {self._url}")
        return text
