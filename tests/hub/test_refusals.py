"""Every way in which a hub can fail or lie: one line that says what to do, and nothing under a file's name in the cache."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aiohttp import web
from huggingface_hub import constants

from mmrt.cli.main import run
from mmrt.hub.errors import HubError
from mmrt.hub.names import HubName
from mmrt.hub.repository import gguf_files, parse_repository, safetensors_files, small_files
from mmrt.tests.hub.conftest import COMMIT, TOKEN, FakeHub, entry
from mmrt.tests.settings import examples

Files = dict[str, bytes]
Captured = pytest.CaptureFixture[str]
WEIGHTS = "model.safetensors"
SIGNED = "Policy=a%2Fb%7E_c%2B&Signature=%3D"


@pytest.fixture
def served(hub: FakeHub, checkpoint: Files) -> FakeHub:
    hub.repositories["org/m"] = dict(checkpoint)
    return hub


def refused(capsys: Captured, *arguments: str, status: int = 1) -> str:
    """What is said of a pull that fails: one line."""
    capsys.readouterr()
    assert run(["pull", *(arguments or ("org/m",))]) == status
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


def blobs(tmp_path: Path) -> set[str]:
    folder = tmp_path / "cache" / "models--org--m" / "blobs"
    return {file.name for file in folder.iterdir()} if folder.is_dir() else set()


async def gated(request: web.Request) -> web.StreamResponse | None:
    opened = request.headers.get("Authorization") == f"Bearer {TOKEN}"
    return None if opened else web.Response(status=401, headers={"X-Error-Code": "GatedRepo"})


def test_a_gated_model_needs_a_token(served: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    served.hook = gated
    page = f"org/m is gated: accept its terms at {served.endpoint}/org/m; "
    assert refused(capsys) == f"{page}then set HF_TOKEN, or `hf auth login`"
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert refused(capsys) == f"{page}the token (HF_TOKEN, hf auth login) does not open it"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert run(["pull", "org/m"]) == 0


def status(code: int, **headers: str) -> Callable[[web.Request], Any]:
    async def hook(request: web.Request) -> web.StreamResponse:
        return web.Response(status=code, headers={name.replace("_", "-"): value for name, value in headers.items()})

    return hook


STATUSES = {
    "rate": (status(429), 1, "does not answer: status 429, too many requests: wait some minutes; what has come is kept, try again"),
    "broken": (status(503), 1, "(HF_ENDPOINT) does not answer: status 503"),
    "disabled": (status(403), 1, "refuses access (status 403)"),
    "unknown": (status(418), 1, "answers with status 418, expected 200"),
    "private": (status(401), 2, "has no model org/m, or it is private and needs HF_TOKEN, or `hf auth login`"),
    "loop": (status(302, Location="/api/models/org/m"), 1, "redirects more than 10 times"),
    "scheme": (status(302, Location="file:///etc/passwd"), 1, "redirects to 'file:///etc/passwd', which is no address to fetch from"),
    "nowhere": (status(302), 1, "redirects to"),
    "odd": (status(302, Location="http://[::1"), 1, "redirects to 'http://[::1', which is no address"),
}


@pytest.mark.parametrize("kind", STATUSES)
def test_what_a_status_means_is_said(served: FakeHub, capsys: Captured, kind: str) -> None:
    served.hook, code, said = STATUSES[kind]
    assert said in refused(capsys, status=code)


def test_names_that_lead_nowhere(served: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert refused(capsys, "org/none", status=2).startswith(f"{served.endpoint} has no model org/none, or it is private and needs")
    assert refused(capsys, "org/m@gone", status=2).startswith("org/m has no revision 'gone': ")
    assert refused(capsys, "org/m:Q4_K_M", status=2) == (
        "org/m:Q4_K_M: org/m has no GGUF files, which tags choose from; leave :Q4_K_M out"
    )
    served.repositories["org/m"] = {"pytorch_model.bin": b"\x80", "config.json": b"{}"}
    assert refused(capsys, status=2) == "org/m: has neither *.safetensors nor *.gguf files; mmrt does not read its .bin files"
    served.repositories["org/m"] = {"adapter_config.json": b"{}", "adapter_model.safetensors": b""}
    assert refused(capsys) == "org/m is not fetched: adapter_config.json: peft_type is None, expected 'LORA'"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refused(capsys) == "HF_HUB_OFFLINE is set, so no hub is asked: unset it to fetch a model"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "hub.example")
    assert "HF_ENDPOINT = 'hub.example' is not the address of a hub" in refused(capsys)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 (HF_ENDPOINT) does not answer: " in refused(capsys)


def test_a_token_stays_with_the_hub(served: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a hub redirects large files to another host. Here it has another name and the same port."""

    async def elsewhere(request: web.Request) -> web.StreamResponse | None:
        if request.host.startswith("127.") and request.path.endswith(WEIGHTS):
            return web.Response(status=302, headers={"Location": f"http://localhost:{served.port}{request.path}?{SIGNED}"})
        hosts.append((request.host, request.headers.get("Authorization", "")))
        queries.update({request.rel_url.raw_query_string} if request.host.startswith("localhost") else ())
        return None

    hosts: list[tuple[str, str]] = []
    queries: set[str] = set()
    served.hook = elsewhere
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert run(["pull", "org/m"]) == 0
    assert {token for host, token in hosts if host.startswith("localhost")} == {""}
    assert queries == {SIGNED}
    assert {token for host, token in hosts if host.startswith("127.")} == {f"Bearer {TOKEN}"}


