"""``mmrt trace``, ``inspect`` and ``replay`` on real runs: what they show is what happened, also of a run that was killed."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mmrt.bench.serve.traces import load_trace
from mmrt.runtime.observe.breakdown import PARTS
from mmrt.runtime.observe.dumps import saved_recordings
from mmrt.runtime.observe.replay_capture import is_ordered
from mmrt.runtime.observe.request_names import short_name
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.end_to_end.conftest import MMRT, Server, also_slow, ours
from mmrt.tests.end_to_end.test_media import image_part, picture, sound, text, video
from mmrt.tests.runtime.observe.trace_schema import Event, check_trace

FOREVER = {"ignore_eos": True}


def trace_of(server: Server, *arguments: str) -> tuple[dict[str, Any], list[Event]]:
    file = server.config.with_name("trace.json")
    done = server.mmrt("trace", "-o", str(file), *arguments)
    assert done.returncode == 0, done.stderr
    assert str(file) in done.stdout and "https://ui.perfetto.dev" in done.stdout
    trace = json.loads(file.read_text())
    return trace, check_trace(trace)


def ask(server: Server, content: Any, **options: Any) -> str:
    """A whole streamed answer; returns its id."""
    return [chunk.id for chunk in server.stream(content, **options)][-1]


def plans(events: list[Event], name: str, request: str) -> list[tuple[float, float]]:
    """(begin, end) of the plans of a kind that were for this request."""
    found = [event for event in events if event["ph"] == "X" and event["name"] == name]
    return [(event["ts"], event["ts"] + event["dur"]) for event in found if request in event["args"]["requests"]]


def overlap(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> bool:
    return any(a < d and c < b for a, b in first for c, d in second)


@pytest.fixture(scope="module")
def traced(server: Server) -> tuple[dict[str, str], list[Event]]:
    """A trace of one request of each kind, and their ids. The video is alone: with others running stages take turns."""
    ids = {
        "text": ask(server, "Say something."),
        "image": ask(server, [image_part(picture(1, 150, 200)), text("What is it?")]),
        "sound": ask(server, [sound(2.0, 440)[0], text("What do you hear?")]),
        "guided": ask(server, "Say something.", extra_body={"guidance_scale": 2.0}),
        "video": ask(server, [video(96, 224, 224, 2)[0], text("What moves?")]),
    }
    server.wait_until_empty()
    return ids, trace_of(server)[1]


def test_every_request_is_in_the_trace(traced: tuple[dict[str, str], list[Event]]) -> None:
    ids, events = traced
    spans = {event["name"]: event for event in events if event["ph"] == "b" and event["name"] in ids.values()}
    assert set(spans) == set(ids.values())
    for kind, request in ids.items():
        assert not spans[request]["args"]["unfinished"] and spans[request]["args"]["status"] == 0
        stages = [event["name"] for event in events if event["ph"] == "b" and event.get("id") == spans[request]["id"]][1:]
        media = ["fetching", "analysing"] if kind in ("image", "sound", "video") else []
        assert stages == ["submitted", "queued", *media, "prefilling", "decoding", "delivering"]
        assert spans[request]["args"]["tokens_sent"] > 0
        (end,) = (event for event in events if event["ph"] == "e" and (event["name"], event["id"]) == (request, spans[request]["id"]))
        parts = {name: spans[request]["args"][f"{name}, ms"] for name in PARTS.values()}
        assert sum(parts.values()) == pytest.approx((end["ts"] - spans[request]["ts"]) / 1000)
        assert parts["prefill execution"] > 0 and parts["decode execution"] > 0 and (parts["encode execution"] > 0) == bool(media)


def test_stages_of_one_video_work_at_once(server: Server, traced: tuple[dict[str, str], list[Event]]) -> None:
    request, events = traced[0]["video"], traced[1]
    for _ in range(5):  # on a loaded machine one stage may have no core until the one before it is done
        decoded, encoded, prefilled = (plans(events, name, request) for name in ("preprocess", "encode", "prefill"))
        waits_for_all = len(prefilled) < 2 or prefilled[1][0] >= encoded[-1][0] or prefilled[-1][0] <= decoded[0][1]
        if overlap(decoded, encoded) and overlap(encoded, prefilled) and not waits_for_all:
            break
        request = ask(server, [video(96, 224, 224, 2)[0], text("What moves?")])
        server.wait_until_empty()
        events = trace_of(server)[1]
    assert len(decoded) > 4 and len(encoded) > 2 and len(prefilled) > 2
    assert overlap(decoded, encoded), "a segment is decoded while the one before it is encoded"
    assert overlap(encoded, prefilled), "a segment is encoded while the one before it is prefilled"
    assert not waits_for_all, "prefill waits for all of the video"


def test_arrows_lead_a_video_through_its_stages(traced: tuple[dict[str, str], list[Event]]) -> None:
    _, events = traced
    pids = {event["name"]: event["pid"] for event in events if event["ph"] == "X"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    hops = {(begins[number]["pid"], ends[number]["pid"]) for number in ends}
    decoder, encoder, prefill, decode = (pids[work] for work in ("preprocess", "encode", "prefill", "step"))
    assert {(decoder, decoder), (decoder, encoder), (encoder, prefill), (prefill, decode)} <= hops


def test_pools_queues_and_generations_are_in_the_trace(traced: tuple[dict[str, str], list[Event]]) -> None:
    counters = {event["name"] for event in traced[1] if event["ph"] == "C"}
    assert {"kv pages", "patch pages", "embedding pages", "media pages", "requests", "plans in flight", "budgets"} <= counters
    used = [event["args"]["used"] for event in traced[1] if event["name"] == "patch pages"]
    assert max(used) > 0 and used[-1] == 0
    processes = {event["pid"] for event in traced[1] if event.get("cat") == "generation"}
    assert len(processes) == 8
    assert [event for event in traced[1] if event.get("cat") == "wait"]


def test_the_last_seconds_alone(server: Server, traced: tuple[dict[str, str], list[Event]]) -> None:
    time.sleep(5.1)  # nothing can tell us that so many seconds without work are over
    stream = server.stream("Say something.", max_tokens=30000, extra_body=FOREVER)
    request = next(stream).id
    spans = [event["name"] for event in trace_of(server, "--last", "5")[1] if event["ph"] == "b" and event.get("cat") == "request"]
    stream.close()
    assert request in spans and not set(traced[0].values()) & set(spans)
    server.wait_until_empty()


# ------------------------------------------------------------------------------------------------------------- inspect


def inspect(server: Server, *arguments: str) -> Any:
    done = server.mmrt("inspect", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_live_request_from_outside(server: Server) -> None:
    stream = server.stream("Go on and on.", max_tokens=3000, extra_body={**FOREVER, "guidance_scale": 1.5, "priority": -7})
    chunks = [next(stream) for _ in range(20)]
    request = chunks[0].id
    controller = server.pid("controller")
    os.kill(controller, signal.SIGSTOP)  # nobody has to answer
    try:
        with ThreadPoolExecutor(3) as pool:  # decode goes on, and has done all of it after some seconds
            later = [pool.submit(server.mmrt, "inspect", *names) for names in ((), (request[:20],))]
            found = inspect(server, request)
        table, shown = (one.result().stdout for one in later)
    finally:
        with contextlib.suppress(ProcessLookupError):  # on a busy machine the watchdog may have replaced it by now
            os.kill(controller, signal.SIGCONT)
    assert (found["request_id"], found["stage"], found["phase"], found["live"]) == (request, "decoding", "decode", True)
    assert found["in_running_set"] and found["end"] == ""
    assert (found["kind"], found["priority"]) == ("text", -7)
    assert 15 <= found["committed_tokens"] <= 3000 and found["max_new_tokens"] == 3000
    assert 0 < found["sent_tokens"] <= found["committed_tokens"] + 1
    first, companion = found["members"]
    assert first["prompt_tokens"] == first["ready_tokens"] == first["prefilled_tokens"] + 1
    assert first["block_table"] and not set(first["block_table"]) & set(companion["block_table"])
    assert [timing["stage"] for timing in found["timings"]] == ["submitted", "queued", "prefilling", "decoding"]
    assert [work["what"] for work in found["work"]] == ["prefill"]
    assert 0 < found["deadline_s"] <= 600
    assert sum(found["breakdown"].values()) == pytest.approx(found["age_s"]) and found["breakdown"]["decode_s"] > 0
    assert request[:17] in table and re.search("decoding|delivering", table) and "3000" in table
    assert (
        "counts it as text, priority -7" in shown
        and ("in the running set" in shown or "delivering" in shown)
        and "block table of" in shown
        and "companion" in shown
        and "in parts     prefill queue" in shown
    )
    stream.close()
    server.wait_until_empty()
    over = inspect(server, request)
    assert (over["stage"], over["live"]) == ("over", False)


def looked_at(server: Server) -> list[dict[str, Any]]:
    """A request with a video, as often as there is time to look at it."""
    thread = threading.Thread(target=ask, args=(server, [video(96, 224, 224, 2)[0], text("What moves?")]))
    seen: list[dict[str, Any]] = []
    thread.start()
    while thread.is_alive():
        seen += inspect(server)["requests"]
    thread.join()
    return [found for found in seen if found["items"]]


def test_top_in_a_terminal_and_in_a_pipe(server: Server) -> None:
    request = short_name(ask(server, "Say something."))
    piped = server.mmrt("top")
    assert piped.returncode == 0 and "tokens/s" in piped.stdout and request in piped.stdout
    assert not piped.stderr and "\x1b" not in piped.stdout
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 50, 120, 0, 0))
    environment = {**server.environment, "TERM": "xterm-256color"}
    with subprocess.Popen([*MMRT, "top"], env=environment, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, close_fds=True) as top:
        os.close(theirs)
        shown = b""
        try:
            while shown.count(b"tokens/s") < 2:  # it draws anew
                shown += os.read(ours, 65536)
            top.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # the terminal's other end is closed
                while data := os.read(ours, 65536):
                    shown += data
            assert top.wait(20) == 130 and top.stderr is not None and top.stderr.read() == b""
        finally:
            top.kill()
            os.close(ours)
    assert request.encode() in shown and b"\x1b[?1049h" in shown
    assert shown.rindex(b"\x1b[?1049l") > shown.rindex(b"tokens/s")  # the screen is as it was


@pytest.mark.slow
def test_a_request_with_media_from_outside(server: Server) -> None:
    """Seen again and again from its begin to its end: stages only advance, and what it holds fits to where it is."""
    for _ in range(5):  # on a loaded machine it may be over before somebody has looked
        seen = looked_at(server)
        if any(found["stage"] == "prefilling" and found["plans"] for found in seen):
            break
    stages = ["submitted", "queued", "fetching", "analysing", "waits for kv", "prefilling", "decoding", "delivering", "ending"]
    order = [stages.index(found["stage"]) for found in seen]
    assert order == sorted(order)
    prepared = [found for found in seen if found["stage"] == "prefilling"]
    assert prepared
    for found in prepared:
        (item,) = found["items"]
        assert item["kind"] == "video" and item["media_pages"] and len(item["segments"]) > 4
        starts = [segment["start"] for segment in item["segments"]]
        assert starts == sorted(starts) and starts[0] > 0
        (member,) = found["members"]
        assert member["prefilled_tokens"] <= member["ready_tokens"] <= member["prompt_tokens"]
        for segment in item["segments"]:
            assert bool(segment["patch_pages"]) == (segment["state"] in ("decoding", "decoded", "encoding"))
    assert [plan for found in prepared for plan in found["plans"]]


# -------------------------------------------------------------------------------------------------------------- replay


@pytest.mark.parametrize("actor", also_slow("video", "encoder", "prefill"))
def test_a_captured_plan_comes_out_the_same_alone(server: Server, actor: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.safetensors"
    command = [*MMRT, "replay", "--capture", actor, "--out", str(file)]
    with subprocess.Popen(command, env=server.environment, stdout=subprocess.PIPE, text=True) as capturing:
        while not is_ordered(server.run_path, actor):
            assert capturing.poll() is None
            time.sleep(0.01)
        ask(server, [image_part(picture(3, 200, 180)), text("What is it?")])
        printed = capturing.communicate(timeout=60)[0]
    assert capturing.returncode == 0 and f"{file}: {actor} plan 0x" in printed
    done = server.mmrt("replay", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in the run" in done.stdout and "here" in done.stdout and "differ" not in done.stdout
    if actor == "prefill":
        assert "identical" in done.stdout
        environment = {**server.environment, "COLUMNS": "200"}
        debugged = subprocess.run(
            [*MMRT, "replay", str(file), "--pdb"], env=environment, input="p type(plan).__name__\nc\n", capture_output=True, text=True
        )
        assert debugged.returncode == 0 and "'Prefill'" in debugged.stdout and "identical" in debugged.stdout


@pytest.mark.slow
def test_the_last_captured_plan_and_one_by_its_id(server: Server) -> None:
    with subprocess.Popen([*MMRT, "replay", "--capture", "prefill"], env=server.environment, stdout=subprocess.PIPE, text=True) as one:
        while not is_ordered(server.run_path, "prefill"):
            time.sleep(0.01)
        ask(server, "Hello there.")
        printed = one.communicate(timeout=60)[0]
    plan_id = printed.partition(" plan ")[2].split()[0]
    for arguments in (("--last", "prefill"), (plan_id,), (str(int(plan_id, 16)),), (f"prefill-{plan_id[2:]}",)):
        done = server.mmrt("replay", *arguments)
        assert done.returncode == 0 and f"plan {plan_id}" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_hanging_actor_is_captured_from_outside(server: Server) -> None:
    encoder = server.pid("encoder")
    os.kill(encoder, signal.SIGSTOP)
    thread = threading.Thread(target=ask, args=(server, [image_part(picture(4, 100, 100)), text("And?")]))
    try:
        thread.start()
        server.wait(lambda status: status["requests"]["preparing"] > 0, "a request that waits for the encoder")
        done = server.mmrt("replay", "--capture", "encoder", "--wait", "1")
    finally:
        os.kill(encoder, signal.SIGCONT)
        thread.join()
    assert done.returncode == 0 and "not done to its end" in done.stdout and "from outside" in done.stderr
    again = server.mmrt("replay", "--last", "encoder")
    assert again.returncode == 0 and "not done to its end" in again.stdout and "here         done" in again.stdout


# ------------------------------------------------------------------------------------------------------------- crashes


def saved(server: Server) -> list[Path]:
    return saved_recordings(Path(server.environment["XDG_STATE_HOME"]) / "mmrt" / server.run_path.name)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.slow
def test_what_is_known_after_crashes(launch: Callable[..., Server]) -> None:
    """An actor dies; then the supervisor; then everybody at once: each time the trace tells of the time before."""
    server = launch()
    request = ask(server, "Say something.")
    server.kill("decode")
    wait_for(lambda: len(saved(server)) == 1, "the supervisor saves what was going on")
    trace, events = trace_of(server, "--crash", "latest")
    assert trace["otherData"]["reason"] == "decode ended with SIGKILL"
    assert request in {event["name"] for event in events}
    assert "generation 1 ended: SIGKILL" in {event["name"] for event in events if event["ph"] == "i"}
    assert "decode ended with SIGKILL" in server.mmrt("trace", "--crashes").stdout
    server.wait(lambda status: bool(status["ready"]), "decode is back")
    actors = {found["name"] for found in server.status()["actors"]}

    os.kill(int(server.status()["supervisor_pid"]), signal.SIGKILL)
    wait_for(lambda: not server.run_path.exists(), "the run ends with its supervisor")
    assert trace_of(server, "--crash", "latest")[0]["otherData"]["reason"] == "the supervisor was killed"

    server.client.close()
    server.up()
    request = ask(server, "Say something.")
    wait_for(lambda: inspect(server, request)["stage"] == "over", "the gateway notes that it is over")
    for pid in ours(server.run_path):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not RunDirectory.is_alive(server.run_path), "everybody is dead")
    events = trace_of(server)[1]  # out of the directory that nobody has swept
    assert request in {event["name"] for event in events}
    assert {event["pid"] for event in events if event.get("cat") == "generation"} == set(range(2, 2 + len(actors)))
    found = inspect(server, request)
    assert found["stage"] == "over"

    server.client.close()
    server.up()
    trace, events = trace_of(server, "--crash", saved(server)[-1].stem)
    assert trace["otherData"]["reason"] == "every process of the run was killed"
    assert request in {event["name"] for event in events}
    assert len(saved(server)) == 3
    server.down()
    assert request in {event["name"] for event in trace_of(server, "--crash", str(saved(server)[-1]))[1]}


def usage_of(server: Server, content: Any) -> tuple[int, int]:
    done = server.client.chat.completions.create(
        model=server.checkpoint.name, messages=[{"role": "user", "content": content}], max_tokens=5
    )
    assert done.usage is not None
    return done.usage.prompt_tokens, done.usage.completion_tokens


def test_traffic_is_recorded_without_contents_and_sent_again(server: Server) -> None:
    """The lines have the lengths of the answers' usage; equal beginnings and pictures are told, and no word of a prompt."""
    file, words = server.config.with_name("traffic.jsonl"), "the river and the stone " * 130
    recording = subprocess.Popen([*MMRT, "record", "-o", str(file)], env=server.environment, stderr=subprocess.PIPE, text=True)
    try:
        assert recording.stderr is not None and "recording until Ctrl-C" in recording.stderr.readline()
        seen = [image_part(picture(3, 60, 90)), text("What is it?")]
        usages = [usage_of(server, content) for content in (words, words + "again", seen, seen)]
        deadline = time.monotonic() + 30
        while len(file.read_text().splitlines()) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        recording.send_signal(signal.SIGINT)
        assert "4 requests" in recording.stderr.read() and recording.wait(30) == 0
    finally:
        recording.kill()
        recording.communicate()
    rows = load_trace(file)
    assert [(row.num_input_tokens, row.num_output_tokens) for row in rows] == usages
    assert rows[0].blocks[0] == rows[1].blocks[0] and rows[0].blocks[1] != rows[1].blocks[1]
    assert rows[2].blocks == rows[3].blocks and rows[2].media == rows[3].media and rows[2].media[0].tokens > 0
    assert "river" not in file.read_text()
    done = server.mmrt("bench", "serve", "--url", server.url, "--trace", str(file), "--warmup", "0")
    assert done.returncode == 0 and re.search(r"all\s*│\s*4\s*│\s*0", done.stdout), done.stdout + done.stderr
