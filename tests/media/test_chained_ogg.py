"""Ogg files of several links: each is decoded as the file that it was, whatever its channels, rate and codec."""

import io

import numpy as np
import pytest

from mmrt.media.audio import decode_audio
from mmrt.media.errors import MediaError
from mmrt.media.limits import MediaLimits
from mmrt.tests.media.conftest import encode_audio

LIMITS = MediaLimits()
RATE = 16000


def tone(channels: int, rate: int, hertz: float) -> np.ndarray:
    return np.tile(0.5 * np.sin(2 * np.pi * hertz * np.arange(rate) / rate), (channels, 1))


LINKS = {
    "Opus, mono": encode_audio(tone(1, 48000, 440), 48000, "libopus", "ogg", "flt"),
    "Opus, stereo": encode_audio(tone(2, 48000, 880), 48000, "libopus", "ogg", "flt"),
    "Opus, six channels": encode_audio(tone(6, 48000, 660), 48000, "libopus", "ogg", "flt"),
    "FLAC, 16 kHz": encode_audio(tone(1, 16000, 500), 16000, "flac", "ogg", "s16"),
    "FLAC, 44.1 kHz": encode_audio(tone(2, 44100, 700), 44100, "flac", "ogg", "s16"),
}
CHAINS = [
    ["Opus, mono", "Opus, stereo"],
    ["Opus, stereo", "Opus, mono", "Opus, six channels"],
    ["FLAC, 16 kHz", "FLAC, 44.1 kHz", "FLAC, 16 kHz"],
    ["Opus, mono", "FLAC, 44.1 kHz"],
    ["Opus, mono", "Opus, mono"],
]


def decoded(data: bytes, limits: MediaLimits = LIMITS) -> np.ndarray:
    return decode_audio(io.BytesIO(data), RATE, limits)


@pytest.mark.parametrize("names", CHAINS, ids=" + ".join)
def test_all_links_are_heard_one_after_another(names):
    found = decoded(b"".join(LINKS[name] for name in names))
    assert np.array_equal(found, np.concatenate([decoded(LINKS[name]) for name in names]))
    assert len(found) == pytest.approx(len(names) * RATE, abs=700)


def test_a_link_that_is_broken_is_named_and_one_cut_off_in_its_head_left_out():
    first, second = LINKS["Opus, mono"], LINKS["Opus, stereo"]
    assert np.array_equal(decoded(first + second[:60]), decoded(first))
    broken = second.replace(b"OpusHead", b"Opus????")
    with pytest.raises(MediaError, match="part 2 of 3 of the chained Ogg file: ") as caught:
        decoded(first + broken + first)
    assert caught.value.status == 422


def test_links_are_limited_together():
    with pytest.raises(MediaError, match="longer than the limit of 1.5 s") as caught:
        decoded(2 * LINKS["Opus, mono"], MediaLimits(max_audio_s=1.5))
    assert caught.value.status == 400
