"""``mmrt doctor``: the judgement of machines on which something is missing, and one look at this one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mmrt.cli import doctor_facts
from mmrt.cli.doctor_checks import Check, Facts, Need, describe_import_end, diagnose
from mmrt.cli.main import run
from mmrt.runtime.process.host_room import HostRoom
from mmrt.runtime.process.run import DEFAULT_MODEL
from mmrt.shm.run_directory import RunDirectory

GIB, MIB = 1 << 30, 1 << 20
GOOD = Facts(
    system="Linux",
    machine="x86_64",
    kernel="6.1.0",
    python="3.12.4",
    python_bounds=">=3.11,<3.14",
    requirements=[
        "torch==2.13.0",
        "tokenizers>=0.23.1,<0.24",
        'triton==3.7.1; extra == "cuda"',
        'cuda-bindings>=13,<14; extra == "cuda"',
        'pytest>=9,<10; extra == "test"',
    ],
    installed={"torch": "2.13.0+cpu", "tokenizers": "0.23.1"},
    import_problem="",
    config_problem="",
    need=Need(model="/m", tables_bytes=700 * MIB, weights_bytes=300 * MIB),
    device="cpu",
    room=HostRoom(8 * GIB, 4 * GIB),
    place="/dev/shm",
    place_problem="",
    is_tmpfs=True,
    run_endpoint="",
    address="127.0.0.1:8000",
    address_problem="",
    open_files=4096,
    processor="A Processor",
    num_cores=8,
    processor_flags=frozenset({"avx2", "avx512_bf16"}),
    has_bfloat16=True,
    choices={},
    gpus=[],
    gpu_driver="",
    sandbox_problem="",
    namespace_problem="",
    logs="/home/u/.local/state/mmrt/default",
    logs_problem="",
    dead_runs={},
)
GPU: dict[str, Any] = {"device": "cuda", "gpus": ["NVIDIA H100"], "gpu_driver": "580.1"}
CUDA = {"torch": "2.13.0", "tokenizers": "0.23.1", "triton": "3.7.1", "cuda-bindings": "13.1"}
NO_ROOM = "a run needs 1000 MiB (700 MiB of pools and tables, 300 MiB of weights)"


def found(**changes: Any) -> dict[str, Check]:
    return {check.name: check for check in diagnose(msgspec.structs.replace(GOOD, **changes))}


def test_a_good_machine() -> None:
    checks = diagnose(GOOD)
    assert {check.name: check.state for check in checks if check.state != "ok"} == {"gpu": "note"}
    assert len({check.name for check in checks}) == len(checks) and all("\n" not in check.text for check in checks)


def test_what_was_tried_of_kernels_is_said() -> None:
    assert found()["kernels"].text == "none was tried yet: the first run does it, once"
    tried = {"many-rows-int4": "integers (integers 1.00 ms, blocks 2.00 ms)", "torch": "alike"}
    assert found(choices=tried)["kernels"].text == "many-rows-int4: integers (integers 1.00 ms, blocks 2.00 ms); torch: alike"


@pytest.mark.parametrize(
    "changes, name, state, text",
    [
        ({"system": "Darwin"}, "system", "failed", "mmrt needs Linux"),
        ({"machine": "aarch64"}, "system", "warning", "tested on x86_64 only"),
        ({"python": "3.10.2"}, "python", "failed", "3.10.2, mmrt needs >=3.11,<3.14"),
        ({"installed": {"torch": "2.13.0"}}, "packages", "failed", "tokenizers is missing (<0.24,>=0.23.1)"),
        ({"installed": {"torch": "2.12.1", "tokenizers": "0.24"}}, "packages", "failed",
         "torch is 2.12.1, not ==2.13.0; tokenizers is 0.24, not <0.24,>=0.23.1"),
        ({"requirements": []}, "packages", "warning", "mmrt is not installed"),
        ({"import_problem": "av cannot be loaded: SIGILL"}, "imports", "failed", "av cannot be loaded: SIGILL"),
        ({"config_problem": "model.path = 'x' is not a directory", "need": None}, "configuration", "failed", "model.path = 'x'"),
        ({"room": HostRoom(8 * GIB, 64 * MIB)}, "shared memory", "failed", f"64 MiB free in /dev/shm, {NO_ROOM}: in Docker: --shm"),
        ({"room": HostRoom(999 * MIB, 4 * GIB)}, "memory", "failed", f"999 MiB available, {NO_ROOM}: close programs"),
        ({"room": HostRoom(1000 * MIB, 1000 * MIB)}, "memory", "ok", NO_ROOM),
        ({"is_tmpfs": False, "place": "/home/u"}, "shared memory", "warning", "in /home/u, which is no tmpfs"),
        ({"place_problem": "no directory /a to make /a/b in"}, "shared memory", "failed", "to make /a/b in (MMRT_RUN_DIR)"),
        ({"address_problem": "cannot serve on 127.0.0.1:8000: Address already in use"}, "port", "failed", "Address already in use"),
        ({"open_files": 127}, "open files", "failed", "a process may open 127, a run needs 128"),
        ({"open_files": 256}, "open files", "warning", "few clients"),
        ({"processor_flags": frozenset({"sse4_2"})}, "processor", "warning", "without AVX2"),
        ({"num_cores": 1}, "processor", "warning", "A Processor, 1 core:"),
        ({"has_bfloat16": False}, "processor", "note", "without bfloat16 units"),
        ({"gpus": ["NVIDIA L4"], "gpu_driver": "580.1"}, "gpu", "note", "NVIDIA L4 (driver 580.1) is not used"),
        ({"device": "cuda:1"}, "gpu", "failed", "none found, for model.device = cuda:1"),
        (GPU, "gpu", "failed", "torch 2.13.0+cpu is the build for CPUs"),
        (GPU, "packages", "failed", "triton is missing (==3.7.1); cuda-bindings is missing (<14,>=13)"),
        ({**GPU, "installed": CUDA}, "gpu", "ok", "NVIDIA H100 (driver 580.1)"),
        ({**GPU, "installed": CUDA}, "packages", "ok", "torch 2.13.0"),
        ({"namespace_problem": "Operation not permitted"}, "sandbox", "ok", "in no namespaces of its own: Operation not permitted"),
        ({"sandbox_problem": "this system does not restrict system calls"}, "sandbox", "warning", "does not restrict system calls"),
        ({"logs_problem": "/home/u: Read-only file system"}, "logs", "failed", "Read-only file system (XDG_STATE_HOME)"),
        ({"dead_runs": {"old": 3 * GIB}}, "leftovers", "warning", "the dead run old holds 3.0 GiB: mmrt down --run old"),
    ],
)  # fmt: skip
def test_what_is_missing(changes: dict[str, Any], name: str, state: str, text: str) -> None:
    check = found(**changes)[name]
    assert check.state == state and text in check.text, check


def test_beside_a_run_its_own_memory_and_port_are_no_problem() -> None:
    checks = found(
        run_endpoint="http://127.0.0.1:8000",
        room=HostRoom(MIB, MIB),
        address_problem="cannot serve on 127.0.0.1:8000: Address already in use",
    )
    assert [checks[name].state for name in ("run", "memory", "shared memory", "port")] == ["ok"] * 4
    assert "mmrt status" in checks["run"].text


@pytest.mark.parametrize(
    "status, line, text",
    [
        (-signal.SIGILL, "", "av cannot be loaded: SIGILL: the processor lacks its instructions"),
        (-signal.SIGSEGV, "", "av cannot be loaded: SIGSEGV"),
        (1, "ImportError: libz.so.1", "av cannot be loaded: ImportError: libz.so.1"),
        (3, "", "av cannot be loaded: exit status 3"),
    ],
)
def test_how_a_package_fails_to_load(status: int, line: str, text: str) -> None:
    assert describe_import_end("av", status, line) == text


def test_a_package_that_ends_its_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good.py").write_text("")
    (tmp_path / "deadly.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)")
    (tmp_path / "wrong.py").write_text("raise ImportError('no libx.so')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    problem = doctor_facts._import_problem
    assert problem(["good>=1"]) == ""
    assert problem(["good>=1", "deadly>=1"]) == "deadly cannot be loaded: SIGILL: the processor lacks its instructions"
    assert problem(["wrong>=1", 'missing>=1; extra == "x"']) == "wrong cannot be loaded: ImportError: no libx.so"


@pytest.mark.parametrize(
    "version",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version:  gcc version 12.2.0\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.129.03  Release Build  (dvs-builder@U22)\n",
    ],
)
def test_gpus_as_the_driver_tells_them(tmp_path: Path, version: str) -> None:
    assert (doctor_facts.gpu_names(tmp_path), doctor_facts.gpu_driver(tmp_path)) == ([], "")
    for number in (1, 2):
        folder = tmp_path / f"driver/nvidia/gpus/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA L{number}\nIRQ:   \t\t 17\n")
    (tmp_path / "driver/nvidia/version").write_text(version)
    assert (doctor_facts.gpu_names(tmp_path), doctor_facts.gpu_driver(tmp_path)) == (["NVIDIA L1", "NVIDIA L2"], "535.129.03")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run and its logs are this test's own."""
    monkeypatch.setenv("MMRT_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MMRT_CONFIG", raising=False)
    return tmp_path


