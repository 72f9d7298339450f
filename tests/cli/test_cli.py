"""The command line: what it prints, what it refuses in one line, its exit statuses, and that it is quick."""

import http.server
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mmrt.cli.main import COMMANDS, run
from mmrt.cli.options import override
from mmrt.cli.words import ADVICE, ALIASES
from mmrt.runtime.config.runtime_config import RuntimeConfig, parse_config
from mmrt.runtime.process.host_room import HostRoom
from mmrt.runtime.process.run import DEFAULT_MODEL, create_run, run_info
from mmrt.runtime.stage_table import ACTORS
from mmrt.runtime.supervisor.specs import child_environment
from mmrt.shm.run_directory import RunDirectory

if TYPE_CHECKING:
    from ..runtime.supervisor.conftest import ToyRun

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the user's own runs, logs or configuration."""
    monkeypatch.setenv("MMRT_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MMRT_CONFIG", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1 << 40, free=1 << 36))
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)


def refused(capsys: Captured, *arguments: str) -> tuple[int, str]:
    """(exit status, what stands on stderr)."""
    status = run(arguments)
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" not in error
    return status, error


def test_help_names_every_command_and_the_exit_statuses(capsys: Captured) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for command in {*COMMANDS} - {"actor"}:  # for systemd and the supervisor
        assert f"\n  {command} " in text
    assert "Exit status: 0" in text and "--version" in text


@pytest.mark.parametrize("group", [[], ["layout"], ["model"], ["config"], ["bench"]])
def test_no_line_of_a_list_of_commands_is_cut_at_80_columns(
    group: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*group, "--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:\n")[2]
    assert listed and "..." not in listed


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: Captured) -> None:
    assert run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"mmrt {command}" in text
    assert run([command, "-h"]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("alias", ALIASES)
def test_words_of_other_programs_lead_to_the_command(alias: str, capsys: Captured) -> None:
    command = ALIASES[alias]
    assert run([alias, "--help"]) == run(["help", alias]) == run([*command, "--help"]) == 0
    first, second, third = (part for part in capsys.readouterr().out.split("Usage: mmrt ") if part)
    assert first == second == third and first.startswith(" ".join(command))
    if command != ("bench",):  # a group, whose list of commands ends its help
        assert f"mmrt {alias}" in " ".join(first.partition("Also typed:")[2].split())
    assert run(["--help"]) == 0
    assert f"\n  {alias} " not in capsys.readouterr().out, "aliases are not listed"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("stpo", "did you mean mmrt stop (mmrt down)"),
        ("strat", "did you mean mmrt start (mmrt up)"),
        ("serv", "did you mean mmrt serve?"),
        ("Stop", "did you mean mmrt stop (mmrt down)"),
        ("statsu", "did you mean mmrt status"),
        ("pul", "did you mean mmrt pull"),
        ("nonsense", "No such command 'nonsense': mmrt --help lists all"),
        ("create", "mmrt create: mmrt makes no models of others: mmrt model make has random weights, and mmrt pull ORG/REPO"),
        ("kill", "mmrt kill: mmrt down --drain 0 ends the run at once; mmrt restart ACTOR replaces one process"),
    ],
)
def test_a_word_that_is_no_command_leads_on(word: str, said: str, capsys: Captured) -> None:
    status, error = refused(capsys, word, "x")
    assert status == 2 and said in error and error.count("\n") == 1


def test_aliases_and_commands_do_not_overlap() -> None:
    assert not {*ALIASES, *ADVICE} & {*COMMANDS} and not {*ALIASES} & {*ADVICE}
    assert {words[0] for words in ALIASES.values()} <= {*COMMANDS}


