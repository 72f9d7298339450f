"""Tiny checkpoints of the families that see, transformers' float32 model of each, and the oracle's prompts."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmrt.models.architecture import ModelConfig
from mmrt.models.checkpoint.weights import attach_weights, write_weights
from mmrt.models.config import load_model_config
from mmrt.models.families.family import CheckpointRecipe, Family
from mmrt.models.families.registry import family_of
from mmrt.models.lm.decoder import Chunk, StateRefs, StateRows
from mmrt.models.lm.delta_pages import StatePools
from mmrt.models.lm.language_model import LanguageModel
from mmrt.models.make import checkpoint
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.models.make.tokenizer import write_tokenizer
from mmrt.models.pictures import Run, whole_runs, within
from mmrt.models.state_layout import GRID, state_layout
from mmrt.models.towers.dispatch import Towers
from mmrt.models.towers.interface import TowerInput
from mmrt.runtime.controller.scheduling.types import MemberView
from mmrt.schema.media import ItemShape, MediaSpan, SegmentShape
from mmrt.tests.settings import also_slow
from mmrt.tests.threads import one_thread as one_thread

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
FAMILIES = (
    *("qwen2_5_vl", "qwen2_5_omni", "qwen2_vl", "qwen3_vl", "qwen3_5_moe", "glm_ocr", "glm4v"),
    *also_slow("qwen3_5", "qwen3_vl_moe", "glm46v"),
)
PAGE_TOKENS = 16
SECONDS = {"qwen2_5_omni": "video_second_per_grid", "qwen3_omni_moe": "video_second_per_grid", "qwen2_5_vl": "second_per_grid_ts"}
FENCES = {
    "image": ("vision_start_token_id", "vision_end_token_id"),
    "video": ("vision_start_token_id", "vision_end_token_id"),
    "audio": ("audio_start_token_id", "audio_end_token_id"),
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny checkpoint of a family, made once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(family: str) -> Path:
        if not (root / family).exists():
            make_checkpoint("tiny", root / family, family)  # type: ignore[arg-type]
        return root / family

    return get


def load_checkpoint(path: Path, dtype: str = "auto") -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    config = load_model_config(path, dtype)  # type: ignore[arg-type]
    buffer = bytearray()

    def allocate(num_bytes: int) -> memoryview:
        buffer.extend(bytes(num_bytes))
        return memoryview(buffer)

    index = write_weights(path, config, allocate)
    return config, attach_weights(memoryview(buffer), index)


@pytest.fixture(scope="session")
def load() -> Callable[..., tuple[ModelConfig, dict[str, torch.Tensor]]]:
    return load_checkpoint


@pytest.fixture
def sized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], int]:
    """How many parameters a shape of a family has, without its weights being made."""

    def ids_alone(out: Path, recipe: CheckpointRecipe) -> dict[str, int]:
        num_added = len(recipe.special_tokens) + len(recipe.plain_tokens)
        write_tokenizer(out, recipe._replace(vocab_size=256 + num_added, num_merges=0))
        return {text: recipe.vocab_size - 30 + i for i, text in enumerate([*recipe.special_tokens, *recipe.plain_tokens])}

    def count(family: str, shape: str) -> int:
        monkeypatch.setattr(checkpoint, "_write_weights", lambda *_: None)
        monkeypatch.setattr(checkpoint, "write_tokenizer", ids_alone)
        make_checkpoint(shape, tmp_path / shape, family)
        config = load_model_config(tmp_path / shape)
        return sum(torch.Size(spec.shape).numel() for spec in family_of(config).tensor_specs(config))

    return count


@dataclass
class Prompt:
    """An expanded prompt with its media as transformers wants them and as our towers want them."""

    ids: list[int]
    spans: list[MediaSpan]
    rows: list[list[np.ndarray]]  # of each segment of each medium
    reference_inputs: dict[str, Any]

    @property
    def segments(self) -> Iterator[tuple[int, SegmentShape]]:
        """Each with the place of its first token."""
        for span in self.spans:
            start = span.start
            for segment in span.shape.segments:
                yield start + len(segment.lead), segment
                start += segment.num_prompt_tokens

    @property
    def has_sound_tracks(self) -> bool:
        return any({part.kind for part in span.shape.segments} > {"audio"} for span in self.spans)


class StatefulModel:
    """A model with recurrent states in the place of one without: a row, which is known by the first page of its block table, has two
    bases and a log. The pages begin as garbage."""

    NUM_ROWS = 8

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor], kv: torch.Tensor) -> None:
        layout = state_layout(config)
        assert layout is not None
        sizes = (2 * self.NUM_ROWS, layout.base_bytes), (self.NUM_ROWS, layout.log_bytes)
        pools = StatePools(*(torch.randint(0, 256, size, dtype=torch.uint8) for size in sizes))
        self._lm = LanguageModel(config, weights, kv, PAGE_TOKENS, states=pools)
        self.embed, self.logits = self._lm.embed, self._lm.logits
        self._rows: dict[int, int] = {}
        self._slots = [0] * self.NUM_ROWS

    def prefill(self, chunks: Sequence[Chunk], wanted: Sequence[int] = ()) -> list[torch.Tensor]:
        rows = [self._row(chunk.block_table) for chunk in chunks]
        found = self._lm.prefill(
            [
                replace(chunk, state=StateRefs(self._base(row) if chunk.start else -1, self._base(row, other=True), row))
                for row, chunk in zip(rows, chunks, strict=True)
            ],
            wanted,
        )
        for row in rows:
            self._slots[row] ^= 1
        return found

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        rows = [self._row(table) for table in tables]
        bases = torch.tensor([self._base(row) for row in rows])
        logits = self._lm.decode(tokens, positions, lengths, tables, StateRows(bases, torch.tensor(rows)))
        full = [row for row, length in zip(rows, lengths.tolist(), strict=True) if length % GRID == 0]
        if full:
            ends = [length for length in lengths.tolist() if length % GRID == 0]
            states = StateRows(torch.tensor([self._base(row) for row in full]), torch.tensor(full))
            self._lm.fold(ends, states, [self._base(row, other=True) for row in full])
        for row in full:
            self._slots[row] ^= 1
        return logits

    def _row(self, table: torch.Tensor) -> int:
        return self._rows.setdefault(int(table[0]), len(self._rows))

    def _base(self, row: int, other: bool = False) -> int:
        return 2 * row + (self._slots[row] ^ other)


def model_over(config: ModelConfig, weights: dict[str, torch.Tensor], kv: torch.Tensor) -> LanguageModel | StatefulModel:
    """A model over this pool of pages of ``PAGE_TOKENS``."""
    if state_layout(config) is not None:
        return StatefulModel(config, weights, kv)
    return LanguageModel(config, weights, kv, PAGE_TOKENS)


def _share_windows(item: ItemShape, rows: list[np.ndarray]) -> np.ndarray | None:
    """Give runs of one window of a sound track the same mel frames. Returns all of the track; None where sound has no runs."""
    windows: dict[int, np.ndarray] = {}
    for number, segment in enumerate(item.segments):
        if segment.kind == "audio" and segment.details:
            rows[number] = windows.setdefault(segment.details[0], rows[number])
    return np.concatenate([*windows.values()]) if windows else None


def text(rng: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in rng.integers(0, 1000, length)]


@dataclass
class Loaded:
    """Our model beside transformers'."""

    path: Path
    config: ModelConfig
    family: Family
    weights: dict[str, torch.Tensor]
    towers: Towers
    reference: Any
    cache: dict[str, Any] = field(default_factory=dict)
    page_tokens: int = PAGE_TOKENS

    @property
    def grid(self) -> int:
        """Prompts are cut at multiples of so many tokens alone."""
        return GRID if state_layout(self.config) else 1

    def language_model(self, num_pages: int = 320) -> LanguageModel | StatefulModel:
        """With a KV pool full of garbage that is finite, as reused pages are."""
        shape = (num_pages, self.config.kv_page_bytes(PAGE_TOKENS))
        return model_over(self.config, self.weights, torch.randint(0, 60, shape, dtype=torch.uint8))

    def build_prompt(self, parts: list[int | ItemShape], seed: int = 0) -> Prompt:
        """``parts``: numbers of text tokens, and media. Pixels and mel frames are random."""
        config, rng = self.config, np.random.default_rng(seed)
        rules = config.vision_rules
        assert rules is not None
        omni = config.family in ("qwen2_5_omni", "qwen3_omni_moe")
        hf = self.reference.config
        prompt = Prompt([], [], [], {})
        pixels: dict[str, list[torch.Tensor]] = {"image": [], "video": []}
        mels: list[np.ndarray] = []
        seconds: list[float] = []
        for part in parts:
            if isinstance(part, int):
                prompt.ids += text(rng, part)
                continue
            kinds = dict.fromkeys((part.kind, *(segment.kind for segment in part.segments)))
            prompt.ids += [getattr(hf, FENCES[kind][0], 0) for kind in kinds]
            prompt.spans.append(MediaSpan(len(prompt.ids), part))
            for segment in part.segments:
                tokens = segment.ids or ((config.placeholder_id(segment.kind), segment.num_tokens),)
                prompt.ids += [*segment.lead, *(id for id, count in tokens for _ in range(count)), *segment.trail]
            prompt.ids += [getattr(hf, FENCES[kind][1], 0) for kind in reversed(kinds)]
            prompt.rows.append([self._random_rows(segment, rng) for segment in part.segments])
            sound = _share_windows(part, prompt.rows[-1])
            for kind in kinds:
                rows = np.concatenate([rows for rows, of in zip(prompt.rows[-1], part.segments, strict=True) if of.kind == kind])
                if kind == "audio":
                    mels.append(rows if sound is None else sound)
                    continue
                frame = rules.row_bytes // 3
                mean = torch.tensor(rules.image_mean).repeat_interleave(frame) * 255
                std = torch.tensor(rules.image_std).repeat_interleave(frame) * 255
                pixels[kind].append((torch.from_numpy(rows).float() - mean) / std)
            if part.kind == "video":
                seconds.append(part.second_per_grid_s)
        inputs: dict[str, Any] = {"input_ids": torch.tensor([prompt.ids])}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for kind, values, grid in (("image", "pixel_values", "image_grid_thw"), ("video", "pixel_values_videos", "video_grid_thw")):
            if pixels[kind]:
                inputs[values] = torch.cat(pixels[kind])
                inputs[grid] = torch.tensor([span.shape.grid for span in prompt.spans if span.shape.kind == kind])
        if seconds and config.family in SECONDS:
            inputs[SECONDS[config.family]] = torch.tensor(seconds)
        if mels:
            longest = max(len(mel) for mel in mels)
            padded = [np.pad(mel, ((0, longest - len(mel)), (0, 0))) for mel in mels]
            inputs["input_features"] = torch.stack([torch.from_numpy(mel).T for mel in padded])
            inputs["feature_attention_mask"] = torch.tensor([[int(i < len(mel)) for i in range(longest)] for mel in mels])
        if prompt.has_sound_tracks:
            inputs["use_audio_in_video"] = True
        if not omni:
            types = torch.zeros_like(inputs["input_ids"])
            for start, segment in prompt.segments:
                types[0, start : start + segment.num_tokens] = {"image": 1, "video": 2}[segment.kind]
            inputs["mm_token_type_ids"] = types
        prompt.reference_inputs = inputs
        return prompt

    def _random_rows(self, segment: SegmentShape, rng: np.random.Generator) -> np.ndarray:
        if segment.kind == "audio":
            return rng.normal(0, 0.5, (segment.num_rows, self.config.audio.num_mel_bins)).astype(np.float32)
        return rng.integers(0, 256, (segment.num_rows, segment.row_bytes), dtype=np.uint8)

    def encode(self, prompt: Prompt) -> list[list[torch.Tensor]]:
        """The embedding rows of each segment of each medium."""
        return [
            self.towers.encode(
                [
                    TowerInput(part.kind, rows, part.grid, part.details, part.ids)
                    for part, rows in zip(span.shape.segments, found, strict=True)
                ]
            )
            for span, found in zip(prompt.spans, prompt.rows, strict=True)
        ]

    def prompt_chunks(self, lm: LanguageModel, prompt: Prompt, positions: torch.Tensor, table: torch.Tensor, step: int) -> list[Chunk]:
        """``chunks`` of a prompt with its media."""
        embeds = lm.embed(torch.tensor(prompt.ids))
        deep = torch.zeros(len(embeds), self.config.num_deep, embeds.shape[1])
        rows = [rows for found in self.encode(prompt) for rows in found]
        for (start, segment), its in zip(prompt.segments, rows, strict=True):
            parts = its.view(segment.num_tokens, 1 + self.config.num_deep, -1)
            embeds[start : start + segment.num_tokens], deep[start : start + segment.num_tokens] = parts[:, 0], parts[:, 1:]
        ids, runs = torch.tensor(prompt.ids), whole_runs(self.config.language, prompt.spans)
        return self.chunks(embeds, positions, table, step, deep if self.config.num_deep and prompt.spans else None, ids, runs)

    @staticmethod
    def chunks(
        embeds: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, step: int,
        deep: torch.Tensor | None = None, ids: torch.Tensor | None = None, runs: Sequence[Run] = (),
    ) -> list[Chunk]:  # fmt: skip
        """The prompt but for its last token, in pieces of ``step`` tokens."""
        end = embeds.shape[0] - 1
        cuts, at = list[tuple[int, int]](), 0
        while at < end:
            cuts.append((at, MemberView(at, end, end, pictures=tuple(runs)).chunk_end(min(at + step, end))))
            at = cuts[-1][1]
        parts = [(None if deep is None else deep[a:b], None if ids is None else ids[a:b]) for a, b in cuts]
        return [
            Chunk(embeds[a:b], positions[:, a:b], a, table, deep=own, ids=its, pictures=within(runs, a, b))
            for (a, b), (own, its) in zip(cuts, parts, strict=True)
        ]


