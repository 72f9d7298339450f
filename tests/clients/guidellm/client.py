"""guidellm: loads of chats and of text completions, synthetic, with the checkpoint's tokenizer."""

import json
import os
from pathlib import Path
from typing import Any

from load import CONCURRENCY, INPUT_TOKENS, NUM_REQUESTS, OUTPUT_TOKENS, Figures, command, compare, run
from served import CHECKPOINT, MODEL, URL

os.environ |= {"HF_HOME": str(Path("hf").absolute()), "HF_HUB_OFFLINE": "1"}  # for the program


def benchmark(route: str) -> Any:
    """Make a load. Returns its metrics."""
    file = Path(f"{route.replace('/', '-')}.json")
    options = {
        "backend": f"kind=openai_http,target={URL},model={MODEL},request_format={route}",
        "tokenizer": f"kind=hf_auto,model={CHECKPOINT}",
        "data": f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "profile": f"kind=concurrent,streams={CONCURRENCY}",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "output": f"kind=json,path={file}",
    }
    run(command("guidellm", "run", "--disable-console", *(part for name, value in options.items() for part in (f"--{name}", value))))
    (found,) = json.loads(file.read_text())["benchmarks"]
    state, metrics = found["scheduler_state"], found["metrics"]  # which leave out what ends outside the time that is measured
    assert state["created_requests"] == state["successful_requests"] == NUM_REQUESTS, state
    of_answers = metrics["output_token_count"]["successful"]
    assert of_answers["min"] == of_answers["max"] == OUTPUT_TOKENS, of_answers
    assert metrics["prompt_token_count"]["successful"]["min"] >= INPUT_TOKENS
    return metrics


benchmark("/v1/completions")
metrics = benchmark("/v1/chat/completions")
medians = [metrics[name]["successful"]["median"] for name in ("time_to_first_token_ms", "request_latency")]
compare("guidellm", Figures(medians[0], medians[1] * 1000, metrics["output_tokens_per_second"]["successful"]["mean"]))