def test_version(capsys: Captured) -> None:
    assert run(["version"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("mmrt 0.")
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == told


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("mmrt re", ["restart", "record", "replay"]),
        ("mmrt restart de", ["decode", "detokenizer"]),
        ("mmrt debug vi", ["video"]),
        ("mmrt logs su", ["supervisor"]),
        ("mmrt replay --last e", ["encoder"]),
        ("mmrt replay --capture p", ["prefill"]),
    ],
)
def test_shells_complete_commands_and_actors(words: str, offered: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert run(["--show-completion", "bash"]) == 0
    assert "_MMRT_COMPLETE=complete_bash" in capsys.readouterr().out
    monkeypatch.setenv("_MMRT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert run([]) == 0
    assert capsys.readouterr().out.split() == offered


def test_config_show_and_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[server]\nport = 1234\n")
    assert run(["config", "check", str(file)]) == 0
    assert run(["config", "show", "--config", str(file)]) == 0
    shown = capsys.readouterr().out.partition("ok\n")[2]
    assert parse_config(shown).server.port == 1234
    monkeypatch.setenv("MMRT_CONFIG", str(file))
    assert run(["config", "show"]) == 0
    assert capsys.readouterr().out == shown
    file.write_text("[server]\nprot = 1234\n")
    status, error = refused(capsys, "config", "check", str(file))
    assert status == 2
    assert error.startswith(f"error: {file}: unknown key 'server.prot': did you mean 'port'?") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["up", "--port", "70000"], 2, "error: server.port = 70000: expected `int` <= 65535"),
        (["up", "--model", "/no/such"], 2, "error: model.path = '/no/such' is not a directory: expected a Hugging Face"),
        (["up", "/no/such"], 2, "error: model.path = '/no/such' is not a directory: expected a Hugging Face"),
        (["serve", "/no/such"], 2, "error: model.path = '/no/such' is not a directory: expected a Hugging Face"),
        (["run", "/no/such", "Hello"], 2, "error: model.path = '/no/such' is not a directory: expected a Hugging Face"),
        (["up", "a", "--model", "b"], 2, "MODEL is 'a' and --model is 'b': give one of them"),
        (["up", ""], 2, "model.path is empty; leave the option out"),
        (["up", "--api-key", ""], 2, "server.api_key is empty; leave the option out"),
        (["up", "--dtype", "half"], 2, "error: model.dtype = \"half\": expected one of 'auto', 'float32', 'bfloat16'"),
        (["up", "--max-model-len", "-1"], 2, "error: model.max_context = -1: expected `int` >= 0"),
        (["up", "--dry-run", "--port", "0", "--max-model-len", "1000000"], 2, "max_context of 1000000 is above the model's limit"),
        (["stop", "decode"], 2, "unexpected extra argument"),
        (["up", "--model", "~nosuchuser/x"], 2, "error: model.path = '~nosuchuser/x': Could not determine home directory"),
        (["up", "--host", "a..b"], 1, "error: cannot serve on a..b:8000 (server.host, server.port): "),
        (["ask", "x", "--url", "http://[::1"], 1, "error: cannot reach http://[::1: "),
        (["up", "--model", "/usr"], 2, "has no config.json: expected a Hugging Face checkpoint directory"),
        (["up", "--config", "/no/such.toml"], 2, "error: cannot read the configuration /no/such.toml: No such file"),
        (["up", "--run", "a/b"], 2, "'a/b' is not a name"),
        (["status"], 1, "error: no run is up in"),
        (["restart", "decode"], 1, "error: no supervisor answers in"),
        (["restart"], 2, "name actors, or say --all"),
        (["scale"], 2, "Missing argument 'STAGE=N"),
        (["scale", "decode"], 2, "'decode' is not STAGE=N, such as encoder=2"),
        (["scale", "decode=-1"], 2, "'decode=-1' is not STAGE=N"),
        (["scale", "decode=2"], 1, "error: no supervisor answers in"),
        (["layout", "show"], 1, "error: no run is up in"),
        (["layout", "set", "E+P+2D"], 1, "error: no supervisor answers in"),
        (["debug"], 2, "Missing argument 'ACTOR'"),
        (["logs"], 1, "error: no logs in"),
        (["logs", "decoed"], 2, "no actor 'decoed'; did you mean decode? There are memory"),
        (["restart", "decodr"], 2, "no actor 'decodr'; did you mean decode? There are memory"),
        (["debug", "vidoe"], 2, "no actor 'vidoe'; did you mean video? There are memory"),
        (["restart", "x"], 2, "no actor 'x'; there are memory"),
        (["restart", "encoder.9"], 2, "no actor 'encoder.9': '9' is no number from 1 to 7"),
        (["logs", "memory.1"], 2, "no actor 'memory.1': a run has one memory"),
        (["debug", "encodr.1"], 2, "no actor 'encodr.1'; did you mean encoder? There are memory"),
        (["up", "a" * 5000], 2, " cannot be read: File name too long"),
        (
            ["up", "--adapter", "/no/such"],
            2,
            "error: model.adapter = '/no/such': /no/such is not a directory: expected an adapter that",
        ),
        (["run", "--adapter", "/no/such"], 2, "error: model.adapter = '/no/such': /no/such is not a directory: expected an adapter"),
        (["up", "--model", "m.gguf"], 2, "error: model.path = 'm.gguf' is not there"),
        (
            ["up", "--model", "bartowski/Qwen-GGUF"],
            2,
            "error: model.path = 'bartowski/Qwen-GGUF' is neither a path nor in the cache: mmrt pull bartowski/Qwen-GGUF",
        ),
        (["up", "--model", "https://huggingface.co/Qwen/Q-3B"], 2, "mmrt pull Qwen/Q-3B fetches it, as do --yes and model.download"),
        (["up", "--yes", "--model", "Qwen/Q-3B"], 1, "error: HF_HUB_OFFLINE is set, so no hub is asked: unset it to fetch a model"),
        (["ask", "x", "--image", "https://a.org/b.png"], 2, "error: https://a.org/b.png: URLs are not supported; download it"),
        (["ask", "x", "--audio", "http://a.org/b.wav"], 2, "error: http://a.org/b.wav: URLs are not supported; download it"),
        (["ask", "-", "--image", "-"], 2, "standard input (-) can be read once"),
        (["ask", "x", "--image", "-", "--video", "-"], 2, "standard input (-) can be read once"),
        (["ask", "--image", "-"], 2, "it is missing, and standard input is for the medium"),
        (["actor", "decoed"], 2, "error: no actor 'decoed'; there are memory"),
        (["ask", "hello"], 1, "error: no run is up in"),
        (["ask", "x", "--url", "http://127.0.0.1:1"], 1, "error: cannot reach http://127.0.0.1:1: [Errno 111] Connection refused"),
        (["ask", "x", "--url", "http://x", "--image", "/dev/null"], 2, "error: /dev/null is empty"),
        (["ask", "x", "--url", "http://x", "--image", "/no/such.png"], 2, "error: cannot read /no/such.png: No such file"),
        (["ask", "x", "--url", "file:///etc/passwd"], 2, "error: --url 'file:///etc/passwd' is not an http:// or https:// address"),
        (["model", "make", "huge", "x"], 2, "Invalid value for"),
        (["model", "make", "qwen2_vl-9b", "x"], 2, "no shape '9b' of qwen2_vl; there are tiny, 2b, 7b, 72b"),
        (["nonsense"], 2, "No such command 'nonsense'"),
    ],
)
def test_refusals(arguments: list[str], status: int, message: str, capsys: Captured) -> None:
    found, error = refused(capsys, *arguments)
    assert found == status
    assert message in " ".join(error.split())


