"""From a trained network to a checkpoint directory: weights in bfloat16, the files of the skeleton, the loss curve."""

import json
import shutil
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file

from .loop import CURVE
from .network import Network

FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_CURVE_SIZE = (900, 360)


def export(network: Network, work: Path, out: Path) -> None:
    """Write the checkpoint into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(work / name, out / name)
    weights = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in network.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    draw_curve(work / CURVE, out / "loss.png")


def draw_curve(curve: Path, out: Path) -> None:
    """The loss of each step, averaged over its neighbours, on a logarithmic scale from 0.001 to 10."""
    losses = torch.tensor([json.loads(line)["loss"] for line in curve.read_text().splitlines()]).clamp(1e-3, 10)
    width, height = _CURVE_SIZE
    window = max(1, len(losses) // 100)
    smooth = torch.nn.functional.avg_pool1d(losses.log10()[None, None], window, 1, count_include_pad=False)[0, 0]
    xs = torch.linspace(40, width - 10, len(smooth)).tolist()
    ys = (10 + (1 - smooth) / 4 * (height - 40)).tolist()
    image = Image.new("RGB", _CURVE_SIZE, "white")
    draw = ImageDraw.Draw(image)
    for power in range(-3, 2):
        y = 10 + (1 - power) / 4 * (height - 40)
        draw.line((40, y, width - 10, y), fill="lightgray")
        draw.text((4, y - 6), f"{10.0**power:g}", fill="black")
    draw.text((40, height - 18), f"loss over {len(losses)} steps", fill="black")
    draw.line(list(zip(xs, ys, strict=True)), fill="navy", width=2)
    image.save(out)
