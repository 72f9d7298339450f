"""Pools: rows and bytes over pages against a model, readers, and generations."""

import io
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mmrt.shm.errors import StalePage
from mmrt.shm.pool import PagedReader, PagePool
from mmrt.tests.settings import examples

PAGES, PAGE_BYTES = 9, 48


@pytest.fixture
def pool(run):
    pool = PagePool.create(run, "p", PAGES, PAGE_BYTES)
    yield pool
    pool.close()


class PoolMachine(RuleBasedStateMachine):
    """Two mappings of one pool against an array; a page run is any choice of distinct pages."""

    pool: ClassVar
    other: ClassVar

    @initialize()
    def clear(self):
        self.pool.data[:] = 0
        self.model = np.zeros((PAGES, PAGE_BYTES), np.uint8)
        self.random = np.random.default_rng(0)

    @rule(
        pages=st.permutations(range(PAGES)).flatmap(lambda order: st.integers(1, PAGES).map(lambda count: order[:count])),
        row_bytes=st.integers(1, 50),
        first=st.integers(0, 20),
        count=st.integers(0, 60),
        neighbours=st.booleans(),
    )
    def rows(self, pages, row_bytes, first, count, neighbours):
        pages = sorted(pages) if neighbours else pages
        per_page = PAGE_BYTES // row_bytes
        rows = self.random.integers(0, 256, (count, row_bytes), dtype=np.uint8)
        if row_bytes > PAGE_BYTES or first + count > per_page * len(pages):
            before = self.pool.data.copy()
            with pytest.raises(ValueError):
                self.pool.gather_rows(pages, row_bytes, count, first)
            if count:
                with pytest.raises(ValueError):
                    self.pool.scatter_rows(pages, rows, first)
            assert (self.pool.data == before).all()
            return
        self.pool.scatter_rows(pages, rows, first)
        for index, row in enumerate(rows):
            page, place = divmod(first + index, per_page)
            self.model[pages[page], place * row_bytes : (place + 1) * row_bytes] = row
        assert (self.other.gather_rows(pages, row_bytes, count, first) == rows).all()

    @rule(
        pages=st.permutations(range(PAGES)).flatmap(lambda order: st.integers(0, PAGES).map(lambda count: order[:count])),
        start=st.integers(0, 400),
        data=st.binary(max_size=400),
    )
    def bytes_of_a_run(self, pages, start, data):
        if start + len(data) > len(pages) * PAGE_BYTES:
            with pytest.raises(ValueError):
                self.pool.write_bytes(pages, data, start)
            return
        self.pool.write_bytes(pages, data, start)
        for offset, value in enumerate(data, start):
            self.model[pages[offset // PAGE_BYTES], offset % PAGE_BYTES] = value
        expected = b"".join(bytes(self.model[page]) for page in pages)
        reader = self.other.reader(pages, start + len(data))
        assert reader.read() == expected[: start + len(data)]
        reader.close()

    @invariant()
    def equal(self):
        assert (self.other.data == self.model).all()


def test_pool_is_its_pages(run, pool):
    PoolMachine.pool, PoolMachine.other = pool, PagePool.attach(run, "p", "read")
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=examples(50), stateful_step_count=15, deadline=None))
    PoolMachine.other.close()
    del PoolMachine.pool, PoolMachine.other


def test_rows_of_one_page_and_of_neighbours_are_views(pool):
    def is_view(rows):
        return np.shares_memory(rows, pool.data)

    assert is_view(pool.gather_rows([4], 20, 2))  # slack at the end of a page does not matter within it
    assert is_view(pool.gather_rows([4, 5, 6], 16, 9))
    assert is_view(pool.gather_rows([0, 4, 5], 16, 5, first_row=4))
    assert not is_view(pool.gather_rows([4, 5], 20, 3))
    assert not is_view(pool.gather_rows([5, 4], 16, 6))


def test_rows_of_any_dtype(pool):
    values = np.linspace(0, 1, 21, dtype=np.float32).reshape(7, 3)
    pool.scatter_rows([8, 2], values[::-1])
    assert (pool.gather_rows([8, 2], 12, 7).view(np.float32) == values[::-1]).all()


def test_rows_per_page(pool):
    assert [pool.rows_per_page(num_bytes) for num_bytes in (48, 20, 1)] == [1, 2, 48]
    with pytest.raises(ValueError, match="49 bytes"):
        pool.rows_per_page(49)


def test_stale_pages(run, pool):
    pool.generations[:] = 7
    other = PagePool.attach(run, "p", "read")
    other.check([0, 8], [7, 7])
    pool.generations[8] += 1
    with pytest.raises(StalePage, match="page 8 of pool 'p' has generation 8, not 7"):
        other.check([0, 8], [7, 7])
    for page in (-1, PAGES):
        for use in (
            lambda page=page: other.check([page], [7]),
            lambda page=page: other.page(page),
            lambda page=page: other.gather_rows([page], 8, 1),
            lambda page=page: other.reader([page], 1),
        ):
            with pytest.raises(StalePage, match="outside pool 'p'"):
                use()
    with pytest.raises(StalePage, match="2 pages"):
        other.check([0, 1], [7])
    other.close()


