"""What a run is made of before its first actor, and how processes join it without a supervisor."""

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import mmrt
from mmrt.runtime.config.runtime_config import RuntimeConfig, convert_config, parse_config
from mmrt.runtime.environment import Environment
from mmrt.runtime.errors import ConfigError, RunError
from mmrt.runtime.process.run import RunInfo, create_run, free_port, join_run, model_path, read_run_info, run_info, running
from mmrt.runtime.process.server_key import read_key, store_key
from mmrt.runtime.supervisor.ask_key import server_key
from mmrt.shm.run_directory import RunDirectory


def with_port(port: int, host: str = "127.0.0.1") -> RuntimeConfig:
    return convert_config({"server": {"port": port, "host": host}})


def with_model(path: Path | str) -> RuntimeConfig:
    return convert_config({"model": {"path": str(path)}})


def test_port_zero_is_some_free_port_and_a_used_one_is_refused() -> None:
    port = free_port(with_port(0))
    assert 1024 <= port <= 65535
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(RunError, match=r"cannot serve on 127.0.0.1:\d+ .*Address already in use; another port: --port"):
            free_port(with_port(other.getsockname()[1]))
    with pytest.raises(RunError, match="cannot serve on no.such.host.invalid:0"):
        free_port(with_port(0, "no.such.host.invalid"))


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:8"), ("0.0.0.0", "http://127.0.0.1:8"), ("::", "http://[::1]:8")]
)
def test_the_endpoint_is_one_that_clients_can_reach(host: str, url: str) -> None:
    assert run_info(with_port(8, host), Path("/m"), 8).endpoint == url


def test_the_default_model_comes_with_the_package() -> None:
    found = model_path(RuntimeConfig())
    assert found.parents[1] == Path(mmrt.__file__).parent


def test_a_configured_model_must_be_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory: expected a Hugging Face checkpoint directory"):
        model_path(with_model("/no/such"))
    (tmp_path / "model-q4.gguf").touch()
    with pytest.raises(ConfigError, match="is a GGUF file, of which `mmrt up` and `mmrt units` make a checkpoint"):
        model_path(with_model(tmp_path / "model-q4.gguf"))
    with pytest.raises(ConfigError, match="has no config.json"):
        model_path(with_model(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_omni_thinker"}')
    assert model_path(with_model(tmp_path)) == tmp_path


@pytest.fixture
def run_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mmrt-join-") as root:
        yield Path(root) / "run"


@pytest.fixture
def environment(run_path: Path, tmp_path: Path) -> Environment:
    """As a systemd unit would set it: a run directory, a configuration, no lifeline."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    file = tmp_path / "c.toml"
    file.write_text(f'[model]\npath = "{tmp_path}/model"\n[server]\nport = 0\n')
    return Environment(run_dir=run_path, config_file=file)


def test_without_a_supervisor_memory_makes_the_run_and_the_others_wait(environment: Environment, tmp_path: Path) -> None:
    joined: list[RunDirectory] = []
    waiting = threading.Thread(target=lambda: joined.append(join_run("decode", environment)))
    waiting.start()
    run = join_run("memory", environment)
    waiting.join()
    assert joined[0].run_id == run.run_id
    info = read_run_info(joined[0])
    assert info == read_run_info(run) and info.model_path == str(tmp_path / "model")
    told = parse_config((tmp_path / "c.toml").read_text()).model
    assert msgspec.structs.replace(info.config.model, dtype=told.dtype) == told, "float32 where the processor has no bfloat16"
    assert info.config.server.port > 0, "the port that was picked, for every actor to read"
    again = join_run("memory", environment)
    assert again.run_id == run.run_id, "a memory that starts again joins the live run"
    assert [directory.leave() for directory in (again, joined[0], run)] == [False, False, True]
    assert not run.path.exists()


def test_memory_takes_the_checkpoint_that_units_name(environment: Environment, tmp_path: Path) -> None:
    """Of a configuration whose path is no directory: a GGUF file, or a name."""
    assert environment.config_file is not None
    environment.config_file.write_text('[model]\npath = "org/m:Q4_K_M"\n[server]\nport = 0\n')
    with pytest.raises(ConfigError, match="mmrt pull org/m"):
        join_run("memory", environment)
    named = msgspec.structs.replace(environment, checkpoint=tmp_path / "model", model_name="org/m:Q4_K_M")
    with join_run("memory", named) as run:
        info = read_run_info(run)
        assert (info.model_path, info.model_name) == (str(tmp_path / "model"), "org/m:Q4_K_M")
        assert run.leave()
    gone = msgspec.structs.replace(named, checkpoint=tmp_path / "gone")
    with pytest.raises(ConfigError, match="MMRT_CHECKPOINT = '.*/gone' has no config.json by now: `mmrt units` makes another"):
        join_run("memory", gone)


def test_joining_ends_with_a_reason(environment: Environment) -> None:
    with pytest.raises(RunError, match="no run in .* after 0 s: is the memory actor up"):
        join_run("decode", environment, timeout_s=0)
    supervised = msgspec.structs.replace(environment, lifeline_fd=3)
    with pytest.raises(RunError, match="the run in .* is gone"):
        join_run("memory", supervised)


def test_a_run_of_another_version_is_refused_by_name(run_path: Path) -> None:
    with create_run(run_path, RunInfo()) as run:
        assert read_run_info(run) == RunInfo(created_s=run.info["created_s"])
    with RunDirectory.create(run_path, {"version": "9.9", "config": {"model": {"planet": "Mars"}}}) as other:
        says = r"was started by another build of mmrt \(9\.9, this is .*\): Object contains unknown field `planet`"
        with pytest.raises(RunError, match=says):
            read_run_info(other)
        other.destroy()


def test_a_file_tells_that_there_is_a_key_and_not_which(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a supervisor the gateway and clients have it from the configuration, wherever they are called."""
    assert environment.config_file is not None
    monkeypatch.chdir(environment.config_file.parent)
    environment = msgspec.structs.replace(environment, config_file=Path(environment.config_file.name))
    assert environment.config_file is not None
    environment.config_file.write_text(environment.config_file.read_text() + 'api_key = "s3cret"\n')
    with join_run("memory", environment) as run:
        assert not [file for file in run.path.rglob("*") if file.is_file() and b"s3cret" in file.read_bytes()]
        info = running(run.path)
        assert (info.has_api_key, info.config.server.api_key) == (True, "")
        assert read_key(info, environment) == "s3cret"
        monkeypatch.chdir("/")
        assert server_key(run.path, info) == "s3cret"
        assert read_key(info, Environment(server_key="other")) == "other"
        with pytest.raises(ConfigError, match="memory has been given server.api_key, and the gateway not"):
            read_key(info, Environment())
        run.destroy()


def test_a_supervisor_gives_the_key_as_memory_that_nobody_can_change() -> None:
    fd = store_key("s3cret")
    again = os.dup(fd)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    assert read_key(RunInfo(has_api_key=True), Environment(key_fd=fd)) == "s3cret"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert read_key(RunInfo(), Environment(key_fd=again)) == "s3cret"
