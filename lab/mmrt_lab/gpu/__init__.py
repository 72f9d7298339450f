"""The bench of the GPU kernels: ``python -m mmrt_lab.gpu PART`` on a machine with an NVIDIA GPU.

The parts are ``works``, ``speed`` and ``serve``. ``works`` and ``speed`` start each section in a process of its own, since a faulty
kernel ends a CUDA context, and judge what comes back. ``section`` runs in that process; the other modules are sections and what they
are made of. ``speed`` needs torch, triton and numpy, no more.
"""
