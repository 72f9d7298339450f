"""Device memory on a real device: what one process writes another reads, and it outlives who allocated it."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mmrt.actors.base import GRACE_S
from mmrt.runtime.fate import outlive
from mmrt.shm.descriptors import DescriptorServer, fetch_descriptors
from mmrt.shm.errors import DeviceError

pytestmark = pytest.mark.gpu
NUM_BYTES = 5_000_003
OWNER = """
import select, sys, torch
from pathlib import Path
from mmrt.shm.descriptors import DescriptorServer
from mmrt.shm.device_memory import DeviceMemory

torch.cuda.init()
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

    torch.cuda.init()
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

    torch.cuda.init()
    memory = DeviceMemory.allocate(0, 100)
    torch.as_tensor(memory, device="cuda:0").fill_(5)
    torch.cuda.synchronize()
    passed = os.dup(memory.descriptor.fd)
    with DescriptorServer(tmp_path / "device", {"kv": memory.descriptor._replace(fd=passed)}) as server:
        script = (
            "import sys, torch; from pathlib import Path; from mmrt.shm.descriptors import fetch_descriptors;"
            "from mmrt.shm.device_memory import DeviceMemory; torch.cuda.init();"
            "found = fetch_descriptors(Path(sys.argv[1]), 60);"
            "print(torch.as_tensor(DeviceMemory.attach(0, found['kv']), device='cuda:0').tolist() == [5] * 100)"
        )
        reader = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "device")], stdout=subprocess.PIPE, text=True)
        assert select.select([server.fd], [], [], 60)[0] and server.serve() == 1
        assert reader.communicate(timeout=60)[0] == "True\n"
    os.close(passed)


def test_too_much_is_refused() -> None:
    from mmrt.shm.device_memory import DeviceMemory

    torch.cuda.init()
    with pytest.raises(DeviceError, match=r"1125899906842624 bytes on device 0: cuMemCreate says CUDA_ERROR_OUT_OF_MEMORY"):
        DeviceMemory.allocate(0, 1 << 50)


TRESPASSER = """
import sys, torch
from pathlib import Path
from mmrt.shm.descriptors import fetch_descriptors
from mmrt.shm.device_memory import DeviceMemory

torch.cuda.init()
weights = torch.as_tensor(DeviceMemory.attach(0, fetch_descriptors(Path(sys.argv[1]), 60)["weights"], writable=False), device="cuda:0")
print(int(weights.sum()), flush=True)
weights.fill_(1)
torch.cuda.synchronize()
"""


def test_who_may_only_read_cannot_write(tmp_path: Path) -> None:
    from mmrt.shm.device_memory import DeviceMemory

    torch.cuda.init()
    memory = DeviceMemory.allocate(0, 100)
    whole = torch.as_tensor(memory, device="cuda:0")
    whole.fill_(5)
    torch.cuda.synchronize()
    with DescriptorServer(tmp_path / "device", {"weights": memory.descriptor}) as server:
        command = [sys.executable, "-c", TRESPASSER, str(tmp_path / "device")]
        trespasser = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert select.select([server.fd], [], [], 60)[0] and server.serve() == 1
        out, errors = trespasser.communicate(timeout=60)
    assert out == "500\n" and trespasser.returncode == 1 and "CUDA error" in errors
    assert whole.tolist() == [5] * 100


WRITER = """
import sys, torch
from pathlib import Path
from mmrt.shm.descriptors import fetch_descriptors
from mmrt.shm.device_memory import DeviceMemory

torch.cuda.init()
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

    torch.cuda.init()
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