def changed(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_a_file_that_is_not_of_its_commit_gets_no_name(served: FakeHub, checkpoint: Files, tmp_path: Path, capsys: Captured) -> None:
    """Its contents are others than the digest says, as of a file that changed, or of a host in between."""

    def send(body: bytes) -> None:
        async def hook(request: web.Request) -> web.StreamResponse | None:
            whole = request.path.endswith(WEIGHTS) and not request.headers.get("Range", "").startswith("bytes=0-")
            return web.Response(body=body) if whole else None

        served.hook = hook

    weights = checkpoint[WEIGHTS]
    send(changed(weights))
    assert refused(capsys).startswith(f"org/m: {WEIGHTS} is not the file of commit {COMMIT[:12]}: its digest is ")
    send(weights + b"more")
    assert refused(capsys) == f"org/m: {WEIGHTS} has more than the {len(weights)} bytes that the hub tells of"
    send(weights[:-1])
    assert "does not answer: it sends nothing" in refused(capsys)
    assert {name for name in blobs(tmp_path) if len(name) == 64} == set()
    served.hook = None
    assert run(["pull", "org/m"]) == 0


def test_another_range_than_asked_is_refused(served: FakeHub, checkpoint: Files, capsys: Captured) -> None:
    async def hook(request: web.Request) -> web.StreamResponse | None:
        headers = {"Content-Range": f"bytes 7-99/{len(checkpoint[WEIGHTS])}"}
        return web.Response(status=206, body=b"x" * 93, headers=headers) if request.path.endswith(WEIGHTS) else None

    served.hook = hook
    assert refused(capsys) == f"{'org/m'}: the hub sends bytes from '7', asked for 0"


@pytest.mark.parametrize("name", ["../x.json", "/etc/x.json", "a/../../x.json", "a\\x.json", "x\n.json", "", "a//x.json", "x" * 500])
def test_names_that_lead_out_are_refused(served: FakeHub, tmp_path: Path, capsys: Captured, name: str) -> None:
    served.repositories["org/m"][name] = b"{}"
    assert "which is no name within a directory" in refused(capsys)
    assert not (tmp_path / "cache").exists()


def test_a_link_in_the_place_of_a_blob_is_not_followed(served: FakeHub, tmp_path: Path, capsys: Captured) -> None:
    assert run(["pull", "org/m"]) == 0
    (blob,) = [name for name in blobs(tmp_path) if len(name) == 64]
    folder = tmp_path / "cache" / "models--org--m" / "blobs"
    (folder / blob).unlink()
    (tmp_path / "other").write_bytes(b"kept")
    (folder / f"{blob}.mmrt.incomplete").symlink_to(tmp_path / "other")
    assert "cannot be written" in refused(capsys)
    assert (tmp_path / "other").read_bytes() == b"kept"


def test_what_is_not_served_is_not_fetched(served: FakeHub, checkpoint: Files, tmp_path: Path, capsys: Captured) -> None:
    config = json.loads(checkpoint["config.json"])
    served.repositories["org/m"]["config.json"] = json.dumps({**config, "model_type": "mamba"}).encode()
    line = refused(capsys)
    assert line.startswith("org/m is not fetched, as it would not be served: config.json: model_type is 'mamba', expected one of ")
    served.repositories["org/m"]["config.json"] = json.dumps({**config, "intermediate_size": 96}).encode()
    assert "expected [96, 128]" in refused(capsys)
    assert {asked for asked in served.ranges(WEIGHTS)} == {"bytes=0-262143"}
    assert all(len(name) == 40 for name in blobs(tmp_path))


def test_there_has_to_be_room(served: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 30))
    line = refused(capsys)
    assert re.fullmatch(r"0\.0 GB are to be fetched and 1 GiB has to stay free, .* has 1\.1 GB free: make room .*HF_HOME", line)
    assert served.ranges(WEIGHTS) == []


