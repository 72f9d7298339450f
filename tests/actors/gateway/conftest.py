"""The real gateway on a free port, real rings, pools and bus, and a scripted controller and detokenizer beside it in one loop."""

import asyncio
import random
import secrets
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import msgspec
import numpy as np
import openai
import pytest
import uvloop
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from mmrt.actors.gateway import serve as serving
from mmrt.actors.gateway.reading.prompt import PromptBuilder
from mmrt.actors.gateway.reading.validation import Limits
from mmrt.actors.gateway.text_stack import TextStack
from mmrt.actors.host.actor import Actor
from mmrt.models.architecture import AttentionConfig, LanguageConfig, LayerConfig, MlpConfig, ModelConfig, RopeConfig
from mmrt.models.media_config import AudioRules, VisionRules
from mmrt.models.text.chat_template import ChatTemplate
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.runtime.bus.messages import (
    Cancel,
    Computed,
    Delivered,
    Delta,
    Failed,
    Filled,
    FinishReason,
    Granted,
    PageRun,
    Prepared,
    Query,
    Queued,
    Released,
    RequestSpec,
    SequenceSpec,
    Submit,
    ToActor,
    ToController,
    Unknown,
)
from mmrt.runtime.bus.transport import ActorSocket, ControllerSocket, drain_in_loop
from mmrt.runtime.bus.wire import encode
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import MediaSection, ServerSection, SupervisorSection
from mmrt.runtime.process.run import DEFAULT_MODEL
from mmrt.runtime.stage_table import ACTORS
from mmrt.shm.controller_stats import ControllerStats, PoolUse, StatsSnapshot
from mmrt.shm.doorbell import Ringer
from mmrt.shm.flight_recorder import FlightRecorder
from mmrt.shm.logprob_file import ANSWER, PROMPT, Logprobs
from mmrt.shm.pool import PagePool
from mmrt.shm.ring import Ring
from mmrt.shm.role_lock import RoleLock
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable
from mmrt.shm.status import ActorState, ActorTable

MODEL = "tiny"
MAX_CONTEXT = 2048
PAGE_BYTES = 4096
NUM_ROWS = 32
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|audio_pad|>", "<|audio_bos|>", "<|audio_eos|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<|{{ part['type'] }}_pad|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(["user assistant the quick brown fox"] * 4, trainer)
    return Tokenizer(backend, eos_ids=[1])


@pytest.fixture(scope="session")
def model() -> ModelConfig:
    return ModelConfig(
        family="qwen2_5_omni",
        language=LanguageConfig(
            vocab_size=400,
            hidden_size=8,
            rms_norm_eps=1e-6,
            layers=(
                LayerConfig(
                    mixer=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8), feed_forward=MlpConfig(intermediate_size=8)
                ),
            ),
            ropes=(RopeConfig(theta=1e4),),
        ),
        dtype="float32",
        max_context=MAX_CONTEXT,
        eos_token_ids=(1,),
        vision_rules=VisionRules(),
        audio_rules=AudioRules(),
        image_token_id=2,
        video_token_id=3,
        audio_token_id=4,
        audio_start_token_id=5,
        audio_end_token_id=6,
    )


@pytest.fixture(scope="session")
def prompts(tokenizer: Tokenizer, model: ModelConfig) -> PromptBuilder:
    return PromptBuilder(tokenizer, ChatTemplate(TEMPLATE), model, MAX_CONTEXT)


@pytest.fixture
def limits() -> Limits:
    return Limits(
        model_name=MODEL,
        family="qwen2_5_omni",
        kinds=("image", "video", "audio"),
        weight_bytes=1000,
        max_context=MAX_CONTEXT,
        media=MediaSection(),
    )


