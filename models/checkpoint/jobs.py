"""Work on tensors in several threads: torch's operations let other threads run. ``weights`` calls it, in the memory actor."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
Job = Callable[[], None]
_AHEAD = 8  # groups


def do_all(groups: Iterable[tuple[T, Iterable[Job]]], done: Callable[[T], None], num_threads: int) -> None:
    """Do the jobs of all groups, those of some groups ahead of the one that is waited for. ``done`` is called here, for each group in
    turn. What it or a job raises ends the work: jobs that have not begun are not done."""
    waiting: deque[tuple[T, list[Future[None]]]] = deque()
    pool, in_inference = ThreadPoolExecutor(num_threads), torch.is_inference_mode_enabled()

    def do(job: Job) -> None:
        with torch.inference_mode(in_inference):  # each thread has a mode of its own
            job()

    def wait_for_one() -> None:
        group, futures = waiting.popleft()
        for future in futures:
            future.result()
        done(group)

    try:
        for group, jobs in groups:
            waiting.append((group, [pool.submit(do, job) for job in jobs]))
            if len(waiting) > _AHEAD:
                wait_for_one()
        while waiting:
            wait_for_one()
    finally:
        pool.shutdown(cancel_futures=True)
