"""Cached pages that outlive a run, without the run: real pools, real files."""

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import pytest

from mmrt.actors import page_store
from mmrt.actors.page_store import PageStore
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import CacheSection, MediaSection, MemorySection
from mmrt.runtime.process.memory_layout import MemoryLayout, PoolLayout
from mmrt.runtime.process.saved_pages import keep_era, read_era, read_saved_pages
from mmrt.shm.page_file import PageFile, PageFileReader, bytes_of_slots
from mmrt.shm.pool import PagePool
from mmrt.shm.run_directory import RunDirectory

SIZES = {"embedding": PoolLayout(12, 64), "kv": PoolLayout(5, 32)}
LAYOUT = MemoryLayout(
    num_rows=2, max_context=64, max_pages=4, kv_page_tokens=16, pools=SIZES, dtype="float32", kv_dtype="float32", device="cpu"
)


class Run:
    """The pools of a run, which a "controller" fills and names."""

    def __init__(self, path: Path, config: RuntimeConfig, model: Path, layout: MemoryLayout = LAYOUT) -> None:
        self.directory = RunDirectory.create(path, {})
        self.cache = Path(config.cache.dir)
        self.pools = {n: PagePool.create(self.directory, n, p.num_pages, p.page_bytes) for n, p in layout.pools.items()}
        self.reopen = partial(PageStore.open, self.directory, config, layout, model)
        self.store = self.reopen()

    def name(self, pool: str, page: int, text: str, depth: int = 0) -> None:
        """A page is written and named, as a prefill plan and the controller do it."""
        found = self.pools[pool]
        found.generations[page] += 1
        found.write_bytes([page], text.encode().ljust(found.page_bytes, b"."))
        found.write_keys([page], [int(found.generations[page])], [text.encode().ljust(16, b"-")], [depth])

    def saved(self, pool: str) -> dict[str, str]:
        """Key -> contents of the pages that the run could load."""
        file = read_saved_pages(self.directory.path, self.cache)[pool]
        reader = PageFileReader.open(Path(file.path), file.secret, file.page_bytes)
        found = {key: reader.read(key, slot) for key, slot in reader.slots().items()}
        reader.close()
        return {key.rstrip(b"-").decode(): contents.rstrip(b".").decode() for key, contents in found.items() if contents is not None}

    def end(self) -> None:
        if self.store is not None:
            self.store.close()
        for pool in self.pools.values():
            pool.close()
        self.directory.destroy()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    monkeypatch.setattr(page_store, "SAVE_S", 0.01)
    make_checkpoint("tiny", tmp_path / "model")
    numbers = count()

    def one(layout: MemoryLayout = LAYOUT, **changes: object) -> Run:
        config = msgspec.structs.replace(RuntimeConfig(cache=CacheSection(dir=str(tmp_path / "cache"), max_mib=1)), **changes)
        run = Run(tmp_path / f"run{next(numbers)}", config, tmp_path / "model", layout)
        if run.store is not None:
            run.store.start()
        return run

    return one


