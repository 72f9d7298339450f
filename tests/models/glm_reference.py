"""What transformers makes of GLM's pictures and videos in one prompt."""

from types import SimpleNamespace
from typing import Any

import torch

from mmrt.tests.settings import ImportedLater

glm4v: Any = ImportedLater("transformers.models.glm4v.processing_glm4v")
glm46v: Any = ImportedLater("transformers.models.glm46v.processing_glm46v")


def text_of_glm_clip(family: str, grid: list[int], metadata: Any) -> str:
    """What the processor puts in place of a video; it wants torchvision to be made, this part of it does not. ``metadata``: its ``fps``
    and the ``timestamps`` of its sampled frames."""
    processor = glm4v.Glm4vProcessor if family == "glm4v" else glm46v.Glm46VProcessor
    fields = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2), image_token="<|image|>")
    fields.replace_frame_token_id = lambda *args, **named: processor.replace_frame_token_id(fields, *args, **named)
    text: str = processor.replace_video_token(fields, {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}, 0)
    return text


def embedded(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a forward with the rows of pictures and videos in their places. transformers' own forward takes pictures or videos:
    it counts the placeholders of both together. ``model``: without its head; ``inputs`` have ``position_ids``."""
    embeds, types = model.get_input_embeddings()(inputs["input_ids"]), inputs["mm_token_type_ids"]
    for type, kind, values, get in (
        (1, "image", "pixel_values", model.get_image_features),
        (2, "video", "pixel_values_videos", model.get_video_features),
    ):
        if values in inputs:
            embeds[types == type] = torch.cat(get(inputs[values], inputs[f"{kind}_grid_thw"], return_dict=True).pooler_output)
    return {"inputs_embeds": embeds, "position_ids": inputs["position_ids"]}