@pytest.fixture(scope="session")
def models(checkpoints: Callable[[str], Path]) -> Callable[[str], Loaded]:
    import transformers

    found: dict[str, Loaded] = {}

    def get(family: str) -> Loaded:
        if family not in found:
            path = checkpoints(family)
            classes = {
                "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
                "qwen2_vl": "Qwen2VLForConditionalGeneration",
                "qwen3_vl": "Qwen3VLForConditionalGeneration",
                "qwen3_5": "Qwen3_5ForConditionalGeneration",
                "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
                "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
                "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
                "glm_ocr": "GlmOcrForConditionalGeneration",
                "glm4v": "Glm4vForConditionalGeneration",
                "glm46v": "Glm46VForConditionalGeneration",
                "qwen3_asr": "Qwen3ASRForConditionalGeneration",
                "qwen2_audio": "Qwen2AudioForConditionalGeneration",
                "smolvlm": "SmolVLMForConditionalGeneration",
                "pixtral": "LlavaForConditionalGeneration",
                "llava": "LlavaForConditionalGeneration",
                "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
                "lighton_ocr": "LightOnOcrForConditionalGeneration",
                "mistral3": "Mistral3ForConditionalGeneration",
                "internvl": "InternVLForConditionalGeneration",
                "minicpmv4_6": "MiniCPMV4_6ForConditionalGeneration",
                "minicpmv4_7": "MiniCPMV4_7ForConditionalGeneration",
                "paddleocr_vl": "PaddleOCRVLForConditionalGeneration",
                "llava_next": "LlavaNextForConditionalGeneration",
                "llava_onevision": "LlavaOnevisionForConditionalGeneration",
                "gemma4": "Gemma4ForConditionalGeneration",
                "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
                "gemma3_seeing": "Gemma3ForConditionalGeneration",
            }
            reference = getattr(transformers, classes[family]).from_pretrained(path, dtype=torch.float32).eval()
            config, weights = load_checkpoint(path)
            found[family] = Loaded(path, config, family_of(config), weights, Towers(config, weights), reference)
        return found[family]

    return get


@pytest.fixture(params=FAMILIES)
def loaded(request: pytest.FixtureRequest, models: Callable[[str], Loaded]) -> Iterator[Loaded]:
    with torch.inference_mode():
        yield models(request.param)
