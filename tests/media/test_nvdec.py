"""The engine for NVIDIA's units, with a library in place of PyNvVideoCodec that decodes on the processor.

It shows that packets, parameter sets, time stamps and planes arrive as they should, not that hardware does what its makers say.
"""

import ctypes
import io
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch

from mmrt.media import nvdec
from mmrt.media.decoding import DecodingPool, analyse_bitstream
from mmrt.media.engines import CpuEngine, EngineError
from mmrt.tests.media.conftest import assert_frames, decode_all, outputs

CAPS = {
    "supported": 1,
    "num_decoder_engines": 3,
    "width_min": 48,
    "width_max": 4096,
    "height_min": 16,
    "height_max": 4096,
    "mb_num_max": 65536,
}
OPEN_GOP = "open-gop=1:keyint=12:min-keyint=12:bframes=3:scenecut=0"


class ToyFrame:
    """NV12, as the units put it out."""

    def __init__(self, frame: Any) -> None:
        planes, height = frame.to_ndarray(), frame.height
        luma, chroma = planes[:height], planes[height:].reshape(2, -1)
        surface = np.concatenate([luma, np.stack([chroma[0], chroma[1]], axis=-1).reshape(height // 2, -1)])
        self._tensor = torch.from_numpy(surface)
        self._pts = frame.pts

    def getPTS(self) -> int:
        return self._pts

    def __dlpack__(self, **how: Any) -> Any:
        return self._tensor.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


class ToyDecoder:
    """Takes packets with start codes only, and needs parameter sets in them: it never sees the file's header."""

    def __init__(self, codec: str) -> None:
        self._context: Any = av.CodecContext.create(codec, "r")
        self._context.thread_count = 1

    def Decode(self, data: Any) -> list[ToyFrame]:
        if not data.bsl:
            frames = self._context.decode(None)
            self._context.flush_buffers()
            return [ToyFrame(frame) for frame in frames]
        content = ctypes.string_at(data.bsl_data, data.bsl)
        assert self._context.name not in ("h264", "hevc") or content.startswith((b"\0\0\0\1", b"\0\0\1"))
        packet = av.Packet(content)
        packet.pts = data.pts
        return [ToyFrame(frame) for frame in self._context.decode(packet)]


class ToyLibrary:
    def __init__(self, **caps: int) -> None:
        self.caps = CAPS | caps
        self.decoders: list[ToyDecoder] = []
        self.cudaVideoCodec = SimpleNamespace(H264="h264", HEVC="hevc", VP9="vp9", AV1="libdav1d")
        self.cudaVideoChromaFormat = SimpleNamespace(**{"420": 1})
        self.OutputColorType = SimpleNamespace(NATIVE=0)

    def GetDecoderCaps(self, **of: Any) -> dict[str, int]:
        return self.caps

    def PacketData(self) -> SimpleNamespace:
        return SimpleNamespace(bsl_data=0, bsl=0, pts=0)

    def CreateDecoder(self, codec: str, **settings: Any) -> ToyDecoder:
        self.decoders.append(ToyDecoder(codec))
        return self.decoders[-1]


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch):
    monkeypatch.setattr(nvdec, "new_stream", lambda gpu: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(nvdec, "on_gpu", lambda gpu, stream: nullcontext())


def decode(library: ToyLibrary, data: bytes, wanted: list[int], num_engines: int = 2) -> list[np.ndarray]:
    engines = [nvdec.NvdecEngine(library, 0) for _ in range(num_engines)]
    with DecodingPool(engines, packets_per_segment=8) as pool:
        request = pool.add_decoding_request(analyse_bitstream(io.BytesIO(data)), wanted)
        return outputs(pool, request)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"options": {"x264-params": OPEN_GOP}},
        {"container": "mpegts"},
        {"codec": "libx265", "options": {"preset": "ultrafast", "x265-params": f"log-level=none:{OPEN_GOP}"}},
        {"codec": "libvpx-vp9", "container": "webm", "options": {"deadline": "realtime", "cpu-used": "8"}},
        {"times": [25 * i - 200 for i in range(48)]},
    ],
    ids=["h264", "open GOP", "MPEG-TS", "hevc open GOP", "vp9", "edit list"],
)
def test_frames_are_those_of_the_processor(make_video, how):
    data = make_video(**how)
    frames = decode_all(data)
    for wanted in (list(range(len(frames))), list(range(3, len(frames), 7))):
        assert_frames(decode(ToyLibrary(), data, wanted), [frames[index] for index in wanted])


@pytest.mark.parametrize(
    ("how", "caps"),
    [
        ({}, {"supported": 0}),
        ({}, {"width_max": 80}),
        ({}, {"mb_num_max": 20}),
        ({"pix_fmt": "yuv444p"}, {}),
        ({"pix_fmt": "yuv420p10le"}, {}),
        ({"height": 61, "pix_fmt": "yuv444p"}, {}),
        ({"rotation": 90}, {}),
        ({"container": "h264"}, {}),
        ({"codec": "mpeg4", "container": "avi"}, {}),
    ],
)
def test_what_the_units_cannot_do_is_refused(make_video, how, caps):
    bitstream = analyse_bitstream(io.BytesIO(make_video(num_frames=12, **how)))
    with pytest.raises(EngineError):
        nvdec.NvdecEngine(ToyLibrary(**caps), 0).open(bitstream)


def test_the_processor_takes_over(make_video):
    data = make_video(num_frames=24, height=720, width=1280, options={"preset": "ultrafast"})
    bitstream = analyse_bitstream(io.BytesIO(data))
    with DecodingPool([nvdec.NvdecEngine(ToyLibrary(supported=0), 0), CpuEngine()]) as pool:
        request = pool.add_decoding_request(bitstream, [0, 20])
        assert len(outputs(pool, request)) == 2


def test_a_session_is_used_again_unless_it_failed(make_video):
    library = ToyLibrary()
    engine = nvdec.NvdecEngine(library, 0)
    bitstream = analyse_bitstream(io.BytesIO(make_video(num_frames=12)))
    first = engine.open(bitstream)
    first.close()
    second = engine.open(bitstream)
    assert len(library.decoders) == 1
    library.decoders[0].Decode = lambda data: 1 / 0  # type: ignore[assignment]
    with pytest.raises(EngineError):
        second.drain()
    second.close()
    engine.open(bitstream)
    assert len(library.decoders) == 2


def test_without_the_library_there_are_no_engines():
    assert nvdec.nvdec_engines() == []


def test_parameter_sets_are_found():
    data = b"\0\0\0\1\x67ab\0\0\1\x68c\0\0\1\x65picture"
    assert nvdec.parameter_sets("h264", data) == b"\0\0\0\1\x67ab\0\0\0\1\x68c"
    assert nvdec.parameter_sets("vp9", data) == b""
