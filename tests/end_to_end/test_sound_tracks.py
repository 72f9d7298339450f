"""Videos with their sound tracks: from the bytes of H.264 and AAC on, greedy tokens are transformers' argmax."""

import io
import os
import signal
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from mmrt.tests.end_to_end.conftest import Server, also_slow
from mmrt.tests.end_to_end.oracle import Media, Oracle
from mmrt.tests.end_to_end.test_media import as_url, image_part, num_prompt_tokens, picture, sample, sound, text, video

FPS = 8
WITH_SOUND = {"mm_processor_kwargs": {"use_audio_in_video": True}}


class Film(NamedTuple):
    part: dict[str, Any]
    frames: NDArray[np.uint8]  # sampled at two per second
    samples: NDArray[np.float32]


def film(video_s: float, sound_s: float, hertz: float) -> Film:
    """A file with both streams, and what PyAV decodes of each: at 16 kHz, so that nothing is resampled."""
    out, num_frames = io.BytesIO(), int(FPS * video_s)
    with av.open(out, "w", format="mp4") as container:
        pictures: Any = container.add_stream("libx264", rate=FPS)
        pictures.width, pictures.height, pictures.pix_fmt = 128, 96, "yuv420p"
        pictures.codec_context.thread_count = 1
        track: Any = container.add_stream("aac", rate=16000, layout="mono")
        for index in range(num_frames):
            frame = av.VideoFrame.from_ndarray(picture(index, 96, 128), format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, FPS)
            container.mux(pictures.encode(frame))
        container.mux(pictures.encode(None))
        wave = (0.4 * np.sin(np.arange(int(16000 * sound_s)) * 2 * np.pi * hertz / 16000)).astype(np.float32)
        for at in range(0, len(wave), 1024):
            sounding = av.AudioFrame.from_ndarray(wave[None, at : at + 1024], format="fltp", layout="mono")
            sounding.sample_rate, sounding.pts, sounding.time_base = 16000, at, Fraction(1, 16000)
            container.mux(track.encode(sounding))
        container.mux(track.encode(None))
    with av.open(io.BytesIO(out.getvalue())) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    with av.open(io.BytesIO(out.getvalue())) as container:
        samples = np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])
    part = {"type": "video_url", "video_url": {"url": as_url("video/mp4", out.getvalue())}}
    return Film(part, frames[sample(num_frames, FPS)], samples)


@pytest.mark.parametrize(("video_s", "sound_s"), [(1.5, 1.2), (5.0, 5.0), (3.0, 6.5), (6.0, 1.0)])
def test_a_video_with_its_sound_track(server: Server, oracle: Oracle, video_s: float, sound_s: float) -> None:
    made = film(video_s, sound_s, 440)
    media = Media(videos=[(made.frames, 2.0)], audios=[made.samples], use_audio_in_video=True)
    inputs = oracle.inputs([{"role": "user", "content": [{"type": "video"}, text("What happens?")]}], media)
    content = [made.part, text("What happens?")]
    _, ids = server.chat(content, extra_body=WITH_SOUND)
    oracle.check_greedy(inputs, ids)
    assert num_prompt_tokens(server, content, extra_body=WITH_SOUND) == inputs["input_ids"].shape[1]
    assert server.chat([{**made.part, "use_audio_in_video": True}, content[1]])[1] == ids
    assert num_prompt_tokens(server, content) < inputs["input_ids"].shape[1], "the sound track counts only where it is asked for"


def test_beside_other_media(server: Server, oracle: Oracle) -> None:
    first, second = film(3.0, 4.0, 300), film(4.0, 2.5, 700)
    pixels, (noise, samples) = picture(5, 120, 90), sound(1.5, 300)
    words = text("Do they match?")
    plain = [{"type": kind} for kind in ("video", "image", "audio", "video")]
    media = Media([pixels], [(first.frames, 2.0), (second.frames, 2.0)], [first.samples, samples, second.samples])
    media.use_audio_in_video = True
    _, ids = server.chat([first.part, image_part(pixels), noise, second.part, words], extra_body=WITH_SOUND)
    oracle.check_greedy(oracle.inputs([{"role": "user", "content": [*plain, words]}], media), ids)
    server.wait_until_empty()


@pytest.mark.parametrize("victim", ["encoder", *also_slow("video", "controller")])
def test_killing_a_stage_changes_nothing(server: Server, victim: str) -> None:
    """Killed as soon as the request is prepared, while its segments are decoded and encoded; guided, so that it has a companion."""
    content = [film(9.0, 7.5, 500).part, text("What happens?")]
    options: dict[str, Any] = {"max_tokens": 40, "extra_body": {**WITH_SOUND, "guidance_scale": 1.5, "ignore_eos": True}}
    expected = server.chat(content, **options)[1]
    pid = server.pid(victim)
    stream = server.stream(content, **options)
    os.kill(pid, signal.SIGKILL)
    ids = [token for chunk in stream for choice in chunk.choices for token in (getattr(choice, "token_ids", None) or [])]
    assert ids == expected
    server.wait(lambda status: bool(status["ready"]), f"{victim} back")
    server.wait_until_empty()


def test_a_video_without_a_sound_track(server: Server) -> None:
    part, _ = video(6, 64, 64, 2)
    with pytest.raises(openai.UnprocessableEntityError, match=r"content\[1\]\.video_url\.url: the video has no sound track"):
        server.chat([image_part(picture(1, 64, 64)), part, text("Hm?")], extra_body=WITH_SOUND)
    server.wait_until_empty()
