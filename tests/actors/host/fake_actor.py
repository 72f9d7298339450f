"""What the loops of ``actors/`` need of their process: scripted messages in, answers kept."""

from collections.abc import Callable, Sequence

from mmrt.actors.host.turns import FreeTurn
from mmrt.runtime.bus.messages import ToActor, ToController
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.process.crash_cause import Death
from mmrt.shm.flight_recorder import FlightRecorder
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.status import ActorStatus, ActorTable


class FakeActor:
    """Each turn of the loop takes one entry of ``script``: messages, or something to do first. It ends with the script."""

    generation = 1
    config = RuntimeConfig()

    def __init__(self, run: RunDirectory, name: str, script: Sequence[Sequence[ToActor] | Callable[[], object]]) -> None:
        self.name = name
        self.run = run
        self.script = list(script)
        self.sent: list[ToController] = []
        self.status: ActorStatus | None = None
        self.death: Death | None = None
        self.turn = FreeTurn()
        self.num_waits = 0
        self.is_serving = False
        self._actors = ActorTable.create(run, dict.fromkeys((name, "gateway")))
        self.flight = FlightRecorder.create(run, name, 64).writer(self.generation)

    @property
    def ending(self) -> bool:
        return not self.script

    def become_active(self) -> ActorStatus:
        self.status = self._actors.writer(self.name, self.generation)
        return self.status

    def serving(self) -> None:
        self.is_serving = True

    def receive(self) -> list[ToActor]:
        while self.script:
            entry = self.script.pop(0)
            if not callable(entry):
                return list(entry)
            entry()
        return []

    def send(self, message: ToController) -> bool:
        self.sent.append(message)
        return True

    def wake(self) -> None:
        pass

    def wait(self, timeout_s: float, extra_fds: Sequence[int] = ()) -> None:
        self.num_waits += 1