def test_the_next_run_has_the_pages_of_this_one(start: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    run = start()
    for page, text in enumerate(("a", "b", "c")):
        run.name("embedding", page, text)
    run.name("kv", 3, "picture")
    run.end()
    with caplog.at_level(logging.INFO):
        run = start()
    assert "there are 1 kv pages and 3 embedding pages" in caplog.text
    assert run.saved("embedding") == {"a": "a", "b": "b", "c": "c"} and run.saved("kv") == {"picture": "picture"}
    assert all(pool.read_keys() == {} for pool in run.pools.values()), "pages wait until they are asked for"
    run.name("embedding", 0, "d")
    run.end()
    run = start()
    assert set(run.saved("embedding")) == {"a", "b", "c", "d"}
    run.end()


def test_one_file_has_the_pages_of_all_devices(start: Callable[..., Run]) -> None:
    two = msgspec.structs.replace(LAYOUT, pools={**SIZES, "kv.1": PoolLayout(5, 32)})
    run = start(two)
    for pool, page, text in (("kv", 1, "left"), ("kv.1", 1, "right"), ("kv", 2, "both"), ("kv.1", 0, "both")):
        run.name(pool, page, text)
    run.end()
    run = start()
    assert run.saved("kv") == {name: name for name in ("left", "right", "both")}
    run.end()


def test_a_full_file_keeps_the_pages_that_the_pool_still_has(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_store, "KEEP_S", 0.0)
    monkeypatch.setattr(page_store, "SHARES", {"embedding": (2 * 4096 + 14 * 64) / (1 << 20), "kv": 0.5})
    run = start()
    assert run.store is not None
    run.name("embedding", 0, "begins")
    for number in range(40):
        run.name("embedding", 1 + number % 11, f"page {number}")
        while f"page {number}".encode().ljust(16, b"-") not in run.store._files["embedding"]:
            os.sched_yield()
    run.end()
    run = start()
    assert "begins" in run.saved("embedding") and run.store is not None and run.store._files["embedding"].num_slots == 14
    run.end()


LONG = msgspec.structs.replace(LAYOUT, pools={"embedding": PoolLayout(200, 64), "kv": PoolLayout(5, 32)})


def test_the_end_does_not_wait_for_all_that_is_left(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_store, "LAST_SAVE_S", 0.2)
    write = PageFile.write
    monkeypatch.setattr(PageFile, "write", lambda *arguments: time.sleep(0.05) or write(*arguments))
    run = start(LONG)
    for depth in range(180):
        run.name("embedding", depth, f"page {depth}", depth)
    time.sleep(0.1)
    began_s = time.monotonic()
    run.end()
    assert run.store is not None and not run.store._thread.is_alive() and time.monotonic() - began_s < 5


def test_files_of_others_in_the_directory_stay(start: Callable[..., Run], tmp_path: Path) -> None:
    start().end()
    names = [f"letter{number}-final.pages" for number in range(6)]
    for name in names:
        (tmp_path / "cache" / name).touch()
    (tmp_path / "cache" / f"{'0' * 16}-embedding.pages").symlink_to("nowhere")
    (tmp_path / "cache" / f"{'1' * 16}-embedding.pages").mkdir()
    for number in range(6):
        run = start(media=MediaSection(fps=1.0 + number))
        assert run.store is not None
        run.end()
    assert all((tmp_path / "cache" / name).exists() for name in names)


def test_files_of_models_served_longest_ago_go(start: Callable[..., Run], tmp_path: Path) -> None:
    for number in range(7):
        run = start(media=MediaSection(fps=1.0 + number))
        keep_era(run.directory.path, run.cache, bytes([number] * 16))
        run.end()
        for path in (tmp_path / "cache").glob("*-*"):
            os.utime(path, (path.stat().st_atime - 10, path.stat().st_mtime - 10))
    kinds = {path.name.partition("-")[0] for path in (tmp_path / "cache").glob("*.pages")}
    assert len(kinds) == page_store.NUM_KINDS
    assert {path.name.partition("-")[0] for path in (tmp_path / "cache").glob("*.era")} == kinds
    start(media=MediaSection(fps=7.0)).end()
    assert {path.name.partition("-")[0] for path in (tmp_path / "cache").glob("*.pages")} == kinds, "the last ones are there"


def test_an_era_goes_after_all_files_of_its_pages(tmp_path: Path) -> None:
    """A run that has one of them open keeps it."""
    names = [f"{kind}.pages" for kind in page_store.KINDS] + ["pages.era"]
    for number in range(page_store.NUM_KINDS + 1):
        for name in names:
            path = tmp_path / f"{number:016x}-{name}"
            path.touch(0o600)
            os.utime(path, (number, number))
    used = PageFile.open(tmp_path / f"{1:016x}-window.pages", b"s" * 32, 64, 1 << 16)
    os.utime(tmp_path / f"{1:016x}-window.pages", (1, 1))
    page_store._remove_old(tmp_path, "of this run")
    left = sorted(path.name.partition("-") for path in tmp_path.iterdir())
    used.close()
    assert [(int(kind, 16), name) for kind, _, name in left if int(kind, 16) < 2] == [(1, "pages.era"), (1, "window.pages")]


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": msgspec.structs.replace(LAYOUT, kv_dtype="int8")},
        {"layout": msgspec.structs.replace(LAYOUT, weights="int8")},
        {"memory": MemorySection(kv_transfer_dtype="int8")},
        {"layout": msgspec.structs.replace(LAYOUT, kv_page_tokens=8)},
        {"media": MediaSection(fps=3.0)},
    ],
    ids=["dtype", "weights", "transfer", "page", "media"],
)
def test_other_settings_see_other_pages(start: Callable[..., Run], changes: dict[str, object]) -> None:
    run = start()
    secret = run.store and run.store.secret
    run.name("embedding", 0, "a")
    run.end()
    other = start(**changes)
    assert other.saved("embedding") == {} and other.store is not None and other.store.secret != secret
    other.end()
    again = start()
    assert again.saved("embedding") == {"a": "a"}
    again.end()


