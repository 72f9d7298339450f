"""The bench of the GPU kernels: ``python -m mmrt.bench.gpu``, one command for a machine with an NVIDIA GPU.

``__main__`` starts each section in a process of its own, since a faulty kernel ends a CUDA context, and judges what comes back.
``section`` runs in that process; the other modules are sections and what they are made of. Needs torch, triton and numpy, no more.
"""
