"""Paged embedding buffer: rows written to pages and read back, contiguous only while they are used (US3, US4)."""

from .indices import PageIndices, PageSpan, num_consumed_pages
from .op import read_embeddings, write_embeddings

__all__ = ["PageIndices", "PageSpan", "num_consumed_pages", "read_embeddings", "write_embeddings"]