class Play:
    """One request as a script sees it: what came, and what the controller and the detokenizer do about it."""

    def __init__(self, controller: "Controller", key: int, spec: RequestSpec) -> None:
        self._controller = controller
        self.key = key
        self.spec = spec
        self.filled = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.delivered = asyncio.Event()
        self.state: ToActor = Queued(1, key, 0)  # what a Query is answered with
        self.runs: list[PageRun] = []
        self.offset = 0
        self.num_tokens = 0
        self.number = len(controller.plays)
        self.row = self.number % NUM_ROWS
        self.logprob = -1.0  # of each token

    def queue(self, position: int = 0) -> None:
        self._say(Queued(1, self.key, position))

    async def grant(self) -> list[bytes]:
        """Grant pages, wait until they are filled, and return what stands in them."""
        sizes = [item.num_bytes for item in self.spec.items]
        self.runs = [self._controller.allocate(size) for size in sizes]
        self._say(Granted(1, self.key, self.runs))
        await self.filled.wait()
        pool = self._controller.pool
        return [b"".join(bytes(pool.page(page)) for page in run.pages)[:size] for run, size in zip(self.runs, sizes, strict=True)]

    def prepare(self, num_prompt_tokens: int | None = None, num_cached_tokens: int = 0, num_sound_frames: int = 0) -> None:
        share = min([item.options.known_share for item in self.spec.items], default=1.0)
        num_prompt_tokens = num_prompt_tokens or len(self.spec.prompt_ids)
        self._say(Prepared(1, self.key, num_prompt_tokens, num_cached_tokens, num_sound_frames, share))

    def text(self, text: str, finish: FinishReason | None = None, num_tokens: int | None = None, stop: str = "") -> None:
        """A delta, as the detokenizer pushes it."""
        data = text.encode()
        known = self.num_tokens
        self.num_tokens += len(data.split()) if num_tokens is None else num_tokens
        ids = list(range(known, self.num_tokens)) if self.spec.generation.return_token_ids else []
        if (asked := self.spec.generation.sampling.prompt_logprobs) is not None and not known:
            self._controller.write_prompt_logprobs(self.row, self.key, self.spec, asked)
        if (asked := self.spec.generation.sampling.logprobs) is not None:
            self._controller.write_logprobs(self.row, known, self.num_tokens, self.logprob, asked)
        generation = int(self._controller.table.generation[self.row])
        self._controller.push(Delta(self.key, generation, self.offset, self.num_tokens, data, finish, ids, self.row, stop))
        self.offset += len(data)

    def compute(self, logprob: float = -2.0, vector: Sequence[float] = (), num_cached_tokens: int = 0) -> None:
        """The end of a request without an answer. ``logprob``: of each token that is asked for."""
        spec, table = self.spec, self._controller.table
        length, last = len(spec.prompt_ids), spec.generation.sampling.prompt_logprobs_last
        table.write_prompt(self.row, 0, spec.prompt_ids)
        table.write_spec(self.row, encode(SequenceSpec(self.key, spec.generation, length, 0, 1, [], 1)))
        table.prefilled[self.row, 0] = length
        if spec.generation.sampling.prompt_logprobs is not None and not last:
            self._controller.write_prompt_logprobs(self.row, self.key, spec, spec.generation.sampling.prompt_logprobs)
        elif last:
            own, rank, none = np.full(last, logprob, np.float32), np.ones(last, np.int32), np.empty((last, 0), np.int32)
            table.logprobs.write(self.row, PROMPT, length - last, Logprobs(own, rank, none, none.view(np.float32)))
        if spec.generation.pooling is not None:
            table.vectors.write(self.row, 0, length, np.array(vector, np.float64))
        self._say(Computed(1, self.key, self.row, int(table.generation[self.row]), length, num_cached_tokens))

    def fail(self, status: int, message: str, **more: Any) -> None:
        self._say(Failed(1, self.key, status, message, more.pop("error_type", "invalid_request_error"), **more))

    def _say(self, state: ToActor) -> None:
        self.state = state
        self._controller.send(state)


Script = Callable[[Play], Awaitable[None]]


async def answer_hello(play: Play) -> None:
    play.queue()
    await play.grant()
    play.prepare()
    if play.spec.is_prefill_only:
        play.compute(vector=[1.0])
        return
    play.text("Hello")
    play.text(", größer 😀")
    play.text(" world", "stop")