def test_another_model_of_equal_names_sizes_and_times_sees_other_pages(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start()
    run.name("embedding", 0, "a")
    run.end()
    weights = next((tmp_path / "model").glob("*.safetensors"))
    found, data = weights.stat(), weights.read_bytes()
    pages: dict[str, str]
    for last, pages in ((data[-1] ^ 1, {}), (data[-1], {"a": "a"})):
        weights.write_bytes(data[:-1] + bytes([last]))
        os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
        run = start()
        assert run.saved("embedding") == pages
        run.end()


def test_another_gguf_file_of_an_equal_name_sees_other_pages(start: Callable[..., Run], tmp_path: Path) -> None:
    """A directory that was made of a file has a link to it."""
    model = tmp_path / "model"
    next(model.glob("*.safetensors")).unlink()
    (tmp_path / "elsewhere.gguf").write_bytes(b"GGUF, once")
    (model / "model.gguf").symlink_to(tmp_path / "elsewhere.gguf")
    run = start()
    run.name("embedding", 0, "a")
    run.end()
    (tmp_path / "elsewhere.gguf").write_bytes(b"GGUF again")
    run = start()
    assert run.saved("embedding") == {}
    run.end()


def test_an_equal_model_elsewhere_sees_the_same_pages(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start()
    run.name("embedding", 0, "a")
    run.end()
    weights = next((tmp_path / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes())
    os.utime(weights, (1, 1))
    run = start()
    assert run.saved("embedding") == {"a": "a"}
    run.end()


def test_edited_code_sees_other_pages(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    run.name("embedding", 0, "a")
    run.end()
    monkeypatch.setattr(page_store, "loaded_code", lambda: 7)
    other = start()
    assert other.saved("embedding") == {}
    other.end()


def test_a_process_with_edited_code_leaves_the_run_its_file(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """memory is killed and comes back: the pages of the run, and the file that prefill reads, are of the older code."""
    run = start()
    saved = read_saved_pages(run.directory.path, run.cache)
    assert run.store is not None and saved.keys() == {"kv", "embedding"}
    run.store.close()
    with monkeypatch.context() as edited:
        edited.setattr(page_store, "loaded_code", lambda: 7)
        assert run.reopen() is None and "changed since the run began" in caplog.text
    assert read_saved_pages(run.directory.path, run.cache) == saved
    run.store = run.reopen()
    assert run.store is not None, "the edit was taken back"
    run.end()


def test_a_damaged_page_is_saved_again_once_it_was_made_anew(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start()
    for page, text in enumerate(("a", "b", "c")):
        run.name("embedding", page, text)
    run.end()
    (path,) = (tmp_path / "cache").glob("*-embedding.pages")
    data = bytearray(path.read_bytes())
    data[data.index(b"b...")] ^= 1
    path.write_bytes(data)
    run = start()
    with pytest.raises(ValueError, match="not as it was written"):
        run.saved("embedding")
    for page, text in ((0, "a"), (5, "b")):
        run.name("embedding", page, text)
    run.end()
    run = start()
    assert run.saved("embedding") == {"a": "a", "b": "b", "c": "c"}
    run.end()


@pytest.mark.parametrize("max_mib", [0.1, 3.0])
def test_another_size_keeps_the_pages(start: Callable[..., Run], tmp_path: Path, max_mib: float) -> None:
    run = start(LONG)
    for depth in range(180):
        run.name("embedding", depth, f"page {depth}", depth)
    run.end()
    run = start(LONG, cache=CacheSection(dir=str(tmp_path / "cache"), max_mib=max_mib))  # type: ignore[arg-type]
    found = run.saved("embedding")
    assert set(found) == {f"page {depth}" for depth in range(len(found))}, "those of a prompt's beginning"
    assert len(found) == (180 if max_mib > 1 else 73)
    (path,) = (tmp_path / "cache").glob("*-embedding.pages")
    assert path.stat().st_size <= max_mib * (1 << 20)
    run.end()


def test_a_file_of_another_secret_is_emptied_with_a_line(
    start: Callable[..., Run], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start()
    run.name("embedding", 0, "a")
    run.end()
    (tmp_path / "cache" / "secret").unlink()
    run = start()
    assert run.saved("embedding") == {} and "emptied" in caplog.text
    run.end()


def test_the_era_of_the_caches_is_kept_beside_the_pages(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start()
    assert read_era(run.directory.path, run.cache) == b""
    keep_era(run.directory.path, run.cache, b"e" * 16)
    run.end()
    run, other = start(), start(media=MediaSection(fps=3.0))
    assert read_era(run.directory.path, run.cache) == b"e" * 16 and read_era(other.directory.path, other.cache) == b""
    (path,) = (tmp_path / "cache").glob("*.era")
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"torn")
    with pytest.raises(OSError, match="has 4 bytes, not 16"):
        read_era(run.directory.path, run.cache)
    run.end()
    other.end()


def test_the_era_of_a_run_stays_while_the_run_lasts(start: Callable[..., Run], tmp_path: Path) -> None:
    running = start()
    keep_era(running.directory.path, running.cache, b"e" * 16)
    for path in (tmp_path / "cache").glob("*-*"):
        os.utime(path, (1, 1))
    for number in range(6):
        start(media=MediaSection(fps=1.0 + number)).end()
    assert read_era(running.directory.path, running.cache) == b"e" * 16
    running.end()


def test_two_runs_do_not_share_a_directory(start: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    first, second = start(), start()
    assert first.store is not None and second.store is None and "another run has it" in caplog.text
    first.end()
    second.end()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda secret: secret.chmod(0o644), "readable by no other"),
        (lambda secret: secret.write_bytes(b"short"), "has 5 bytes, not 32"),
        (lambda secret: (secret.unlink(), secret.mkdir()), "is not a regular file"),
        (lambda secret: (secret.unlink(), os.mkfifo(secret)), "is not a regular file"),
        (lambda secret: secret.parent.chmod(0o777), "writable by no other"),
        (lambda secret: next(secret.parent.glob("*.pages")).chmod(0o640), "no other can read"),
    ],
)
def test_a_directory_that_cannot_be_trusted_is_not_used(
    start: Callable[..., Run], tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], object], message: str
) -> None:
    start().end()
    spoil(tmp_path / "cache" / "secret")
    run = start()
    assert run.store is None and message in caplog.text
    run.end()


def test_a_full_disk_costs_pages_and_nothing_else(
    start: Callable[..., Run], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    assert run.store is not None
    for file in run.store._files.values():
        file._fd = os.open("/dev/full", os.O_RDWR)
    run.name("embedding", 0, "a")
    run.store._thread.join(10)
    assert "pages are no longer saved: there is no room" in caplog.text
    run.end()


HYBRID = msgspec.structs.replace(LAYOUT, pools={**SIZES, "state": PoolLayout(6, 96), "log": PoolLayout(2, 32)})


def test_states_are_saved_with_the_pages_under_them_once_they_have_rested(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(HYBRID)
    run.name("state", 0, "soon gone")
    run.name("kv", 0, "under it")
    wait_until(lambda: run.saved("kv") == {"under it": "under it"})
    assert run.saved("state") == {}, "another may soon follow"
    run.name("state", 0, "stays")
    monkeypatch.setattr(page_store, "STATE_REST_S", 0.0)
    wait_until(lambda: run.saved("state") == {"stays": "stays"})
    monkeypatch.setattr(page_store, "STATE_REST_S", 100.0)
    run.name("state", 1, "the last")
    run.end()
    run = start(HYBRID)
    assert run.saved("state") == {"stays": "stays", "the last": "the last"} and run.saved("kv") == {"under it": "under it"}
    run.end()
    run = start(msgspec.structs.replace(HYBRID, pools={**HYBRID.pools, "state": PoolLayout(6, 128)}))
    assert run.saved("state") == run.saved("kv") == {}, "states of another size are of another model"
    run.end()


def test_a_state_without_room_in_its_file_is_named_at_the_start(start: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    run = start(msgspec.structs.replace(HYBRID, pools={**HYBRID.pools, "state": PoolLayout(2, 1 << 20)}))
    assert "cache.max_mib is 1, of which state pages get 38%: one needs 1.0 MiB, and none is saved" in caplog.text
    run.name("state", 1, "large")
    run.end()


@pytest.mark.parametrize("page_bytes", [(64, 16 << 10), (64, 100), (4096, 12288)])
def test_there_is_room_for_as_many_pages_of_windows_as_of_kv(start: Callable[..., Run], page_bytes: tuple[int, int]) -> None:
    """Those of KV are small where all layers have a window, and hold nothing: of each file the heads count, too."""
    kv, window = (PoolLayout(4, num_bytes) for num_bytes in page_bytes)
    run = start(msgspec.structs.replace(LAYOUT, pools={**SIZES, "kv": kv, "window": window}))
    assert run.store is not None
    files = run.store._files
    num_slots = files["kv"].num_slots
    assert num_slots > 30 and num_slots <= files["window"].num_slots <= num_slots + 1
    assert sum(bytes_of_slots(files[name].num_slots, files[name].page_bytes) for name in ("kv", "window")) <= 7 / 8 * (1 << 20)
    run.end()


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.005)
