"""Devices with KV pools of their own: prompts are prefilled in one pool and decoded in another, and no token differs from those of one
pool, whoever is killed while pages are copied."""

import json
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from numpy.typing import NDArray

from mmrt.bench.serve.command import main as bench
from mmrt.runtime.bus.copy_plans import Transfer
from mmrt.runtime.bus.plans import decode_plan
from mmrt.runtime.stage_table import ProcessSpec, format_layout
from mmrt.shm.controller_stats import ControllerStats
from mmrt.shm.layer_progress import DONE, LayerProgress
from mmrt.shm.plan_table import PlanTable
from mmrt.shm.pool import PagePool
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable
from mmrt.shm.status import ActorTable
from mmrt.tests.end_to_end.conftest import Server, also_slow, copy_package
from mmrt.tests.end_to_end.test_instances import at_once
from mmrt.tests.end_to_end.test_outages import TIMEOUT_S, Asking
from mmrt.tests.end_to_end.test_restart import LONG, PROMPT, Streams, processes
from mmrt.tests.end_to_end.test_scale import always_asked, set_layout

SETTINGS = """[actors]
layout = "{}"
[[devices]]
name = "left"
[[devices]]
name = "right"
[scheduling]
prefill_budget_tokens = 128
[supervisor]
backoff_s = 0.05
"""
PAGE_S = 0.01  # to copy a page
SLOW_PAGE_S = 0.1
LAYER_S = 0.1  # of prefill
PIECE_S = 0.3  # of eight pages that decode computes
COPY_LINE = "            ours.page(target)[part] = contents\n"
STORED_LINE, DONE_LINE = "        self._note(self._num_layers + 1)\n", "        self._note(DONE)\n"
LETTERS = "abcdefghij " * 90
LONG_PROMPT = [{"role": "user", "content": LETTERS + PROMPT}]


def slow_down(source: Path, page_s: float) -> Path:
    """Let a copy of the package take its time to copy a page."""
    share = "(part.stop - part.start) / ours.page_bytes"
    take_time(source / "actors" / "decode" / "page_copier.py", COPY_LINE, f"{page_s} * {share}")
    return source


@pytest.fixture(scope="module")
def slow_source(source: Path) -> Path:
    """A copy of the package that takes its time to copy a page, and computes none instead."""
    file = source / "actors" / "decode" / "loop.py"
    text = file.read_text()
    assert text.count("if may_recompute(actor, layout.has_windows):") == 1
    file.write_text(text.replace("if may_recompute(actor, layout.has_windows):", "if False:"))
    return slow_down(source, PAGE_S)


@pytest.fixture(scope="module")
def apart(launch: Callable[..., Server], slow_source: Path) -> Server:
    return launch(settings=SETTINGS.format("EP@left+D@right"), source=slow_source)


def transferred(server: Server) -> int:
    with RunDirectory.attach(server.run_path) as run, closing(ControllerStats.attach(run)) as stats:
        return stats.read().transferred_bytes_total


def is_copy(theirs: NDArray[np.float32], ours: NDArray[np.float32]) -> bool:
    """Return whether a page was copied, packed or not."""
    return bool(np.abs(theirs - ours).max() < 0.01 * np.abs(theirs).max())