def test_this_machine(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the real packages, model and sandbox; nothing is left behind."""
    status = run(["doctor", "--port", "0", "--json"])
    told = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in told["checks"]}
    assert told["can_run"] == (status == 0) == all(check["state"] != "failed" for check in told["checks"])
    for name in ("system", "python", "packages", "imports", "configuration", "port", "open files", "logs"):
        assert checks[name]["state"] == "ok", checks[name]
    assert str(DEFAULT_MODEL) in checks["configuration"]["text"] and "of pools and tables" in checks["memory"]["text"]
    assert list(here.iterdir()) == []


def test_lines_and_exit_status(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor_facts, "_import_problem", lambda requirements: "")
    file = here / "c.toml"
    for arguments, text in (
        (["--model", str(here)], "has no config.json"),
        (["--config", str(here / "no.toml")], "no.toml"),
        (["--device", "tpu"], "model.device"),
    ):
        assert run(["doctor", "--port", "0", *arguments]) == 1
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed   configuration")]
        assert text in line
    monkeypatch.setenv("MMRT_RUN_DIR", str(here / "no" / "run"))
    assert run(["doctor", "--port", "0"]) == 1
    assert f"failed   shared memory  no directory {here}/no to make {here}/no/run in" in capsys.readouterr().out
    monkeypatch.setenv("MMRT_RUN_DIR", f"/dev/shm/{'x' * 100}")
    assert run(["doctor", "--port", "0"]) == 1
    assert "bytes in its name; sockets allow" in capsys.readouterr().out
    monkeypatch.setenv("MMRT_RUN_DIR", str(here / "run"))
    file.write_text("[memory]\nkv_tokens = 100000000")
    assert run(["doctor", "--port", "0", "--config", str(file)]) == 1
    assert "failed   memory" in capsys.readouterr().out


def test_dead_runs_are_found(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = here / "runs"
    monkeypatch.setattr(RunDirectory, "default_path", staticmethod(lambda name=None: runs / (name or "default")))
    runs.mkdir()
    RunDirectory.create(runs / "dead", {}).close()
    (runs / "dead" / "pool").write_bytes(os.urandom(1 << 20))
    (runs / "other").mkdir()
    with RunDirectory.create(runs / "alive", {}) as alive:
        assert list(doctor_facts._dead_runs(runs / "alive")) == ["dead"]
        assert doctor_facts._dead_runs(runs / "alive")["dead"] >= 1 << 20
        alive.destroy()


def test_a_machine_where_torch_cannot_be_loaded_is_judged(here: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('no such library')")
    command = [sys.executable, "-m", "mmrt.cli.main", "doctor", "--port", "0"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path / "broken")}, capture_output=True, text=True)
    assert done.returncode == 1 and "torch cannot be loaded" in done.stdout and "memory" in done.stdout
    assert "Traceback" not in done.stderr
