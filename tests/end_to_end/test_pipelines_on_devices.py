"""Prefill in a pipeline over two devices (RS1, RS6, KT1): all stages fill the pool of the first one's device; decode copies from it.
The tokens are those of one process, whatever dies."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from mmrt.tests.end_to_end.conftest import Server, copy_package
from mmrt.tests.end_to_end.test_devices import (
    LAYER_S,
    LETTERS,
    LONG_PROMPT,
    PAGE_S,
    kill,
    slow_down,
    slow_layers,
    transferred,
    wait_for_some_layers,
)
from mmrt.tests.end_to_end.test_media import image_part, picture, text
from mmrt.tests.end_to_end.test_outages import Asking
from mmrt.tests.end_to_end.test_restart import processes

SETTINGS = """[actors]
layout = "{}"
[[devices]]
name = "left"
[[devices]]
name = "right"
[scheduling]
prefill_pipeline = true
prefill_budget_tokens = {}
[supervisor]
backoff_s = 0.05
restart_limit = 40
"""
THREE = ("prefill", "prefill.1", "prefill.2")


@pytest.fixture(scope="module")
def pipeline(launch: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Two stages; a page takes decode its time to copy."""
    source = slow_down(copy_package(tmp_path_factory.mktemp("pipeline")), 0.002)
    return launch(settings=SETTINGS.format("E@left+P@left+P@right+D@right", 32), source=source)


