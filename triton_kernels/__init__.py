"""Kernels for NVIDIA GPUs in Triton, one package per operation: kernel, checked wrapper, plain reference, launch table, budgets.

The GPU implementations of ``models`` and of the actors call the wrappers; nothing here depends on processes or shared memory.
"""
