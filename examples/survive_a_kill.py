"""Kill decode in the middle of an answer, and show that no token is lost: ``mmrt up`` in one terminal, this in another.

Asks the running server about ``shapes.png`` twice. The second time it kills decode (SIGKILL) after a few words. Exits with 1 if the two
answers differ. ``--svg FILE`` draws what happened as an animation in slow motion: README.md shows the one of docs/images.
"""

import argparse
import base64
import html
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_PICTURE = Path(__file__).with_name("shapes.png")
_QUESTION = "Describe the picture."
_WORDS_BEFORE_KILL = 5
_RESTART_TIMEOUT_S = 30.0


class Delta(NamedTuple):
    """A piece of text, and when it came, in seconds from the first one."""

    at_s: float
    text: str


class Recording(NamedTuple):
    """One killed answer: its pieces, when decode was killed and when its successor was ready, and both process ids."""

    deltas: list[Delta]
    killed_s: float
    ready_s: float
    old_pid: int
    new_pid: int

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def gap_s(self) -> float:
        """The longest silence of the stream."""
        return max(after.at_s - before.at_s for before, after in zip(self.deltas, self.deltas[1:], strict=False))


def status() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "mmrt", "status", "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.strip() or "mmrt status failed")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def decode_pid() -> int:
    actor = next(actor for actor in status()["actors"] if actor["name"] == "decode")
    return int(actor["pid"]) if actor["ready"] else 0


def ask(endpoint: str) -> Iterator[str]:
    """The pieces of the answer as they come."""
    image = "data:image/png;base64," + base64.b64encode(_PICTURE.read_bytes()).decode()
    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": _QUESTION}]
    body = {"messages": [{"role": "user", "content": content}], "stream": True, "temperature": 0}
    request = urllib.request.Request(f"{endpoint}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as lines:
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                sys.exit(chunk["error"]["message"])
            for choice in chunk["choices"]:
                if choice["delta"].get("content"):
                    yield choice["delta"]["content"]


def record(endpoint: str) -> Recording:
    """One answer during which decode is killed."""
    old_pid, killed_at = decode_pid(), 0.0
    deltas: list[Delta] = []
    start = time.monotonic()
    for text in ask(endpoint):
        start = start if deltas else time.monotonic()
        deltas.append(Delta(time.monotonic() - start, text))
        print(text, end="", flush=True)
        if not killed_at and "".join(delta.text for delta in deltas).count(" ") >= _WORDS_BEFORE_KILL:
            os.kill(old_pid, signal.SIGKILL)
            killed_at = time.monotonic()
            print(f" [kill -9 {old_pid}] ", end="", file=sys.stderr, flush=True)
    print()
    deadline = time.monotonic() + _RESTART_TIMEOUT_S
    while (new_pid := decode_pid()) in (0, old_pid):
        if time.monotonic() > deadline:
            sys.exit(f"decode was not back after {_RESTART_TIMEOUT_S:g} s")
    ready_s = min(delta.at_s for delta in deltas if delta.at_s > killed_at - start)
    return Recording(deltas, killed_at - start, ready_s, old_pid, new_pid)


# --- the drawing

_SLOWER = 8  # times slower than it happened
_HOLD_S = 5.0  # of the last picture
_LINE = 22  # pixels
_COLOURS = {"text": "#e6edf3", "dim": "#8b949e", "prompt": "#7ee787", "kill": "#ff7b72", "good": "#79c0ff"}


def draw(recording: Recording) -> str:
    """An SVG that plays the recording in a loop; where animations are off it shows the end."""
    begin_s, slow = 1.0, _SLOWER
    end_s = begin_s + recording.deltas[-1].at_s * slow + _HOLD_S
    style: list[str] = []
    body: list[str] = []

    def show(at_s: float, line: int, spans: str) -> None:
        """A line of text that appears at a moment."""
        percent = 100 * at_s / end_s
        name = f"a{len(style)}"
        style.append(f"@keyframes {name}{{0%,{max(percent - 0.01, 0):.2f}%{{opacity:0}}{percent:.2f}%,100%{{opacity:1}}}}")
        body.append(f'<text x="20" y="{56 + line * _LINE}" style="animation:{name} {end_s:.2f}s infinite step-end">{spans}</text>')

    def span(text: str, colour: str) -> str:
        return f'<tspan fill="{_COLOURS[colour]}">{html.escape(text)}</tspan>'

    command = f'mmrt ask "{_QUESTION}" --image examples/shapes.png'
    show(0.2, 0, span("$ ", "prompt") + span(command, "text"))
    said = ""
    for delta in recording.deltas:  # each piece stands behind as many blanks as there is text before it
        show(begin_s + delta.at_s * slow, 1, span("\u00a0" * len(said) + delta.text.replace(" ", "\u00a0"), "text"))
        said += delta.text
    killed_s, back_s = begin_s + recording.killed_s * slow, begin_s + recording.ready_s * slow
    show(killed_s, 3, span("$ ", "prompt") + span(f"kill -9 {recording.old_pid}", "kill") + span("   # decode", "dim"))
    show(
        back_s,
        4,
        span(f"decode is back as process {recording.new_pid}; ", "dim")
        + span(f"the stream paused for {recording.gap_s:.2f} s", "good"),
    )
    show(end_s - _HOLD_S + 0.4, 6, span("The answer is the same as without the kill.", "good"))
    caption = f"recorded on two CPU cores, shown {slow} times slower"
    width, height = 720, 56 + 7 * _LINE
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
            "<title>An answer streams on while its decode process is killed and restarted</title>",
            "<style>text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}",
            "@media(prefers-reduced-motion){text{animation:none!important}}",
            *style,
            "</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
            *(
                f'<circle cx="{20 + 18 * index}" cy="18" r="6" fill="{fill}"/>'
                for index, fill in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))
            ),
            f'<text x="{width - 20}" y="22" text-anchor="end" fill="{_COLOURS["dim"]}" style="font-size:12px">{caption}</text>',
            *body,
            "</svg>\n",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill decode in the middle of an answer and compare it with an undisturbed one.")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw what happened")
    options = parser.parse_args()
    endpoint = status()["endpoint"]
    expected = "".join(ask(endpoint))
    recording = record(endpoint)
    print(f"killed {recording.old_pid}, back as {recording.new_pid}; longest pause {recording.gap_s:.2f} s", file=sys.stderr)
    if recording.text != expected:
        sys.exit(f"the answers differ: without the kill it was {expected!r}")
    if options.svg is not None:
        options.svg.write_text(draw(recording))


if __name__ == "__main__":
    main()
