"""The interface of a language model for the prefill and decode actors; ``lm`` and ``null_model`` implement it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

AfterLayer = Callable[[], object]
"""Called between the layers of a forward, which may pause there: True if the model has done another one meanwhile. On CUDA the layer
before is launched, and perhaps not computed."""


@dataclass(frozen=True, slots=True)
class StateRefs:
    """Pages of a chunk's recurrent states (``state_layout``); -1 is none. ``base_from``: of the base at its start, without one the
    sequence begins there. ``base_to``: for the base at the last border, another page. ``log``: for what is behind that, where a decode
    step is to follow. ``snapshots``: borders within the chunk, each with a page that gets the base there too."""

    base_from: int = -1
    base_to: int = -1
    log: int = -1
    snapshots: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StateRows:
    """Pages of a step's recurrent states, int64 [B] each: of the base at the last border before each row's token, and of its log."""

    bases: Tensor
    logs: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens [start, start + n) of one sequence.

    embeds [n, H] in the model's dtype; positions int64 [3, n]; block_table int64, at least ceil((start + n) / page_tokens) pages.
    ``state``: for a model with recurrent states; ``start`` is a border then.
    deep [n, D, H]: what is added to the residual stream after layers 0 to D - 1; 0 for text. ids int64 [n]: for a model with
    ``LanguageConfig.per_layer``. ``pictures``: those that have tokens here, [start, end) in the sequence, for a model whose pictures
    see themselves; none may reach beyond the chunk. ``window_table``: as ``block_table``, of the pool of layers with a window, where
    they have one; entries before the window of the chunk's first token are arbitrary.
    """

    embeds: Tensor
    positions: Tensor
    start: int
    block_table: Tensor
    state: StateRefs | None = None
    deep: Tensor | None = None
    ids: Tensor | None = None
    pictures: tuple[tuple[int, int], ...] = ()
    window_table: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream of a forward between two layers, ``hidden`` [N, H], and its norm, the next layer's input, [N, H]."""

    hidden: Tensor
    normed: Tensor


class Decoder(Protocol):
    """A language model, as the actors use it. Arguments may lie on the CPU whatever the model's device; results lie on that device."""

    def embed(self, ids: Tensor) -> Tensor:
        """ids int64 [n] -> [n, H] in the model's dtype."""
        ...

    def prefill(
        self,
        chunks: list[Chunk],
        wanted: Collection[int] = (),
        after_layer: AfterLayer | None = None,
        ends: Collection[int] = (),
        stream: Stream | None = None,
        first: int = 0,
    ) -> list[Tensor]:
        """Write the chunks' K and V; tokens before a chunk's start must have theirs already, unless their chunk comes earlier.
        ``after_layer`` is called between layers. ``stream``: that of the chunks before layer ``first``, from ``prefill_layers``; their
        embeddings are not read then.

        Returns the last hidden states [n, H] of the ``wanted`` chunks, given by their indices, and [1, H] of the last tokens of those
        in ``ends``, in order: input of ``logits``. Where only ends are asked for, other tokens stop at the last layer that stores.
        """
        ...

    def prefill_layers(
        self, chunks: list[Chunk], layers: range, stream: Stream | None = None, after_layer: AfterLayer | None = None
    ) -> Stream:
        """The part of ``prefill`` in these layers (RS1). The model's last layer is not among them. ``stream`` comes from the layers
        before them; None at the first. The parts together give the same bits as ``prefill`` alone. Not for a model with a
        ``pipeline_fault``."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] of ``prefill`` -> float32 [n, V]: of the token after each."""
        ...

    def decode(
        self,
        ids: Tensor,
        positions: Tensor,
        lengths: Tensor,
        block_tables: Tensor,
        states: StateRows | None = None,
        window_tables: Tensor | None = None,
    ) -> Tensor:
        """One step: logits float32 [B, V] of the token after each sequence's input token.

        ids int64 [B]; positions int64 [3, B]; lengths int64 [B], the input token included: its K and V go to index length - 1;
        block_tables int64 [B, P], P at least the pages of the longest sequence; entries after a row's own pages are arbitrary.
        ``states``: for a model with recurrent states. ``window_tables``: as ``block_tables``, see ``Chunk``. A step that is done again
        from what it read gives the same bits.
        """
        ...

    def fold(self, borders: Sequence[int], states: StateRows, targets: Sequence[int]) -> None:
        """Write bases: row i's at ``borders[i]``, the end of its full log, into page ``targets[i]``. ``states`` are those of the step
        that filled the logs."""
        ...
