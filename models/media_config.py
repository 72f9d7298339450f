"""The media of a model as plain numbers: its towers, and the rules from pixels and sound to their rows.

``families`` reads them from a checkpoint's JSON files; ``architecture.ModelConfig`` holds them. No torch; msgspec can encode it all.
"""

from typing import Literal

import msgspec


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A vision tower, as Qwen's and GLM's. A family whose tower has more fields adds them in a subclass."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    out_hidden_size: int
    window_size: int = 0  # pixels at a side of the windows that attention stays in; 0: it sees whole frames
    full_attention_blocks: tuple[int, ...] = ()  # that see whole frames although there are windows
    norm: Literal["rms", "layer"] = "rms"  # of blocks and merger; LayerNorms have biases
    feed_forward: Literal["swiglu", "gelu", "quick_gelu", "gelu_tanh"] = "swiglu"  # the others: this activation between two matrices
    patch_bias: bool = False  # of the projection of patches
    patch_norm: bool = False  # an RMSNorm behind it
    position_side: int = 0  # of the square table of learned positions; 0: there is none
    positions: Literal["bilinear", "bilinear_edges", "bicubic"] = "bilinear"  # corners of frame and table meet, else their edges
    deepstack_blocks: tuple[int, ...] = ()  # behind which rows for the decoder's first layers are taken
    biases: bool = True  # of the blocks' projections
    split_qkv: bool = False  # the tower has three projections in place of a fused one
    norm_eps: float = 1e-6
    qk_norm: bool = False  # an RMSNorm of each query head and key head
    merger_norm: bool = False  # a LayerNorm before the merger's matrices, besides the tower's
    merger_size: int = 0  # width of a SwiGLU that ends the merger, behind a convolution and a projection; 0: two matrices are all


class AudioConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A sound tower, as Qwen's: layers of Whisper's encoder behind convolutions."""

    num_mel_bins: int
    num_layers: int
    num_heads: int
    ffn_size: int
    hidden_size: int
    out_hidden_size: int
    max_source_positions: int
    n_window: int  # half the mel frames that convolutions see at once
    conv_channels: int = 0  # of three convolutions over time and mel; 0: there are two over time


class VisionRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules from pixels to patch rows: sizes, limits, sampling and normalisation of the checkpoint's image and video processors."""

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    video_min_pixels: int = 128 * 28 * 28
    video_max_pixels: int = 768 * 28 * 28
    video_total_pixels: int = 0  # bound on height * width * num_frames / temporal_patch_size; 0: none
    video_frame_pixels: int = 0  # bound on each frame, where the model's bounds are those of a whole clip; 0: none
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768  # 0: the model takes no video
    resample: Literal["bicubic", "bilinear", "lanczos"] = "bicubic"  # of pictures
    video_resample: Literal["bicubic", "bilinear"] = "bicubic"
    tile: int = 0  # pixels at a side of the squares that pictures are cut into; 0: they are not
    grids: tuple[tuple[int, int], ...] = ()  # heights and widths in pixels of what tiles may make up together
    slice_side: int = 0  # of a square with about as many pixels as each slice that a picture is cut into; 0: it is not
    cuts_alone: bool = False  # only the one picture of a request is cut into tiles; others have no ``grids``
    most_tiles: int = 0  # to whose worth the tokens of a picture of more tiles are brought down; 0: they are not
    longest_edge: int = 0  # that a picture is resized to before; 0: it has none
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def row_bytes(self) -> int:
        """Bytes of one uint8 patch row: 3 channels x temporal_patch_size x patch_size x patch_size."""
        return 3 * self.temporal_patch_size * self.patch_size * self.patch_size


class AudioRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for turning sound into mel rows, as in the checkpoint's feature extractor (Whisper's). ``max_s`` 0: of any length.
    ``has_mirrored_end``: the clip's own end is mirrored behind it, in place of silence, and an incomplete last frame is dropped.
    ``window``: samples of a window that is shorter than ``n_fft``, as Gemma's, whose frames begin half of it before the clip and end
    within; 0: Whisper's. ``n_fft`` 0: rows are ``hop`` samples themselves, the last filled up with silence."""

    sample_rate: int = 16000
    n_fft: int = 400
    hop: int = 160
    num_mel_bins: int = 128
    window_frames: int = 200  # mel frames that the tower attends over at once
    max_s: float = 300.0
    min_samples: int = 0  # shorter clips are filled up with silence, which then counts as heard
    silent_frames: int = 0  # behind a clip, which the tower's convolutions see; they give no tokens
    has_mirrored_end: bool = False
    window: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one float32 mel row."""
        return 4 * self.num_mel_bins

    def num_frames(self, num_samples: int) -> int:
        """Mel frames of a clip of ``num_samples`` at ``sample_rate``."""
        if self.window:
            return max(-(-(num_samples - self.window // 2) // self.hop), 0)
        num_samples = max(num_samples, self.min_samples)
        return num_samples // self.hop if self.has_mirrored_end else -(-num_samples // self.hop)
