"""The interface of a turn to compute (``turns``), of cores that are shared (``cores``), and of neither."""

from collections.abc import Callable
from types import TracebackType


class FreeTurn:
    """A context manager around a plan or a step. This one does nothing."""

    after_layer: Callable[[], object] | None = None
    """To be called between the layers of a plan, which may pause there."""

    waited_ns = 0
    """The time that this actor has waited, in all."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def work(self) -> None:
        """Note that this actor computes, until it rests. A plan or a step in its turn says so by itself."""

    def rest(self) -> None:
        """Note that this actor has nothing to compute."""

    def took(self, step_s: float) -> None:
        """Note that a step of decode has taken so long, in its turn."""
