"""A server under load, and the bodies that were made for it. Called by ``command``."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from .client import post_json, stream_chat
from .drivers import new_record
from .errors import BenchError
from .options import Options
from .record import Record
from .workload import Calibration, Message, RequestPlan, calibrate, encode_body, make_body, make_message

_CALIBRATION_TOKENS = (32, 160)


class Target:
    """The server at ``url``."""

    def __init__(self, session: aiohttp.ClientSession, options: Options, url: str, model: str) -> None:
        self.options = options
        self._session = session
        self._url = url
        self.model = model
        self._calibration = Calibration()
        self._bodies: dict[str, bytes] = {}

    def prepare(self, plans: Sequence[RequestPlan]) -> None:
        """Make the bodies of these requests."""
        for plan in plans:
            self._bodies[plan.seed] = self._body(plan)

    def message(self, plan: RequestPlan) -> Message:
        """The user's message of a request."""
        return make_message(plan, self.options.shapes, self._calibration)

    def _body(self, plan: RequestPlan) -> bytes:
        options = self.options
        return make_body(
            plan, options.shapes, self._calibration, self.model, extensions=options.extensions, temperature=options.temperature
        )

    async def send(self, plan: RequestPlan, record: Record) -> None:
        """Send a prepared request."""
        await stream_chat(self._session, self._url, self._bodies[plan.seed], record)

    async def ask(self, messages: Sequence[Message], plan: RequestPlan, record: Record) -> str:
        """Send these messages as one request. Returns the answer's text."""
        options = self.options
        body = encode_body(messages, plan.max_tokens, self.model, extensions=options.extensions, temperature=options.temperature)
        return await stream_chat(self._session, self._url, body, record)

    async def post(self, path: str, body: Mapping[str, object]) -> Any:
        """Send a request outside the measurement. Returns the reply, in JSON. Raises: BenchError."""
        return await post_json(self._session, self._url + path, json.dumps({"model": self.model, **body}).encode())

    async def probe(self, plan: RequestPlan) -> Record:
        """Send one request outside the measurement. Raises: BenchError if it fails."""
        record = new_record(plan, 0.0)
        await stream_chat(self._session, self._url, self._body(plan), record)
        if record.error is not None:
            raise BenchError(f"a {plan.group} request before the measurement failed: {record.error}")
        return record

    async def calibrate(self) -> None:
        """Learn how many tokens a word has, if the server says how many tokens a prompt had; else a word counts as one."""
        measured = []
        for words in _CALIBRATION_TOKENS:
            plan = RequestPlan(
                index=0, seed=f"calibration/{words}", group="calibration", media=(), num_input_tokens=words, max_tokens=1
            )
            measured.append((words, (await self.probe(plan)).num_prompt_tokens))
        (short, short_tokens), (long, long_tokens) = measured
        if short_tokens and long_tokens:
            self._calibration = calibrate((short, short_tokens), (long, long_tokens))

    async def warm_up(self, plans: Sequence[RequestPlan]) -> None:
        """``num_warmup`` of each group, one after the other, with content of their own and short answers. Raises: BenchError if one
        fails."""
        first = {plan.group: plan for plan in reversed(plans)}
        for plan in first.values():
            for number in range(self.options.num_warmup):
                short = min(4, plan.max_tokens)
                fresh = msgspec.structs.replace(plan, seed=f"warmup/{plan.seed}/{number}", max_tokens=short, messages=())
                await self.probe(fresh)
