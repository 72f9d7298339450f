"""Shared memory: run directory, segments, page pools, sequence table, plan records, ring, status words."""
