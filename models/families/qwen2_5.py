"""What the two Qwen2.5 families share: the decoder's fields, image and video processors' rules, grids and segments.

The rules are those of transformers' Qwen2VLImageProcessor, Qwen2VLVideoProcessor and WhisperFeatureExtractor.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..architecture import (
    AudioConfig,
    AudioRules,
    DType,
    Item,
    ItemLike,
    LanguageConfig,
    MediaKind,
    ModelConfig,
    Segment,
    SpanLike,
    VisionConfig,
    VisionRules,
)
from ..errors import UnsupportedMediaError
from ..json_fields import CheckpointFiles, JsonObject

MAX_SEGMENT_PATCHES = 4096  # patch rows per video segment, unless one temporal patch has more
MAX_SEGMENT_MEL_FRAMES = 3000
MAX_ASPECT_RATIO = 200

# ------------------------------------------------------------------------------------------------------ configuration


def parse_language(text: JsonObject, default_theta: float, tie: bool) -> LanguageConfig:
    """The decoder out of ``text`` (nested or flat). Raises CheckpointError."""
    hidden = text.integer("hidden_size")
    heads = text.integer("num_attention_heads")
    kv_heads = text.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise text.error("num_key_value_heads", f"is {kv_heads}, which does not divide num_attention_heads ({heads})")
    head_dim = text.integer("head_dim", default=max(hidden // heads, 1))
    if head_dim % 2:
        raise text.error("head_dim", f"is {head_dim}, expected an even number")
    text.text("hidden_act", default="silu", choices=("silu",))
    if text.has("use_sliding_window") and text.boolean("use_sliding_window"):
        raise text.error("use_sliding_window", "is true; sliding-window attention is not supported")
    rope = text.object("rope_parameters", "rope_scaling")
    kind = rope.text("rope_type", "type", default="default")
    if kind not in ("default", "mrope"):
        raise rope.error("rope_type", f"is {kind!r}, expected 'default' or 'mrope'")
    section = rope.integers("mrope_section", default=(16, 24, 24), least=0)
    if len(section) != 3 or sum(section) != head_dim // 2:
        raise rope.error("mrope_section", f"is {list(section)}, expected three numbers that sum to head_dim / 2 = {head_dim // 2}")
    theta = rope if rope.has("rope_theta") else text
    return LanguageConfig(
        vocab_size=text.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=text.integer("intermediate_size"),
        num_layers=text.integer("num_hidden_layers", most=1000),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=text.number("rms_norm_eps", default=1e-6),
        rope_theta=theta.number("rope_theta", default=default_theta),
        mrope_section=section,
        tie_embeddings=tie,
    )


def parse_vision(vision: JsonObject, hidden_size: int, split_qkv: bool = False) -> VisionConfig:
    """The vision tower. Raises CheckpointError if it does not fit the decoder."""
    config = VisionConfig(
        depth=vision.integer("depth", "num_hidden_layers", most=1000),
        hidden_size=vision.integer("hidden_size"),
        intermediate_size=vision.integer("intermediate_size", default=3420),
        num_heads=vision.integer("num_heads", "num_attention_heads", default=16),
        in_channels=vision.integer("in_channels", "in_chans", default=3, most=3),
        patch_size=vision.integer("patch_size", "spatial_patch_size", default=14),
        temporal_patch_size=vision.integer("temporal_patch_size", default=2),
        merge_size=vision.integer("spatial_merge_size", default=2),
        window_size=vision.integer("window_size", default=112),
        out_hidden_size=vision.integer("out_hidden_size", default=hidden_size),
        full_attention_blocks=vision.integers("fullatt_block_indexes", default=(7, 15, 23, 31)),
        hidden_act=vision.text("hidden_act", default="silu"),
        split_qkv=split_qkv,
    )
    if config.out_hidden_size != hidden_size:
        raise vision.error("out_hidden_size", f"is {config.out_hidden_size}, expected the decoder's hidden_size ({hidden_size})")
    if config.hidden_size % (4 * config.num_heads):
        raise vision.error("hidden_size", f"is {config.hidden_size}, expected a multiple of 4 x num_heads ({config.num_heads})")
    if config.window_size < config.patch_size * config.merge_size:
        raise vision.error("window_size", f"is {config.window_size}, expected at least patch_size x spatial_merge_size")
    return config


def parse_audio(audio: JsonObject, hidden_size: int) -> AudioConfig:
    """The audio tower. Raises CheckpointError if it does not fit the decoder."""
    config = AudioConfig(
        num_mel_bins=audio.integer("num_mel_bins", default=128),
        num_layers=audio.integer("encoder_layers", "num_hidden_layers", default=32, most=1000),
        num_heads=audio.integer("encoder_attention_heads", default=20),
        ffn_size=audio.integer("encoder_ffn_dim", default=5120),
        hidden_size=audio.integer("d_model", default=1280),
        out_hidden_size=audio.integer("output_dim", default=hidden_size),
        max_source_positions=audio.integer("max_source_positions", default=1500),
        n_window=audio.integer("n_window", default=100),
        scale_embedding=audio.boolean("scale_embedding", default=False),
        activation=audio.text("activation_function", default="gelu"),
    )
    if config.out_hidden_size != hidden_size:
        raise audio.error("output_dim", f"is {config.out_hidden_size}, expected the decoder's hidden_size ({hidden_size})")
    if config.hidden_size % config.num_heads:
        raise audio.error("d_model", f"is {config.hidden_size}, expected a multiple of {config.num_heads} heads")
    if config.max_source_positions < config.n_window:
        problem = f"is {config.max_source_positions}, expected at least n_window ({config.n_window})"
        raise audio.error("max_source_positions", problem)
    return config


def parse_dtype(*places: JsonObject) -> DType:
    """The checkpoint's dtype from the first place that names one; half precision of either kind is computed in bfloat16."""
    for place in places:
        if place.has("dtype", "torch_dtype"):
            name = place.text("dtype", "torch_dtype", choices=("float32", "bfloat16", "float16"))
            return "float32" if name == "float32" else "bfloat16"
    return "bfloat16"