def wait_for_half_a_copy(server: Server) -> None:
    """Until decode has copied some of the pages of a plan, and not all."""
    until_s = time.monotonic() + TIMEOUT_S
    with ExitStack() as stack:
        run = stack.enter_context(RunDirectory.attach(server.run_path))
        table = stack.enter_context(closing(SequenceTable.attach(run, writable=False)))
        plans = stack.enter_context(closing(PlanTable.attach(run, writable=False)))
        pools = [stack.enter_context(closing(PagePool.attach(run, name, "read"))) for name in ("kv", "kv.1")]
        while time.monotonic() < until_s:
            for plan in [decode_plan(record.payload) for record in plans.live()]:
                if isinstance(plan, Transfer) and (chunk := plan.chunks[0]).end - chunk.start > 64:
                    places = slice(chunk.start // 16, -(-chunk.end // 16))
                    pages = table.source_pages(chunk.row, 0)[places], table.pages(chunk.row, 0)[places]
                    both = zip(*(pool.data[numbers] for pool, numbers in zip(pools, pages, strict=True)), strict=True)
                    if 0 < sum(is_copy(theirs.view(np.float32), ours.view(np.float32)) for theirs, ours in both) < len(pages[0]):
                        return
    raise AssertionError("no copy was seen")


def take_time(file: Path, line: str, seconds: str) -> None:
    """Let a copy of the package sleep before the only line of a file that begins so."""
    text = file.read_text()
    assert text.count(line) == 1
    file.write_text(text.replace(line, f"{line[: len(line) - len(line.lstrip())]}__import__('time').sleep({seconds})\n{line}"))


def slow_layers(source: Path, layer_s: float = LAYER_S) -> Path:
    """Let each layer of a prefill that is followed take its time in a copy of the package; half of LAYER_S is enough to copy it."""
    take_time(source / "actors" / "decode" / "page_copier.py", COPY_LINE, f"{LAYER_S} / 16")
    take_time(source / "shm" / "layer_progress.py", STORED_LINE, f"{layer_s}")
    return source


@pytest.fixture(scope="module")
def layered(launch: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Seven layers of two groups."""
    source = slow_layers(copy_package(tmp_path_factory.mktemp("layered")))
    take_time(source / "shm" / "layer_progress.py", DONE_LINE, f"{LAYER_S}")  # the last layer's end is that of the plan
    return launch("gemma3", settings=SETTINGS.format("EP@left+D@right"), source=source)


@pytest.fixture(scope="module")
def slow_link(launch: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Eight pages are sooner computed than copied, and both take longer than it takes to kill a process. Prefill takes its time."""
    source = slow_down(copy_package(tmp_path_factory.mktemp("slow")), SLOW_PAGE_S)
    take_time(source / "shm" / "layer_progress.py", STORED_LINE, f"{LAYER_S}")
    take_time(source / "actors" / "decode" / "recomputing.py", "            self._model.prefill([", f"{PIECE_S}")
    return launch(settings=SETTINGS.format("EP@left+D@right"), source=source)


def kill(server: Server, victims: Sequence[str], asking: Asking, expected: list[int], before: dict[str, tuple[int, int]]) -> None:
    """Kill these actors, which had the processes ``before``: the request that is in work has the expected tokens."""
    for victim in victims:
        server.kill(victim)
    asking.join(TIMEOUT_S)
    assert (asking.error, asking.ids) == (None, expected)
    server.wait(lambda status: bool(status["ready"]), "ready")
    assert all(processes(server)[victim] != before[victim] for victim in victims)
    server.wait_until_empty()


def wait_for_some_layers(server: Server, *, of_windows: bool = False) -> None:
    """Until decode has copied some layers of a page that prefill is at: a KV page, or one ``of_windows``."""
    until_s = time.monotonic() + TIMEOUT_S
    with ExitStack() as stack:
        run = stack.enter_context(RunDirectory.attach(server.run_path))
        table = stack.enter_context(closing(SequenceTable.attach(run, writable=False)))
        plans = stack.enter_context(closing(PlanTable.attach(run, writable=False)))
        words = stack.enter_context(closing(LayerProgress.attach(run)))
        names = ("window", "window.1") if of_windows else ("kv", "kv.1")
        pools = [stack.enter_context(closing(PagePool.attach(run, name, "read"))) for name in names]
        their_table, our_table = (table.source_window_pages, table.window_pages) if of_windows else (table.source_pages, table.pages)
        while time.monotonic() < until_s:
            for plan in [decode_plan(record.payload) for record in plans.live()]:
                if isinstance(plan, Transfer) and plan.behind is not None and (chunk := plan.chunks[0]).filled > 64:
                    at, place = words.read(plan.behind[0]), (chunk.end - 1) // 16 if of_windows else chunk.filled // 16
                    theirs, ours = their_table(chunk.row, 0), our_table(chunk.row, 0)
                    if of_windows and not chunk.windows <= place < len(ours):
                        continue
                    same = np.mean(pools[0].data[theirs[place]] == pools[1].data[ours[place]])
                    if at is not None and 1 < at.num_layers < DONE and 0.1 < same < 0.9:
                        return
    raise AssertionError("no layers were seen")


def wait_for_a_computed_piece(server: Server) -> None:
    """Until decode computes pages of a row of which others have come over the link."""
    until_s = time.monotonic() + TIMEOUT_S
    with ExitStack() as stack:
        run = stack.enter_context(RunDirectory.attach(server.run_path))
        plans = stack.enter_context(closing(PlanTable.attach(run, writable=False)))
        actors = stack.enter_context(closing(ActorTable.attach(run)))
        while time.monotonic() < until_s:
            decode = actors.read("decode")
            for plan in [decode_plan(record.payload) for record in plans.live() if record.plan_id == decode.step_plan]:
                if decode.step_deadline_ns and isinstance(plan, Transfer) and plan.chunks[0].start > 0:
                    return
    raise AssertionError("nothing was computed")


def test_layers_are_copied_while_prefill_computes_the_next(layered: Server, launch: Callable[..., Server]) -> None:
    """KT1: some of the last chunk's layers are copied before prefill is done with it, the last one behind that, and decode's first step
    comes after all of them."""
    assert layered.chat(LONG_PROMPT)[1] == launch("gemma3").chat(LONG_PROMPT)[1]
    layered.wait_until_empty()
    events = json.loads(layered.mmrt("trace", "-o", "-").stdout)["traceEvents"]
    slices = sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])
    last = [event for event in slices if event["name"] == "transfer"][-1]
    copies = [event for event in slices if event["name"] == "copy" and event["args"]["plan"] == last["args"]["plan"]]
    prefilled = max(event["ts"] + event["dur"] for event in slices if event["name"] == "prefill")
    assert sum(event["args"]["copied"] for event in copies) == last["args"]["bytes"] > 0
    before = [event["args"]["copied"] for event in copies if event["ts"] + event["dur"] < prefilled]
    assert len(before) > 1 and sum(before) < last["args"]["bytes"], "some layers, not the last"
    first_step = min(event["ts"] for event in slices if event["name"] == "step")
    assert max(event["ts"] + event["dur"] for event in copies) < first_step


