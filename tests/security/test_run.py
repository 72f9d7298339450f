"""A real run from the outside: what it listens on, whose its files are, and what it answers without its key."""

import ast
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from mmrt.cli.endpoint import find_endpoint
from mmrt.runtime.process.run import read_run_info
from mmrt.runtime.supervisor.ask_key import server_key
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.end_to_end.conftest import Server

ROOT = Path(__file__).parent.parent.parent
KEY = "a-key-of-the-test"
LISTENING = "0A"  # of /proc/net/tcp
ACCEPTS = 1 << 16  # __SO_ACCEPTCON, of /proc/net/unix


@pytest.fixture(scope="module")
def server(launch: Callable[..., Server], source: Path) -> Iterator[Server]:
    """Its actors, except the one in a sandbox, can be told to try what they may not (``intruder``)."""
    shutil.copy(Path(__file__).with_name("intruder.py"), source / "actors/host")
    edit(source / "actors/host/actor.py", ".intruder", "        now_s = time.monotonic()\n        self._say_active(now_s)\n", "self")
    edit(source / "actors/controller/serve.py", "..host.intruder", "        actor.notifier.watchdog()\n", "actor")
    controller = source / "actors/controller/serve.py"
    controller.write_text(controller.read_text().replace("ended.wait(), watchdog_s)", "ended.wait(), 0.1)"))
    server = launch(settings=f'[server]\napi_key = "{KEY}"\n', source=source)
    # A stream, so that every actor has opened what it opens for work.
    server.client = server.client.with_options(api_key=KEY)
    server.chat("Hello")
    PATHS.update({path.stem: path for path in server.run_path.glob(f"*.{server.status()['run_id']}")})
    yield server
    server.down()


def edit(file: Path, module: str, place: str, actor: str) -> None:
    """Call the intruder at a place that an actor comes by again and again."""
    text = file.read_text()
    assert text.count(place) == 1
    call = f'        if {actor}.name != "video":\n            intrude({actor}.run.path, {actor}.name)\n'
    file.write_text(f"from {module} import intrude\n{text.replace(place, call + place)}")


def processes(server: Server) -> dict[int, str]:
    """Everything that belongs to the run, by the program's own word or by descent from its supervisor."""
    status = server.status()
    names = {int(actor["pid"]): str(actor["name"]) for actor in status["actors"]} | {int(status["supervisor_pid"]): "supervisor"}
    waiting = [int(status["supervisor_pid"])]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                names.setdefault(child, "zygote")
                waiting.append(child)
    return names


def inodes(pid: int) -> set[int]:
    """Of the sockets that the process has open."""
    links = (os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink())
    return {int(found[1]) for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}


def table(name: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]


def test_nothing_but_the_gateways_socket_listens_on_tcp(server: Server) -> None:
    """One listening socket, on loopback. Its supervisor may hold it too: it is there before, and after, any one gateway."""
    owners: dict[int, set[str]] = {}
    for pid, name in processes(server).items():
        for inode in inodes(pid):
            owners.setdefault(inode, set()).add(name)
    addresses = {}
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for fields in table(protocol):
            inode = int(fields[9])
            if inode in owners and (fields[3] == LISTENING or protocol.startswith("udp")):
                addresses[fields[1]] = owners[inode]
    ((address, names),) = addresses.items()
    host, port = address.split(":")
    assert host == "0100007F" and int(port, 16) == int(server.url.rpartition(":")[2])
    assert "gateway" in names and names <= {"gateway", "supervisor"}


def test_unix_sockets_lie_in_the_run_directory(server: Server) -> None:
    """No abstract names, which have no mode; what listens, or takes datagrams, has a file of mode 0600."""
    own = {inode for pid in processes(server) for inode in inodes(pid)}
    paths = set()
    for fields in table("unix"):
        if int(fields[6]) in own and len(fields) > 7:
            assert not fields[7].startswith("@"), fields
            paths.add(Path(fields[7]).parent)
    assert paths == {server.run_path}
    sockets = [entry for entry in server.run_path.iterdir() if entry.is_socket()]
    assert {"bus", "control", "notify"} <= {entry.name for entry in sockets}
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in sockets} == {0o600}


