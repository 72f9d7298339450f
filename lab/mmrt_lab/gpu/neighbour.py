"""A process that encodes pictures beside a decode step of ``sharing``, until its input ends or it is killed."""

import select
import sys

import torch

from .counts import SHAPE_7B
from .timing import capture
from .tower import Tower


def main() -> int:
    """Report the start of the encoding."""
    tower = Tower.make(SHAPE_7B, torch.device("cuda", 0))
    graph = capture([tower.forward])
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        graph.replay()
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
