"""PaddleOCR-VL: text and pictures of documents, at any size. As transformers' ``paddleocr_vl``: the decoder of ERNIE 4.5 with three
position axes, and SigLIP with interpolated positions and rotations."""

from collections.abc import Mapping

from msgspec.structs import replace

from ....schema.media import ItemShape
from ...architecture import LanguageConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...checkpoint.weight_specs import TensorSpec
from ...errors import UnsupportedMediaError
from ...media_config import VisionConfig, VisionRules
from ..family import CheckpointRecipe, made_recipes
from ..fields import parse_attention, parse_decoder
from ..qwen2_5 import fields, media, seeing, tensors
from ..text.ropes import expect_whole_heads

_PLACEHOLDER = 100295  # of a picture, where the file does not say
_ERNIE = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
_SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
_RULES = VisionRules(min_pixels=384 * 384, max_pixels=1536 * 1536, max_frames=0)
_NAMES = {
    ".vision_model.embeddings.patch_embedding.": ".patch_embed.proj.",
    ".vision_model.embeddings.position_embedding.": ".pos_embed.",
    ".vision_model.encoder.layers.": ".blocks.",
    ".vision_model.post_layernorm.": ".merger.ln_q.",
    ".layer_norm1.": ".norm1.",
    ".layer_norm2.": ".norm2.",
    ".self_attn.q_proj.": ".attn.q.",
    ".self_attn.k_proj.": ".attn.k.",
    ".self_attn.v_proj.": ".attn.v.",
    ".self_attn.out_proj.": ".attn.proj.",
    ".mlp.fc1.": ".mlp.up_proj.",
    ".mlp.fc2.": ".mlp.down_proj.",
}
_PROJECTOR = {
    "mlp_AR.pre_norm.": "vision.merger.pre_norm.",
    "mlp_AR.linear_1.": "vision.merger.mlp.0.",
    "mlp_AR.linear_2.": "vision.merger.mlp.2.",
}

audio_item, sample_frames = media.audio_item, media.sample_frames
build_towers, video_item, video_with_sound = seeing.build_towers, seeing.video_item, seeing.video_with_sound
positions = seeing.positions_by_patch


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json, nested (text_config) or flat. Raises CheckpointError."""
    root = files.required("config.json")

    def parse_text(text: JsonObject, is_any_tied: bool) -> LanguageConfig:
        return _parse_text(text, is_any_tied or root.boolean("tie_word_embeddings", default=True))

    config = seeing.parse_config(files, "paddleocr_vl", parse_text, _parse_tower, _parse_rules, _PLACEHOLDER)
    text = root.object("text_config") if root.has("text_config") else root
    return replace(config, max_context=text.integer("max_position_embeddings", default=131072))


def _parse_text(text: JsonObject, tie: bool) -> LanguageConfig:
    text = text.with_defaults(_ERNIE)
    if text.boolean("use_bias", default=False):
        raise text.error("use_bias", "is true, which is not supported")
    mixer = parse_attention(text, default_head_dim=128, default_kv_heads=2)
    expect_whole_heads(text)
    rope = fields.parse_sections(text, mixer.head_dim // 2, default_theta=5e5, default_section=(16, 24, 24))
    return parse_decoder(text, replace(mixer, bias=False, output_bias=False), rope, tie)


def _parse_tower(vision: JsonObject, hidden_size: int) -> VisionConfig:
    """The files may name two frames for a patch, which no picture has."""
    vision = vision.with_defaults(_SIGLIP)
    vision.text("hidden_act", default="gelu_pytorch_tanh", choices=("gelu_pytorch_tanh",))
    config = fields.parse_tower(vision.with_values({"out_hidden_size": hidden_size}), hidden_size, vision.integer("intermediate_size"))
    return replace(
        config,
        temporal_patch_size=1,
        norm="layer",
        feed_forward="gelu_tanh",
        patch_bias=True,
        position_side=vision.integer("image_size", default=384, least=config.patch_size) // config.patch_size,
        positions="bilinear_edges",
        split_qkv=True,
        norm_eps=vision.number("layer_norm_eps", default=1e-6),
        merger_norm=True,
    )


def _parse_rules(files: CheckpointFiles, vision: VisionConfig) -> VisionRules:
    image, _, _ = fields.processors(files, video_falls_back=False)
    return fields.image_rules(image, vision, _RULES)


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """Decoder and tower; a patch is of one frame."""
    return [_of_one_frame(spec) if spec.name == "vision.patch_embed.proj.weight" else spec for spec in tensors.tensor_specs(config)]


def _of_one_frame(spec: TensorSpec) -> TensorSpec:
    shape = (*spec.shape[:2], *spec.shape[3:])
    return spec._replace(shape=shape, sources=tuple(source._replace(shape=shape) for source in spec.sources))


def canonical_name(name: str) -> str:
    """See ``Family``."""
    name = name.replace("model.projector.", "mlp_AR.", 1)
    if name.startswith("mlp_AR."):
        return tensors.placed(name, _PROJECTOR)
    return tensors.renamed(tensors.canonical_name(name), _NAMES)


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    name = tensors.placed(name, {ours: theirs for theirs, ours in _PROJECTOR.items()})
    return tensors.checkpoint_name(tensors.renamed(name, {ours: theirs for theirs, ours in _NAMES.items()}))


def image_item(config: ModelConfig, height: int, width: int) -> ItemShape:
    """A side below a token's is first enlarged to it."""
    rules = media.vision_rules(config, "image")
    if min(height, width) < 1:
        raise UnsupportedMediaError(f"picture of {width}x{height} pixels is empty")
    factor = rules.patch_size * rules.merge_size
    if height < factor:
        height, width = factor, round(width * factor / height)
    if width < factor:
        height, width = round(height * factor / width), factor
    return media.image_item_of(rules, media.smart_resize(height, width, factor, rules.min_pixels, rules.max_pixels))


def recipes() -> Mapping[str, CheckpointRecipe]:
    return made_recipes(__package__)
