"""Kernels for NVIDIA GPUs in Triton, one package per operation: kernel, checked wrapper, plain reference, launch table, budgets.

The GPU implementations of ``models`` and of the actors call the wrappers; nothing here knows of processes or of shared memory.
"""
