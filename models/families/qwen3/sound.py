"""The sound of Qwen3-ASR: fields of the tower and its processor, tensors, and the segments of a clip.

A *chunk* of mel frames goes through three convolutions of stride 2 by itself; a *window* is what rows of the tower see of each other.
"""

from collections.abc import Iterator

import msgspec

from ....schema.media import ItemShape, SegmentShape
from ...architecture import ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...checkpoint.weight_specs import TensorSpec, linear, same
from ...errors import UnsupportedMediaError
from ...media_config import AudioConfig, AudioRules
from ..qwen2_5.fields import feature_extractor, parse_audio, parse_audio_rules
from ..qwen2_5.tensors import encoder_specs

STRIDES = 3
_WINDOW = 800


def parse_tower(audio: JsonObject, hidden_size: int, base: AudioConfig) -> AudioConfig:
    """The tower; ``base`` where the file does not say. Its rows have the positions of their chunk. Raises CheckpointError as
    ``parse_audio``."""
    config = parse_audio(audio, hidden_size, base)
    channels = audio.integer("downsample_hidden_size", default=base.conv_channels)
    return msgspec.structs.replace(config, conv_channels=channels, max_source_positions=halved(2 * config.n_window))


def parse_rules(files: CheckpointFiles, audio: JsonObject, config: AudioConfig) -> AudioRules:
    """Rules of the feature extractor. Raises CheckpointError if windows do not hold whole chunks."""
    window, chunk = audio.integer("n_window_infer", default=_WINDOW), 2 * config.n_window
    if window % chunk:
        raise audio.error("n_window_infer", f"is {window}, expected a multiple of 2 x n_window ({chunk})")
    return msgspec.structs.replace(
        parse_audio_rules(files, config),
        window_frames=window,
        max_s=0,
        min_samples=feature_extractor(files, config).integer("min_length", default=8000, least=0),
        has_mirrored_end=True,
    )


def halved(num_frames: int) -> int:
    """Rows that the convolutions make of so many mel frames of one chunk."""
    for _ in range(STRIDES):
        num_frames = (num_frames + 1) // 2
    return num_frames


def num_tokens(audio: AudioConfig, num_frames: int) -> int:
    """Tokens of a clip of so many mel frames."""
    num_chunks, rest = divmod(num_frames, 2 * audio.n_window)
    return num_chunks * halved(2 * audio.n_window) + halved(rest)


def audio_item(config: ModelConfig, num_frames: int) -> ItemShape:
    """A segment for each window. See ``Family``."""
    rules, audio = config.audio_rules, config.audio
    assert rules is not None and audio is not None
    if num_frames < 1:
        raise UnsupportedMediaError("audio of 0 mel frames is too short, at least 1 is needed")
    lengths = [min(rules.window_frames, num_frames - at) for at in range(0, num_frames, rules.window_frames)]
    segments = [SegmentShape("audio", (n, 0, 0), n, rules.row_bytes, num_tokens(audio, n)) for n in lengths]
    return ItemShape(kind="audio", grid=(num_frames, 0, 0), num_tokens=num_tokens(audio, num_frames), segments=segments)


def tower_specs(audio: AudioConfig) -> Iterator[TensorSpec]:
    """The tower's tensors, the projection to the decoder's width included."""
    hidden, channels = audio.hidden_size, audio.conv_channels
    for number in range(1, STRIDES + 1):
        yield same(f"audio.conv2d{number}.weight", channels, channels if number > 1 else 1, 3, 3)
        yield same(f"audio.conv2d{number}.bias", channels)
    yield from linear("audio.conv_out", hidden, channels * halved(audio.num_mel_bins), bias=False)
    yield from encoder_specs(audio, has_key_bias=True)
    yield from linear("audio.proj1", hidden, hidden)
    yield from linear("audio.proj2", audio.out_hidden_size, hidden)
