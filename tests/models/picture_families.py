"""Families that see pictures, as ``test_picture_families`` and the runs of ``end_to_end/test_tiles`` know them: the processor
of transformers, and what differs between them."""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")
Sizes = tuple[tuple[int, int], ...]


class PictureFamily(NamedTuple):
    """``processor_of`` a checkpoint, with the Pillow form of its image processor. ``pictures``: heights and widths around each border
    of the rules. ``spellings``: of the names that a saved checkpoint has, those that other files have in their place."""

    processor_of: Callable[[Path], Any]
    pictures: Sizes
    spellings: tuple[Callable[[str], str], ...]


def _images(checkpoint: Path, module: str, name: str) -> Any:
    place = transformers.models
    for part in module.split("."):
        place = getattr(place, part)
    return getattr(place, name).from_pretrained(checkpoint)


def llava(checkpoint: Path) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    options = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    if json.loads((checkpoint / "config.json").read_bytes())["model_type"] == "llava":
        images = _images(checkpoint, "clip.image_processing_pil_clip", "CLIPImageProcessorPil")
        return transformers.LlavaProcessor(images, tokenizer, **options)
    images = _images(checkpoint, "llava_next.image_processing_pil_llava_next", "LlavaNextImageProcessorPil")
    return transformers.LlavaNextProcessor(images, tokenizer, **options)


def llava_onevision(checkpoint: Path) -> Any:
    """Without its processor of videos, which wants torchvision."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    images = _images(checkpoint, "llava_onevision.image_processing_pil_llava_onevision", "LlavaOnevisionImageProcessorPil")
    told = json.loads((checkpoint / "processor_config.json").read_bytes())
    options = {name: told[name] for name in ("num_image_tokens", "vision_feature_select_strategy", "vision_aspect_ratio")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.LlavaOnevisionProcessor, "check_argument_for_proper_class", lambda *_: None)
        return transformers.LlavaOnevisionProcessor(images, tokenizer, **options)


def paddleocr_vl(checkpoint: Path) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    images = _images(checkpoint, "paddleocr_vl.image_processing_pil_paddleocr_vl", "PaddleOCRVLImageProcessorPil")
    return transformers.PaddleOCRVLProcessor(images, tokenizer)


def minicpm_v(checkpoint: Path) -> Any:
    """Without its processor of videos, which wants torchvision."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    images = _images(checkpoint, "minicpmv4_6.image_processing_pil_minicpmv4_6", "MiniCPMV4_6ImageProcessorPil")
    with pytest.MonkeyPatch.context() as patch:
        made = getattr(transformers, json.loads((checkpoint / "preprocessor_config.json").read_bytes())["processor_class"])
        patch.setattr(made, "check_argument_for_proper_class", lambda *_: None)
        return made(images, images, tokenizer)


def internvl(checkpoint: Path) -> Any:
    """Without its processor of videos, which wants torchvision."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    images = _images(checkpoint, "got_ocr2.image_processing_pil_got_ocr2", "GotOcr2ImageProcessorPil")
    length = json.loads((checkpoint / "processor_config.json").read_bytes())["image_seq_length"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.InternVLProcessor, "check_argument_for_proper_class", lambda *_: None)
        return transformers.InternVLProcessor(images, tokenizer, image_seq_length=length)


def smolvlm(checkpoint: Path) -> Any:
    """Idefics3's: SmolVLM's writes pictures alike, and wants packages for videos."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    images = _images(checkpoint, "smolvlm.image_processing_pil_smolvlm", "SmolVLMImageProcessorPil")
    length = json.loads((checkpoint / "processor_config.json").read_bytes())["image_seq_len"]
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=length)