def test_down_with_nothing_up_is_no_error(tmp_path: Path, capsys: Captured) -> None:
    assert run(["down"]) == 0
    RunDirectory.create(tmp_path / "run", {}).close()
    assert run(["down"]) == 0
    assert not (tmp_path / "run").exists(), "what a dead run left is swept"


def test_up_refuses_a_busy_directory_and_a_port_in_use(tmp_path: Path, capsys: Captured) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        status, error = refused(capsys, "up", "--port", str(port))
        assert status == 1
        assert f"error: cannot serve on 127.0.0.1:{port} (server.host, server.port): Address already in use" in error
    with RunDirectory.create(tmp_path / "run", {}) as other:
        status, error = refused(capsys, "up", "--port", "0")
        assert status == 1 and f"error: a run is already up in {tmp_path}/run" in error and "mmrt down" in error
        other.destroy()


@pytest.mark.parametrize("dry", [True, False])
def test_up_refuses_what_cannot_run_before_it_starts_anything(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, dry: bool
) -> None:
    file = tmp_path / "c.toml"
    arguments = ["up", "--port", "0", "--config", str(file), *(["--dry-run"] if dry else [])]
    file.write_text("[model]\nmax_context = 100000")
    status, error = refused(capsys, *arguments)
    assert status == 2 and "max_context" in error and error.count("\n") == 1
    file.write_text("[memory]\nkv_tokens = 100000000")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1 << 40, free=1 << 30))
    assert run(arguments) == 1
    captured = capsys.readouterr()
    assert re.match(r"error: pools and tables need 39\d{4} MiB of shared memory, .* has 1024 MiB available", captured.err)
    assert ("kv pool" in captured.out) == dry
    assert not (tmp_path / "run").exists() and not (tmp_path / "state").exists()


