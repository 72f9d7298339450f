"""``mmrt top``: what it draws of a run, in wide and narrow terminals."""

import io
import os
import re
import signal
import termios
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from mmrt.cli.keys import Keys
from mmrt.cli.main import run
from mmrt.cli.status import _render
from mmrt.cli.top import _has_colours
from mmrt.cli.top_view import render, sparkline, timeline
from mmrt.cli.top_watch import View
from mmrt.runtime.observe.live import Event, LiveRequest
from mmrt.runtime.observe.trace_requests import RequestSpan, Stage
from mmrt.runtime.supervisor.run_report import ActorReport, PoolReport, RequestsReport, RunReport

S = 1_000_000_000


def a_span(key: int, status: int = 0, end_ns: int = 0) -> RequestSpan:
    stages = [Stage("submitted", 1 * S, 2 * S), Stage("prefilling", 2 * S, 4 * S), Stage("decoding", 4 * S, end_ns)]
    return RequestSpan(
        key, f"chatcmpl-{key:024x}", stages=stages, marks=[("first text", 5 * S)], num_sent=17, status=status, end_ns=end_ns
    )


def a_view(*spans: RequestSpan) -> View:
    actors = [
        ActorReport(name="decode", state="active", pid=4711, generation=2, restarts=1, cpu_percent=50.0, memory_bytes=190_000_000),
        ActorReport(name="video", state="broken"),
    ]
    report = RunReport(
        ready=False, state="degraded", path="/r", run_id="x", endpoint="http://127.0.0.1:8000", model="/m", supervisor_pid=1,
        uptime_s=61, actors=actors, pools={"kv": PoolReport(8, 2)}, requests=RequestsReport(1, 2, 3),
    )  # fmt: skip
    events = [Event(1, 8 * S, "decode", "generation 1 ended: SIGKILL"), Event(1, 9 * S, "decode", "generation 2 serves")]
    return View(report, [0.0, 10.0, 20.0], {"decode": 123.0}, [LiveRequest(span) for span in spans], events, 10 * S)


def drawn(view: View, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(view, width))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return lines


@pytest.mark.parametrize("width", [80, 96, 200])
def test_a_view(width: int) -> None:
    lines = drawn(a_view(a_span(2), a_span(1, status=504, end_ns=6 * S)), width)
    assert lines[0].split()[:4] == ["degraded", "http://127.0.0.1:8000", "up", "1m01s"]
    assert "1 waiting, 2 preparing, 3 running" in " ".join(lines[:2]) and any("tokens/s     20" in line for line in lines)
    (decode,) = [line.split() for line in lines if line.startswith("decode ")]
    assert [word for word in decode if "█" not in word] == ["decode", "active", "4711", "2", "1", "50", "0", "123", "190"]
    assert any("██████" in word for word in decode) == (width >= 96)
    assert [line.split()[-2:] for line in lines if line.startswith("kv")] == [["2", "8"]]
    live, failed = [line for line in lines if line.startswith("chatcmpl-00000000 ")]
    assert live.split()[1:7] == ["decoding", "4000", "ms", "17", "9000", "ms"]
    assert failed.split()[1:3] == ["failed", "(504)"]
    assert [line.strip() for line in lines[-2:]] == [
        "1s ago  decode: generation 2 serves",
        "2s ago  decode: generation 1 ended: SIGKILL",
    ]


def test_what_requests_wait_for() -> None:
    view = a_view(a_span(1))
    view.report.requests = RequestsReport(4, 0, 2, ["KV pages", "states"])
    assert "4 waiting for KV pages and states, 0 preparing, 2 running" in drawn(view, 200)[0]


def test_a_request_whose_gateway_ended() -> None:
    span = a_span(1, end_ns=6 * S)
    span.is_lost = True
    (line,) = [line for line in drawn(a_view(span), 96) if line.startswith("chatcmpl-00000000 ")]
    assert line.split()[1] == "ended"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_status_has_room_in_narrow_terminals(width: int) -> None:
    busy = ActorReport(
        name="detokenizer", state="restarting", pid=4194303, generation=12, cpu_percent=199.5, memory_bytes=99_000_000_000
    )
    report = msgspec.structs.replace(a_view().report, actors=[*a_view().report.actors, busy])
    console = Console(file=io.StringIO(), width=width)
    console.print(_render(report, width))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    (heading,) = [line.split() for line in lines if line.startswith("ACTOR")]
    assert {"STATE", "PID", "RESTARTS", "PSS", "CPU"} < {*heading} and ("GEN" in heading) == (width >= 80)
    (row,) = [line.split() for line in lines if line.startswith("detokenizer ")]
    assert row[:3] == ["detokenizer", "restarting", "4194303"] and "99000" in row and "…" not in " ".join(lines)


