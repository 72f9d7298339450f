"""The work that requests ask of each stage: TriInfer's W_e, W_p and W_d (TI9)."""

import msgspec


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over requests. ``encode_rows``: patch and mel rows; ``prompt_tokens``: with those of media; ``decode_tokens``: generated.
    Squares: what attention reads; 0 where nobody has counted it."""

    num_requests: int = 0
    encode_rows: int = 0
    encode_squares: float = 0.0
    prompt_tokens: int = 0
    prompt_squares: float = 0.0
    decode_tokens: int = 0

    @property
    def tokens_per_request(self) -> float:
        """In the KV cache at the end of a request, on average."""
        return (self.prompt_tokens + self.decode_tokens) / self.num_requests if self.num_requests else 0.0