def pixtral(checkpoint: Path) -> Any:
    """transformers' class for Mistral 3 wants torchvision, and uses a function that the Pillow form has, too."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    images = _images(checkpoint, "pixtral.image_processing_pil_pixtral", "PixtralImageProcessorPil")
    merge = json.loads((checkpoint / "processor_config.json").read_bytes())["spatial_merge_size"]
    if json.loads((checkpoint / "config.json").read_bytes())["model_type"] == "lighton_ocr":
        return transformers.LightOnOcrProcessor(images, tokenizer, patch_size=14, spatial_merge_size=2)
    with pytest.MonkeyPatch.context() as patch:
        module = "transformers.models.pixtral.image_processing_pixtral"
        patch.setitem(sys.modules, module, sys.modules["transformers.models.pixtral.image_processing_pil_pixtral"])
        processing = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    return processing.PixtralProcessor(images, tokenizer, patch_size=14, spatial_merge_size=merge)


def without_model(name: str) -> str:
    return name.removeprefix("model.")


def of_hub(name: str) -> str:
    """As files of hubs have them."""
    return name.replace("vision_tower.", "vision_tower.vision_model.")


def within_model(name: str) -> str:
    """With all but the head in ``model.``, as newer files have them."""
    inner = f"model.{name.replace('language_model.model.', 'language_model.')}"
    return inner.replace("model.language_model.lm_head.", "lm_head.")


def of_hub_within_model(name: str) -> str:
    return within_model(of_hub(name))


def of_paddle(name: str) -> str:
    """With all but the head in ``model.``."""
    if name.startswith("model."):
        return name.replace("model.", "model.language_model.", 1)
    return name if name.startswith("lm_head.") else f"model.{name.replace('mlp_AR.', 'projector.')}"


_LLAVA: Sizes = (
    *((1, 1), (7, 400), (400, 7), (33, 21), (58, 58), (57, 59), (116, 58), (116, 116), (174, 58), (60, 170), (115, 117)),
    *((300, 41), (97, 203), (150, 31), (640, 480), (61, 999), (17, 23), (29, 290), (5000, 40)),
)
_DOCUMENTS: Sizes = (
    *((1, 1), (7, 400), (400, 7), (27, 29), (28, 28), (13, 15), (14, 400), (20, 3000), (224, 252), (253, 225), (1754, 1240)),
    *((300, 41), (97, 203), (150, 31), (640, 480), (61, 999), (17, 23), (29, 290), (60, 60), (41, 43)),
)
_ONE_VISION: Sizes = (
    *((1, 1), (7, 400), (400, 7), (33, 21), (72, 72), (71, 73), (144, 72), (72, 144), (144, 144), (216, 432), (217, 431)),
    *((300, 41), (97, 203), (150, 31), (640, 480), (61, 999), (17, 23), (29, 290), (5000, 40), (215, 100)),
)
_SMOLVLM: Sizes = (
    *((1, 1), (7, 400), (400, 3), (33, 21), (58, 58), (57, 59), (116, 58), (232, 232), (232, 174), (231, 175), (174, 175)),
    *((300, 41), (97, 203), (150, 31), (640, 480), (61, 999), (17, 23), (29, 290)),
)
_INTERNVL: Sizes = (
    *((1, 1), (7, 400), (400, 3), (33, 21), (56, 56), (57, 59), (112, 56), (112, 112), (80, 80), (79, 79), (158, 159), (56, 168)),
    *((300, 41), (97, 203), (150, 31), (640, 480), (61, 999), (29, 290), (5000, 40), (40, 80), (39, 80)),
)
_PIXTRAL: Sizes = (
    *((28, 28), (29, 27), (33, 61), (56, 56), (57, 59), (112, 56), (210, 210), (211, 209), (210, 30), (30, 210), (420, 300)),
    *((300, 41), (97, 203), (150, 31), (640, 480), (400, 77), (69, 99), (29, 150), (43, 43), (42, 70)),
)
SLICES: Sizes = (
    *((1, 1), (7, 400), (400, 7), (33, 21), (100, 100), (99, 101), (101, 100), (100, 200), (201, 100), (111, 99), (300, 300)),
    *((300, 41), (97, 203), (150, 31), (640, 480), (61, 999), (17, 23), (29, 290), (5000, 40), (299, 301), (173, 173), (84, 140)),
)
PICTURE_FAMILIES: Mapping[str, PictureFamily] = {
    "smolvlm": PictureFamily(smolvlm, _SMOLVLM, (without_model,)),
    "internvl": PictureFamily(internvl, _INTERNVL, (within_model,)),
    "lighton_ocr": PictureFamily(pixtral, _PIXTRAL, (without_model,)),
    "mistral3": PictureFamily(pixtral, _PIXTRAL, (within_model,)),
    "pixtral": PictureFamily(pixtral, _PIXTRAL, (within_model,)),
    "minicpmv4_6": PictureFamily(minicpm_v, SLICES, (without_model,)),
    "minicpmv4_7": PictureFamily(minicpm_v, SLICES, (without_model,)),
    "paddleocr_vl": PictureFamily(paddleocr_vl, _DOCUMENTS, (of_paddle,)),
    "llava": PictureFamily(llava, _LLAVA, (of_hub, of_hub_within_model)),
    "llava_next": PictureFamily(llava, _LLAVA, (of_hub, of_hub_within_model)),
    "llava_onevision": PictureFamily(llava_onevision, _ONE_VISION, (of_hub, of_hub_within_model)),
}
