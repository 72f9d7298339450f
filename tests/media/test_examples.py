"""The files in examples/ are what their script makes, and go through the pipeline."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmrt.examples import media_files
from mmrt.media.audio import decode_audio
from mmrt.media.image import decode_image
from mmrt.media.limits import MediaLimits
from mmrt.media.video import decode_frames
from mmrt.media.video_info import analyse

EXAMPLES = Path(media_files.__file__).parent
LIMITS = MediaLimits()


def test_the_picture():
    with open(EXAMPLES / "shapes.png", "rb") as file:
        assert np.array_equal(decode_image(file, LIMITS), np.asarray(media_files.shapes()))


def test_the_video():
    """Lossy, and an encoder may change: the square is where the script puts it."""
    with open(EXAMPLES / "moving.mp4", "rb") as file:
        info = analyse(file, LIMITS)
        assert (info.num_frames, info.fps, info.width, info.height) == (72, 24.0, 160, 120)
        drawn = list(media_files.moving_frames())
        for index, frame in decode_frames(file, info, range(0, 72, 6)):
            assert np.abs(frame.astype(int) - drawn[index]).mean() < 6


def test_the_sound():
    with open(EXAMPLES / "beeps.wav", "rb") as file:
        assert np.array_equal(decode_audio(file, 16000, LIMITS), media_files.beeps() / np.float32(32768))


@pytest.mark.parametrize("name", ["shapes.png", "beeps.wav"])
def test_the_script_makes_the_same_files(tmp_path: Path, name):
    media_files.write_examples(tmp_path)
    made, kept = (tmp_path / name).read_bytes(), (EXAMPLES / name).read_bytes()
    if name.endswith("png"):  # zlib's output may change between versions
        with Image.open(io.BytesIO(made)) as a, Image.open(io.BytesIO(kept)) as b:
            assert np.array_equal(a, b)
    else:
        assert made == kept


def test_they_are_small():
    assert sum(path.stat().st_size for path in EXAMPLES.iterdir()) < 200_000
