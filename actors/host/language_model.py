"""Open the language model of the run on its weights and KV pages, for prefill and for decode."""

from ...models.lm.decode_graphs import DecodeGraphs
from ...models.lm.decoder import Decoder
from ...models.lm.delta_pages import StatePools
from ...models.lm.language_model import build_language_model
from ...models.state_layout import state_layout
from ...runtime.pools import log_pool, state_pool, window_pool
from ...runtime.process.memory_layout import MemoryLayout
from ...shm.pool import PagePool
from .actor import Actor
from .kept_kernels import keep_kernels
from .shared_tensors import SharedTensors


def open_language_model(actor: Actor, shared: SharedTensors, kv: PagePool, layout: MemoryLayout) -> Decoder:
    """Open the decoder of the run's model on the KV pool, and those of states and windows beside it, or the null model."""
    keep_kernels()
    states = None
    if state_layout(actor.model) is not None:
        pools = [PagePool.attach(actor.run, name(kv.name), "fill") for name in (state_pool, log_pool)]
        states = StatePools(*map(shared.pages, pools))
    windows = shared.pages(PagePool.attach(actor.run, window_pool(kv.name), "fill")) if layout.has_windows else None
    return build_language_model(actor.model, shared.weights(), shared.pages(kv), layout.kv_page_tokens, states, windows)


def open_decoding_model(actor: Actor, shared: SharedTensors, kv: PagePool, layout: MemoryLayout) -> Decoder:
    """Open the same for decode, with steps of every size captured in graphs on CUDA. A guidance pair takes two rows of a step."""
    model = open_language_model(actor, shared, kv, layout)
    if shared.device.type != "cuda":
        return model
    max_pages = -(-actor.model.max_context // layout.kv_page_tokens)
    graphs = DecodeGraphs(model, actor.model.language.vocab_size, 2 * layout.num_rows, max_pages, shared.device)
    graphs.capture_all()
    return graphs
