"""Everything of the demo checkpoint but its weights: configuration, processors, tokenizer, template. The training loop calls it."""

import json
from functools import cache
from pathlib import Path
from typing import get_args

from mmrt.models.families.qwen2_5.made_checkpoint import Dimensions
from mmrt.models.families.qwen2_5_omni.made_checkpoint import recipe as make_recipe
from mmrt.models.make.checkpoint import write_configs, write_json
from mmrt.models.make.tokenizer import write_tokenizer

from ..data import Medium, sample
from ..data.phrases import TOLD
from .recipe import Recipe

CORPUS_SAMPLES = 400  # per medium: every sentence of the material turns up many times
WORD_REPEATS = 200  # of each word that grounding takes as a token: often enough to become one


def write_skeleton(out: Path, recipe: Recipe, corpus_samples: int = CORPUS_SAMPLES) -> None:
    """Write the JSON files of a checkpoint of this recipe into the directory ``out``. The tokenizer learns from so many samples per
    medium."""
    shape = recipe.model
    text = {"vocab_size": shape.vocab_size, "max_position_embeddings": shape.context, **shape.text}
    dimensions = Dimensions("float32", shape.num_merges, True, text, shape.vision, shape.audio, full_attention_every=1)
    made = make_recipe(dimensions)
    ids = write_tokenizer(out, made, _corpus(recipe.seed, corpus_samples))
    write_configs(out, made, ids)
    config = json.loads((out / "config.json").read_text())
    rope = {"rope_theta": shape.rope_theta, "mrope_section": list(shape.mrope_section)}
    config["text_config"]["rope_parameters"] |= rope
    write_json(out / "config.json", config)
    processor = json.loads((out / "preprocessor_config.json").read_text())
    _write_processor(out / "preprocessor_config.json", processor, shape.image_pixels)
    video = {**processor, "video_processor_type": "Qwen2VLVideoProcessor", "fps": 2.0, "min_frames": 4, "max_frames": shape.max_frames}
    _write_processor(out / "video_preprocessor_config.json", video, shape.video_pixels)


def _write_processor(file: Path, processor: dict[str, object], pixels: tuple[int, int]) -> None:
    least, most = pixels
    write_json(file, {**processor, "min_pixels": least, "max_pixels": most, "size": {"shortest_edge": least, "longest_edge": most}})


@cache
def _corpus(seed: int, num_samples: int) -> list[str]:
    samples = (sample(seed, index, medium) for medium in get_args(Medium) for index in range(num_samples))
    texts = [text for one in samples for question in one.questions for text in (question.text, question.answer)]
    return texts + [f" {word}" for word in TOLD] * WORD_REPEATS
