"""Pages of layers with a window in a pool of their own: the same bits as in one pool, whatever lies on pages that windows have left."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.lm import attention
from mmrt.models.lm.decoder import Chunk
from mmrt.models.lm.language_model import LanguageModel
from mmrt.runtime.process.memory_layout import EMPTY_PAGE_BYTES
from mmrt.tests.models.test_gemma4 import save
from mmrt.tests.models.test_text_families import save as save_text

PAGE_TOKENS, LENGTH, STEPS = 8, 60, 12


class Windows:
    """A pool of few pages for one sequence: those that a window has left hold NaN until they are used again, elsewhere."""

    def __init__(self, config: Any, num_pages: int) -> None:
        self.window = config.language.window
        self.pages = torch.zeros(num_pages, config.window_page_bytes(PAGE_TOKENS), dtype=torch.uint8)
        self.table = torch.zeros(32, dtype=torch.int64)
        self._free, self._first, self._end = list(range(num_pages)), 0, 0

    def begin(self, start: int, end: int) -> torch.Tensor:
        """The table for the tokens [start, end)."""
        while (self._first + 1) * PAGE_TOKENS <= start + 1 - self.window:
            page = int(self.table[self._first])
            self.pages[page] = 255  # NaN in every dtype
            self._free.append(page)
            self._first += 1
        while self._end * PAGE_TOKENS < end:
            self.table[self._end] = page = self._free.pop(0)
            self.pages[page] = 0
            self._end += 1
        return self.table


@pytest.mark.parametrize("family", ["gemma4", "mistral"])
@pytest.mark.parametrize("has_kernels", [True, False])
@torch.inference_mode()
def test_pages_are_used_again_once_a_window_has_left_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, has_kernels: bool
) -> None:
    """All layers of Mistral have a window, so that a KV page holds nothing."""
    if family == "gemma4":
        save(tmp_path, head_dim=32, global_head_dim=64)  # for which there are kernels
    else:
        save_text(tmp_path, "mistral", sliding_window=24, head_dim=32)
    config = load_model_config(tmp_path, dtype="float32")
    if not has_kernels:
        monkeypatch.setattr(attention.PagedAttention, "of", lambda *_: None)
        monkeypatch.setattr(attention, "has_kernel", lambda _: False)
    whole, apart = config.kv_page_bytes(PAGE_TOKENS), config.window_page_bytes(PAGE_TOKENS)
    assert (
        config.language.has_windows_apart
        and (0 < apart < whole if family == "gemma4" else apart == whole)
        and config.language.window == 24
    )
    weights, ids = read_weights(tmp_path, config), torch.randint(0, 300, (LENGTH,), generator=torch.Generator().manual_seed(1))
    places, table, windows = torch.arange(99).expand(3, -1), torch.arange(16), Windows(config, num_pages=7)
    one = LanguageModel(config, weights, torch.zeros(16, whole, dtype=torch.uint8), PAGE_TOKENS)
    two = LanguageModel(
        config, weights, torch.zeros(16, whole - apart or EMPTY_PAGE_BYTES, dtype=torch.uint8), PAGE_TOKENS, windows=windows.pages
    )
    for start, end in ((0, 5), (5, 29), (29, 30), (30, 50), (50, LENGTH - 1)):
        part = ids[start:end]
        its, wanted = windows.begin(start, end).clone(), [0] if start != 29 else []
        found = [
            lm.prefill([Chunk(lm.embed(part), places[:, start:end], start, table, ids=part, window_table=its)], wanted, None, [0])[0]
            for lm in (one, two)
        ]
        assert torch.equal(*found)
    for length in range(LENGTH, LENGTH + STEPS):
        its = windows.begin(length - 1, length)[None].repeat(2, 1)
        arguments = (
            ids[-1:].repeat(2),
            places[:, length - 1 : length].repeat(1, 2),
            torch.tensor([length, length]),
            table[None].repeat(2, 1),
        )
        first, second = (lm.decode(*arguments, window_tables=its) for lm in (one, two))
        assert torch.equal(first, second) and not first.isnan().any()
