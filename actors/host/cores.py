"""The cores of an actor that computes while others may: its share, and a part of those that nobody uses (``processors.divide``).

An actor says in its status words when it begins to compute and when it has nothing more to do. All read these words before each kernel
and divide the cores alike, so cores are taken and given back between two kernels: only who is in the midst of one when another begins
keeps what it has until the kernel ends. Torch's operations follow between two layers.
"""

import time
from collections.abc import Callable

import torch

from ...cpu_kernels.kernel import set_threads
from ...runtime.config.runtime_config import RuntimeConfig
from ...runtime.process.processors import Claim, divide
from ...runtime.stage_table import STAGES, InstanceId, stage_of
from ...shm.status import ActorTable
from .free_turn import FreeTurn

_FIRST = ("decode", "prefill", "encoder", "video")  # gets a core that cannot be divided


class SharedCores(FreeTurn):
    """The cores of one actor. For the thread in which it computes."""

    def __init__(
        self,
        config: RuntimeConfig,
        actor: InstanceId,
        table: ActorTable,
        num_cores: int,
        say: Callable[[bool], object],
        *,
        torch_too: bool,
        count: Callable[[int], object] = lambda borrowed_ns: None,
    ) -> None:
        """``num_cores``: of its device. ``say`` tells the others whether it computes. ``torch_too``: torch's operations have as many
        threads as kernels, between layers. ``count`` gets the time of cores beyond its share, while it computed, in all."""
        self._config, self._actor, self._table, self._num_cores, self._say = config, actor, table, num_cores, say
        self._is_working = False
        self._share, self._count = config.actor(actor).threads, count
        self._num_borrowed = self._borrowed_ns = self._since_ns = 0
        self._meet()
        self._of_torch = torch.get_num_threads()
        self.after_layer = self._lend_to_torch if torch_too else None
        if STAGES[stage_of(actor)].has_device:
            set_threads(self.num_threads)

    def __enter__(self) -> None:
        self.work()
        if self.after_layer is not None:
            self.after_layer()

    def work(self) -> None:
        if self._version != self._table.version:
            self._meet()
        if not self._is_working:
            self._say(True)
            self._is_working = True
        self._borrow(self._num_borrowed)

    def rest(self) -> None:
        if self._is_working:
            self._borrow(0)
            self._is_working = False
            self._say(False)

    def num_threads(self) -> int:
        """Threads that compute the next kernel. Whoever has not said that it computes, as a standby that warms up, has its share."""
        if not self._is_working:
            return self._share
        computing = self._look()
        known = self._known.get(computing)
        if known is None:
            known = self._known[computing] = self._beside(computing)
        if known - self._share != self._num_borrowed:
            self._borrow(known - self._share)
        return known

    def _borrow(self, num_cores: int) -> None:
        """Count what it had so far of cores beyond its share. It has so many from now on."""
        now_ns = time.monotonic_ns()
        self._borrowed_ns += self._num_borrowed * (now_ns - self._since_ns)
        self._num_borrowed, self._since_ns = num_cores, now_ns
        self._count(self._borrowed_ns)

    def _meet(self) -> None:
        """Find those with whom it shares the cores: of its device, or of none."""
        table, devices = self._table, self._table.devices
        self._version = table.version
        with_it = [InstanceId(one) for one in table.present if one != self._actor and STAGES[stage_of(one)].core_share]
        self._others = [one for one in with_it if not STAGES[stage_of(one)].has_device or devices[one] == devices[self._actor]]
        self._look = table.lookout(self._others)
        self._known: dict[int, int] = {}

    def _beside(self, computing: int) -> int:
        """Its threads while these others compute."""
        found = [one for index, one in enumerate(self._others) if computing >> index & 1]
        found = sorted([*found, self._actor], key=lambda one: (_FIRST.index(stage_of(one)), one))
        config = self._config
        claims = [Claim(config.actor(one).threads, config.most_threads(one)) for one in found]
        return divide(self._num_cores, claims)[found.index(self._actor)]

    def _lend_to_torch(self) -> None:
        if (threads := self.num_threads()) != self._of_torch:
            self._of_torch = threads
            torch.set_num_threads(threads)