def mutations(answer: Any, random: Random) -> Any:
    """The answer with one value replaced, dropped or doubled, at a random place."""
    if isinstance(answer, dict) and answer and random.random() < 0.8:
        key = random.choice(sorted(answer))
        return {**answer, key: mutations(answer[key], random)}
    if isinstance(answer, list) and answer and random.random() < 0.8:
        at = random.randrange(len(answer))
        if random.random() < 0.2:
            return [*answer[:at], answer[at], *answer[at:]]
        return [*answer[:at], mutations(answer[at], random), *answer[at + 1 :]]
    return random.choice(ODD)


ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1 << 70,
    1.5,
    "",
    "\x00",
    "../..",
    "é" * 300,
    "a" * 40,
    "g" * 64,
    [],
    {},
    [[]],
    {"a": {}},
    "\ud800",
]


def bodies(checkpoint: Files, random: Random, count: int) -> Iterator[bytes]:
    """Answers of the hub about a model, changed in their meaning or in their bytes."""
    answer = {"id": "org/m", "sha": COMMIT, "siblings": [entry(name, data) for name, data in checkpoint.items()]}
    answer["siblings"] += [entry(f"{kind}/m-{kind}.gguf", b"GGUF") for kind in ("Q4_K_M", "Q8_0")]
    whole = json.dumps(answer).encode()
    for _ in range(count):
        if random.random() < 0.6:
            yield json.dumps(mutations(answer, random)).encode()
        else:
            at = random.randrange(len(whole))
            yield random.choice([whole[:at], whole[:at] + bytes([random.randrange(256)]) + whole[at + 1 :], whole[at:], whole * 2])


def test_mutated_answers_are_read_or_refused(checkpoint: Files) -> None:
    random, refusals = Random(5), 0
    index = json.dumps({"weight_map": {"a": WEIGHTS}}).encode()
    for body in bodies(checkpoint, random, examples(3000)):
        changed_index = json.dumps(mutations(json.loads(index), random)).encode()
        try:
            found = parse_repository("org/m", body)
            small_files(found)
            safetensors_files(found, random.choice([None, index, changed_index]))
            gguf_files(HubName("org/m", random.choice(["", "q8_0", "Q4_K_M"])), found)
        except HubError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
            refusals += 1
    assert refusals > examples(3000) // 2


def test_mutated_answers_are_refused_in_one_line(served: FakeHub, checkpoint: Files, tmp_path: Path, capsys: Captured) -> None:
    """Through the program, with mutated headers of weights beside them."""
    random = Random(6)
    weights = bytearray(checkpoint[WEIGHTS])
    for body in bodies(checkpoint, random, examples(60)):
        is_api = random.random() < 0.5
        headers = bytes(weights)
        if not is_api:
            at = random.choice([random.randrange(8), random.randrange(8, 3000)])
            headers = headers[:at] + bytes([random.randrange(256)]) + headers[at + 1 :]
        served.repositories["org/m"][WEIGHTS] = headers
        served.hook = partial(answer_with, body) if is_api else None
        capsys.readouterr()
        code = run(["pull", "org/m", "--quiet"])
        told = capsys.readouterr()
        assert code in (0, 1, 2) and len(told.err.splitlines()) == (code != 0), (body, told.err)
        assert {path.name for path in tmp_path.iterdir()} <= {"cache", "state", "run"}


async def answer_with(body: bytes, request: web.Request) -> web.StreamResponse | None:
    return web.Response(body=body) if request.path.startswith("/api/") else None
