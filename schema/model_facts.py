"""The numbers of a model from which the runtime derives the sizes of its memory: models compute them, without torch."""

import msgspec


class ModelFacts(msgspec.Struct, frozen=True):
    """A model's memory needs: bytes of a KV page, of an embedding row, of the longest patch or mel row, of a prompt token in
    prefill, of a row's logits, of the weights, and of a KV page that is packed, or 0 where none are; tokens of context; and
    whether it takes media. Of a model with recurrent states: bytes of one, and of a log; and the tokens between two of a sequence that
    are kept, 0 without any. Of one with experts: bytes that these take in a step on a GPU, else 0. What of it no kernel for a GPU
    computes, or ""; what keeps its layers from being divided among stages of a pipeline, bytes of a token between two, and how many
    layers there are. Of one whose layers with a window can have pages of their own: bytes of a KV page that are theirs, tokens of the
    longest window, and of the longest chunk of a prompt."""

    kv_page_bytes: int
    embedding_row_bytes: int
    max_context: int
    patch_row_bytes: int
    prefill_token_bytes: int = 0
    logits_bytes: int = 0
    weight_bytes: int = 0
    packed_page_bytes: int = 0
    takes_media: bool = True
    state_bytes: int = 0
    log_bytes: int = 0
    state_grid: int = 0
    step_bytes: int = 0
    gpu_fault: str = ""
    pipeline_fault: str = ""
    stream_token_bytes: int = 0
    num_layers: int = 0
    window_page_bytes: int = 0
    window_tokens: int = 0
    window_chunk_tokens: int = 0

    @property
    def kv_room_bytes(self) -> int:
        """Bytes of a page of a KV pool, and of its packed one."""
        return self.kv_page_bytes + self.packed_page_bytes

    def kv_bytes(self, num_tokens: int, page_tokens: int) -> int:
        """Bytes of the KV pages that a request of so many tokens keeps, with pages of their own for layers with a window."""
        num_pages = -(-num_tokens // page_tokens)
        num_left = max(0, num_pages - -(-self.window_tokens // page_tokens) - 1) if self.window_page_bytes else 0
        return num_pages * self.kv_page_bytes - num_left * self.window_page_bytes

    @property
    def are_all_windows(self) -> bool:
        """True if all layers that attend have a window."""
        return 0 < self.window_page_bytes == self.kv_page_bytes

    @property
    def member_bytes(self) -> int:
        """Bytes of the states of a sequence that runs: the last that was kept, the next, and the log."""
        return 2 * self.state_bytes + self.log_bytes