@pytest.mark.parametrize("arguments", [["up", "--port", "0", "--config"], ["config", "check"]])
def test_bad_files_of_the_server_are_refused_before_anything_starts(tmp_path: Path, capsys: Captured, arguments: list[str]) -> None:
    file, keys = tmp_path / "c.toml", tmp_path / "keys.toml"
    file.write_text('[server]\napi_keys_file = "keys.toml"\n')
    status, error = refused(capsys, *arguments, str(file))
    assert status == 2 and error == f"error: server.api_keys_file = '{keys}' cannot be read: No such file or directory\n"
    keys.touch(0o600)
    keys.write_text("[[key]]\nname = 'a'\nkey = 'short'\n")
    status, error = refused(capsys, *arguments, str(file))
    assert status == 2 and error.startswith(f"error: {keys}: line 3: key = a text of 5 characters: expected 16 to 512")
    file.write_text('[server]\ntls_cert = "cert.pem"\ntls_key = "key.pem"\n')
    status, error = refused(capsys, *arguments, str(file))
    assert status == 2 and error == f"error: server.tls_cert = '{tmp_path / 'cert.pem'}' cannot be read: No such file or directory\n"
    file.write_text("[server]\nmax_connections = 1000000\n")
    assert "server.max_connections = 1000000: a process may open" in refused(capsys, *arguments, str(file))[1]
    assert not (tmp_path / "run").exists() and not (tmp_path / "state").exists()


def test_presets_by_option(tmp_path: Path, capsys: Captured) -> None:
    assert run(["up", "--dry-run", "--port", "0", "--preset", "monolithic"]) == 0
    assert len(re.findall("in the process of decode", capsys.readouterr().out)) == 2
    assert run(["up", "--dry-run", "--port", "0", "--preset", "split"]) == 0
    assert len(re.findall("in the process of prefill", capsys.readouterr().out)) == 1
    assert refused(capsys, "up", "--preset", "mono")[1].startswith('error: scheduling.preset = "mono": expected one of')
    file = tmp_path / "c.toml"
    file.write_text('[scheduling]\npreset = "split"\n')
    status, error = refused(capsys, "up", "--config", str(file), "--preset", "monolithic")
    assert status == 2 and error == "error: --preset monolithic: the configuration has scheduling.preset = 'split'\n"
    file.write_text('[actors]\nlayout = "2E+P+D"\n')
    status, error = refused(capsys, "up", "--config", str(file), "--preset", "split")
    assert status == 2 and 'actors.layout = "2E+P+D": scheduling.preset = "split" needs "EP+D"' in error
    assert not (tmp_path / "run").exists() and not (tmp_path / "state").exists()


def test_what_a_dead_run_has_left_counts_as_room(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.toml").write_text("[memory]\nkv_tokens = 4096\nembedding_tokens = 4096")
    arguments = ["up", "--dry-run", "--port", "0", "--config", str(tmp_path / "c.toml")]
    assert run(arguments) == 0
    needed = int(re.findall(r"shared memory +(\d+) MiB", capsys.readouterr().out)[0]) << 20
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1 << 40, free=needed - (1 << 20)))
    assert refused(capsys, *arguments)[0] == 1
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "pool-kv.left").write_bytes(bytes(3 << 20))
    assert run(arguments) == 0


@pytest.mark.parametrize(
    ("free_mib", "kv_mib", "why"),
    [
        (512, range(220, 240), "the least"),  # half of what the weights leave
        (700, range(256, 257), "the least"),
        (1500, range(330, 380), "25% of the memory available"),
        (7000, range(512, 513), "the most"),
    ],
)
def test_dry_run_says_why_pools_have_their_sizes(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, free_mib: int, kv_mib: range, why: str
) -> None:
    monkeypatch.setattr("mmrt.cli.plan.read_host_room", lambda path: HostRoom(free_mib << 20, 1 << 40))
    assert run(["up", "--dry-run", "--port", "0"]) == 0
    (line,) = re.findall(r"kv pool .*", capsys.readouterr().out)
    assert why in line
    assert int(line.split()[2]) in kv_mib


def test_dry_run_starts_nothing(tmp_path: Path, capsys: Captured) -> None:
    assert run(["up", "--dry-run", "--port", "0"]) == 0
    plan = capsys.readouterr().out
    assert f"run directory  {tmp_path}/run" in plan and "shared memory" in plan and "models/demo" in plan
    assert all(name in plan for name in ACTORS)
    assert sorted(tmp_path.iterdir()) == []


