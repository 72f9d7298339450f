"""Mutated files and headers: a sentence of one line or a model that is read, whatever the bytes; never another error, a crash, or
memory beyond a bound. A few by day; 10,000 at night, with the hub's answers of ``tests/hub/test_refusals.py``."""

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from mmrt.models.checkpoint.gguf_files import read_gguf
from mmrt.models.checkpoint.safetensors_files import SafetensorsFiles
from mmrt.models.checkpoint.weights import check_weights, read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.gguf.directory import gguf_directory
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.tests.models.gguf_files import write_gguf, write_tower

MEMORY = 1 << 30  # beyond what the process has at the start
NUMBERS = (0, 1, 2, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
KINDS = ("header of GGUF", "model in GGUF", "tower in GGUF", "safetensors")


@contextmanager
def bounded_memory() -> Iterator[None]:
    """No address space beyond a bound: a larger allocation fails."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def mutated(data: bytes, header: int, random: Random) -> bytes:
    """``header``: the bytes that are changed, from the first on; most often near its ends, where fields and tensors are."""
    near = random.randrange(min(header, random.choice((1024, 4096))))
    at = random.choice((random.randrange(header), near, header - 1 - near))
    match random.randrange(6):
        case 0:
            changed = random.randbytes(random.randint(1, 8))
        case 1:
            changed = random.choice((*NUMBERS, len(data), random.randrange(len(data)))).to_bytes(8, "little")
        case 2:
            changed = (random.choice((*NUMBERS, random.randrange(20))) % (1 << 32)).to_bytes(4, "little")
        case 3:
            return data[: random.choice((at, random.randrange(len(data))))]
        case 4:  # something is missing, or there twice
            end = at + random.randint(1, 64)
            return data[:at] + random.choice((b"", data[at:end] * 2)) + data[end:]
        case _:
            other = random.randrange(header)
            changed = data[other : other + random.randint(1, 64)]
    return data[:at] + changed + data[at + len(changed) :]


class Original:
    """What is mutated: ``header`` bytes of ``data``, which lie in ``file``, and how they are read."""

    def __init__(self, file: Path, header: int, read: Callable[[], None]) -> None:
        self.file, self.header, self.read = file, header, read
        self.data = file.read_bytes()

    def try_one(self, random: Random) -> bool:
        """Whether it is refused."""
        self.file.write_bytes(mutated(self.data, self.header, random))
        try:
            self.read()
        except CheckpointError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000, str(error)
            return True
        return False


@pytest.fixture
def originals(tmp_path: Path) -> Callable[[str], Original]:
    def get(kind: str) -> Original:
        if kind == "safetensors":
            return of_safetensors(tmp_path)
        make_checkpoint("tiny", tmp_path / "checkpoint", "qwen3_vl")
        write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "Q8_0")
        tower = write_tower(tmp_path / "checkpoint", tmp_path / "tower.gguf")
        file = tower if "tower" in kind else tmp_path / "model.gguf"
        header = min(tensor.start for tensor in read_gguf(file).tensors.values())

        def whole() -> None:
            home = tmp_path / "home"
            try:
                directory = gguf_directory(tmp_path / "model.gguf", home, tower=tower)
                config = load_model_config(directory)
                if not check_weights(directory, config).problems:
                    read_weights(directory, config)
            finally:
                shutil.rmtree(home, ignore_errors=True)

        def header_alone() -> None:
            read_gguf(file)

        return Original(file, header, header_alone if "header" in kind else whole)

    return get


def of_safetensors(folder: Path) -> Original:
    make_checkpoint("tiny", folder / "checkpoint", "llama")
    file, config = folder / "checkpoint" / "model.safetensors", load_model_config(folder / "checkpoint")
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert json.loads(file.read_bytes()[8:header])

    def read() -> None:
        with SafetensorsFiles(file.parent):
            pass
        if not check_weights(file.parent, config).problems:
            read_weights(file.parent, config)

    return Original(file, header, read)


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files(originals: Callable[[str], Original], kind: str) -> None:
    check(originals(kind), 100 if "header" in kind else 12, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "count"), list(zip(KINDS, (3600, 600, 600, 2400), strict=True)))
def test_many_mutated_files(originals: Callable[[str], Original], kind: str, count: int) -> None:
    """With 3,000 answers of a hub more than 10,000."""
    check(originals(kind), count, seed=2)


def check(original: Original, count: int, seed: int) -> None:
    random = Random(seed)
    with bounded_memory():
        refused = sum(original.try_one(random) for _ in range(count))
    assert count // 10 < refused, "some are damaged"
