"""The language model: embeddings, a list of layers with a paged KV cache, a norm and a head.

The prefill actor calls ``prefill``, the decode actor ``decode``; they share weights and KV pages through memory that neither owns.
Shapes: N tokens of all sequences together, B sequences, H hidden, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import islice, repeat

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..architecture import ModelConfig
from ..checkpoint.weights import torch_dtype
from .decoder import AfterLayer, Chunk, Decoder, StateRefs, StateRows, Stream
from .delta_pages import DeltaPages, StatePools
from .interface import MakeOperations
from .kv_pages import KvPages
from .layer_ops import operations_for
from .layers import layers_of
from .matrices import Matrix, table_of
from .null_model import NullModel
from .per_layer import PerLayerInputs

__all__ = ["Chunk", "Decoder", "LanguageModel", "build_language_model"]


def build_language_model(
    config: ModelConfig,
    weights: dict[str, Tensor],
    kv: Tensor,
    page_tokens: int,
    states: StatePools | None = None,
    windows: Tensor | None = None,
) -> Decoder:
    """The model of this configuration. ``kv`` uint8 [num_pages, config.kv_page_bytes(page_tokens)]; ``states`` of a model that has some
    (``state_layout``). ``windows`` [num_pages, config.window_page_bytes(page_tokens)]: pages of layers with a window, which ``kv`` then
    lacks."""
    if config.null is not None:
        return NullModel(config, config.null)
    return LanguageModel(config, weights, kv, page_tokens, states=states, windows=windows)


class LanguageModel:
    """``Decoder`` on the device where its KV pool and weights lie. The latter are views (``weights.attach_weights``), never copied."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        kv: Tensor,
        page_tokens: int,
        make_operations: MakeOperations = operations_for,
        states: StatePools | None = None,
        windows: Tensor | None = None,
    ) -> None:
        language = config.language
        self._device = kv.device
        self._dtype = torch_dtype(config.dtype)
        self._embeddings = table_of(weights, "embed")
        self._head: Matrix = self._embeddings if language.tie_embeddings else table_of(weights, "lm_head")
        self._embedding_scale = torch.tensor(language.embedding_scale, dtype=self._dtype).item()
        self._divisor, self._softcap = language.logits_divisor, language.final_softcap
        pages = KvPages.of_groups(language, kv, page_tokens, self._dtype, config.kv_dtype, windows)
        self._are_apart = [windows is not None and bool(group.heads.window) for group in language.kv_groups]
        self._operations = make_operations(language, pages, None if states is None else DeltaPages(config, states))
        self._attentions, self._delta = self._operations.attentions, self._operations.delta
        inputs = language.per_layer
        self._inputs = None if inputs is None else PerLayerInputs(inputs, language.num_layers, weights, self._operations)
        self._layers, self._last_owner = layers_of(language, weights, self._operations), language.last_owner

    def embed(self, ids: Tensor) -> Tensor:
        rows = self._embeddings.lookup(ids.to(self._device), self._dtype)
        return rows if self._embedding_scale == 1.0 else rows.mul_(self._embedding_scale)

    @torch.inference_mode()
    def prefill(
        self,
        chunks: list[Chunk],
        wanted: Collection[int] = (),
        after_layer: AfterLayer | None = None,
        ends: Collection[int] = (),
        stream: Stream | None = None,
        first: int = 0,
    ) -> list[Tensor]:
        self._begin_prefill(chunks)
        stream = stream or self._first_stream(chunks)
        hidden = stream.hidden
        inputs = self._inputs_of([chunk.ids for chunk in chunks], hidden)
        last = len(self._layers) if wanted else self._last_owner
        normed = self._prefill_layers(chunks, range(first, last), stream, inputs, after_layer)
        if not wanted:
            self._layers[self._last_owner].mixer.store(normed)
            return self._finish_ends(chunks, sorted(ends), hidden, normed, inputs) if ends else []
        parts = torch.split(normed, [chunk.embeds.shape[0] for chunk in chunks])
        return [parts[index] if index in wanted else parts[index][-1:] for index in sorted({*wanted, *ends})]

    @torch.inference_mode()
    def prefill_layers(
        self, chunks: list[Chunk], layers: range, stream: Stream | None = None, after_layer: AfterLayer | None = None
    ) -> Stream:
        self._begin_prefill(chunks)
        stream = stream or self._first_stream(chunks)
        return Stream(stream.hidden, self._prefill_layers(chunks, layers, stream, repeat(None), after_layer))

    def _begin_prefill(self, chunks: list[Chunk]) -> None:
        spans = [(chunk.start, chunk.start + chunk.embeds.shape[0]) for chunk in chunks]
        tables = [chunk.block_table for chunk in chunks]
        for attention, is_apart in zip(self._attentions, self._are_apart, strict=True):
            theirs = [chunk.window_table for chunk in chunks if chunk.window_table is not None] if is_apart else tables
            attention.begin_prefill(spans, theirs, [chunk.pictures for chunk in chunks])
        if self._delta is not None:
            self._delta.begin_prefill(spans, [chunk.state or StateRefs() for chunk in chunks])
        self._operations.begin(torch.cat([chunk.positions for chunk in chunks], 1).to(self._device))

    def _first_stream(self, chunks: list[Chunk]) -> Stream:
        hidden = torch.cat([chunk.embeds for chunk in chunks])  # a copy even of one: it is added to in place
        return Stream(hidden, self._layers[0].begin(hidden))

    def _prefill_layers(
        self, chunks: list[Chunk], layers: range, stream: Stream, inputs: Iterator[Tensor | None], after_layer: AfterLayer | None
    ) -> Tensor:
        """Add these layers' parts to the stream, in place. Returns its norm for the layer behind them, or the model's last one."""
        normed, deep = stream.normed, islice(_deep(chunks, stream.hidden), layers.start, None)
        for layer in self._layers[layers.start : layers.stop]:
            normed = layer.finish(layer.mixer.prefill(normed), stream.hidden, next(deep, ()), next(inputs))
            if after_layer is not None and after_layer() is True:
                self._begin_prefill(chunks)
        return normed

    def _finish_ends(
        self, chunks: list[Chunk], ends: list[int], hidden: Tensor, normed: Tensor, inputs: Iterator[Tensor | None]
    ) -> list[Tensor]:
        """Take the last tokens of these chunks through the layers from the last one that stores on, as a step does. Texts end in them,
        so no picture sees them and nothing is added to them."""
        assert self._delta is None, "a step appends to the log of a recurrent state, which begins behind the prompt"
        lengths = [chunk.start + chunk.embeds.shape[0] for chunk in chunks]
        tables = pad_sequence([chunks[index].block_table for index in ends], batch_first=True)
        windows = [chunk.window_table for chunk in map(chunks.__getitem__, ends) if chunk.window_table is not None]
        for attention, is_apart in zip(self._attentions, self._are_apart, strict=True):
            theirs = pad_sequence(windows, batch_first=True) if is_apart else tables
            attention.begin_decode(torch.tensor([lengths[index] for index in ends]), theirs)
        self._operations.begin(torch.cat([chunks[index].positions[:, -1:] for index in ends], 1).to(self._device))
        last = torch.tensor([chunk.embeds.shape[0] for chunk in chunks]).cumsum(0)[ends] - 1
        hidden, normed = hidden[last], normed[last]
        for layer in self._layers[self._last_owner :]:
            part = next(inputs)
            normed = layer.finish(layer.mixer.decode(normed), hidden, inputs=None if part is None else part[last])
        return list(torch.split(normed, 1))

    @torch.inference_mode()
    def decode(
        self,
        ids: Tensor,
        positions: Tensor,
        lengths: Tensor,
        block_tables: Tensor,
        states: StateRows | None = None,
        window_tables: Tensor | None = None,
    ) -> Tensor:
        for attention, is_apart in zip(self._attentions, self._are_apart, strict=True):
            assert not is_apart or window_tables is not None, "a model with pages of windows"
            attention.begin_decode(lengths, window_tables if is_apart and window_tables is not None else block_tables)
        if self._delta is not None:
            assert states is not None, "a model with recurrent states"
            self._delta.begin_decode(lengths, states)
        self._operations.begin(positions.to(self._device))
        hidden = self.embed(ids)
        normed = self._layers[0].begin(hidden)
        inputs = self._inputs_of([ids], hidden)
        for layer in self._layers:
            normed = layer.finish(layer.mixer.decode(normed), hidden, inputs=next(inputs))
        return self.logits(normed)

    def _inputs_of(self, ids: Sequence[Tensor | None], hidden: Tensor) -> Iterator[Tensor | None]:
        """What each layer gets besides the residual stream, which is still the embeddings."""
        if self._inputs is None:
            return repeat(None)
        found = [part for part in ids if part is not None]
        assert len(found) == len(ids), "a model with per-layer inputs needs ids"
        return iter(self._inputs.of(torch.cat(found).to(self._device), hidden).unbind(1))

    @torch.inference_mode()
    def fold(self, borders: Sequence[int], states: StateRows, targets: Sequence[int]) -> None:
        assert self._delta is not None, "a model with recurrent states"
        self._delta.fold(borders, states, targets)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._head.product(hidden).float()
        if self._divisor != 1.0:
            logits.div_(self._divisor)
        return logits.div_(self._softcap).tanh_().mul_(self._softcap) if self._softcap else logits


def _deep(chunks: list[Chunk], hidden: Tensor) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """For each of the first layers: the chunks' parts of the stream, and what is added to them after the layer."""
    parts = zip(torch.split(hidden, [chunk.embeds.shape[0] for chunk in chunks]), [chunk.deep for chunk in chunks], strict=True)
    added = [(part, deep) for part, deep in parts if deep is not None]
    for index in range(max((deep.shape[1] for _, deep in added), default=0)):
        yield [(part, deep[:, index]) for part, deep in added]