def test_without_requests() -> None:
    assert "no requests yet" in drawn(a_view(), 80)


@pytest.mark.parametrize(
    "values, width, line",
    [([], 5, ""), ([0.0, 0.0], 5, "▁▁"), ([1.0, 4.0, 8.0], 5, "▂▅█"), ([8.0, 1.0, 1.0], 2, "██"), ([1e-9, 5e8], 5, "▁█")],
)
def test_sparkline(values: list[float], width: int, line: str) -> None:
    assert sparkline(values, width) == line


def test_timeline_is_in_proportion_to_time() -> None:
    """One second of waiting, two of prefill, six of decode until now."""
    text = timeline(a_span(1), 10 * S, 9)
    styles = [str(span.style) for span in text.spans for _ in range(span.start, span.end)]
    assert text.plain == "█" * 9 and styles == ["bright_black"] + ["blue"] * 2 + ["green"] * 6


@pytest.mark.parametrize("width", [60, 120])
def test_headings_have_a_legend(width: int) -> None:
    told = " ".join(" ".join(drawn(a_view(a_span(1)), width)).split())
    assert "AGE: since the request came, or what it took." in told
    assert "STAGES: █ submitted, █ queued, █ fetching, █ analysing, █ prefilling, █ decoding, █ delivering, █ failing" in told
    assert "AGE:" not in " ".join(drawn(a_view(), width)), "no requests, no legend"


def test_letters_take_the_place_of_colours() -> None:
    assert timeline(a_span(1), 10 * S, 9, has_colours=False).plain == ".PPDDDDDD"
    console = Console(file=io.StringIO(), width=120)
    console.print(render(a_view(a_span(1)), 120, has_colours=False))
    assert isinstance(console.file, io.StringIO)
    assert re.search(r" \.+P+D+$", console.file.getvalue(), re.MULTILINE)
    shown = " ".join(console.file.getvalue().split())
    for legend in (". submitted", "q queued", "P prefilling", "D decoding", "> delivering", "! failing"):
        assert legend in shown


@pytest.mark.parametrize(
    ("pressed", "ends"),
    [(b"q", True), (b"Q", True), (b"\x1b", True), (b"x", False), (b"\x1b[A", False), (b"qq", True), (b"Q\x1b[A", True)],
)
def test_a_key_ends_a_view(pressed: bytes, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    with os.fdopen(slave) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        before = termios.tcgetattr(slave)
        with Keys() as keys:
            assert not termios.tcgetattr(slave)[3] & (termios.ICANON | termios.ECHO), "keys come at once, unseen"
            assert termios.tcgetattr(slave)[3] & termios.ISIG, "Ctrl-C is a signal"
            os.write(master, pressed)
            assert keys.wait_for_end(10.0 if ends else 0.1) == ends
        assert termios.tcgetattr(slave) == before
    os.close(master)


def test_sigterm_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    with os.fdopen(slave) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        before, on_term = termios.tcgetattr(slave), signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as end, Keys():
            assert signal.getsignal(signal.SIGTERM) != on_term, "it would end this process"
            signal.raise_signal(signal.SIGTERM)
        assert end.value.code == 143
        assert termios.tcgetattr(slave) == before and signal.getsignal(signal.SIGTERM) == on_term
    os.close(master)


@pytest.mark.parametrize(
    ("environ", "has_colours"),
    [({"TERM": "xterm-256color"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)],
)
def test_terminals_without_colours_get_letters(environ: dict[str, str], has_colours: bool) -> None:
    assert _has_colours(Console(file=io.StringIO(), force_terminal=True, _environ=environ)) == has_colours


def test_without_a_terminal_no_key_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        with Keys() as keys:
            assert not keys.wait_for_end(0.01)


def test_without_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MMRT_RUN_DIR", str(tmp_path / "run"))
    assert run(["top"]) == 1
    assert f"no run is up in {tmp_path}/run" in capsys.readouterr().err