def test_the_run_directory_is_its_users_and_on_this_host_alone(server: Server) -> None:
    assert stat.S_IMODE(server.run_path.stat().st_mode) == 0o700
    for entry in server.run_path.rglob("*"):
        found = entry.lstat()
        assert found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077, entry
        assert not entry.is_symlink(), entry
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(server.run_path)], capture_output=True, text=True, check=True)
    assert kind.stdout.strip() in ("tmpfs", "ramfs")  # memory of this machine, never a network file system


def test_segments_have_a_token_in_their_names(server: Server) -> None:
    token = str(server.status()["run_id"])
    assert re.fullmatch(r"[0-9a-f]{12}", token)
    large = [entry.name for entry in server.run_path.iterdir() if entry.is_file() and entry.stat().st_size >= 1 << 16]
    segments = [name for name in large if name != "journal"]
    assert len(segments) > 5 and all(name.endswith(f".{token}") for name in segments)
    for name in ("health", "ready", "v1/models", "metrics", "version"):
        answer = httpx2.get(f"{server.url}/{name}", headers={"Authorization": f"Bearer {KEY}"})
        assert token not in answer.text and str(server.run_path) not in answer.text


def mappings(pid: int, names: dict[int, str]) -> dict[str, str]:
    """What a process may write of the segments that it maps: "w" all, "p" a part, "r" nothing.

    The kernel tells whether a mapping can be written or made so (mprotect): its file was opened for it.
    """
    writable: dict[str, int] = {}
    name, num_bytes = "", 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+)", line):
            name, num_bytes = names.get(int(found[3]), ""), int(found[2], 16) - int(found[1], 16)
        elif line.startswith("VmFlags:") and name:
            writable[name] = writable.get(name, 0) + num_bytes * bool({"wr", "mw"} & set(line.split()))
    sizes = {name: path.stat().st_size for name, path in PATHS.items()}
    return {name: "r" if not of_it else "p" if of_it < sizes[name] else "w" for name, of_it in writable.items()}


PATHS: dict[str, Path] = {}
COLUMNS = ("supervisor", "memory", "controller", "gateway", "video", "encoder", "prefill", "decode", "detokenizer")


def test_each_process_can_write_what_the_page_on_security_says(server: Server) -> None:
    """Of all that it maps of the run. Where they differ, the failure shows the table that is right."""
    names = {path.stat().st_ino: name for name, path in PATHS.items()}
    found = {actor: mappings(pid, names) for pid, actor in processes(server).items()}
    assert found.pop("zygote") == {}
    own = {f"flight-{actor}": "w" for actor in found}
    rights = {name: [found[actor].get(name, "") for actor in COLUMNS] for name in sorted(PATHS) if name not in own}
    lines = [f"| `{name}` | {' | '.join(cells)} |" for name, cells in rights.items() if any(cells)]
    written = (ROOT / "docs/security.md").read_text().split("<!-- the table of mappings -->")[1].split("<!-- its end -->")[0]
    assert [re.sub(" +", " ", line) for line in written.splitlines() if line.startswith("| `")] == [
        re.sub(" +", " ", line) for line in lines
    ], "\n".join(lines)
    for actor in COLUMNS[1:]:
        assert {name: right for name, right in found[actor].items() if name in own and right != "r"} == {f"flight-{actor}": "w"}


def test_no_process_can_write_what_it_reads(server: Server) -> None:
    """Tried from inside each process that is in no sandbox; ``tests/actors/video/test_attack.py`` has the other."""
    actors = [actor for actor in COLUMNS[1:] if actor != "video"]
    (server.run_path / "intrude").touch()
    try:
        server.wait(lambda _: all((server.run_path / f"intruded-{actor}").exists() for actor in actors), "attempts of all actors")
        outcomes = {actor: json.loads((server.run_path / f"intruded-{actor}").read_text()) for actor in actors}
    finally:
        (server.run_path / "intrude").unlink()
    assert {outcome for of_one in outcomes.values() for outcome in of_one.values()} == {"EACCES"}
    tried = {actor: {name.split()[0] for name in of_one} for actor, of_one in outcomes.items()}
    assert "weights" in tried["prefill"] & tried["decode"] & tried["encoder"] and "sequences" in tried["gateway"] & tried["detokenizer"]