@pytest.mark.parametrize(
    "victims",
    [
        ("prefill",),
        pytest.param(("decode",), marks=pytest.mark.slow),
        pytest.param(("controller",), marks=pytest.mark.slow),
        pytest.param(("decode", "prefill", "controller"), marks=pytest.mark.slow),
    ],
    ids="+".join,
)
def test_a_kill_in_the_middle_of_a_chunk_changes_nothing(layered: Server, victims: tuple[str, ...]) -> None:
    """Decode has some layers of it."""
    expected, before = layered.chat(LONG_PROMPT, extra_body={"cache_salt": "first"})[1], processes(layered)
    asking = Asking(layered, LONG_PROMPT, max_tokens=24, extra_body={"cache_salt": "of a kill of " + "+".join(victims)})
    wait_for_some_layers(layered, of_windows=True)
    kill(layered, victims, asking, expected, before)


def test_what_a_slow_link_would_bring_is_computed(
    launch: Callable[..., Server], slow_link: Server, apart: Server, server: Server
) -> None:
    """KT2: by the speeds of link and prefill as measured. The first pages are copied, which tells the link's, and most others computed;
    with the link as it is all are copied. Tokens are those of one pool."""
    whole, num_bytes = transferred(apart), []
    apart.chat(LONG_PROMPT, extra_body={"cache_salt": "of a slow link"})
    apart.wait_until_empty()
    whole = transferred(apart) - whole
    guided = {"guidance_scale": 2.0, "negative_prompt": LETTERS}
    for run in (slow_link, launch(settings=SETTINGS.format("EP@left+D@right"))):
        before = transferred(run)
        assert run.chat(LONG_PROMPT)[1] == server.chat(LONG_PROMPT)[1]
        run.wait_until_empty()
        num_bytes.append(transferred(run) - before)
        assert run.chat(PROMPT + LETTERS, extra_body=guided)[1] == server.chat(PROMPT + LETTERS, extra_body=guided)[1]
        run.wait_until_empty()
    slow, fast = num_bytes
    assert 0 < slow < whole / 2 and fast == whole


@pytest.mark.parametrize(
    "victims",
    [("decode",), *also_slow((("prefill",),), (("memory",),), (("decode", "prefill", "memory"),))],
    ids="+".join,
)
def test_a_kill_while_decode_computes_what_a_slow_link_would_bring(slow_link: Server, server: Server, victims: tuple[str, ...]) -> None:
    """KT2. The prompt was asked for before, so that decode knows how fast the link is."""
    salt = {"cache_salt": "of a slow link and of " + "+".join(victims)}
    expected = server.chat(LONG_PROMPT, max_tokens=24)[1]
    assert slow_link.chat(LONG_PROMPT, max_tokens=24, extra_body={"cache_salt": "before " + salt["cache_salt"]})[1] == expected
    before = processes(slow_link)
    asking = Asking(slow_link, LONG_PROMPT, max_tokens=24, extra_body=salt)
    wait_for_a_computed_piece(slow_link)
    kill(slow_link, victims, asking, expected, before)


