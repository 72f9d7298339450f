"""A real server with the demo model is asked what its own description allows, and what it forbids, by schemathesis, and what no tool
that knows JSON would send."""

import contextlib
import http.client
import json
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrt.tests.end_to_end.conftest import Server

SECONDS = 120
CONVERSATIONS = "^/v1/(chat|messages|responses)|^/tokenize"  # whose schemas are large
# An answer is short, so many fit into the time.
SETTINGS = "[model]\nmax_context = 256\n[memory]\nmax_sequences = 16\n"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
)


@pytest.fixture(scope="module")
def fuzzed(launch: Callable[..., Server]) -> Server:
    return launch(None, SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        {"--phases": "examples,coverage", "--include-path-regex": CONVERSATIONS},  # each field at its limits
        {"--phases": "examples,coverage", "--exclude-path-regex": CONVERSATIONS},
        {"--phases": "fuzzing"},  # all fields at random
        {"--phases": "stateful"},  # what was made is read and deleted
    ],
    ids=["limits-of-conversations", "limits", "random", "in-turn"],
)
def test_requests_made_of_the_description(fuzzed: Server, tmp_path: Path, what: dict[str, str]) -> None:
    pytest.importorskip("schemathesis", reason="pip install -e '.[fuzz]'")
    options = {
        **what,
        "--checks": ",".join(CHECKS),
        "--max-time": str(SECONDS),
        "--max-examples": "15",  # of a route at a time
        "--seed": "1",
        "--request-timeout": "30",
        "--generation-database": "none",
        "--suppress-health-check": "all",  # large schemas take long to make requests of
    }
    arguments = [
        f"{fuzzed.url}/openapi.json",
        "--continue-on-failure",
        "--no-color",
        *(part for option in options.items() for part in option),
    ]
    command = [str(Path(sys.executable).with_name("st")), "run", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS + 100)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found is not None and int(found[2]) > 20, done.stdout
    routes = re.search(r"Selected: (\d+)(?:/\d+)?\s+Tested: (\d+)", done.stdout)
    assert routes is not None and ("stateful" in what["--phases"] or routes[1] == routes[2]), "time was too short for all routes"
    fuzzed.wait_until_empty()


BROKEN = {  # JSON that is none, or not what a request may be
    "nothing": b"",
    "spaces": b"   ",
    "NaN": b'{"temperature": NaN}',
    "infinity": b'{"temperature": -Infinity}',
    "too large a number": b'{"temperature": 1e999}',
    "digits": b'{"seed": ' + b"9" * 5000 + b"}",
    "open brackets": b"[" * 100_000,
    "nested arrays": b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "nested objects": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "UTF-16": '{"model": null}'.encode("utf-16"),
    "no UTF-8": b'{"model": "\xff"}',
    "half a character": b'{"model": "\xed\xa0\x80"}',
    "half a character, escaped": b'{"model": "\\ud800"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "something behind it": b"{}x",
    "an array": b"[]",
    "a text": b'"x"',
    "null": b"null",
}
HOSTILE: tuple[object, ...] = (
    *(10**40, -(2**63) - 1, 2**64, 1e308, 5e-324, -1, 1.5, True, "", "\0", "\U0010ffff", "٣", "x" * 70_000),
    *([], {}, [[]], [{}], [None], [1e300], {"type": []}, {"type": {}}, {"type": "function"}, {"\0": 1}, {"a": {"b": {"c": [1]}}}),
)
TYPES = (
    *("text/plain", "", "application/json; charset=utf-16", "application/json, text/plain", "multipart/form-data; boundary="),
    "x" * 5000,
)


class Asker:
    """Sends a body of any bytes on a connection that stays open."""

    def __init__(self, server: Server) -> None:
        address = urllib.parse.urlsplit(server.url)
        assert address.hostname is not None
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)

    def ask(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> tuple[int, bytes]:
        self._connection.request(method, path, body, {"Content-Type": kind})
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def close(self) -> None:
        self._connection.close()


def hostile_bodies(example: dict[str, Any], schema: dict[str, Any]) -> Iterator[bytes]:
    """Yield the example with each field in turn set to something that it may not be, or may be at most."""
    names = {name for one in schema.get("anyOf", [schema]) for name in one.get("properties", ())}
    for name in sorted(names):
        for value in HOSTILE:
            yield json.dumps({**example, name: value}).encode()
        yield json.dumps({**example, name: "@"}).replace('"@"', "9" * 5000).encode()
        yield json.dumps({**example, name: "@"}).replace("@", "\\udc00").encode()


@pytest.fixture
def asker(fuzzed: Server) -> Iterator[Asker]:
    with contextlib.closing(Asker(fuzzed)) as asker:
        yield asker


@pytest.mark.slow
def test_bodies_that_no_tool_would_send(fuzzed: Server, asker: Asker) -> None:
    """Each answer is one that the description has, and none a server error; what is no JSON is refused everywhere."""
    _, document = asker.ask("GET", "/openapi.json")
    num_asked = 0
    for path, methods in json.loads(document)["paths"].items():
        content = methods.get("post", {"requestBody": {"content": {}}})["requestBody"]["content"].get("application/json")
        if content is None:
            continue
        described = {int(status) for status in methods["post"]["responses"]}
        for name, body in BROKEN.items():
            status, answer = asker.ask("POST", path, body)
            assert status == 400, (path, name, status, answer)
        for kind in TYPES:
            status, answer = asker.ask("POST", path, b"{}", kind)
            assert status < 500 and status in described, (path, kind, status, answer)
        for body in hostile_bodies(content["example"], content["schema"]):
            status, answer = asker.ask("POST", path, body)
            assert status < 500 and status in described, (path, body[:2000], status, answer)
            num_asked += 1
    assert num_asked > 5000
    fuzzed.wait_until_empty()


@pytest.mark.slow
def test_paths_that_no_tool_would_send(asker: Asker) -> None:
    for base in ("/v1/models/", "/v1/responses/", "/v1/", "/", "/page/", "/api/"):
        for name in ("%ff", "%ED%A0%80", "%00", "..%2f..%2fetc", "a" * 4000, "%2f", "%252f", "\\", "%", "%zz", "x%0ay", ";a=b", "*"):
            for end in ("", "/", "?stream=%ff", "/input_items?limit=%ff", "/input_items?after=%ed%a0%80"):
                for method in ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT"):
                    status, answer = asker.ask(method, f"{base}{name}{end}")
                    assert status < 500, (method, base, name, end, answer)
