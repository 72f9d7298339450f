"""Several processes that train one network: each computes its part of every batch, and what they find is added up (gloo).

On two cores, two processes of one thread each take two thirds of the time of one process with two threads. The training loop calls it.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_PATIENCE = timedelta(minutes=10)  # one may compile while another waits


@contextmanager
def together(processes: int, help_: Callable[..., object], *args: Any) -> Iterator[None]:
    """Be the first of ``processes``; the others call ``help_(rank, *args)``, with as many threads each. They end with this one.

    Raises: RuntimeError, where something is computed together, if one of them has ended.
    """
    if processes == 1:
        yield
        return
    others: list[SpawnProcess] = []
    with tempfile.TemporaryDirectory() as meeting:
        try:
            for rank in range(1, processes):
                others.append(SpawnProcess(target=_help, args=(meeting, rank, processes, torch.get_num_threads(), help_, args)))
                others[-1].start()
            _join(meeting, 0, processes)
            yield
        except BaseException:
            for other in others:
                other.kill()
            raise
        finally:
            for other in others:
                other.join()
            if dist.is_initialized():
                dist.destroy_process_group()


def _join(meeting: str, rank: int, processes: int) -> None:
    dist.init_process_group("gloo", f"file://{meeting}/store", _PATIENCE, processes, rank)


def _help(meeting: str, rank: int, processes: int, threads: int, help_: Callable[..., object], args: Sequence[Any]) -> None:
    torch.set_num_threads(threads)
    _join(meeting, rank, processes)
    help_(rank, *args)
    dist.destroy_process_group()


def averaged(parameters: Sequence[nn.Parameter], loss: Tensor) -> Tensor:
    """The processes' mean loss; gradients become their means. A parameter without one in any process keeps none."""
    has = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.float32)
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    flat = torch.cat([loss.detach()[None], has, *(gradient.flatten() for gradient in gradients)])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    mean_loss, has, *means = torch.split(flat, [1, len(parameters), *(one.numel() for one in parameters)])
    for parameter, anywhere, mean in zip(parameters, has.tolist(), means, strict=True):
        parameter.grad = mean.view_as(parameter) if anywhere else None
    return mean_loss.squeeze()