class Controller:
    """Plays a script per request over the real bus. Whatever ends a request releases it."""

    def __init__(self, run: RunDirectory, generation: int) -> None:
        self.pool = PagePool.attach(run, "media", "grant")
        self.table = SequenceTable.attach(run)
        self.script: Script = answer_hello
        self.plays: dict[int, Play] = {}
        self.log: list[ToController] = []
        self.loses: Callable[[], bool] = lambda: False  # whether the next message gets lost
        self._run = run
        self._generation = generation
        self._deltas = Ring.attach(run, "deltas")
        self._bell = Ringer(run, "gateway")
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._next_page = 0
        self._has_play = asyncio.Event()
        self.start()

    def start(self) -> None:
        """Come up, as after a restart: the same truth, a new socket."""
        self._socket = ControllerSocket(self._run.path)
        self._reader = drain_in_loop(asyncio.get_running_loop(), self._socket, self._receive)

    def stop(self) -> None:
        self._reader.close()
        self._socket.close()

    async def close(self) -> None:
        self.stop()
        self._bell.close()
        self.table.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def count(self, kind: type[Any]) -> int:
        return sum(isinstance(message, kind) for message in self.log)

    @property
    def play(self) -> Play:
        """The only request there is."""
        (play,) = self.plays.values()
        return play

    async def first_play(self) -> Play:
        await self._has_play.wait()
        return self.play

    def allocate(self, num_bytes: int) -> PageRun:
        pages = [(self._next_page + i) % self.pool.num_pages for i in range(-(-num_bytes // self.pool.page_bytes))]
        self._next_page += len(pages)
        for page in pages:
            self.pool.generations[page] += 1
        return PageRun(pages[::-1], [int(self.pool.generations[page]) for page in pages[::-1]])

    def send(self, message: ToActor) -> None:
        if not self.loses():
            self._socket.send("gateway", self._generation, message)
            self._reader.poke()

    def write_logprobs(self, row: int, first: int, last: int, logprob: float, num: int) -> None:
        """Ids count up from 10; the alternatives of each are the ids before it."""
        ids = np.arange(first, last, dtype=np.int32) + 10
        self.table.ids[row, first:last] = ids
        others = ids[:, None] - np.arange(1, num + 1, dtype=np.int32)
        values = np.full(others.shape, -0.5, np.float32)
        self.table.logprobs.write(
            row, ANSWER, first, Logprobs(np.full(len(ids), logprob, np.float32), np.full(len(ids), 2, np.int32), others, values)
        )

    def write_prompt_logprobs(self, row: int, key: int, spec: RequestSpec, num: int) -> None:
        """That of each token is -2, and its alternatives are tokens 40 and up."""
        length = len(spec.prompt_ids)
        self.table.write_prompt(row, 0, spec.prompt_ids)
        self.table.write_spec(row, encode(SequenceSpec(key, spec.generation, length, 0, 1, [], 1)))
        others = np.tile(np.arange(40, 40 + num, dtype=np.int32), (length - 1, 1))
        own, rank = np.full(length - 1, -2, np.float32), np.full(length - 1, 9, np.int32)
        self.table.logprobs.write(row, PROMPT, 1, Logprobs(own, rank, others, np.full(others.shape, -0.5, np.float32)))

    def push(self, delta: Delta) -> None:
        assert self._deltas.try_push(encode(delta))
        self._bell.ring()

    def _receive(self, received: tuple[str, int, ToController]) -> None:
        message = received[2]
        if self.loses():
            return
        self.log.append(message)
        match message:
            case Submit(_, key, spec):
                if key not in self.plays:
                    play = self.plays[key] = Play(self, key, spec)
                    self._has_play.set()
                    self._tasks[key] = asyncio.get_running_loop().create_task(self._perform(play))
                else:
                    self.send(self.plays[key].state)
            case Filled(_, key):
                self.plays[key].filled.set()
            case Query(_, key):
                self.send(self.plays[key].state if key in self.plays else Unknown(1, key))
            case Cancel(_, key) | Delivered(_, key):
                if key in self.plays:
                    play = self.plays[key]
                    (play.cancelled if isinstance(message, Cancel) else play.delivered).set()
                    play.state = Released(1, key)
                    if isinstance(message, Cancel):
                        self._tasks[key].cancel()
                self.send(Released(1, key))
            case _:
                pass

    async def _perform(self, play: Play) -> None:
        await self.script(play)


class Scene:
    """A running gateway with its surroundings."""

    def __init__(
        self,
        url: str,
        controller: Controller,
        actor: SimpleNamespace,
        stats: ControllerStats,
        table: ActorTable,
        locks: list[RoleLock],
    ) -> None:
        self.url = url
        self.locks = locks
        self.controller = controller
        self.actor = actor
        self.stats = stats
        self.table = table
        # Certificates would take each of the clients a twentieth of a second to read, and there is no TLS here.
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20, http_client=plain)
        self.http = httpx2.AsyncClient(base_url=url, timeout=20, verify=False)

    async def connect(self, receive_bytes: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        connection = socket.socket()
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        return await asyncio.open_connection(sock=connection)

    def chat(self, content: Any = "hi", **more: Any) -> dict[str, Any]:
        return {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}

    async def post(self, body: Any, **more: Any) -> httpx2.Response:
        return await self.http.post("/v1/chat/completions", json=body, **more)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110  (conditions on what other processes would own)
                await asyncio.sleep(0.002)


class Stage:
    """Sets the scene, runs a test in it, and strikes it."""

    def __init__(self, run: RunDirectory, text: TextStack) -> None:
        self.wait_for_role: Callable[[], None] = lambda: None
        self.follows_a_crash = False
        self._run = run
        self._text = text
        self.answers_fd: int | None = None  # of answers that outlive the gateway
        self.script: Script = answer_hello  # of requests that a gateway before has left
        self.statuses: list[str] = []  # what the gateway says in `mmrt status`
        self.config = RuntimeConfig(
            server=ServerSection(port=0, keep_alive_s=5.0, max_body_mib=1), supervisor=SupervisorSection(drain_s=5.0)
        )

    def configure(self, section: str, **fields: Any) -> None:
        changed = msgspec.structs.replace(getattr(self.config, section), **fields)
        self.config = msgspec.structs.replace(self.config, **{section: changed})

    def run(self, test: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._perform(test))

    async def _perform(self, test: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        run = self._run
        serves = asyncio.Event()
        ended = asyncio.Event()
        controller = Controller(run, generation=1)
        controller.script = self.script
        bus = ActorSocket(run.path, "gateway", 1)
        actor = SimpleNamespace(
            name="gateway",
            run=run,
            config=self.config,
            model_path=DEFAULT_MODEL,  # of which only grammars know
            generation=1,
            bus=bus,
            hold=bus.hold,
            flush=bus.flush,
            become_active=lambda: self.wait_for_role(),
            heartbeat=lambda: None,
            ending=False,
            lifeline=SimpleNamespace(is_gone=lambda: False, fd=None),
            status=None,
            listen_fds=(),
            keeper_fd=None,
            keeps_connections=False,
            store=None,
            answers_fd=self.answers_fd,
            has_adopted=True,
            has_greeted=True,
            follows_a_crash=self.follows_a_crash,
            notifier=SimpleNamespace(status=self.statuses.append),
            flight=FlightRecorder.create(run, f"gateway-{secrets.token_hex(4)}", 1024).writer(1),
            serving=lambda adopts: serves.set(),
            watch_ending=lambda loop, on_ending: None,
        )
        actor.adopted = lambda: setattr(actor, "has_adopted", True)
        actor.end = lambda: setattr(actor, "ending", True)
        table = ActorTable.attach(run)
        locks = [RoleLock(run, name) for name in table.actors]
        for lock in locks:
            assert lock.try_acquire()
            table.writer(lock.actor, 1).set_state(ActorState.ACTIVE)

        async def serve() -> None:
            try:
                await serving.serve(cast(Actor, actor), self._text)
            finally:
                ended.set()

        task = asyncio.create_task(serve())
        await asyncio.wait([asyncio.create_task(serves.wait()), task], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await controller.close()
            bus.close()
            for lock in locks:
                lock.release()
            task.result()
        url = (run.path / serving.ENDPOINT_NAME).read_text().strip()
        scene = Scene(url, controller, actor, ControllerStats.attach(run, writable=True), table, locks)
        try:
            async with asyncio.timeout(30):
                await test(scene)
        finally:
            await scene.client.close()
            await scene.http.aclose()
            actor.ending = True
            await task
            bus.close()
            await controller.close()
            for lock in locks:
                lock.release()


@pytest.fixture
def actors() -> tuple[str, ...]:
    """Of the run."""
    return ACTORS


@pytest.fixture
def stage(limits: Limits, prompts: PromptBuilder, actors: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(serving, "TICK_S", 0.01)
    path = Path(tempfile.mkdtemp(prefix="mmrt-test-", dir="/dev/shm")) / "run"
    run = RunDirectory.create(path, {})
    PagePool.create(run, "media", 64, PAGE_BYTES).close()
    Ring.create(run, "deltas", 1 << 20).close()
    SequenceTable.create(run, NUM_ROWS, MAX_CONTEXT, 8).close()
    ActorTable.create(run, actors).close()
    stats = ControllerStats.create(run)
    stats.publish(StatsSnapshot(running=3, waiting=2, pools={"kv": PoolUse(8, 2)}))
    stats.close()
    try:
        yield Stage(run, TextStack(limits, prompts))
    finally:
        run.close()
        shutil.rmtree(path.parent)


@pytest.fixture
def lossy() -> Callable[[], bool]:
    """Loses a good part of all messages, the same ones every time."""
    rng = random.Random(1)
    return lambda: rng.random() < 0.4