def test_dry_run_says_how_large_the_weights_are(capsys: Captured) -> None:
    assert run(["up", "--dry-run", "--port", "0", "--dtype", "float32"]) == 0
    shown = capsys.readouterr().out
    stored = (DEFAULT_MODEL / "model.safetensors").stat().st_size
    (mib,) = re.findall(r"^weights +(\d+) MiB$", shown, re.MULTILINE)
    assert stored / 2**20 <= int(mib) + 1 <= 2.2 * stored / 2**20
    assert re.search(rf"^shared memory +\d+ MiB, and the weights: {mib} MiB$", shown, re.MULTILINE)


def test_the_null_model_needs_no_weights(tmp_path: Path, capsys: Captured) -> None:
    model = tmp_path / "null"
    assert run(["model", "make", "null", str(model)]) == 0
    assert run(["up", "--dry-run", "--port", "0", "--model", str(model)]) == 0
    (model / "tokenizer.json").unlink()
    assert run(["up", "--dry-run", "--port", "0", "--model", str(model)]) == 2
    told = capsys.readouterr()
    assert "is not a whole checkpoint: tokenizer.json is missing." in told.err + told.out


@pytest.mark.many
@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model.safetensors", "holds no *.safetensors file"),
        ("tokenizer.json", "tokenizer.json is missing"),
        ("chat_template.jinja", "has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"),
        ("*", "holds no *.safetensors file; tokenizer.json is missing; has no chat template ("),
    ],
)
@pytest.mark.parametrize("arguments", [["up", "--dry-run"], ["up", "-d"], ["doctor"]])
def test_a_checkpoint_without_a_part_is_no_checkpoint(
    tmp_path: Path, capsys: Captured, file: str, said: str, arguments: list[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEFAULT_MODEL, model)
    for path in model.glob(file):
        if path.name != "config.json":
            path.unlink()
    assert run([*arguments, "--port", "0", "--model", str(model)]) == (1 if arguments == ["doctor"] else 2)
    told = capsys.readouterr()
    assert f"model.path = '{model}' is not a whole checkpoint: {said}" in told.err + told.out
    assert "mmrt pull ORG/REPO" in told.err + told.out


def test_a_pointer_of_git_lfs_is_no_file(tmp_path: Path, capsys: Captured) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEFAULT_MODEL, model)
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 11\n")
    status, error = refused(capsys, "up", "--dry-run", "--port", "0", str(model))
    assert status == 2 and "model.safetensors is a pointer of Git LFS in place of the file (git lfs pull)" in error
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
    status, error = refused(capsys, "up", "--dry-run", "--port", "0", str(model))
    assert status == 2 and "1.safetensors: missing, though model.safetensors.index.json names it" in error


def test_options_replace_what_the_configuration_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    config = parse_config('[server]\napi_key = "a"\n[model]\nname = "n"\n')
    assert override(config, {"server.api_key": None, "model.name": None}) == config
    changed = override(config, {"server.api_key": "b", "model.name": "m", "model.max_context": 128, "model.dtype": "float32"})
    assert (changed.server.api_key, changed.model.name) == ("b", "m")
    assert (changed.model.max_context, changed.model.dtype) == (128, "float32")
    file = tmp_path / "c.toml"
    file.write_text('[server]\napi_key = "of the file"\n')
    monkeypatch.setenv("MMRT_API_KEY", "of the environment")
    assert run(["config", "show", "--config", str(file)]) == 0
    assert parse_config(capsys.readouterr().out).server.api_key == "of the environment"
    assert "MMRT_API_KEY" not in child_environment(os.environ), "a decoder of media has no use for it"
    assert "HF_TOKEN" not in child_environment({"HF_TOKEN": "hf_x"}), "nor for a hub's"


