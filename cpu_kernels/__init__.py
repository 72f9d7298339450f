"""Kernels for a CPU in machine code that LLVM makes for the processor at hand: products of rows, attention, and what lies between."""
