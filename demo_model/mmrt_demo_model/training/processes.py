"""Several processes that train one network: each computes its part of every batch, and gradients are averaged (gloo, on loopback).

On two cores, two processes of one thread each take four fifths of the time of one process with two threads. The training loop calls it.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmrt_lab.micro.peer import Peer

_HERE = " is here"
_PATIENCE = timedelta(hours=1)  # one may be stopped; the end of one closes its sockets
_POLL_S = 0.05
_GRACE_S = 10.0  # from closed sockets to an exit code


class ProcessEndedError(Exception):
    """One of the processes has ended before its work was done."""


@contextmanager
def together(processes: int, follow: Callable[..., object], *args: Any) -> Iterator[None]:
    """Be the first of ``processes``; the others call ``follow(rank, *args)``, with as many threads each. They end with this one.

    Raises: ProcessEndedError, at once or where something is next computed together.
    """
    if processes == 1:
        yield
        return
    with tempfile.TemporaryDirectory() as meeting, ExitStack() as stack:
        others = []
        for rank in range(1, processes):
            others.append(Peer(_follow, meeting, rank, processes, torch.get_num_threads(), follow, args, may_start_others=True))
            stack.callback(others[-1].stop)
        while len(list(Path(meeting).glob(f"*{_HERE}"))) < len(others):  # gloo's own wait for them cannot be interrupted
            _check(others, _POLL_S)
        try:
            _meet(meeting, 0, processes)
            stack.callback(dist.destroy_process_group)
            yield
        except RuntimeError:  # of gloo, or not
            _check(others, _GRACE_S)
            raise


def _check(others: Sequence[Peer], patience_s: float) -> None:
    """Raises: ProcessEndedError if one of them ends within so many seconds."""
    end_s = time.monotonic() + patience_s
    while not (codes := {rank: other.exitcode for rank, other in enumerate(others, 1) if other.exitcode is not None}):
        if time.monotonic() >= end_s:
            return
        time.sleep(_POLL_S)  # sentinels close before there is an exit code, or only with what a process has forked
    raise ProcessEndedError(f"processes that compute have ended (number: exit code): {codes}; -9 is often a want of memory")


def _follow(meeting: str, rank: int, processes: int, threads: int, follow: Callable[..., object], args: Sequence[Any]) -> None:
    torch.set_num_threads(threads)
    Path(meeting, f"{rank}{_HERE}").touch()
    _meet(meeting, rank, processes)
    follow(rank, *args)
    signal.pause()  # until it is killed: sockets that are closed too early look like a death


def _meet(meeting: str, rank: int, processes: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{meeting}/store", _PATIENCE, processes, rank)


def averaged(parameters: Sequence[nn.Parameter], loss: Tensor) -> Tensor:
    """The processes' mean loss; gradients become their means. A parameter without one in any process keeps none."""
    has_one = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.float32)
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    flat = torch.cat([loss.detach()[None], has_one, *(gradient.flatten() for gradient in gradients)])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    mean_loss, share, *means = torch.split(flat, [1, len(parameters), *(one.numel() for one in parameters)])
    for parameter, anywhere, mean in zip(parameters, share.tolist(), means, strict=True):
        parameter.grad = mean.view_as(parameter) if anywhere else None
    return mean_loss.squeeze()