def test_dry_run_shows_devices_and_their_pools(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "mmrt.toml"
    cpu = min(os.sched_getaffinity(0))
    devices = f'[[devices]]\nname = "a"\n[[devices]]\nname = "b"\ncpus = "{cpu}"\n'
    file.write_text(devices + '[actors]\nlayout = "EP@a+D@b"\n[memory]\nkv_tokens = 4096\n')
    arguments = ["up", "--dry-run", "--port", "0", "--config", str(file)]
    assert run(arguments) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"device a processors any", f"device b processors {cpu}", "actor decode threads 1, nice 0, on device b"} < {*lines}
    assert [line.split()[0] for line in lines if "256 pages" in line] == ["kv", "kv.1"]
    stages = '[actors]\nlayout = "E@a+P@a+P@b+D@b"\n[memory]\nkv_tokens = 4096\n[scheduling]\nprefill_pipeline = true\n'
    file.write_text(devices + stages)
    assert run(["up", "--dry-run", "--port", "0", "--config", str(file)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if "KV pages on" in line] == ["actor prefill.1 threads 1, nice 2, on device b, KV pages on a"]
    file.write_text(devices + "[memory]\nkv_tokens = 1_000_000_000\n")
    status, error = refused(capsys, *arguments)
    assert status == 1 and "pools and tables need" in error


def test_doctor_looks_at_the_adapter(capsys: Captured) -> None:
    assert run(["doctor", "--adapter", "/no/such", "--port", "0"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[1] == "configuration"]
    assert line.startswith("failed ") and "model.adapter = '/no/such': /no/such is not a directory" in line


def test_units(tmp_path: Path, capsys: Captured) -> None:
    assert run(["units", "--out", str(tmp_path / "units")]) == 0
    names = sorted(path.name for path in (tmp_path / "units").iterdir())
    assert names == sorted(["mmrt.target", "mmrt-gateway.socket", *(f"mmrt-{actor}.service" for actor in ACTORS)])
    text = (tmp_path / "units" / "mmrt-decode.service").read_text()
    assert f'Environment="MMRT_RUN_DIR={tmp_path}/run"' in text


def test_units_of_another_layout_are_told_and_others_are_not(tmp_path: Path, capsys: Captured) -> None:
    for name in ("mmrt-prefill.1.service", "mmrt-backup.service", "mmrt-memory.1.service"):
        (tmp_path / name).touch()
    assert run(["units", "--out", str(tmp_path)]) == 0
    assert "(of another layout, and to be removed wherever they are: mmrt-prefill.1.service)" in capsys.readouterr().out


def test_units_are_of_one_layout(tmp_path: Path, capsys: Captured) -> None:
    config = tmp_path / "mmrt.toml"
    config.write_text("[autoscale]\nenabled = true\n")
    status, error = refused(capsys, "units", "--config", str(config), "--out", str(tmp_path / "units"))
    assert status == 2 and "autoscale.enabled: the services are of one layout" in error and not (tmp_path / "units").exists()
    config.write_text('[actors]\nlayout = "2G+E+P+D"\n')
    status, error = refused(capsys, "units", "--config", str(config), "--out", str(tmp_path / "units"))
    assert status == 2 and "'2G+E+P+D': under systemd a run has one gateway" in error and not (tmp_path / "units").exists()


def test_commands_over_a_live_run(toy: "ToyRun", monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("MMRT_RUN_DIR", str(toy.run))
    toy.start()
    toy.wait_for("ready")
    assert run(["status", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ready"] is True
    for actor in report["actors"]:
        assert {"name", "pid", "state", "generation", "restarts", "last_exit", "memory_bytes", "cpu_percent"} <= set(actor)
    assert set(report["pools"]) == {"media", "patch", "embedding", "kv"}
    assert set(report["pools"]["kv"]) == {"pages", "used"}
    assert run(["status"]) == 0
    assert "decode" in capsys.readouterr().out
    assert run(["restart", "decode"]) == 0
    assert "generation 2 serves" in capsys.readouterr().out
    toy.behave("decode", "crash")
    status, error = refused(capsys, "restart", "decode")
    assert status == 1
    assert "decode | Traceback: the toy is broken\n" in error and "the old one keeps serving" in error
    assert run(["down"]) == 0
    assert "the run is down" in capsys.readouterr().out
    assert toy.end() == 0
    toy.assert_nothing_left()


def test_status_without_a_supervisor(tmp_path: Path, capsys: Captured) -> None:
    with create_run(tmp_path / "run", run_info(RuntimeConfig(), Path("/m"), 8000)) as alive:
        assert run(["status", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["ready"], report["state"], report["supervisor_pid"]) == (False, "unsupervised", None)
        assert [actor["state"] for actor in report["actors"]] == ["absent"] * len(ACTORS)
        assert report["endpoint"] == "http://127.0.0.1:8000"
        alive.destroy()


def test_status_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model = Path("/", *["a-long-name"] * 12, "the-model")
    with create_run(tmp_path / "run", run_info(RuntimeConfig(), model, 8000)) as alive:
        assert run(["status"]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert "http://127.0.0.1:8000/v1" in shown[0]
        assert shown[1].startswith("model: …") and shown[1].endswith("/a-long-name/the-model") and len(shown[1]) == 80
        assert shown[2].startswith("ACTOR")
        alive.destroy()


def test_logs(tmp_path: Path, capsys: Captured) -> None:
    directory = tmp_path / "state" / "mmrt" / "run"
    directory.mkdir(parents=True)
    (directory / "decode.log").write_text("2026-01-01T00:00:00.000000Z hello\n")
    (directory / "memory.log").write_text("2026-01-01T00:00:01.000000Z world\n")
    assert run(["logs"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["hello", "world"]
    assert run(["logs", "-f", "-n", "5", "memory"]) == 0
    assert capsys.readouterr().out.splitlines() == ["     memory | 2026-01-01T00:00:01.000000Z world"]
    assert run(["logs", "video"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"video has logged nothing in {directory}\n")


def test_status_is_quick_and_light() -> None:
    """No torch, numpy or asyncio for what people type all the time, and no typer, which loads pydantic."""
    program = (
        "import sys\nfrom mmrt.cli.main import run\nstatus = run(['status'])\n"
        "heavy = {'torch', 'numpy', 'asyncio', 'zmq', 'aiohttp', 'typer', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'{status} {heavy}')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=os.environ.copy())
    assert result.stderr.splitlines()[-1] == "1 set()"


class _Endpoint(http.server.BaseHTTPRequestHandler):
    """A server that answers what the test has put into it and remembers what it was asked."""

    frames: list[str] = []
    asked: list[dict[str, Any]] = []
    keys: list[str | None] = []

    def do_GET(self) -> None:
        self._answer(200, "application/json", json.dumps({"data": [{"id": "toy"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.keys.append(self.headers["Authorization"])
        if body["model"] != "toy":
            self._answer(404, "application/json", json.dumps({"error": {"message": f"no model {body['model']}"}}))
            return
        self._answer(200, "text/event-stream", "".join(f"data: {frame}\n\n" for frame in self.frames))

    def _answer(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    _Endpoint.asked.clear()
    _Endpoint.keys.clear()
    with http.server.HTTPServer(("127.0.0.1", 0), _Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def delta(text: str) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


@pytest.mark.parametrize("question", ["/etc/hosts: what is it?", "/quit", '"""Hi"""', "//x"])
def test_run_asks_a_question_as_it_is(endpoint: str, question: str, tmp_path: Path, capsys: Captured) -> None:
    _Endpoint.frames = [delta("A."), "[DONE]"]
    port = int(endpoint.rpartition(":")[2])
    with create_run(tmp_path / "run", run_info(RuntimeConfig(), DEFAULT_MODEL, port)) as alive:
        assert run(["run", str(DEFAULT_MODEL), question]) == 0
        alive.destroy()
    assert capsys.readouterr().out == "A.\n"
    assert [asked["messages"] for asked in _Endpoint.asked] == [[{"role": "user", "content": question}]]


def test_ask_streams_an_answer_about_files(endpoint: str, tmp_path: Path, capsys: Captured) -> None:
    _Endpoint.frames = [delta("A "), delta("cät"), json.dumps({"choices": []}), "[DONE]"]
    (tmp_path / "i.png").write_bytes(b"png")
    (tmp_path / "v.mp4").write_bytes(b"mp4")
    (tmp_path / "a.mp3").write_bytes(b"mp3")
    (tmp_path / "v.ts").write_bytes(b"mp4")
    files = ["--image", f"{tmp_path}/i.png", "--video", f"{tmp_path}/v.mp4", "--audio", f"{tmp_path}/a.mp3"]
    files += ["--video", f"{tmp_path}/v.ts"]
    options = ["--max-tokens", "7", "--temperature", "0", "--guidance-scale", "1.5", "--negative-prompt", "dog", "--system", "s"]
    assert run(["ask", "What?", "--url", f"{endpoint}/v1", "--api-key", "k", *files, *options]) == 0
    assert capsys.readouterr().out == "A cät\n"
    asked = _Endpoint.asked[0]
    assert _Endpoint.keys == ["Bearer k"]
    assert (asked["model"], asked["max_tokens"], asked["temperature"], asked["guidance_scale"]) == ("toy", 7, 0.0, 1.5)
    assert asked["negative_prompt"] == "dog" and asked["stream"] is True and "seed" not in asked
    assert asked["messages"][0] == {"role": "system", "content": "s"}
    image, video, other, audio, text = asked["messages"][1]["content"]
    assert image == {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}}
    assert video == {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,bXA0"}}
    assert other["video_url"]["url"] == "data:video/*;base64,bXA0", "to mimetypes .ts is a translation"
    assert audio == {"type": "input_audio", "input_audio": {"data": "bXAz", "format": "mp3"}}
    assert text == {"type": "text", "text": "What?"}


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([delta("A")], "error: the server closed the stream before the answer was complete"),
        ([delta("A"), json.dumps({"error": {"message": "decode died"}}), "[DONE]"], "error: decode died"),
    ],
)
def test_ask_never_takes_a_broken_stream_for_an_answer(endpoint: str, frames: list[str], message: str, capsys: Captured) -> None:
    _Endpoint.frames = frames
    status, error = refused(capsys, "ask", "x", "--url", endpoint)
    assert (status, error) == (1, f"{message}\n")


def test_ask_ends_the_line_of_an_answer_that_breaks_off_and_says_when_it_is_cut_off(endpoint: str, capsys: Captured) -> None:
    _Endpoint.frames = [delta("A")]
    assert run(["ask", "x", "--url", endpoint]) == 1
    assert capsys.readouterr().out == "A\n"
    _Endpoint.frames = [delta("A"), json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}), "[DONE]"]
    assert run(["ask", "x", "--url", endpoint]) == 0
    captured = capsys.readouterr()
    assert captured.out == "A\n" and captured.err.startswith("(cut off at the limit of its length")


def test_ask_takes_the_key_from_the_environment(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    _Endpoint.frames = [delta("A"), "[DONE]"]
    assert run(["ask", "x", "--url", endpoint]) == 0
    assert _Endpoint.keys == ["Bearer sk"]


def test_a_full_disk_is_one_line(endpoint: str) -> None:
    _Endpoint.frames = [delta("A"), "[DONE]"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "mmrt", "ask", "x", "--url", endpoint], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (ended.returncode, ended.stderr) == (1, "error: No space left on device\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_is_no_failure(unbuffered: str) -> None:
    """What is printed last goes out when the interpreter ends, or at once."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(
        [sys.executable, "-m", "mmrt", "config", "show"], stdout=write_end, stderr=subprocess.PIPE, text=True, env=environment
    )
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_ask_takes_a_question_from_what_is_no_utf8(endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    _Endpoint.frames = [delta("A"), "[DONE]"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"What\xff?"), "utf-8"))
    assert run(["ask", "-", "--url", endpoint]) == 0
    assert capsys.readouterr().out == "A\n" and _Endpoint.asked[0]["messages"][0]["content"] == "What\N{REPLACEMENT CHARACTER}?"


def test_ask_reads_a_pipe(endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def piped(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))

    _Endpoint.frames = [delta("A"), "[DONE]"]
    piped(b"Hello\n")
    assert run(["ask", "--url", endpoint]) == 0
    piped(b"png")
    assert run(["ask", "What?", "--image", "-", "--url", endpoint]) == 0
    text, (image, question) = (asked["messages"][0]["content"] for asked in _Endpoint.asked)
    assert (text, image["image_url"]["url"], question["text"]) == ("Hello\n", "data:image/*;base64,cG5n", "What?")
    for words, message in ((["ask"], "standard input holds no question"), (["ask", "x", "--video", "-"], "standard input is empty")):
        piped(b"")
        status, error = refused(capsys, *words, "--url", endpoint)
        assert status == 2 and message in error


def test_ask_in_a_terminal_does_not_wait_for_a_question(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    master, slave = os.openpty()
    with open(slave) as terminal, open(master, "rb"):
        monkeypatch.setattr("sys.stdin", terminal)
        status, error = refused(capsys, "ask")
    assert status == 2 and "QUESTION: it is missing: mmrt ask" in error


def test_ask_shows_the_servers_reason(endpoint: str, capsys: Captured) -> None:
    assert refused(capsys, "ask", "x", "--url", endpoint, "--model", "gpt") == (1, "error: 404: no model gpt\n")