def test_answers_are_those_of_one_pool(apart: Server, server: Server) -> None:
    assert at_once(apart, 4) == at_once(server, 4)
    guided = {"guidance_scale": 2.0, "negative_prompt": "Answer rudely."}
    assert apart.chat(LONG_PROMPT, extra_body=guided)[1] == server.chat(LONG_PROMPT, extra_body=guided)[1]
    apart.wait_until_empty()
    assert transferred(apart) > 0
    metrics = urlopen(f"{apart.url}/metrics").read().decode().splitlines()
    (value,) = [line.split()[1] for line in metrics if line.startswith("mmrt_kv_transferred_bytes_total ")]
    assert float(value) == transferred(apart)
    events = json.loads(apart.mmrt("trace", "-o", "-").stdout)["traceEvents"]
    copied = [event["args"]["bytes"] for event in events if event.get("name") == "transfer" and "bytes" in event.get("args", {})]
    assert sum(copied) == transferred(apart)
    assert apart.mmrt("layout", "show").stdout.splitlines() == [
        "EP@left+D@right", "  encoder and prefill on device left", "  decode on device right",
    ]  # fmt: skip


@pytest.mark.slow
def test_packed_pages_are_copied_in_fewer_bytes_also_when_decode_is_killed(
    launch: Callable[..., Server], slow_source: Path, apart: Server
) -> None:
    """They are 3.6 times fewer (heads of 32, float32). The answer is that of an undisturbed run."""
    packed = launch(settings=SETTINGS.format("EP@left+D@right") + '[memory]\nkv_transfer_dtype = "int8"\n', source=slow_source)
    before = transferred(apart)
    apart.chat(LONG_PROMPT, extra_body={"cache_salt": "unknown"})
    expected = packed.chat(LONG_PROMPT)[1]
    apart.wait_until_empty()
    packed.wait_until_empty()
    whole, fewer = transferred(apart) - before, transferred(packed)
    assert fewer == whole * 576 // 2048 > 0
    asking = Asking(packed, LONG_PROMPT, max_tokens=24, extra_body={"cache_salt": "unknown"})
    wait_for_half_a_copy(packed)
    packed.kill("decode")
    asking.join(TIMEOUT_S)
    assert (asking.error, asking.ids) == (None, expected)
    packed.wait_until_empty()


