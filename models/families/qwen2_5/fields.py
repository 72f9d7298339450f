"""Checkpoint reading shared by Qwen's families that see and hear: the fields of decoder, towers and processors."""

import math
from typing import Any, Literal

import msgspec

from ...architecture import LanguageConfig, RopeConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...media_config import AudioConfig, AudioRules, VisionConfig, VisionRules
from ..fields import max_positions, parse_attention, parse_decoder
from ..text.ropes import expect_whole_heads, parse_turns, rope_fields

_STEPS = ("do_resize", "do_rescale", "do_normalize")  # of processors of pixels
_FILTERS: dict[float, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}  # as Pillow numbers them
_BICUBIC = 3


def parse_language(text: JsonObject, tie: bool) -> LanguageConfig:
    """The decoder of Qwen2 and Qwen2.5 from ``text`` (nested or flat). Raises CheckpointError."""
    mixer = parse_attention(text)
    if text.has("use_sliding_window") and text.boolean("use_sliding_window"):
        raise text.error("use_sliding_window", "is true; sliding-window attention is not supported")
    expect_whole_heads(text)
    rope = parse_sections(text, mixer.head_dim // 2, default_theta=1e6, default_section=(16, 24, 24))
    return parse_decoder(text, msgspec.structs.replace(mixer, bias=True, output_bias=False), rope, tie)


def parse_sections(text: JsonObject, pairs: int, default_theta: float, default_section: tuple[int, ...]) -> RopeConfig:
    """Each axis has neighbouring ones of the ``pairs`` of a head that turn. Raises CheckpointError."""
    rope = rope_fields(text)
    section = rope.integers("mrope_section", default=default_section, least=0)
    if len(section) != 3 or sum(section) != pairs:
        raise rope.error("mrope_section", f"is {list(section)}, expected three numbers that sum to the {pairs} pairs that turn")
    axes = tuple(axis for axis, count in enumerate(section) for _ in range(count))
    return msgspec.structs.replace(parse_turns(text, 2 * pairs, max_positions(text), default_theta), axes=axes)


def parse_vision(vision: JsonObject, hidden_size: int, split_qkv: bool = False) -> VisionConfig:
    """Qwen2.5's vision tower. Raises CheckpointError if it does not fit the decoder, or has an activation other than SiLU."""
    vision.text("hidden_act", default="silu", choices=("silu",))
    config = msgspec.structs.replace(
        parse_tower(vision, hidden_size, vision.integer("intermediate_size", default=3420)),
        window_size=vision.integer("window_size", default=112),
        full_attention_blocks=vision.integers("fullatt_block_indexes", default=(7, 15, 23, 31)),
        split_qkv=split_qkv,
    )
    if config.window_size < config.patch_size * config.merge_size:
        raise vision.error("window_size", f"is {config.window_size}, expected at least patch_size x spatial_merge_size")
    return config


def parse_tower(
    vision: JsonObject, hidden_size: int, inner: int, width: str = "hidden_size", output: str = "out_hidden_size", patch: int = 14
) -> VisionConfig:
    """The sizes that all of Qwen's vision towers have. ``inner``: of their feed-forwards; ``width``, ``output``: the names
    of the tower's width and of that of its rows; ``patch``: its patches' side if the file has none. Raises CheckpointError if they do
    not fit the decoder's ``hidden_size``."""
    rope = vision.object("rope_parameters")
    if (theta := rope.number("rope_theta", default=10000.0)) != 10000.0:
        raise rope.error("rope_theta", f"is {theta:g}, expected 10000 in a tower")
    config = VisionConfig(
        depth=vision.integer("depth", "num_hidden_layers", most=1000),
        hidden_size=vision.integer(width),
        intermediate_size=inner,
        num_heads=vision.integer("num_heads", "num_attention_heads", default=16),
        in_channels=vision.integer("in_channels", "in_chans", default=3, least=3, most=3),
        patch_size=vision.integer("patch_size", "spatial_patch_size", default=patch),
        temporal_patch_size=vision.integer("temporal_patch_size", default=2),
        merge_size=vision.integer("spatial_merge_size", default=2),
        out_hidden_size=vision.integer(output, default=hidden_size),
    )
    if config.out_hidden_size != hidden_size:
        raise vision.error(output, f"is {config.out_hidden_size}, expected the decoder's hidden_size ({hidden_size})")
    if config.hidden_size % (4 * config.num_heads):
        raise vision.error(width, f"is {config.hidden_size}, expected a multiple of 4 x num_heads ({config.num_heads})")
    return config


_OMNI = AudioConfig(
    num_mel_bins=128,
    num_layers=32,
    num_heads=20,
    ffn_size=5120,
    hidden_size=1280,
    out_hidden_size=0,
    max_source_positions=1500,
    n_window=100,
)


def parse_audio(audio: JsonObject, hidden_size: int, base: AudioConfig = _OMNI) -> AudioConfig:
    """A sound tower; ``base`` where the file does not say. Raises CheckpointError if it does not fit the decoder, or does not have what
    its layers need."""
    audio.text("activation_function", default="gelu", choices=("gelu",))
    config = AudioConfig(
        num_mel_bins=audio.integer("num_mel_bins", default=base.num_mel_bins),
        num_layers=audio.integer("encoder_layers", "num_hidden_layers", default=base.num_layers, most=1000),
        num_heads=audio.integer("encoder_attention_heads", "num_attention_heads", default=base.num_heads),
        ffn_size=audio.integer("encoder_ffn_dim", "intermediate_size", default=base.ffn_size),
        hidden_size=audio.integer("d_model", "hidden_size", default=base.hidden_size),
        out_hidden_size=audio.integer("output_dim", default=hidden_size),
        max_source_positions=audio.integer("max_source_positions", default=base.max_source_positions),
        n_window=audio.integer("n_window", default=base.n_window),
    )
    if config.out_hidden_size != hidden_size:
        raise audio.error("output_dim", f"is {config.out_hidden_size}, expected the decoder's hidden_size ({hidden_size})")
    if config.hidden_size % config.num_heads:
        raise audio.error("d_model", f"is {config.hidden_size}, expected a multiple of {config.num_heads} heads")
    if config.hidden_size < 4 or config.hidden_size % 2:
        raise audio.error("d_model", f"is {config.hidden_size}, expected an even number of at least 4: half are sines, half cosines")
    if config.max_source_positions < config.n_window:
        problem = f"is {config.max_source_positions}, expected at least n_window ({config.n_window})"
        raise audio.error("max_source_positions", problem)
    return config


def parse_vision_rules(
    files: CheckpointFiles, vision: VisionConfig, video_falls_back: bool, base: VisionRules | None = None
) -> VisionRules:
    """Rules of Qwen2's and Qwen2.5's image and video processors; ``video_falls_back`` as in ``processors``, ``base``: where the files
    do not say."""
    image, video, sized = processors(files, video_falls_back)
    base, video_size = base or VisionRules(), sized.object("size")
    rules = image_rules(image, vision, base)
    check_steps(video, vision)
    return msgspec.structs.replace(
        rules,
        video_min_pixels=_edge(sized, video_size, "min_pixels", "shortest_edge", base.video_min_pixels),
        video_max_pixels=_edge(sized, video_size, "max_pixels", "longest_edge", base.video_max_pixels),
        video_resample=resample_of(video),
        video_total_pixels=_total_pixels(video, vision),
        **sampling(video),
    )


def processors(files: CheckpointFiles, video_falls_back: bool) -> tuple[JsonObject, JsonObject, JsonObject]:
    """The fields of the image processor, those of the video processor, and where the latter's sizes are.

    ``video_falls_back``: without a video file, the image file also applies to videos. If False, transformers' processor sets the
    sizes of videos itself, whatever processor_config.json says; a video file still applies here.
    """
    nested = files.optional("processor_config.json")
    image = files.optional("preprocessor_config.json")
    video = files.optional("video_preprocessor_config.json") or (image if video_falls_back else None)
    if nested is not None and nested.has("image_processor"):
        image = nested.object("image_processor")
    sized = video
    if nested is not None and nested.has("video_processor"):
        video = nested.object("video_processor")
        sized = video if video_falls_back else sized
    empty = JsonObject({}, "defaults")
    return image or empty, video or empty, sized or empty


def image_rules(image: JsonObject, vision: VisionConfig, base: VisionRules) -> VisionRules:
    """``base`` with the tower's sizes and the image processor's bounds and colours. Raises CheckpointError if it cuts other patches
    than the tower takes."""
    size = image.object("size")
    rules = msgspec.structs.replace(
        base,
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.merge_size,
        min_pixels=_edge(image, size, "min_pixels", "shortest_edge", base.min_pixels),
        max_pixels=_edge(image, size, "max_pixels", "longest_edge", base.max_pixels),
        image_mean=image.colour("image_mean", default=base.image_mean),
        image_std=image.colour("image_std", default=base.image_std),
        resample=resample_of(image),
    )
    check_steps(image, vision)
    return rules


def resample_of(processor: JsonObject) -> Literal["bilinear", "bicubic"]:
    """The filter by which an image or video processor resizes (FC11). Raises CheckpointError for one that torchvision has not got for
    tensors, or that makes nothing smooth."""
    if (found := processor.number("resample", default=_BICUBIC, least=0)) not in _FILTERS:
        known = " or ".join(f"{number} ({name})" for number, name in _FILTERS.items())
        raise processor.error("resample", f"is {found:g}, expected {known}")
    return _FILTERS[found]


def check_steps(processor: JsonObject, vision: VisionConfig) -> None:
    """Raise CheckpointError for an image or video processor that makes other rows of pixels than ours, or other patches than the tower
    takes."""
    for name in _STEPS:
        if not processor.boolean(name, default=True):
            raise processor.error(name, "is false, which is not supported")
    if not math.isclose(found := processor.number("rescale_factor", default=1 / 255, least=0), 1 / 255, rel_tol=1e-6):
        raise processor.error("rescale_factor", f"is {found:g}, expected {1 / 255:g}")
    for name, size in (
        ("patch_size", vision.patch_size),
        ("merge_size", vision.merge_size),
        ("temporal_patch_size", vision.temporal_patch_size),
    ):
        if (side := processor.integer(name, default=size)) != size:
            raise processor.error(name, f"is {side}, but the vision tower has {size}")


def sampling(video: JsonObject) -> dict[str, Any]:
    """The rules by which frames are taken. Raises CheckpointError if it is always the same number of them."""
    base = VisionRules()
    if video.has("num_frames"):
        raise video.error("num_frames", f"is {video.integer('num_frames')}; only frames by time (fps) are supported")
    return {
        "fps": video.number("fps", default=base.fps),
        "min_frames": video.integer("min_frames", default=base.min_frames),
        "max_frames": video.integer("max_frames", default=base.max_frames),
    }


def _edge(processor: JsonObject, size: JsonObject, old: str, new: str, default: int) -> int:
    if processor.has(old):
        return processor.integer(old)
    return size.integer(new, old, default=default)


def _total_pixels(video: JsonObject, vision: VisionConfig) -> int:
    if not (video.has("cap_pixels_per_frame") and video.boolean("cap_pixels_per_frame")):
        return 0
    factor = vision.patch_size * vision.merge_size
    return int(video.integer("max_video_tokens", default=128000) * factor * factor * 0.9)


def feature_extractor(files: CheckpointFiles, audio: AudioConfig) -> JsonObject:
    """The fields of the feature extractor. Raises CheckpointError if it does not fit the audio tower."""
    nested = files.optional("processor_config.json")
    extractor = files.optional("preprocessor_config.json") or JsonObject({}, "defaults")
    if nested is not None and nested.has("feature_extractor"):
        extractor = nested.object("feature_extractor")
    if extractor.integer("feature_size", default=audio.num_mel_bins) != audio.num_mel_bins:
        problem = f"is {extractor.integer('feature_size')}, but the audio tower has {audio.num_mel_bins}"
        raise extractor.error("feature_size", problem)
    return extractor


def parse_audio_rules(files: CheckpointFiles, audio: AudioConfig) -> AudioRules:
    """Rules of Whisper's feature extractor. Raises CheckpointError if it does not fit the audio tower."""
    extractor = feature_extractor(files, audio)
    return AudioRules(
        sample_rate=extractor.integer("sampling_rate", default=16000),
        n_fft=extractor.integer("n_fft", default=400),
        hop=extractor.integer("hop_length", default=160),
        num_mel_bins=audio.num_mel_bins,
        window_frames=2 * audio.n_window,
        max_s=extractor.number("chunk_length", default=300),
    )
