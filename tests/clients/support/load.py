"""The load that benchmarking clients make, and the figures of ``mmrt bench serve`` for it, beside which theirs must be plausible."""

import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

from served import MODEL, URL

CONCURRENCY = 4
NUM_REQUESTS = 40
INPUT_TOKENS = 40
OUTPUT_TOKENS = 60
MOST = 10  # how many times as large a figure may be as the other; the machine has other work, and minutes lie between them


class Figures(NamedTuple):
    """Medians in milliseconds, and tokens of answers per second."""

    ttft_ms: float
    latency_ms: float
    tokens_per_s: float


def command(name: str, *arguments: str) -> list[str]:
    """The command line of a program of this environment."""
    return [os.path.join(os.path.dirname(sys.executable), name), *arguments]


def run(arguments: list[str]) -> str:
    """Run a program, and return its output. Raises: AssertionError with the end of it if the program fails."""
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def compare(name: str, found: Figures) -> None:
    """Show what a client has found beside the figures of ``mmrt bench serve``."""
    load = ["--concurrency", f"{CONCURRENCY}", "--num-requests", f"{NUM_REQUESTS}", "--input-tokens", f"{INPUT_TOKENS}"]
    bench = [os.environ["MMRT_PYTHON"], "-m", "mmrt", "bench", "serve", "--url", URL, "--model", MODEL, *load]
    report: dict[str, Any] = json.loads(run([*bench, "--max-tokens", f"{OUTPUT_TOKENS}", "--json", "-"]))
    (group,) = report["groups"]
    own = Figures(group["ttft"]["p50"] * 1000, group["e2e"]["p50"] * 1000, group["output_tokens_per_s"])
    for who, figures in ((name, found), ("mmrt bench serve", own)):
        print(f"{who}: TTFT {figures.ttft_ms:.0f} ms, latency {figures.latency_ms:.0f} ms, {figures.tokens_per_s:.0f} tokens/s")
    assert all(1 / MOST < one / other < MOST for one, other in zip(found, own, strict=True)), (found, own)
