"""Page pools: bulk data, written once in the place where others read it.

``memory`` creates them; only the controller allocates, frees and writes ``generations``; actors read and write the pages that a
plan names, after ``check``. A page number is an index; the pages of a run need not be neighbours. Of a pool on a CUDA device only
the generations and keys are here, and its pages are ``device_memory``'s.
"""

import io
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from ..schema.page_key import KEY_BYTES
from .errors import StalePage
from .fence import fence
from .run_directory import RunDirectory
from .segment import PAGE_BYTES, Field, Layout, Segment

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_KIND = "pool"

Access = Literal["read", "fill", "grant", "own"]
"""What a process writes of a pool: nothing; the pages; the words that say whose they are and what they hold; all of it."""


class PagePool:
    """``data`` uint8 [num_pages, page_bytes], on whole pages of the system's; ``generations`` uint64 [num_pages], whose one writer is
    the controller.

    ``on_device``: the pages lie elsewhere, and ``data`` has none. The index of the cache: ``_keys`` uint8 [num_pages, 16] name the
    contents of pages; a key is valid iff ``_key_generations`` uint64 [num_pages], which the controller writes after it, has the
    page's generation. So a page that is given away loses its key with its generation.

    A pool of packed pages (``runtime.pools.packed_pool``) has the same page numbers as its KV pool. The actor that packs a page is its
    only writer then: after the bytes it writes the generation that the KV page had.
    """

    def __init__(self, segment: Segment, name: str, num_pages: int, page_bytes: int, on_device: bool) -> None:
        """Use ``create`` or ``attach``."""
        self.name = name
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.on_device = on_device
        self._segment = segment
        fields = _Fields(num_pages, page_bytes, on_device)
        segment.expect_bytes(fields.layout.num_bytes)
        self.generations: NDArray[np.uint64] = segment.field(fields.generations)
        self.data: NDArray[np.uint8] = segment.field(fields.data)
        self._keys: NDArray[np.uint8] = segment.field(fields.keys)
        self._key_depths: NDArray[np.uint32] = segment.field(fields.key_depths)
        self._key_generations: NDArray[np.uint64] = segment.field(fields.key_generations)
        self._flat: NDArray[np.uint8] = self.data.reshape(-1)

    @classmethod
    def create(cls, run: RunDirectory, name: str, num_pages: int, page_bytes: int, *, on_device: bool = False) -> Self:
        """Make the pool ``name``. Raises: SpaceError, FileExistsError, ValueError."""
        if num_pages < 1 or page_bytes < 1:
            raise ValueError(f"pool {name!r} of {num_pages} pages of {page_bytes} bytes: both must be at least 1")
        num_bytes = _Fields(num_pages, page_bytes, on_device).layout.num_bytes
        path = run.segment_path(f"pool-{name}")
        segment = Segment.create(path, num_bytes, kind=_KIND, geometry=(num_pages, page_bytes, int(on_device)))
        return cls(segment, name, num_pages, page_bytes, on_device)

    @classmethod
    def attach(cls, run: RunDirectory, name: str, access: Access = "fill") -> Self:
        """Map the pool ``name``, for writing as far as ``access`` says. Raises: MissingError, SegmentError."""
        segment = Segment.attach(run.segment_path(f"pool-{name}"), kind=_KIND, writable=access == "own")
        num_pages, page_bytes, on_device, *_ = segment.geometry
        pool = cls(segment, name, num_pages, page_bytes, bool(on_device))
        if access == "fill" and not on_device:
            pool.data = segment.part_to_write(_Fields(num_pages, page_bytes, False).data)
            pool._flat = pool.data.reshape(-1)
        elif access == "grant":
            pool._let_grant(_Fields(num_pages, page_bytes, bool(on_device)))
        return pool

    def _let_grant(self, fields: "_Fields") -> None:
        self.generations = self._segment.part_to_write(fields.generations)
        first, names = fields.keys.offset, (fields.keys, fields.key_depths, fields.key_generations)
        part = self._segment.part_to_write(Field(first, (fields.layout.num_bytes - first,), np.dtype(np.uint8)))
        self._keys, self._key_depths, self._key_generations = (
            np.frombuffer(part, field.dtype, int(np.prod(field.shape)), field.offset - first).reshape(field.shape) for field in names
        )

    def close(self) -> None:
        """Drop the pool's own views. The memory stays mapped while others (tensors, rows, readers) are around."""
        del self.generations, self.data, self._flat, self._keys, self._key_depths, self._key_generations
        self._segment.close()

    def page(self, page: int) -> memoryview:
        """The bytes of one page, in place."""
        return memoryview(self.data[self._index(page)])

    def check(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        """Raise StalePage unless every page still has the generation that it was granted with."""
        if len(pages) != len(generations):
            raise StalePage(f"{len(pages)} pages of pool {self.name!r} with {len(generations)} generations")
        for page, granted in zip(pages, generations, strict=True):
            found = int(self.generations[self._inside(page)])
            if found != granted:
                raise StalePage(f"page {page} of pool {self.name!r} has generation {found}, not {granted}")

    def write_keys(self, pages: Sequence[int], generations: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        """Name the contents of these pages, which have these generations. ``depths``: their places in their prompts or segments: a page
        is of no use without those before it."""
        self._keys[pages] = np.frombuffer(b"".join(keys), np.uint8).reshape(len(pages), KEY_BYTES)
        self._key_depths[pages] = depths
        fence()
        self._key_generations[pages] = generations

    def read_keys(self) -> dict[int, bytes]:
        """All valid keys, by page, pages of little depth first. For the only writer, or while there is none."""
        valid = np.flatnonzero((self._key_generations == self.generations) & (self.generations > 0))
        valid = valid[np.argsort(self._key_depths[valid], kind="stable")]
        return dict(zip(valid.tolist(), map(bytes, self._keys[valid]), strict=True))

    def named_since(self, seen: NDArray[np.uint64]) -> list[tuple[int, int, bytes, int]]:
        """Return (page, generation, key, depth) of the pages with a key, but those whose generation is in ``seen`` [num_pages].

        For any reader, at any time: a key is right if ``copy`` then finds the generation.
        """
        generations = self._key_generations.copy()
        fence()
        pages = np.flatnonzero((generations == self.generations) & (generations > 0) & (generations != seen))
        keys, depths = map(bytes, self._keys[pages]), self._key_depths[pages].tolist()
        return list(zip(pages.tolist(), generations[pages].tolist(), keys, depths, strict=True))

    def copy(self, page: int, generation: int) -> bytes | None:
        """Copy the contents of a page that has a key; None if it has another generation by now. For any reader, at any time."""
        contents = bytes(self.page(page))
        fence()
        return contents if int(self.generations[page]) == generation else None

    def _index(self, page: int) -> int:
        """The index of a page whose bytes are here."""
        assert not self.on_device, f"pages of pool {self.name!r} lie on a device"
        return self._inside(page)

    def _inside(self, page: int) -> int:
        if not 0 <= page < self.num_pages:
            raise StalePage(f"page {page} is outside pool {self.name!r} ({self.num_pages} pages)")
        return page

    def write_bytes(self, pages: Sequence[int], data: bytes | bytearray | memoryview, start: int = 0) -> None:
        """Write ``data`` over the pages, in their order, from byte ``start`` of the run on.

        Raises: ValueError if it does not fit; StalePage for a page outside the pool.
        """
        source = np.frombuffer(data, np.uint8)
        if start + len(source) > len(pages) * self.page_bytes:
            raise ValueError(f"{len(source)} bytes from {start} on do not fit {len(pages)} pages of {self.page_bytes} bytes")
        done = 0
        while done < len(source):
            index, offset = divmod(start + done, self.page_bytes)
            target = self._index(pages[index]) * self.page_bytes + offset
            size = min(self.page_bytes - offset, len(source) - done)
            # Neighbours in one copy: a long copy bypasses the caches, short ones do not (measured at 8 MiB: 1.6 times as fast).
            while size < len(source) - done and pages[index + 1] == pages[index] + 1:
                index += 1
                size = min(size + self.page_bytes, len(source) - done)
                self._index(pages[index])
            self._flat[target : target + size] = source[done : done + size]
            done += size

    def reader(self, pages: Sequence[int], num_bytes: int) -> "PagedReader":
        """A file over the first ``num_bytes`` of a page run."""
        return PagedReader(self, pages, num_bytes)

    def rows_per_page(self, row_bytes: int) -> int:
        """How many rows a page holds: rows lie one after another and never cross a page border. Raises: ValueError if none."""
        if not 0 < row_bytes <= self.page_bytes:
            raise ValueError(f"a row of {row_bytes} bytes does not fit a page of {self.page_bytes} of pool {self.name!r}")
        return self.page_bytes // row_bytes

    def gather_rows(self, pages: Sequence[int], row_bytes: int, num_rows: int, first_row: int = 0) -> NDArray[np.uint8]:
        """Rows [first_row, first_row + num_rows) of a page run, as uint8 [num_rows, row_bytes].

        A view where the rows lie one after another in the pool, else a copy: read it before the plan is answered, never write it.
        Raises: ValueError if the run is too short; StalePage for a page outside the pool.
        """
        spans = list(self._spans(pages, row_bytes, num_rows, first_row))
        if num_rows and all(start == spans[0][0] + done * row_bytes for start, done, _ in spans):
            start = spans[0][0]
            return self._flat[start : start + num_rows * row_bytes].reshape(num_rows, row_bytes)
        rows = np.empty((num_rows, row_bytes), np.uint8)
        for start, done, count in spans:
            rows[done : done + count] = self._flat[start : start + count * row_bytes].reshape(count, row_bytes)
        return rows

    def scatter_rows(self, pages: Sequence[int], rows: NDArray[Any], first_row: int = 0) -> None:
        """Write rows (any dtype, [num_rows, …], each row_bytes long) as rows [first_row, …) of a page run.

        Raises: ValueError if the run is too short; StalePage for a page outside the pool.
        """
        if len(rows) == 0:
            return
        source = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
        row_bytes = source.shape[1]
        for start, done, count in list(self._spans(pages, row_bytes, len(rows), first_row)):
            target = self._flat[start : start + count * row_bytes].reshape(count, row_bytes)
            target[:] = source[done : done + count]

    def _spans(self, pages: Sequence[int], row_bytes: int, num_rows: int, first_row: int) -> Iterator[tuple[int, int, int]]:
        """(byte offset in the pool, rows before it, rows in it) for each page that the rows touch."""
        per_page = self.rows_per_page(row_bytes)
        last_row = first_row + num_rows
        if first_row < 0 or num_rows < 0 or last_row > len(pages) * per_page:
            raise ValueError(f"rows [{first_row}, {last_row}) of {row_bytes} bytes do not lie in {len(pages)} pages of {self.name!r}")
        done = 0
        while done < num_rows:
            index, row = divmod(first_row + done, per_page)
            count = min(per_page - row, num_rows - done)
            yield self._index(pages[index]) * self.page_bytes + row * row_bytes, done, count
            done += count


class _Fields:
    """The places of all fields."""

    def __init__(self, num_pages: int, page_bytes: int, on_device: bool) -> None:
        self.layout = layout = Layout()
        self.generations: Field = layout.add(num_pages, np.uint64)
        self.data: Field = layout.add((0 if on_device else num_pages, page_bytes), np.uint8, align=PAGE_BYTES)
        self.keys: Field = layout.add((num_pages, KEY_BYTES), np.uint8, align=PAGE_BYTES)  # those who fill pages cannot write it
        self.key_depths: Field = layout.add(num_pages, np.uint32)
        self.key_generations: Field = layout.add(num_pages, np.uint64)


class PagedReader(io.RawIOBase):
    """A seekable, read-only binary file whose bytes are read in place, as PyAV and Pillow take it."""

    def __init__(self, pool: PagePool, pages: Sequence[int], num_bytes: int) -> None:
        """Raises: ValueError if the pages hold fewer than ``num_bytes``; StalePage for a page outside the pool."""
        if not 0 <= num_bytes <= len(pages) * pool.page_bytes:
            raise ValueError(f"{num_bytes} bytes do not lie in {len(pages)} pages of {pool.page_bytes} bytes")
        self._pages = [pool.page(page) for page in pages]
        self._page_bytes = pool.page_bytes
        self._num_bytes = num_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move; a position behind the end reads nothing. Raises: ValueError before the start."""
        self._check_open()
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}
        if whence not in origins:
            raise ValueError(f"whence {whence} is not one of {sorted(origins)}")
        position = origins[whence] + offset
        if position < 0:
            raise ValueError(f"position {position} is before the start")
        self._position = position
        return position

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Fill ``buffer`` as far as there are bytes."""
        self._check_open()
        target = memoryview(buffer).cast("B")
        done = 0
        for piece in self._take(len(target)):
            target[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to ``size`` bytes, fewer only at the end; all that is left if negative or None."""
        self._check_open()
        pieces = list(self._take(self._num_bytes if size is None or size < 0 else size))
        return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)

    def readall(self) -> bytes:
        return self.read()

    def close(self) -> None:
        """Forget the pages; they are the controller's to free."""
        self._pages = []
        super().close()

    def _take(self, size: int) -> Iterator[memoryview]:
        """Take the next ``size`` bytes in place, page by page, moving the position."""
        end = min(self._position + size, self._num_bytes)
        while self._position < end:
            index, offset = divmod(self._position, self._page_bytes)
            piece = self._pages[index][offset : offset + end - self._position]
            self._position += len(piece)
            yield piece

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on a closed reader")
