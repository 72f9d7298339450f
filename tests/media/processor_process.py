"""In a process of its own: transformers' image and video processors, Qwen2-VL's or those of a checkpoint.

They need torchvision, which has no build for CPU torch. Where it is there all the same, its missing operators are registered; else
this stands in for the five functions that the processors call (``resize`` as torchvision does it for uint8 tensors).
``processor_reference`` calls ``main`` in forks of a process that has imported this.
"""

import enum
import importlib.machinery
import importlib.util
import io
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch
from PIL import Image


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BOX = "box"
    BILINEAR = "bilinear"
    HAMMING = "hamming"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def resize(image, size, interpolation, antialias):
    assert image.dtype == torch.uint8 and interpolation in (InterpolationMode.BICUBIC, InterpolationMode.BILINEAR)
    flat = image.reshape(-1, *image.shape[-3:])
    resized = torch.nn.functional.interpolate(flat, list(size), mode=interpolation.value, antialias=antialias)
    return resized.reshape(*image.shape[:-2], *size)


def normalize(image, mean, std, inplace=False):
    mean, std = (torch.as_tensor(values, dtype=image.dtype).view(-1, 1, 1) for values in (mean, std))
    return image.sub(mean).div_(std)


def grayscale_to_rgb(image):
    return image.expand(*image.shape[:-3], 3, *image.shape[-2:]) if image.shape[-3] == 1 else image


def stub_torchvision() -> None:
    functions = {"resize": resize, "normalize": normalize, "grayscale_to_rgb": grayscale_to_rgb}
    contents = {
        "torchvision": {"__version__": "0.28.0", "__file__": __file__},
        "torchvision.io": {},
        "torchvision.transforms": {"InterpolationMode": InterpolationMode},
        "torchvision.transforms.functional": {"pil_to_tensor": None},
        "torchvision.transforms.v2": {},
        "torchvision.transforms.v2.functional": {"InterpolationMode": InterpolationMode, **functions},
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(attributes)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def register_missing_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


if importlib.util.find_spec("torchvision") is None:
    stub_torchvision()
else:
    library = register_missing_operators()  # operators live as long as the library

from transformers.models.glm4v.image_processing_glm4v import Glm4vImageProcessor  # noqa: E402 behind the stub
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor  # noqa: E402
from transformers.models.glm46v.image_processing_glm46v import Glm46VImageProcessor  # noqa: E402
from transformers.models.glm46v.video_processing_glm46v import Glm46VVideoProcessor  # noqa: E402
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor  # noqa: E402
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor  # noqa: E402
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor  # noqa: E402

GLM4V, GLM46V = (Glm4vImageProcessor, Glm4vVideoProcessor), (Glm46VImageProcessor, Glm46VVideoProcessor)


def processors(checkpoint: str | None):
    """The image and the video processor."""
    options = {"cap_pixels_per_frame": False, "do_sample_frames": False}
    if checkpoint is None:
        return Qwen2VLImageProcessor(), Qwen2VLVideoProcessor(**options)
    model_type = json.loads((Path(checkpoint) / "config.json").read_bytes())["model_type"]
    if model_type.startswith("glm"):
        of_image, of_video = GLM4V if model_type == "glm4v" else GLM46V
        return of_image.from_pretrained(checkpoint), of_video.from_pretrained(checkpoint, do_sample_frames=False)
    of_video = Qwen3VLVideoProcessor if model_type.startswith("qwen3") else Qwen2VLVideoProcessor
    return Qwen2VLImageProcessor.from_pretrained(checkpoint), of_video.from_pretrained(checkpoint, **options)


def main(source: str, target: str, checkpoint: str | None = None) -> None:
    """Arrays of ``source``: image* [height, width, 3] or [bytes] of a file that Pillow opens, and video* [frames, height, width, 3]."""
    torch.set_num_threads(1)
    images, videos = processors(checkpoint)
    results = {}
    with np.load(source) as arrays:
        for name, array in arrays.items():
            if name.startswith("image"):
                picture = Image.open(io.BytesIO(array.tobytes())) if array.ndim == 1 else Image.fromarray(array)
                output = images(images=[picture], return_tensors="pt")
                results[name], grid = output["pixel_values"].numpy(), output["image_grid_thw"]
            else:
                frames = torch.from_numpy(array).permute(0, 3, 1, 2)
                output = videos(videos=[frames], return_tensors="pt")
                results[name], grid = output["pixel_values_videos"].numpy(), output["video_grid_thw"]
            results[f"{name}_grid"] = grid[0].numpy()
    np.savez(target, **results)
