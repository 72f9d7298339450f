"""Kernels and their plain references."""
