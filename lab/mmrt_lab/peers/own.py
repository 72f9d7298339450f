"""mmrt's party: the decoder that prefill and decode run, without the processes around it.

``python -m mmrt_lab.peers.own CHECKPOINT DTYPE WEIGHTS``
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mmrt import __version__
from mmrt.models.architecture import ModelConfig
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.lm.decoder import Chunk
from mmrt.models.lm.language_model import build_language_model

from .party import CONTEXT_TOKENS, MAX_SEQUENCES, prompt, serve

_PAGE_TOKENS = 16
_PAGES = CONTEXT_TOKENS // _PAGE_TOKENS + 1  # of a sequence: the prompt, and the token after it


class OwnModel:
    """A ``party.Party``."""

    def __init__(self, checkpoint: Path, config: ModelConfig) -> None:
        self.build = f"mmrt {__version__}, torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
        kv = torch.zeros((MAX_SEQUENCES * _PAGES, config.kv_page_bytes(_PAGE_TOKENS)), dtype=torch.uint8)
        self._model = build_language_model(config, read_weights(checkpoint, config), kv, _PAGE_TOKENS)
        self._tables = torch.arange(MAX_SEQUENCES * _PAGES).view(MAX_SEQUENCES, _PAGES)
        self._ids = torch.tensor(prompt(config.language.vocab_size))
        self._logits = torch.empty(0)
        self.prefill()
        kv.view(MAX_SEQUENCES, -1)[1:] = kv.view(MAX_SEQUENCES, -1)[0]

    def use_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def prefill(self) -> None:
        positions = torch.arange(CONTEXT_TOKENS).expand(3, -1)
        self._model.prefill([Chunk(self._model.embed(self._ids[:-1]), positions, 0, self._tables[0])])

    def step(self, num_sequences: int) -> None:
        positions = torch.full((3, num_sequences), CONTEXT_TOKENS)
        ids = self._ids[-1:].expand(num_sequences)
        self._logits = self._model.decode(ids, positions, positions[0] + 1, self._tables[:num_sequences])

    def logits(self) -> Sequence[float]:
        found: list[float] = self._logits[0].tolist()
        return found


def load(checkpoint: str, dtype: str, weights: str) -> OwnModel:
    """The model of a checkpoint in a format. Raises: CheckpointError."""
    path = Path(checkpoint)
    return OwnModel(path, load_model_config(path, dtype, weights=weights))  # type: ignore[arg-type]  # names that the command has checked


if __name__ == "__main__":
    serve(lambda: load(*sys.argv[1:]))
