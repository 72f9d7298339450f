"""Device memory on a real device: what one process writes another reads, and it outlives who allocated it."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmrt.actors.host.actor import GRACE_S
from mmrt.runtime.process.crash_cause import outlive
from mmrt.shm.descriptors import DescriptorServer, fetch_descriptors
from mmrt.shm.errors import DeviceError

pytestmark = pytest.mark.gpu
NUM_BYTES = 5_000_003
OWNER = """
import select, sys, torch
from pathlib import Path
from mmrt.shm.descriptors import DescriptorServer
from mmrt.shm.device_memory import DeviceMemory

torch.cuda.current_stream().synchronize()
memory = DeviceMemory.allocate(0, int(sys.argv[2]))
whole = torch.as_tensor(memory, device="cuda:0")
assert whole.shape == (int(sys.argv[2]),) and whole.dtype == torch.uint8
whole.fill_(7)
torch.cuda.synchronize()
with DescriptorServer(Path(sys.argv[1]), {"kv": memory.descriptor}) as server:
    print("ready", flush=True)
    while True:
        select.select([server.fd], [], [])
        server.serve()
"""


def test_memory_outlives_who_allocated_it(tmp_path: Path) -> None:
    from mmrt.shm.device_memory import DeviceMemory

    torch.cuda.current_stream().synchronize()
    path = tmp_path / "device"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(path), str(NUM_BYTES)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
        (descriptor,) = fetch_descriptors(path, 20).values()
        memory = DeviceMemory.attach(0, descriptor)
        here = torch.as_tensor(memory, device="cuda:0")
        assert here.numel() == NUM_BYTES and bool((here == 7).all())
        here[3] = 9
        torch.cuda.synchronize()
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    again = torch.as_tensor(DeviceMemory.attach(0, descriptor), device="cuda:0")
    os.close(descriptor.fd)
    assert again.data_ptr() != here.data_ptr()
    assert int(again[3]) == 9 and int(again.sum()) == 7 * NUM_BYTES + 2


def test_a_standby_hands_on_what_it_was_given(tmp_path: Path) -> None:
    from mmrt.shm.device_memory import DeviceMemory

    torch.cuda.current_stream().synchronize()
    memory = DeviceMemory.allocate(0, 100)
    torch.as_tensor(memory, device="cuda:0").fill_(5)
    torch.cuda.synchronize()
    passed = os.dup(memory.descriptor.fd)
    with DescriptorServer(tmp_path / "device", {"kv": memory.descriptor._replace(fd=passed)}) as server:
        script = (
            "import sys, torch; from pathlib import Path; from mmrt.shm.descriptors import fetch_descriptors;"
            "from mmrt.shm.device_memory import DeviceMemory; torch.cuda.current_stream().synchronize();"
            "found = fetch_descriptors(Path(sys.argv[1]), 60);"
            "print(torch.as_tensor(DeviceMemory.attach(0, found['kv']), device='cuda:0').tolist() == [5] * 100)"
        )
        reader = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "device")], stdout=subprocess.PIPE, text=True)
        assert select.select([server.fd], [], [], 60)[0] and server.serve() == 1
        assert reader.communicate(timeout=60)[0] == "True\n"
    os.close(passed)


KEEPER = """
import select, sys
from pathlib import Path
from mmrt.shm.descriptors import DescriptorServer, fetch_descriptors

with DescriptorServer(Path(sys.argv[2]), fetch_descriptors(Path(sys.argv[1]), 60)) as server:
    assert "torch" not in sys.modules and "libcuda" not in Path("/proc/self/maps").read_text()
    print("holding", flush=True)
    while True:
        select.select([server.fd], [], [])
        server.serve()
"""

READER = """
import sys, torch
from pathlib import Path
from mmrt.shm.descriptors import fetch_descriptors
from mmrt.shm.device_memory import DeviceMemory

torch.cuda.current_stream().synchronize()
whole = torch.as_tensor(DeviceMemory.attach(0, fetch_descriptors(Path(sys.argv[1]), 60)["kv"]), device="cuda:0")
print(whole.numel(), int(whole.min()), int(whole.max()))
whole.add_(1)
torch.cuda.synchronize()
"""


def test_a_descriptor_in_a_process_without_cuda_keeps_memory(tmp_path: Path) -> None:
    """Nobody else has it, nor has it mapped: twice a new process imports it, and finds what the last one wrote."""
    owned, kept = tmp_path / "owned", tmp_path / "kept"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(owned), str(NUM_BYTES)], stdout=subprocess.PIPE, text=True)
    keeper = None
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
        keeper = subprocess.Popen([sys.executable, "-c", KEEPER, str(owned), str(kept)], stdout=subprocess.PIPE, text=True)
        assert keeper.stdout is not None and keeper.stdout.readline() == "holding\n"
        owner.kill()
        owner.wait()
        for value in (7, 8):
            reader = subprocess.run([sys.executable, "-c", READER, str(kept)], capture_output=True, text=True, timeout=120, check=False)
            assert (reader.stdout, reader.returncode) == (f"{NUM_BYTES} {value} {value}\n", 0), reader.stderr
    finally:
        for process in (owner, keeper):
            if process is not None:
                process.kill()
                process.communicate()


def test_cleared_memory_is_zeros() -> None:
    from mmrt.shm.device_memory import DeviceMemory

    torch.cuda.current_stream().synchronize()
    memory = DeviceMemory.allocate(0, NUM_BYTES)
    whole = torch.as_tensor(memory, device="cuda:0")
    whole.fill_(5)
    memory.clear()
    assert not bool(whole.any())


def test_too_much_is_refused() -> None:
    from mmrt.shm.device_memory import DeviceMemory

    torch.cuda.current_stream().synchronize()
    with pytest.raises(DeviceError, match=r"1125899906842624 bytes on device 0: cuMemCreate says CUDA_ERROR_OUT_OF_MEMORY"):
        DeviceMemory.allocate(0, 1 << 50)


TRESPASSER = """
import sys, torch
from pathlib import Path
from mmrt.shm.descriptors import fetch_descriptors
from mmrt.shm.device_memory import DeviceMemory