def parse_eos(files: CheckpointFiles, *places: JsonObject) -> tuple[int, ...]:
    """Ids that end a sequence, from generation_config.json or else from the configuration."""
    generation = files.optional("generation_config.json")
    for place in (generation, *places) if generation is not None else places:
        if place.has("eos_token_id"):
            return place.integers("eos_token_id")
    return ()


def parse_vision_rules(files: CheckpointFiles, vision: VisionConfig, video_falls_back: bool) -> VisionRules:
    """Rules of the image and video processors. ``video_falls_back``: without a video file, the image file counts for videos too."""
    nested = files.optional("processor_config.json")
    image = files.optional("preprocessor_config.json")
    video = files.optional("video_preprocessor_config.json") or (image if video_falls_back else None)
    if nested is not None and nested.has("image_processor"):
        image = nested.object("image_processor")
    if nested is not None and nested.has("video_processor"):
        video = nested.object("video_processor")
    empty = JsonObject({}, "defaults")
    image, video, base = image or empty, video or empty, VisionRules()
    size, video_size = image.object("size"), video.object("size")
    rules = VisionRules(
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.merge_size,
        min_pixels=_edge(image, size, "min_pixels", "shortest_edge", base.min_pixels),
        max_pixels=_edge(image, size, "max_pixels", "longest_edge", base.max_pixels),
        video_min_pixels=_edge(video, video_size, "min_pixels", "shortest_edge", base.video_min_pixels),
        video_max_pixels=_edge(video, video_size, "max_pixels", "longest_edge", base.video_max_pixels),
        video_total_pixels=_total_pixels(video, vision),
        fps=video.number("fps", default=base.fps),
        min_frames=video.integer("min_frames", default=base.min_frames),
        max_frames=video.integer("max_frames", default=base.max_frames),
        image_mean=image.colour("image_mean", default=base.image_mean),
        image_std=image.colour("image_std", default=base.image_std),
    )
    for name, expected in (("patch_size", vision.patch_size), ("merge_size", vision.merge_size)):
        if image.integer(name, default=expected) != expected:
            raise image.error(name, f"is {image.integer(name)}, but the vision tower has {expected}")
    return rules


def _edge(processor: JsonObject, size: JsonObject, old: str, new: str, default: int) -> int:
    if processor.has(old):
        return processor.integer(old)
    return size.integer(new, old, default=default)


