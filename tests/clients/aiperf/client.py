"""aiperf with the checkpoint's tokenizer: a load of chats, and one of chats with a picture, half of them cancelled."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from load import CONCURRENCY, INPUT_TOKENS, NUM_REQUESTS, OUTPUT_TOKENS, Figures, command, compare, run
from served import CHECKPOINT, MODEL, URL

os.environ.pop("HF_HUB_OFFLINE", None)  # aiperf takes no folder as a tokenizer where it is set
SIZES = ["--isl", f"{INPUT_TOKENS}", "--osl", f"{OUTPUT_TOKENS}", "--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
LOAD = ["--concurrency", f"{CONCURRENCY}", "--request-count", f"{NUM_REQUESTS}", "--random-seed", "1", *SIZES]
SERVER = ["--model", MODEL, "--tokenizer", str(CHECKPOINT), "--url", URL, "--endpoint-type", "chat", "--streaming"]
QUIET = ["--ui-type", "none", "--no-gpu-telemetry"]
PICTURES = ["--image-batch-size", "1", "--image-width-mean", "200", "--image-height-mean", "200"]
CANCELLED = ["--request-cancellation-rate", "50", "--request-cancellation-delay", "0.1"]


def profile(name: str, *options: str) -> tuple[Any, list[Any]]:
    """Make a load. Returns the report, and the records of the requests."""
    run(command("aiperf", "profile", *SERVER, *LOAD, *QUIET, *options, "--artifact-dir", name))
    records = [json.loads(line) for line in Path(name, "profile_export.jsonl").read_text().splitlines()]
    return json.loads(Path(name, "profile_export_aiperf.json").read_text()), records


report, records = profile("whole")
assert report["request_count"]["avg"] == NUM_REQUESTS and not any(record.get("error") for record in records)
assert report["output_sequence_length"]["avg"] == report["output_sequence_length"]["p50"] == OUTPUT_TOKENS
medians = [report[name]["p50"] for name in ("time_to_first_token", "request_latency")]
compare("aiperf", Figures(*medians, report["output_token_throughput"]["avg"]))

report, records = profile("cancelled", *PICTURES, *CANCELLED)
ends = Counter(record["error"]["type"] if record.get("error") else "whole" for record in records)
assert ends.keys() == {"whole", "RequestCancellationError"} and ends.total() == NUM_REQUESTS, ends
assert ends["whole"] == report["request_count"]["avg"] and ends["RequestCancellationError"] > NUM_REQUESTS // 4
print(f"aiperf: of {NUM_REQUESTS} requests with a picture {ends['RequestCancellationError']} were cancelled")
