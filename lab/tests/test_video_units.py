"""The bench of NVIDIA's units, with the library in their place that the tests of ``media.nvdec`` have."""

from types import SimpleNamespace

import pytest
import torch

from mmrt.media import nvdec
from mmrt.tests.media.conftest import make_video
from mmrt.tests.media.test_nvdec import ToyLibrary, without_cuda
from mmrt_lab.gpu import video_units
from mmrt_lab.gpu.case import WrongResult
from mmrt_lab.gpu.results import judge
from mmrt_lab.media.clips import make_clips

__all__ = ["make_video", "without_cuda"]


def test_the_bench_compares_every_frame_with_the_processors(make_video, tmp_path, monkeypatch):
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(make_video())
    units = [nvdec.NvdecEngine(ToyLibrary(), 0) for _ in range(2)]
    assert video_units.check("h264", units, clip) == 0.0
    planar = nvdec.planar
    monkeypatch.setattr(nvdec, "planar", lambda surface: planar(surface) ^ 1)
    with pytest.raises(WrongResult, match="frame 0 of h264 differs"):
        video_units.check("h264", units, clip)


def test_the_bench_times_units_beside_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(nvdec, "load", lambda: ToyLibrary(num_decoder_engines=7))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    clips = make_clips(tmp_path, ["h264"], 10, 96, 160)
    monkeypatch.setattr(video_units, "_clips", lambda: clips)
    timing, _ = video_units.timings(True)
    *rows, ratio = timing.run(SimpleNamespace())
    assert [row.case.rpartition(", ")[2] for row in rows] == ["one unit", "7 units", "all cores"]
    assert ratio.rate == pytest.approx(rows[0].time_us / rows[1].time_us) and judge(ratio, {}, "H200").goal == 5.0