def _total_pixels(video: JsonObject, vision: VisionConfig) -> int:
    if not (video.has("cap_pixels_per_frame") and video.boolean("cap_pixels_per_frame")):
        return 0
    factor = vision.patch_size * vision.merge_size
    return int(video.integer("max_video_tokens", default=128000) * factor * factor * 0.9)


def parse_audio_rules(files: CheckpointFiles, audio: AudioConfig) -> AudioRules:
    """Rules of the feature extractor. Raises CheckpointError if it does not fit the audio tower."""
    nested = files.optional("processor_config.json")
    extractor = files.optional("preprocessor_config.json") or JsonObject({}, "defaults")
    if nested is not None and nested.has("feature_extractor"):
        extractor = nested.object("feature_extractor")
    if extractor.integer("feature_size", default=audio.num_mel_bins) != audio.num_mel_bins:
        problem = f"is {extractor.integer('feature_size')}, but the audio tower has {audio.num_mel_bins}"
        raise extractor.error("feature_size", problem)
    return AudioRules(
        sample_rate=extractor.integer("sampling_rate", default=16000),
        n_fft=extractor.integer("n_fft", default=400),
        hop=extractor.integer("hop_length", default=160),
        num_mel_bins=audio.num_mel_bins,
        window_frames=2 * audio.n_window,
        max_s=extractor.number("chunk_length", default=300),
    )


# --------------------------------------------------------------------------------------------------------------- grids


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size to resize to: multiples of ``factor``, area within the limits, aspect ratio kept as well as that allows.

    Raises UnsupportedMediaError for an empty picture or an aspect ratio above 200.
    """
    if min(height, width) < 1:
        raise UnsupportedMediaError(f"picture of {width}x{height} pixels is empty")
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise UnsupportedMediaError(f"aspect ratio of {width}x{height} is {ratio:.0f}, above the limit of {MAX_ASPECT_RATIO}")
    h_bar, w_bar = round(height / factor) * factor, round(width / factor) * factor
    if h_bar * w_bar > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        h_bar = max(factor, math.floor(height / beta / factor) * factor)
        w_bar = max(factor, math.floor(width / beta / factor) * factor)
    elif h_bar * w_bar < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        h_bar = math.ceil(height * beta / factor) * factor
        w_bar = math.ceil(width * beta / factor) * factor
    return h_bar, w_bar


def vision_rules(config: ModelConfig, kind: MediaKind) -> VisionRules:
    """The model's vision rules. Raises UnsupportedMediaError if it has no vision tower."""
    if config.vision_rules is None:
        raise UnsupportedMediaError(f"this model takes no {kind}")
    return config.vision_rules