def test_a_conversation_is_found_where_it_was_prefilled(apart: Server) -> None:
    extra, create = {"cache_salt": "of this conversation"}, apart.client.chat.completions.create
    usages, num_bytes = [], [transferred(apart)]
    for _ in range(2):
        usages.append(create(model=apart.checkpoint.name, messages=LONG_PROMPT, max_tokens=4, extra_body=extra).usage)  # type: ignore[call-overload]
        apart.wait_until_empty()
        num_bytes.append(transferred(apart))
    first, second = usages
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens >= second.prompt_tokens - 17, "all but the page of the last token"
    num_pages = -(-(first.prompt_tokens - 1) // 16)
    assert num_bytes[1] - num_bytes[0] == num_pages * (num_bytes[2] - num_bytes[1]), "one page is copied again: decode has the others"


def test_an_answer_is_found_where_it_was_decoded(apart: Server, server: Server) -> None:
    """The next turn of a conversation, as token ids."""
    create, model = apart.client.completions.create, apart.checkpoint.name
    prompt, extra = list(range(5, 45)), {"cache_salt": "of this answer", "return_token_ids": True}
    ask = {"model": model, "max_tokens": 40, "temperature": 0, "extra_body": extra}
    answer = create(prompt=prompt, **ask).choices[0].token_ids
    turn = [*prompt, *answer, *range(50, 60)]
    second = create(prompt=turn, **ask)
    assert second.usage.prompt_tokens_details.cached_tokens == (len(prompt) + len(answer) - 1) // 16 * 16
    alone = server.client.completions.create(prompt=turn, **{**ask, "model": server.checkpoint.name})
    assert second.choices[0].token_ids == alone.choices[0].token_ids
    apart.wait_until_empty()


@pytest.mark.parametrize(
    "victims",
    [
        ("decode",),
        pytest.param(("prefill",), marks=pytest.mark.slow),
        pytest.param(("controller",), marks=pytest.mark.slow),
        pytest.param(("decode", "prefill"), marks=pytest.mark.slow),
    ],
    ids="+".join,
)
def test_a_kill_in_the_middle_of_a_copy_changes_nothing(apart: Server, server: Server, victims: tuple[str, ...]) -> None:
    expected, before = server.chat(LONG_PROMPT)[1], processes(apart)
    asking = Asking(apart, LONG_PROMPT, max_tokens=24, extra_body={"cache_salt": "of a kill of " + "+".join(victims)})
    wait_for_half_a_copy(apart)
    kill(apart, victims, asking, expected, before)


@pytest.mark.slow
def test_a_drain_within_a_pool_copies_nothing(apart: Server) -> None:
    expected = apart.chat(PROMPT, **LONG)[1]
    apart.wait_until_empty()
    before = transferred(apart)
    with Streams(apart, 2) as streams:
        since = transferred(apart)
        assert apart.mmrt("scale", "decode=2").stdout.endswith("layout EP@left+2D@right\n")
        assert apart.mmrt("scale", "decode=1").stdout.endswith("layout EP@left+D@right\n")
        assert transferred(apart) == since > before, "prompts were copied once"
    assert streams.errors == [] and streams.ids == [expected] * 2
    apart.wait_until_empty()


@pytest.mark.slow
def test_each_device_serves_by_itself(launch: Callable[..., Server], server: Server) -> None:
    """Without a prefix cache: a prompt that comes late would find its beginning on one device and could be sent to the other."""
    both = launch(settings=SETTINGS.format("2EPD@*") + "[memory]\nprefix_cache = false\n")
    assert both.mmrt("layout", "show").stdout.splitlines()[0] == "EPD@left+EPD@right"
    expected = server.chat(PROMPT, **LONG)[1]
    with Streams(both, 4) as streams:
        both.kill("decode.1")
    assert streams.errors == [] and streams.ids == [expected] * 4
    steps = {actor["name"]: actor["steps"] for actor in both.status()["actors"]}
    assert steps["decode"] and steps["decode.1"] and transferred(both) == 0
    with ThreadPoolExecutor(4) as pool:
        stories = [pool.submit(both.chat, PROMPT, **LONG) for _ in range(4)]
        assert both.mmrt("layout", "set", "EPD@left").returncode == 0, "rows of the other device are prefilled again on this one"
        assert [story.result()[1] for story in stories] == [expected] * 4
    both.wait_until_empty()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_layouts_over_two_devices_change_no_token(launch: Callable[..., Server]) -> None:
    """Devices lose all actors of a stage, and get some again. ``mmrt scale`` adds them on the device of the last of their stage."""
    devices = {"encoder": ["left"], "prefill": ["left"], "decode": ["right"]}
    both, dice = launch(settings=SETTINGS.format("E@left+P@left+D@right")), random.Random(2)
    with always_asked(both):
        for _ in range(50):
            if dice.random() < 0.3:
                stage, count = dice.choice([*devices]), dice.randint(1, 3)
                devices[stage] = [*devices[stage], *devices[stage][-1:] * 3][:count]
                assert both.mmrt("scale", f"{stage}={count}", timeout_s=120).returncode == 0
            else:
                for stage, places in devices.items():
                    devices[stage] = [*places, *dice.choices(("left", "right"), k=3)][: dice.randint(1, 3)]
                set_layout(both, format_layout(ProcessSpec((stage,), 1, at) for stage, places in devices.items() for at in places))
    both.wait_until_empty()
    assert transferred(both) > 0


@pytest.mark.slow
def test_two_devices_find_prefixes_as_often_as_one_pool(launch: Callable[..., Server], tmp_path: Path) -> None:
    """Twelve conversations, four at a time: a later turn may be prefilled on another device than the one before."""
    one, two = (hits(launch(None, SETTINGS.format(layout)), tmp_path) for layout in ("EPD@left", "2EPD@*"))
    assert one > 0.5 and two >= 0.9 * one


def hits(server: Server, tmp_path: Path) -> float:
    """Return the share of the prompts' tokens that the prefix cache had."""
    file = tmp_path / "report.json"
    load = ["--scenario", "chat", "--modality", "text", "--num-requests", "12", "--turns", "4", "--concurrency", "4"]
    assert bench(["--url", server.url, *load, "--json", str(file)]) == 0
    turns = json.loads(file.read_text())["chat"]
    assert [turn["num_requests"] for turn in turns] == [12] * 4
    return float(sum(turn["num_cached_tokens"] for turn in turns) / sum(turn["num_prompt_tokens"] for turn in turns))
