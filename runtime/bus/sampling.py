"""How a request's tokens are drawn: the part of a request that ``gateway`` reads, the controller passes on, and decode obeys."""

import msgspec


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Options for sampling. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 and ``min_p`` 0 mean off, as do penalties of 1
    (repetition) and 0 (the others)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    guidance_scale: float = 1.0  # CF1: guided = u + s (c - u); 1.0 is off
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[tuple[int, float]] = []  # (id, what is added to its logit)
    min_tokens: int = 0  # before that many neither a stop token nor a stop string ends the answer
    bad_words: list[list[int]] = []  # the last id of each is not drawn behind the ids before it
    grammar: str = ""  # that the answer follows, as llguidance's text (models/grammar)

    logprobs: int | None = None  # so many alternatives of each token of the answer, beside its own; None: none at all
    prompt_logprobs: int | None = None  # likewise of the prompt
    prompt_logprobs_last: int = 0  # of so many of its last tokens alone; 0: of all

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def has_rules(self) -> bool:
        """Return whether it changes single logits."""
        return bool(self.logit_bias or self.min_tokens or self.bad_words)
