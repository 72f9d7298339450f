"""A server with OpenAI's streaming chat completions over OpenVINO GenAI, which has none of its own: a side of ``mmrt bench sides``.

It runs in an environment with ``openvino-genai`` and Pillow, without mmrt: ``python openvino_server.py DIR --port 8103``, with a
directory that ``optimum-cli export openvino`` wrote. One thread steps GenAI's continuous batching; each request has a thread that sends
its tokens.
"""

import argparse
import base64
import io
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from PIL import Image


class Engine:
    """GenAI's pipeline, and the thread that steps it while it has requests."""

    def __init__(self, directory: Path, cache_gib: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.enable_prefix_caching = True
        self._pipeline = genai.ContinuousBatchingPipeline(str(directory), scheduler, "CPU")
        self.tokenizer = self._pipeline.get_tokenizer()
        self.stepped = threading.Condition()
        self._numbers = itertools.count()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, prompt: str, images: list[Any], config: Any) -> Any:
        """Begin a request; its handle."""
        number = next(self._numbers)
        if images:
            handle = self._pipeline.add_request(number, prompt, images, config)
        else:
            handle = self._pipeline.add_request(number, prompt, config)
        with self.stepped:
            self.stepped.notify_all()
        return handle

    def _run(self) -> None:
        while True:
            if self._pipeline.has_non_finished_requests():
                self._pipeline.step()
                with self.stepped:
                    self.stepped.notify_all()
            else:
                with self.stepped:
                    self.stepped.wait(0.002)


class Handler(BaseHTTPRequestHandler):
    """``GET /v1/models``, ``GET /health`` and ``POST /v1/chat/completions``, always streamed with usage in each event."""

    engine: Engine

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "openvino"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        messages, images = _read(body["messages"])
        prompt = self.engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        config = genai.GenerationConfig()
        config.max_new_tokens = body.get("max_tokens", 16)
        config.ignore_eos = body.get("ignore_eos", False)
        config.do_sample = False
        config.apply_chat_template = False
        num_prompt = self.engine.tokenizer.encode(prompt, add_special_tokens=False).input_ids.shape[1]
        handle = self.engine.add(prompt, images, config)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        num_tokens = 0
        while num_tokens < config.max_new_tokens:
            with self.engine.stepped:
                self.engine.stepped.wait_for(lambda: handle.can_read() or _is_over(handle), 1.0)
            if not handle.can_read():
                if _is_over(handle):
                    break
                continue
            for output in handle.read().values():
                num_tokens += len(output.generated_ids)
                delta = {"content": self.engine.tokenizer.decode(output.generated_ids)}
                self._send({"delta": delta, "finish_reason": None}, num_prompt, num_tokens)
        self._send({"delta": {}, "finish_reason": "length"}, num_prompt, num_tokens)
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, choice: dict[str, object], num_prompt: int, num_tokens: int) -> None:
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
        event = {"id": "chat", "choices": [{"index": 0, **choice}], "usage": usage}
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of requests."""


def _is_over(handle: Any) -> bool:
    return bool(handle.get_status() != genai.GenerationStatus.RUNNING)


def _read(messages: list[dict[str, Any]]) -> tuple[list[dict[str, str]], list[Any]]:
    """Messages with texts alone, and the pictures of all as tensors of (1, height, width, 3), uint8."""
    images, texts = [], []
    for message in messages:
        content = message["content"]
        parts: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            if part["type"] == "image_url":
                picture = Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2]))).convert("RGB")
                images.append(ov.Tensor(np.asarray(picture)[None]))
        said = [part["text"] for part in parts if part["type"] == "text"]
        pictures = ["<|vision_start|><|image_pad|><|vision_end|>"] * (len(parts) - len(said))
        texts.append({"role": message["role"], "content": "".join([*pictures, *said])})
    return texts, images


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description="OpenAI's chat completions over OpenVINO GenAI.")
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--port", type=int, default=8103)
    parser.add_argument("--cache-gib", type=int, default=1)
    options = parser.parse_args()
    Handler.engine = Engine(options.directory, options.cache_gib)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