torch.cuda.current_stream().synchronize()
weights = torch.as_tensor(DeviceMemory.attach(0, fetch_descriptors(Path(sys.argv[1]), 60)["weights"], writable=False), device="cuda:0")
print(int(weights.sum()), flush=True)
weights.fill_(1)
torch.cuda.synchronize()
"""


def test_who_may_only_read_cannot_write(tmp_path: Path) -> None:
    from mmrt.shm.device_memory import DeviceMemory

    torch.cuda.current_stream().synchronize()
    memory = DeviceMemory.allocate(0, 100)
    whole = torch.as_tensor(memory, device="cuda:0")
    whole.fill_(5)
    torch.cuda.synchronize()
    with DescriptorServer(tmp_path / "device", {"weights": memory.descriptor}) as server:
        command = [sys.executable, "-c", TRESPASSER, str(tmp_path / "device")]
        trespasser = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert select.select([server.fd], [], [], 60)[0] and server.serve() == 1
        out, errors = trespasser.communicate(timeout=60)
    assert out == "500\n" and trespasser.returncode != 0 and "CUDA error" in errors
    assert whole.tolist() == [5] * 100


WRITER = """
import sys, torch
from pathlib import Path
from mmrt.shm.descriptors import fetch_descriptors
from mmrt.shm.device_memory import DeviceMemory

torch.cuda.current_stream().synchronize()
whole = torch.as_tensor(DeviceMemory.attach(0, fetch_descriptors(Path(sys.argv[1]), 60)["kv"]), device="cuda:0").view(torch.int64)
whole.add_(1)
torch.cuda.synchronize()
print("writing", flush=True)
while True:
    whole.add_(1)
"""


def test_nothing_writes_once_a_killed_process_is_outlived(tmp_path: Path) -> None:
    """It dies with launches in its queue; what a successor may give away is its own from then on."""
    from mmrt.shm.device_memory import DeviceMemory

    torch.cuda.current_stream().synchronize()
    memory = DeviceMemory.allocate(0, 1 << 30)
    whole = torch.as_tensor(memory, device="cuda:0").view(torch.int64)
    whole.zero_()
    torch.cuda.synchronize()
    with DescriptorServer(tmp_path / "device", {"kv": memory.descriptor}) as server:
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "device")], stdout=subprocess.PIPE, text=True)
        try:
            assert select.select([server.fd], [], [], 60)[0] and server.serve() == 1
            assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
        finally:
            writer.kill()
        outlive(writer.pid, Path(f"/proc/{writer.pid}/comm").read_text().rstrip("\n"), time.sleep)
        time.sleep(GRACE_S)
        then = whole.clone()
        torch.cuda.synchronize()
        assert int(then[0]) > 0
        time.sleep(0.5)
        assert torch.equal(whole, then)
        writer.wait()


WATCHED_S = 1.0


def test_how_long_a_killed_process_writes_on(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """From the moment at which its pidfd says that it is gone. Who takes its place waits for GRACE_S."""
    from mmrt.shm.device_memory import DeviceMemory

    torch.cuda.current_stream().synchronize()
    memory = DeviceMemory.allocate(0, 1 << 30)
    whole = torch.as_tensor(memory, device="cuda:0").view(torch.int64)
    whole.zero_()
    torch.cuda.synchronize()
    ends = whole[:: whole.numel() - 1]
    with DescriptorServer(tmp_path / "device", {"kv": memory.descriptor}) as server:
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "device")], stdout=subprocess.PIPE, text=True)
        pidfd = os.pidfd_open(writer.pid)
        try:
            assert select.select([server.fd], [], [], 60)[0] and server.serve() == 1
            assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
            ends.tolist()  # what compiles or loads is behind us
        finally:
            writer.kill()
        assert select.select([pidfd], [], [], 60)[0]
        gone_s = time.monotonic()
        found, last_s, num_looks = ends.tolist(), 0.0, 0
        while (now_s := time.monotonic() - gone_s) < WATCHED_S:
            if (seen := ends.tolist()) != found:
                found, last_s = seen, now_s
            num_looks += 1
        os.close(pidfd)
        writer.communicate()
    record_property("last_write_after_pidfd_s", last_s)
    record_property("looks", num_looks)
    print(f"last write seen {last_s * 1e3:.2f} ms after the pidfd, {num_looks} looks in {WATCHED_S:g} s")
    assert found[0] > 0 and num_looks > 100
    assert last_s < GRACE_S