def events_of(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(server.mmrt("trace", "-o", "-").stdout)["traceEvents"]
    return found


def test_chunks_of_several_requests_give_the_tokens_of_one_process(pipeline: Server, server: Server) -> None:
    """Texts, pictures and pairs at the same time, and all of them again, which finds their beginnings in the cache."""
    guided = {"guidance_scale": 2.0, "negative_prompt": LETTERS}
    contents: list[tuple[Any, dict[str, Any]]] = [
        (LONG_PROMPT, {}),
        ([image_part(picture(1, 168, 168)), text(f"What is it? {LETTERS}")], {}),
        ([image_part(picture(2, 56, 56)), text("What is it?")], {"extra_body": guided}),
        ([text(LETTERS), image_part(picture(3, 112, 112)), text("And this?")], {}),
        ("Describe the weather.", {"extra_body": guided}),
    ]
    before = transferred(pipeline)
    answers = []
    for run in (server, pipeline, pipeline):
        with ThreadPoolExecutor(len(contents)) as pool:
            answers.append([one[1] for one in pool.map(lambda given, run=run: run.chat(given[0], **given[1]), contents)])
    assert answers[1] == answers[0] == answers[2]
    pipeline.wait_until_empty()
    assert transferred(pipeline) > before
    ask = partial(pipeline.client.chat.completions.create, model=pipeline.checkpoint.name, messages=LONG_PROMPT, max_tokens=1)  # type: ignore[call-overload]
    first, second = (ask().usage.prompt_tokens_details.cached_tokens for _ in range(2))
    assert second > 256 and second >= first, "its pages are in the cache of the first stage's pool"
    pipeline.wait_until_empty()


def test_stages_of_two_devices_work_at_once_on_the_pages_of_one(pipeline: Server) -> None:
    pipeline.chat(LONG_PROMPT, extra_body={"cache_salt": "of a trace"})
    pipeline.wait_until_empty()
    events = events_of(pipeline)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    work: dict[str, list[tuple[float, float]]] = {"prefill": [], "prefill.1": []}
    for event in events:
        if event["ph"] == "X" and event["name"] == "prefill":
            work[names[event["pid"]]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(work["prefill"]) == len(work["prefill.1"]) > 10
    assert any(one[0] < other[1] and other[0] < one[1] for one in work["prefill"] for other in work["prefill.1"])
    assert pipeline.mmrt("layout", "show").stdout.splitlines()[1:] == [
        "  encoder on device left", "  prefill on device left", "  prefill.1 with KV pages on left on device right",
        "  decode on device right",
    ]  # fmt: skip


def test_a_stage_stays_on_its_device(pipeline: Server) -> None:
    done = pipeline.mmrt("layout", "set", "E@left+2P@left+D@right")
    assert done.returncode == 1 and "prefill.1 is on device left, now it is on right: that needs another start" in done.stderr


def test_what_a_slow_link_would_bring_is_computed(
    launch: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory, server: Server
) -> None:
    """KT2: by the time that a token takes in all stages, as the last one tells it. With the link as it is all pages are copied."""
    settings, num_bytes = SETTINGS.format("E@left+P@left+P@right+D@right", 128), []
    slow = launch(settings=settings, source=slow_down(copy_package(tmp_path_factory.mktemp("slow")), 20 * PAGE_S))
    for run in (slow, launch(settings=settings)):
        assert run.chat(LONG_PROMPT)[1] == server.chat(LONG_PROMPT)[1]
        run.wait_until_empty()
        num_bytes.append(transferred(run))
    assert 0 < num_bytes[0] < num_bytes[1] / 2


@pytest.fixture(scope="module")
def layered(launch: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Five layers in three stages. The last one, of two, takes its time, in which all of a chunk could be copied."""
    source = slow_layers(copy_package(tmp_path_factory.mktemp("layered")), layer_s=4 * LAYER_S)
    return launch("qwen3_vl", settings=SETTINGS.format("EP@left+P@right+P@left+D@right", 128), source=source)


def test_layers_are_copied_while_the_last_stage_computes_the_next(layered: Server, launch: Callable[..., Server]) -> None:
    """KT1: those of the stages before it come first, and its last one comes behind the plan."""
    assert layered.chat(LONG_PROMPT)[1] == launch("qwen3_vl").chat(LONG_PROMPT)[1]
    layered.wait_until_empty()
    slices = sorted((event for event in events_of(layered) if event["ph"] == "X"), key=lambda event: event["ts"])
    last = [event for event in slices if event["name"] == "transfer"][-1]
    copies = [event for event in slices if event["name"] == "copy" and event["args"]["plan"] == last["args"]["plan"]]
    prefilled = max(event["ts"] + event["dur"] for event in slices if event["name"] == "prefill")
    assert sum(event["args"]["copied"] for event in copies) == last["args"]["bytes"] > 0
    before = [event["args"]["copied"] for event in copies if event["ts"] + event["dur"] < prefilled]
    assert last["args"]["bytes"] / 2 < sum(before) < last["args"]["bytes"], "three layers of five, or four"
    first_step = min(event["ts"] for event in slices if event["name"] == "step")
    assert max(event["ts"] + event["dur"] for event in copies) < first_step


@pytest.mark.parametrize(
    "victims",
    [
        ("prefill.2",),
        ("prefill", "controller"),
        pytest.param(("prefill.1",), marks=pytest.mark.slow),
        pytest.param(("controller",), marks=pytest.mark.slow),
        pytest.param(("decode",), marks=pytest.mark.slow),
        pytest.param((*THREE, "decode", "controller"), marks=pytest.mark.slow),
    ],
    ids="+".join,
)
def test_a_kill_in_the_middle_of_a_chunk_changes_nothing(layered: Server, victims: tuple[str, ...]) -> None:
    """Decode has some layers of it; the next chunk is at an earlier stage."""
    expected, before = layered.chat(LONG_PROMPT, extra_body={"cache_salt": "first"})[1], processes(layered)
    asking = Asking(layered, LONG_PROMPT, max_tokens=24, extra_body={"cache_salt": "of a kill of " + "+".join(victims)})
    wait_for_some_layers(layered)
    kill(layered, victims, asking, expected, before)


def test_packed_pages_are_of_all_stages(launch: Callable[..., Server]) -> None:
    """The last stage packs a page, once all layers are in it: answers are those of one prefill that packs."""
    packed = '[memory]\nkv_transfer_dtype = "int8"\n'
    stages = launch(settings=SETTINGS.format("E@left+P@left+P@right+D@right", 32) + packed)
    alone = launch(settings=SETTINGS.format("EP@left+D@right", 32).replace("prefill_pipeline = true\n", "") + packed)
    for content in (LONG_PROMPT, [image_part(picture(1, 168, 168)), text(LETTERS)]):
        assert stages.chat(content)[1] == alone.chat(content)[1]
    for run in (stages, alone):
        run.wait_until_empty()
    assert transferred(stages) == transferred(alone) > 0
