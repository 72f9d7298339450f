"""The systemd units: what they say, and that systemd accepts them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from mmrt.runtime.config.runtime_config import RuntimeConfig, parse_config
from mmrt.runtime.stage_table import ACTORS
from mmrt.runtime.supervisor.systemd import SOCKET, TARGET, service_name, unit_files

ENVIRONMENT = {"MMRT_RUN_DIR": '/dev/shm/a "b" %c $d'}


def test_a_service_for_each_actor_and_a_target_over_them() -> None:
    files = unit_files(RuntimeConfig(), "/usr/bin/mmrt", ENVIRONMENT, Path("/srv/a b"))
    assert set(files) == {TARGET, SOCKET, *map(service_name, ACTORS)}
    assert SOCKET in files[TARGET]
    assert "\nListenStream=127.0.0.1:8000\n" in files[SOCKET]
    for actor in ACTORS:
        text = files[service_name(actor)]
        assert f'ExecStart="/usr/bin/mmrt" actor {actor}\n' in text
        for line in ("Type=notify", "NotifyAccess=main", "Restart=on-failure", f"PartOf={TARGET}"):
            assert f"\n{line}\n" in text
        assert service_name(actor) in files[TARGET]
    assert "\nWatchdogSec=30\n" in files["mmrt-gateway.service"]
    assert "\nWatchdogSec=330\n" in files["mmrt-prefill.service"], "a step may take its time"
    assert "\nFileDescriptorStoreMax=16418\nEnvironment=FDSTORE=16418\n" in files["mmrt-gateway.service"]
    assert "FDSTORE" not in files["mmrt-decode.service"]


def test_actors_that_share_a_process_are_one_service() -> None:
    config = parse_config('[actors]\nlayout = "EP+D"\n[actors.encoder]\nnice = 3\n')
    files = unit_files(config, "/usr/bin/mmrt", ENVIRONMENT, Path("/srv/a b"))
    assert service_name("encoder") not in files and service_name("encoder") not in files[TARGET]
    for line in ("Description=mmrt encoder, prefill", 'ExecStart="/usr/bin/mmrt" actor prefill', "Nice=0", "WatchdogSec=330"):
        assert f"\n{line}\n" in files[service_name("prefill")]


def test_settings_come_from_the_configuration() -> None:
    config = parse_config("[actors.decode]\nthreads = 2\nnice = 1\n[supervisor]\nwatchdog_s = 7.5\nrestart_limit = 9\ndrain_s = 60\n")
    files = unit_files(config, "/usr/bin/mmrt", ENVIRONMENT, Path("/srv/a b"))
    decode = files["mmrt-decode.service"]
    for line in ('Environment="OMP_NUM_THREADS=2"', "Nice=1", "WatchdogSec=127.5", "StartLimitBurst=9"):
        assert f"\n{line}\n" in decode
    assert "\nTimeoutStopSec=70\n" in files["mmrt-gateway.service"]


@pytest.mark.parametrize(
    ("server", "listens"),
    [
        ('host = "::1"', "ListenStream=[::1]:8000"),
        ("port = 9000", "ListenStream=127.0.0.1:9000"),
        ("port = 0", ""),
        ('host = "localhost"', ""),
    ],
)
def test_systemd_listens_where_it_can(server: str, listens: str) -> None:
    text = unit_files(parse_config(f"[server]\n{server}\n"), "/usr/bin/mmrt", ENVIRONMENT, Path("/srv/a b")).get(SOCKET, "")
    assert listens in text and bool(listens) == bool(text)


def test_decode_gets_most_of_the_processor() -> None:
    config = parse_config('[actors]\nlayout = "EP+D"\n[actors.prefill]\nnice = 19\n')
    files = unit_files(config, "/usr/bin/mmrt", ENVIRONMENT, Path("/srv/a b"))
    weights = {name: int(text.partition("CPUWeight=")[2].split()[0]) for name, text in files.items() if "CPUWeight=" in text}
    of_nice = {nice: round(100 * weight / 1024) for nice, weight in ((0, 1024), (2, 655), (4, 423))}  # Linux, sched_prio_to_weight
    assert weights.pop(service_name("video")) == of_nice[4]
    assert weights.pop(service_name("prefill")) == of_nice[2], "that of the encoder, which shares the process"
    assert set(weights.values()) == {of_nice[0]} and service_name("decode") in weights
    least = unit_files(parse_config("[actors.encoder]\nnice = 19\n"), "/usr/bin/mmrt", ENVIRONMENT, Path("/srv/a b"))
    assert "\nCPUWeight=1\n" in least[service_name("encoder")]


def test_services_stop_in_the_order_of_a_run() -> None:
    files = unit_files(RuntimeConfig(), "/usr/bin/mmrt", ENVIRONMENT, Path("/srv/a b"))
    after = {
        actor: set(line.removeprefix("After=").split())
        for actor in ACTORS
        for line in files[service_name(actor)].splitlines()
        if line.startswith("After=")
    }
    memory, controller = service_name("memory"), service_name("controller")
    assert after.pop("gateway") == {memory, controller, service_name("decode"), service_name("detokenizer")}
    assert after.pop("controller") == {memory}
    assert after == dict.fromkeys(("video", "encoder", "prefill", "decode", "detokenizer"), {memory, controller})


def test_special_characters_are_escaped() -> None:
    text = unit_files(RuntimeConfig(), "/opt/a b/mmrt", ENVIRONMENT, Path("/srv/a b"))["mmrt-video.service"]
    assert 'ExecStart="/opt/a b/mmrt" actor video' in text
    assert r'Environment="MMRT_RUN_DIR=/dev/shm/a \"b\" %%c $d"' in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_accepts_them(tmp_path: Path) -> None:
    program = tmp_path / "mmrt program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for name, text in unit_files(RuntimeConfig(), str(program), ENVIRONMENT, tmp_path).items():
        (tmp_path / name).write_text(text)
    command = ["systemd-analyze", "verify", "--recursive-errors=no", "--man=no", *map(str, sorted(tmp_path.glob("mmrt*.*")))]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin", "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    )
    assert (result.returncode, result.stderr) == (0, "")