def image_item(config: ModelConfig, height: int, width: int) -> Item:
    rules = vision_rules(config, "image")
    factor = rules.patch_size * rules.merge_size
    h, w = smart_resize(height, width, factor, rules.min_pixels, rules.max_pixels)
    grid = (1, h // rules.patch_size, w // rules.patch_size)
    segment = _vision_segment(rules, grid)
    return Item(kind="image", grid=grid, num_tokens=segment.num_tokens, segments=(segment,))


def sample_frames(config: ModelConfig, total_frames: int, fps: float) -> NDArray[np.int64]:
    rules = vision_rules(config, "video")
    if total_frames < 1:
        raise UnsupportedMediaError("video has no frames")
    if not 0 < fps < math.inf:
        raise UnsupportedMediaError(f"video has a frame rate of {fps}")
    patch = rules.temporal_patch_size
    most = math.floor(min(rules.max_frames, total_frames) / patch) * patch
    wanted = min(max(total_frames / fps * rules.fps, rules.min_frames), most, total_frames)
    wanted = math.floor(wanted / patch) * patch
    if wanted == 0:
        return np.arange(min(total_frames, patch), dtype=np.int64)
    # torch.arange rounds in its own way (60 frames, 26 wanted: 27 come out), so transformers' frames come from it alone.
    import torch

    return torch.arange(0, total_frames, total_frames / wanted).int().numpy().astype(np.int64)


def video_grid(rules: VisionRules, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
    """(t, h, w) in patches of so many sampled frames; an incomplete last temporal patch repeats the last frame."""
    if num_frames < 1:
        raise UnsupportedMediaError("video has no frames")
    factor = rules.patch_size * rules.merge_size
    max_pixels = rules.video_max_pixels
    if rules.video_total_pixels:
        share = rules.video_total_pixels * rules.temporal_patch_size // num_frames
        max_pixels = max(min(max_pixels, share), int(rules.video_min_pixels * 1.05))
    h, w = smart_resize(height, width, factor, rules.video_min_pixels, max_pixels)
    return -(-num_frames // rules.temporal_patch_size), h // rules.patch_size, w // rules.patch_size


def video_item_of(rules: VisionRules, grid: tuple[int, int, int], second_per_grid_s: float) -> Item:
    """A video of this grid, in segments of whole temporal patches: attention never crosses a temporal patch (FC5)."""
    t, h, w = grid
    per_segment = max(1, MAX_SEGMENT_PATCHES // (h * w))
    segments = tuple(_vision_segment(rules, (min(per_segment, t - at), h, w)) for at in range(0, t, per_segment))
    num_tokens = sum(segment.num_tokens for segment in segments)
    return Item(kind="video", grid=grid, num_tokens=num_tokens, segments=segments, second_per_grid_s=second_per_grid_s)


def _vision_segment(rules: VisionRules, grid: tuple[int, int, int]) -> Segment:
    num_rows = math.prod(grid)
    return Segment(
        grid=grid, num_rows=num_rows, row_bytes=rules.row_bytes, num_tokens=num_rows // rules.merge_size**2
    )


def audio_tokens(num_frames: int) -> int:
    """Tokens of so many mel frames: a stride-2 convolution, then pairs averaged."""
    return (((num_frames - 1) // 2 + 1) - 2) // 2 + 1


def audio_item(config: ModelConfig, num_frames: int) -> Item:
    """A clip in segments of whole tower windows: neither convolution nor attention crosses a window.

    A tail of one or two frames yields no token and stays with the segment before it.
    """
    rules = config.audio_rules
    if rules is None:
        raise UnsupportedMediaError("this model takes no audio")
    if num_frames < 1 or audio_tokens(num_frames) < 1:
        raise UnsupportedMediaError(f"audio of {max(num_frames, 0)} mel frames is too short, at least 3 are needed")
    unit = math.lcm(rules.window_frames, 4)  # pairs of frames after the convolution must not cross a border either
    per_segment = max(1, MAX_SEGMENT_MEL_FRAMES // unit) * unit
    lengths = [min(per_segment, num_frames - at) for at in range(0, num_frames, per_segment)]
    if len(lengths) > 1 and audio_tokens(lengths[-1]) < 1:
        lengths[-2:] = [lengths[-2] + lengths[-1]]
    segments = tuple(
        Segment(grid=(n, 0, 0), num_rows=n, row_bytes=rules.row_bytes, num_tokens=audio_tokens(n)) for n in lengths
    )
    return Item(kind="audio", grid=(num_frames, 0, 0), num_tokens=audio_tokens(num_frames), segments=segments)


# ----------------------------------------------------------------------------------------------------------- positions


def fill_positions(
    num_tokens: int,
    spans: Sequence[SpanLike],
    merge_size: int,
    temporal: Callable[[ItemLike], NDArray[np.int64]],
    advance: Callable[[ItemLike, NDArray[np.int64]], int],
) -> tuple[NDArray[np.int64], int]:
    """Walk over a prompt. ``temporal(item)`` gives one temporal offset per temporal patch, ``advance(item, temporal)`` how far
    the position moves over a medium. Text and audio move by one per token on all axes."""
    positions = np.empty((3, num_tokens), np.int64)
    index = position = 0
    for span in spans:
        if span.shape.kind == "audio":
            continue
        positions[:, index : span.start] = np.arange(position, position + span.start - index)
        position += span.start - index
        _, h, w = span.shape.grid
        offsets = temporal(span.shape)
        index = span.start + span.shape.num_tokens
        target = positions[:, span.start : index].reshape(3, -1, h // merge_size, w // merge_size)
        target[0] = offsets[:, None, None] + position
        target[1] = np.arange(h // merge_size)[:, None] + position
        target[2] = np.arange(w // merge_size) + position
        position += advance(span.shape, offsets)
    positions[:, index:] = np.arange(position, position + num_tokens - index)
    return positions, int(positions.max()) + 1 - num_tokens if num_tokens else 0


