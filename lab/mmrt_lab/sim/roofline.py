"""Cost models computed from a model's shape and a device's peak rates (pure, but for ``renew``): rooflines, never measured.

The counts are TI26's (TriInfer, Table 2 and Appendix B) with its errors mended: of decode 8 B H^2 operations for the projections and
16 B H^2 for the feed-forward layers, where the table and equation 3 have 8 B H and 16 B T H; of decode's attention 4 B H M operations
and 2 B H M values read, for a cache of M tokens. Widths are the model's own: grouped-query attention has narrower keys and values,
and the feed-forward layers have three matrices. Attention of a prompt is causal: a token reads those before it.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from mmrt.models.architecture import DTYPE_BYTES, LanguageConfig, ModelConfig
from mmrt.models.media_config import VisionConfig

from .costs import SHIPPED, Costs, Line, Overheads, load_costs, save_costs, shipped_costs
from .interference import stage_set, stage_sets

LAUNCH_S = 20e-6  # assumed for each layer's kernels where no graph is captured: prefill and towers
VIDEO_PIXEL_S = 7.2e-9  # on one core, to decode a pixel of H.264 and make rows of it; frames have the size that the model takes


class Peak(NamedTuple):
    """A device's peak rates: dense operations and bytes of its memory, per second."""

    name: str
    flops_per_s: float
    bytes_per_s: float


H200 = Peak("H200", 989e12, 4.8e12)  # bfloat16 without sparsity
H20 = Peak("H20", 148e12, 4.0e12)  # TriInfer's (TI15)
PEAKS = {peak.name: peak for peak in (H200, H20)}


def roofline(name: str, model: ModelConfig, peak: Peak, host: Costs) -> Costs:
    """The cost model of a model on one device.

    ``host``: a measured cost model. Processors send messages and prepare pictures and sounds in its times. They decode videos in
    ``VIDEO_PIXEL_S``: the host's model may shrink frames, and then one of its rows stands for many pixels.
    """
    assert model.vision is not None
    lm, vision, size = model.language, model.vision, DTYPE_BYTES[model.dtype]
    layers = _token_flops(lm) // 2 * size  # bytes of the weights that each pass reads
    output = lm.hidden_size * lm.vocab_size * size  # read by decode alone
    activations = 18 * lm.hidden_size * size * lm.num_layers  # TI26: 8 B T H + 10 B T H values
    token_s = max(_token_flops(lm) / peak.flops_per_s, activations / peak.bytes_per_s)
    pair_s = 4 * lm.heads.num_heads * lm.heads.head_dim * lm.num_layers / peak.flops_per_s
    cached = 2 * lm.heads.num_kv_heads * lm.heads.head_dim * lm.num_layers * size  # bytes of a token in the KV cache
    head_s = 2 * lm.hidden_size * lm.vocab_size / peak.flops_per_s
    encode = Line(
        fixed_s=LAUNCH_S * vision.depth,
        least_s=_tower_weights(vision) * size / peak.bytes_per_s,
        per_unit_s=_row_flops(vision) / peak.flops_per_s,
        per_square_s=4 * vision.hidden_size * len(vision.full_attention_blocks) / peak.flops_per_s,
    )
    return Costs(
        name=name,
        origin="roofline",
        note=f"Peak rates of {peak.name}: {peak.flops_per_s / 1e12:g} TFLOP/s, {peak.bytes_per_s / 1e12:g} TB/s. Stages share it by "
        f"time slices. Pictures and messages as measured for {host.name}, videos {1e9 * VIDEO_PIXEL_S:g} ns per pixel.",
        model=model,
        device=peak.name,
        num_cores=1,
        threads={"video": 0, "encoder": 1, "prefill": 1, "decode": 1},
        environment=None,
        analyse={kind: line for kind, line in host.analyse.items() if kind in model.media_kinds},
        preprocess={kind: line for kind, line in host.preprocess.items() if kind in model.media_kinds}
        | {"video": Line(per_unit_s=VIDEO_PIXEL_S * vision.temporal_patch_size * vision.patch_size**2)},
        encode={kind: encode for kind in model.media_kinds if kind != "audio"},
        prefill=Line(fixed_s=LAUNCH_S * lm.num_layers, least_s=layers / peak.bytes_per_s, per_unit_s=token_s, per_square_s=pair_s),
        decode=Line(least_s=(layers + output) / peak.bytes_per_s, per_unit_s=token_s + head_s),
        decode_context_s=max(cached / peak.bytes_per_s, pair_s),
        overheads=Overheads(**{field: getattr(host.overheads, field) for field in host.overheads.__struct_fields__}),
        interference=_time_slices(),
    )


def _token_flops(lm: LanguageConfig) -> int:
    """Of a token's projections and feed-forward layers, in all layers: two for each weight."""
    q, kv = lm.heads.num_heads * lm.heads.head_dim, lm.heads.num_kv_heads * lm.heads.head_dim
    projections = lm.hidden_size * (q + 2 * kv) + q * lm.hidden_size
    return 2 * lm.num_layers * (projections + 3 * lm.hidden_size * lm.intermediate_size)


def _row_flops(vision: VisionConfig) -> int:
    """Of a patch row: its embedding, the blocks with attention within windows where it is not full, and its share of the merger."""
    width, merged = vision.hidden_size, vision.merge_size**2
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    block = 2 * (4 * width**2 + 3 * width * vision.intermediate_size)
    window_rows = (vision.window_size // vision.patch_size) ** 2
    windows = (vision.depth - len(vision.full_attention_blocks)) * 4 * width * window_rows
    merger = 2 * (merged * width) * (merged * width + vision.out_hidden_size) // merged
    return 2 * patch * width + vision.depth * block + windows + merger


def _tower_weights(vision: VisionConfig) -> int:
    """Values of the vision tower's matrices."""
    width, merged = vision.hidden_size, vision.merge_size**2
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    block = 4 * width**2 + 3 * width * vision.intermediate_size
    return patch * width + vision.depth * block + merged * width * (merged * width + vision.out_hidden_size)


def _time_slices() -> dict[str, dict[str, float]]:
    """Stages on the device get equal slices; video is on processors of its own."""
    rates = {}
    for together in stage_sets(("decode", "encoder", "prefill", "video")):
        num_on_device = sum(stage != "video" for stage in together)
        rates[stage_set(together)] = {stage: 1.0 if stage == "video" else 1 / num_on_device for stage in together}
    return rates


def renew(folder: Path = SHIPPED) -> None:
    """Write the shipped rooflines again: after ``demo-cpu``, whose times they have for what stays on processors, was measured."""
    host = load_costs("demo-cpu")
    for costs in map(load_costs, shipped_costs()):
        if costs.origin == "roofline":
            save_costs(folder / f"{costs.name}.json", roofline(costs.name, costs.model, PEAKS[costs.device], host))


if __name__ == "__main__":
    argparse.ArgumentParser(description=renew.__doc__).parse_args()
    renew()