def test_weights_are_sealed(server: Server) -> None:
    """Nobody can write them by what it has mapped, and nobody opens them to do so by mistake."""
    weights = PATHS["weights"]
    assert stat.S_IMODE(weights.stat().st_mode) == 0o400


def test_the_key_lies_in_no_file_of_the_run(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor in its logs, nor in a command line, an environment or an open file of a process. Commands of its user ask the supervisor."""
    state = Path(server.environment["XDG_STATE_HOME"]) / "mmrt"
    places = [entry for place in (server.run_path, state) for entry in place.rglob("*") if entry.is_file()]
    assert {"run.json", "journal", "gateway.log"} <= {place.name for place in places}
    places += [Path(f"/proc/{pid}/{name}") for pid in processes(server) for name in ("cmdline", "environ")]
    held = [fd for pid in processes(server) for fd in Path(f"/proc/{pid}/fd").iterdir() if "mmrt-key" in os.readlink(fd)]
    assert [place for place in places if KEY.encode() in place.read_bytes()] + held == []
    with RunDirectory.attach(server.run_path) as run:
        info = read_run_info(run)
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    monkeypatch.setenv("MMRT_RUN_DIR", str(server.run_path))
    assert (info.config.server.api_key, server_key(server.run_path, info)) == ("", KEY)
    assert find_endpoint(None, None, None).first_model()


def routes() -> list[tuple[str, str]]:
    """Every (method, path) that the application has, by its source: a new one is tested without anybody thinking of it."""
    found = []
    for node in ast.walk(ast.parse((ROOT / "actors/gateway/app.py").read_text())):
        match node:
            case ast.Tuple([ast.Attribute(attr=add), ast.Constant(path), _]) if add.startswith("add_"):
                found.append((add.removeprefix("add_").upper(), str(path)))
    for node in ast.walk(ast.parse((ROOT / "actors/gateway/page/routes.py").read_text())):
        match node:
            case ast.Tuple([ast.Constant("GET" | "POST" as method), ast.Constant(path), ast.Attribute()]):
                found.append((method, str(path)))
    assert len(found) >= 12
    return found


def filled(path: str) -> str:
    """A path of this route."""
    return re.sub(r"\{.*?\}", "x", path)


@pytest.mark.parametrize(
    "method, path", [*routes(), ("GET", "/page/nothing"), ("GET", "/nothing"), ("DELETE", "/v1/models"), ("GET", "/health/x")]
)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"Authorization": KEY},
        {"Authorization": f"bearer {KEY.upper()}"},
        {"Authorization": "Bearer"},
        {"Api-Key": KEY},
    ],
    ids=range(8),
)
def test_every_route_but_health_wants_the_key(server: Server, method: str, path: str, headers: dict[str, str]) -> None:
    answer = httpx2.request(method, server.url + filled(path), headers=headers)
    if path in ("/health", "/ready", "/v1"):
        assert answer.status_code == 200
    else:
        assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
        assert KEY not in answer.text


@pytest.mark.parametrize("method, path", routes())
def test_the_key_opens_them(server: Server, method: str, path: str) -> None:
    answer = httpx2.request(method, server.url + filled(path), headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code != 401


@pytest.mark.parametrize("path", ["/", "/page/app.js"])
def test_the_files_of_the_page_are_open_and_the_same_for_everybody(server: Server, path: str) -> None:
    answers = [httpx2.get(server.url + path, headers=headers) for headers in ({}, {"Authorization": f"Bearer {KEY}"})]
    assert {answer.status_code for answer in answers} == {200} and answers[0].content == answers[1].content
    assert KEY not in answers[0].text


def test_the_key_is_compared_in_constant_time() -> None:
    """Whatever compares something with the key uses compare_digest: no ==, no `in`, no startswith on it anywhere in the gateway."""
    compared = 0
    for path in (ROOT / "actors/gateway").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            source = ast.unparse(node)
            if isinstance(node, ast.Compare):
                names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
                names |= {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
                secret = {"api_key", "Authorization", "digest"}
                assert not secret & names, f"{path.name}: {source}"
            elif isinstance(node, ast.Call) and source.startswith("hmac.compare_digest("):
                compared += 1
    assert compared == 1
