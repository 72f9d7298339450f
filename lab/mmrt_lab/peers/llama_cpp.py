"""llama.cpp's party, by the C functions that llama-cpp-python (extra ``peers``) gives.

``python -m mmrt_lab.peers.llama_cpp FILE``. Each sequence has a KV cache of its own in float16, llama.cpp's default.
"""

import sys
from collections.abc import Sequence

import llama_cpp as llama

from .party import CONTEXT_TOKENS, MAX_SEQUENCES, prompt, serve

_FROM_HERE = -1  # as the last position of a range: up to its end


class LlamaModel:
    """A ``party.Party``."""

    def __init__(self, file: str) -> None:
        self._say_nothing = llama.llama_log_callback(lambda level, text, data: None)  # must live as long as the model
        llama.llama_log_set(self._say_nothing, None)
        llama.llama_backend_init()
        features = llama.llama_print_system_info().decode().strip(" |")
        self.build = f"llama-cpp-python {llama.__version__}, {features}"
        self._model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
        if self._model is None:
            raise ValueError(f"llama.cpp cannot load {file}")
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = 2 * CONTEXT_TOKENS * MAX_SEQUENCES
        parameters.n_seq_max = MAX_SEQUENCES
        self._context = llama.llama_init_from_model(self._model, parameters)
        self._memory = llama.llama_get_memory(self._context)
        self._num_ids = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._ids = prompt(self._num_ids)
        self._batch = llama.llama_batch_init(CONTEXT_TOKENS, 0, 1)
        self.use_threads(1)
        self.prefill()
        for sequence in range(1, MAX_SEQUENCES):
            llama.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def use_threads(self, num_threads: int) -> None:
        llama.llama_set_n_threads(self._context, num_threads, num_threads)

    def prefill(self) -> None:
        llama.llama_memory_seq_rm(self._memory, 0, -1, _FROM_HERE)
        self._decode([(0, position) for position in range(CONTEXT_TOKENS)], wanted={CONTEXT_TOKENS - 1})

    def step(self, num_sequences: int) -> None:
        for sequence in range(num_sequences):
            llama.llama_memory_seq_rm(self._memory, sequence, CONTEXT_TOKENS, _FROM_HERE)
        self._decode([(sequence, CONTEXT_TOKENS) for sequence in range(num_sequences)], wanted=range(num_sequences))

    def logits(self) -> Sequence[float]:
        return list(llama.llama_get_logits_ith(self._context, 0)[: self._num_ids])

    def _decode(self, tokens: Sequence[tuple[int, int]], wanted: set[int] | range) -> None:
        """Compute tokens, given by (sequence, position), and logits after those with the indices ``wanted``."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (sequence, position) in enumerate(tokens):
            batch.token[index] = self._ids[position]
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = index in wanted
        if status := llama.llama_decode(self._context, batch):
            raise ValueError(f"llama_decode of {len(tokens)} tokens returned {status}")
        llama.llama_synchronize(self._context)


if __name__ == "__main__":
    serve(lambda: LlamaModel(sys.argv[1]))