@settings(deadline=None, max_examples=examples(100))
@given(
    data=st.binary(max_size=200),
    moves=st.lists(st.tuples(st.sampled_from(["seek", "read", "readinto", "whence"]), st.integers(-20, 220)), max_size=12),
)
def test_reader_is_a_file(run_pool, data, moves):
    pages = [7, 1, 3, 2, 8][: -(-len(data) // run_pool.page_bytes)]
    run_pool.write_bytes(pages, data)
    reader, model = PagedReader(run_pool, pages, len(data)), io.BytesIO(data)
    for move, number in moves:
        if move == "seek":
            assert reader.seek(max(0, number)) == model.seek(max(0, number))
        elif move == "read":
            assert reader.read(number) == model.read(number)
        elif move == "readinto":
            one, two = bytearray(max(0, number)), bytearray(max(0, number))
            assert reader.readinto(one) == model.readinto(two)
            assert one == two
        else:
            assert reader.seek(0, io.SEEK_END) == model.seek(0, io.SEEK_END)
            assert reader.seek(-min(len(data), abs(number)), io.SEEK_CUR) == model.seek(-min(len(data), abs(number)), io.SEEK_CUR)
        assert reader.tell() == model.tell()
    reader.close()


@pytest.fixture(scope="module")
def run_pool(tmp_path_factory):
    from mmrt.shm.run_directory import RunDirectory

    with RunDirectory.create(tmp_path_factory.mktemp("pool"), {}) as run:
        pool = PagePool.create(run, "p", PAGES, PAGE_BYTES)
        yield pool
        pool.close()


def test_reader_refuses(pool):
    with pytest.raises(ValueError, match="49 bytes"):
        PagedReader(pool, [0], 49)
    reader = PagedReader(pool, [0], 10)
    with pytest.raises(ValueError, match="before the start"):
        reader.seek(-1)
    with pytest.raises(ValueError, match="whence"):
        reader.seek(0, 9)
    assert reader.readable() and reader.seekable() and not reader.writable()
    with io.BufferedReader(reader) as buffered:
        assert buffered.read(5) == bytes(5)
    with pytest.raises(ValueError, match="closed"):
        reader.read(1)


def test_pages_on_a_device_have_only_their_generations_here(run):
    pool = PagePool.create(run, "device", PAGES, 1 << 40, on_device=True)
    other = PagePool.attach(run, "device")
    assert other.on_device and (other.num_pages, other.page_bytes) == (PAGES, 1 << 40)
    pool.generations[3] = 5
    other.check([3], [5])
    with pytest.raises(StalePage):
        other.check([3], [4])
    assert other.data.shape == (0, 1 << 40)
    for use in (lambda: other.write_bytes([3], b"x"), lambda: other.gather_rows([3], 8, 1), lambda: other.page(3)):
        with pytest.raises(AssertionError, match="pages of pool 'device' lie on a device"):
            use()
    pool.close()
    other.close()


@pytest.mark.parametrize("page_bytes", [64, 1 << 20])
@pytest.mark.parametrize(("access", "written"), [("read", ""), ("fill", "data"), ("grant", "words"), ("own", "data words")])
def test_a_process_writes_what_is_its_own(run, access, written, page_bytes):
    pool = PagePool.create(run, "shared", PAGES, page_bytes)
    other = PagePool.attach(run, "shared", access)
    words = (other.generations, other._keys, other._key_depths, other._key_generations)
    assert {other.data.flags.writeable, other._flat.flags.writeable} == {"data" in written}
    assert {word.flags.writeable for word in words} == {"words" in written}
    pool.generations[3] = 7
    pool.write_bytes([3], b"hello")
    assert other.generations[3] == 7 and bytes(other.page(3)[:5]) == b"hello"
    if "data" in written:
        other.write_bytes([4], b"there")
        assert bytes(pool.page(4)[:5]) == b"there"
    if "words" in written:
        other.generations[5] = 9
        other.write_keys([5], [9], [b"k" * 16], [2])
        assert pool.read_keys() == {5: b"k" * 16} and pool._key_depths[5] == 2 and pool.generations[5] == 9
    other.close()
    pool.close()


@pytest.mark.parametrize("on_device", [False, True])
def test_a_key_is_valid_for_one_generation(run, on_device):
    pool = PagePool.create(run, "keyed", PAGES, 64, on_device=on_device)
    assert pool.read_keys() == {}, "a page that was never given has no key"
    pool.generations[[2, 5, 7]] = [3, 4, 1]
    pool.write_keys([2, 5], [3, 4], [b"a" * 16, b"b" * 16], [1, 0])
    other = PagePool.attach(run, "keyed")
    assert [*other.read_keys().items()] == [(5, b"b" * 16), (2, b"a" * 16)], "of little depth first"
    pool.generations[5] = 5  # given away: nothing else is written
    assert other.read_keys() == {2: b"a" * 16}
    pool._keys[5] = 9  # the writer is killed between the key and its generation
    assert other.read_keys() == {2: b"a" * 16}
    pool.write_keys([5], [5], [b"c" * 16], [0])
    assert other.read_keys() == {2: b"a" * 16, 5: b"c" * 16}
    assert not pool.data.any(), "the index lies beside the pages"
    pool.close()
    other.close()
