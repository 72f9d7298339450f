"""Prompts with pictures, from files and a chat template on, beside those of a processor of transformers."""

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmrt.actors.host.media_rules import for_medium
from mmrt.actors.video.items import open_item
from mmrt.media.limits import UNLIMITED, MediaLimits
from mmrt.models.architecture import ModelConfig, WeightFormat
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.item_text import with_prompt_texts
from mmrt.runtime.bus.messages import Generation, MediaItem, RequestSpec
from mmrt.runtime.controller.rows.expansion import check_placeholders, expand, spans_of
from mmrt.runtime.controller.scheduling.types import Limits
from mmrt.schema.media import ItemShape, MediaOptions
from mmrt.tests.models.conftest import PAGE_TOKENS, Loaded, Prompt, model_over
from mmrt.tests.models.kept import exact

Pixels = np.ndarray  # uint8 [height, width, 3]


def noise(height: int, width: int) -> Pixels:
    return np.random.default_rng(height * 10000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def opened(config: ModelConfig, pixels: Pixels) -> tuple[ItemShape, list[np.ndarray]]:
    """A picture as the video process has it, and the rows of each segment."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    item = open_item("image", file, config, MediaLimits(max_aspect=1e9), UNLIMITED, None)  # type: ignore[arg-type]
    return item.item, [np.concatenate(list(item.rows(number))) for number in range(len(item.item.segments))]


def bicubic(image: np.ndarray, size: tuple[int, int], resample: int, **_: object) -> np.ndarray:
    """As torchvision, the default of transformers, does it for uint8 [3, height, width]; in place of Pillow's."""
    assert image.dtype == np.uint8 and resample == 3
    if image.shape[1:] == tuple(size):
        return image
    found = torch.nn.functional.interpolate(torch.from_numpy(image.copy())[None], size, mode="bicubic", antialias=True)
    resized: np.ndarray = found[0].numpy()
    return resized


def prompt_of(loaded: Loaded, processor: Any, content: Sequence[str | Pixels]) -> Prompt:
    """Of a message with texts and pictures. Its ids are ours; ``reference_inputs`` what the processor makes of it."""
    parts = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in content]
    pictures = [part for part in content if not isinstance(part, str)]
    tokenizer, config = processor.tokenizer, loaded.config
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True)
    rules = config.vision_rules
    is_nested = rules is not None and rules.cuts_alone  # pictures of one prompt, as transformers' own chat has them
    options = MediaOptions(is_among_others=is_nested and len(pictures) > 1)
    items = [opened(for_medium(config, options), pixels) for pixels in pictures]
    prompt = expanded(loaded, tokenizer, text, [item for item, _ in items], [rows for _, rows in items])
    images = [Image.fromarray(pixels) for pixels in pictures] or None
    inputs = processor(text=[text], images=[images] if is_nested and images else images, return_tensors="pt")
    prompt.reference_inputs = dict(inputs)
    return prompt


def expanded(loaded: Loaded, tokenizer: Any, text: str, items: Sequence[ItemShape], rows: list[list[np.ndarray]]) -> Prompt:
    """Of a rendered template with these media. ``rows``: of each of their segments."""
    config = loaded.config
    limits = Limits(
        num_rows=1, max_context=1 << 20, kv_page_tokens=16, num_kv_pages=8, media_page_bytes=4096, num_media_pages=8,
        patch_page_bytes=4096, num_patch_pages=8, embedding_page_tokens=32, num_embedding_pages=8,
        placeholder_ids={kind: config.placeholder_id(kind) for kind in config.media_kinds}, behind_ids=frozenset(config.behind_ids),
    )  # fmt: skip
    ids = tokenizer(with_prompt_texts(text, config.prompt_texts))["input_ids"]
    spec = RequestSpec(Generation("r"), ids, [MediaItem(item.kind, 9) for item in items], 4)
    check_placeholders(spec, limits)
    ids, starts = expand(spec, items, limits)
    return Prompt(ids, spans_of(ids, starts, items, limits), rows, {})


