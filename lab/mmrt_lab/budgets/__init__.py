"""Budgets of the Triton kernels: what they may take on GPUs that need not be present (``ahead_of_time``), by operation."""