def forced_logits(reference: Any, prompt: Prompt, following: Sequence[int]) -> torch.Tensor:
    """transformers' logits of the prompt and of tokens behind it, [tokens, vocabulary]."""
    ids = torch.cat((prompt.reference_inputs["input_ids"], torch.tensor([list(following)])), 1)
    inputs = {**prompt.reference_inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if (kinds := inputs.get("mm_token_type_ids")) is not None:
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (0, len(following)))
    found: torch.Tensor = reference(**inputs).logits
    return found[0]


def check_logits_in_cuts(loaded: Loaded, reference: Any, prompt: Prompt, steps: Sequence[int] = (1, 7, 50, 4096)) -> None:
    """Prefill in chunks of each size, then decode: within 1e-5 of the largest of transformers' logits."""
    following = [5, 900, 17]
    expected = forced_logits(reference, prompt, following)
    positions, delta = loaded.family.positions(loaded.config, len(prompt.ids), prompt.spans)
    for step in dict.fromkeys(-(-step // loaded.grid) * loaded.grid for step in steps):
        lm, table = loaded.language_model(), torch.randperm(60, generator=torch.Generator().manual_seed(step))
        for chunk in loaded.prompt_chunks(lm, prompt, torch.from_numpy(positions.copy()), table, step):
            lm.prefill([chunk])
        token, place = prompt.ids[-1], torch.from_numpy(positions[:, -1:].copy())
        for number, forced in enumerate(following):
            length = len(prompt.ids) + number
            (found,) = lm.decode(torch.tensor([token]), place, torch.tensor([length]), table[None])
            assert (found - expected[length - 1]).abs().max() < 1e-5 * expected.abs().max(), (step, number)
            token, place = forced, torch.full((3, 1), length + delta)


def check_greedy_tokens(loaded: Loaded, prompt: Prompt, num_tokens: int = 20) -> None:
    """They are those of transformers' ``generate``."""
    end = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = loaded.reference.generate(**prompt.reference_inputs, **end)[0, len(prompt.ids) :].tolist()
    lm, table, said = loaded.language_model(), torch.randperm(60, generator=torch.Generator().manual_seed(0)), list[int]()
    positions, delta = loaded.family.positions(loaded.config, len(prompt.ids), prompt.spans)
    for chunk in loaded.prompt_chunks(lm, prompt, torch.from_numpy(positions.copy()), table, 32):
        lm.prefill([chunk])
    place = torch.from_numpy(positions[:, -1:].copy())
    while len(said) < num_tokens:
        length, token = len(prompt.ids) + len(said), (said or prompt.ids)[-1]
        said.append(int(lm.decode(torch.tensor([token]), place, torch.tensor([length]), table[None]).argmax()))
        place = torch.full((3, 1), length + delta)
    assert said == expected


def check_rounded_logits(loaded: Loaded, prompt: Prompt, weights: WeightFormat) -> None:
    """Those of the values that the format has, but for the rounding of activations, which recurrent states amplify."""
    config = load_model_config(loaded.path, weights=weights)
    rounded, logits = read_weights(loaded.path, config), list[torch.Tensor]()
    exactly = {name: exact(rounded, name).float() if f"{name}.scales" in rounded else value for name, value in rounded.items()}
    kv = torch.zeros(16, config.kv_page_bytes(PAGE_TOKENS), dtype=torch.uint8)
    with torch.inference_mode():
        positions = torch.arange(len(prompt.ids)).expand(3, -1)
        for model in (model_over(config, rounded, kv.clone()), model_over(loaded.config, exactly, kv.clone())):
            for chunk in loaded.prompt_chunks(model, prompt, positions, torch.arange(16), 16):
                model.prefill([chunk])
            length = torch.tensor([len(prompt.ids)])
            logits.append(model.decode(torch.tensor(prompt.ids[-1:]), positions[:, -1:], length, torch.arange(16)[None]))
        error = (logits[0] - logits[1]).abs().mean() / logits[1].std()
        assert 0 < error < (0.05 if loaded.grid == 1 else 0.1)


def edited(path: Path, to: Path, file: str, changes: dict[str, Any]) -> Path:
    """A checkpoint without weights, with other values of fields of a file."""
    shutil.copytree(path, to, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((to / file).read_text())
    for field, value in changes.items():
        content[field] = {**content[field], **value} if isinstance(value, dict) else value
    (to / file).write_text(json.dumps(content))
    return to
