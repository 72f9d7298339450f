"""Encrypted files are refused by the name of their encryption, and never decoded to noise."""

import io

import numpy as np
import pytest

from mmrt.media.audio import decode_audio
from mmrt.media.encryption import check_not_encrypted
from mmrt.media.errors import MediaError
from mmrt.media.limits import UNLIMITED, MediaLimits
from mmrt.media.video_info import analyse
from mmrt.tests.media.conftest import encode_audio, encode_film, encode_video

LIMITS = MediaLimits()
KEY = {"encryption_key": "76a6c65c5ea762046bd749a2e632ccbb", "encryption_kid": "a7e61c373e219033c21091fa607bf3b8"}
CENC = {"encryption_scheme": "cenc-aes-ctr"} | KEY
SECOND = np.zeros((1, 16000))


def refusal_of_video(data: bytes) -> str:
    with pytest.raises(MediaError) as caught:
        analyse(io.BytesIO(data), LIMITS)
    assert caught.value.status == 422
    return caught.value.message


def refusal_of_sound(data: bytes) -> str:
    with pytest.raises(MediaError) as caught:
        decode_audio(io.BytesIO(data), 16000, LIMITS)
    assert caught.value.status == 422
    return caught.value.message


def box(name: bytes, body: bytes) -> bytes:
    return (8 + len(body)).to_bytes(4) + name + body


def protected(data: bytes, entry: bytes, new: bytes, scheme: bytes) -> bytes:
    """A file without a table of chunks whose sample entry says that it is encrypted."""
    scheme_box = box(b"sinf", box(b"frma", entry) + box(b"schm", bytes(4) + scheme + b"\0\1\0\0"))
    begin = data.index(b"stsd") + 12
    while data[begin + 4 : begin + 8] != entry:
        begin = data.index(b"stsd", begin) + 12
    end = begin + int.from_bytes(data[begin : begin + 4])
    out = data[:begin] + box(new, data[begin + 8 : end] + scheme_box) + data[end:]
    for name in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd"):
        at = out.rindex(name, 0, begin) - 4
        out = out[:at] + (int.from_bytes(out[at : at + 4]) + len(scheme_box)).to_bytes(4) + out[at + 4 :]
    return out


@pytest.mark.parametrize("scheme", [b"cenc", b"cens", b"cbc1", b"cbcs"])
@pytest.mark.parametrize("flags", ["", "frag_keyframe+empty_moov"])
def test_common_encryption(scheme, flags):
    plain = encode_video(num_frames=6, container_options={"movflags": flags} if flags else {})
    message = refusal_of_video(protected(plain, b"avc1", b"encv", scheme))
    assert message == f"the video is encrypted (Common Encryption, {scheme.decode()}): send it decrypted"


def test_common_encryption_as_a_muxer_writes_it():
    assert "Common Encryption, cenc" in refusal_of_video(encode_video(num_frames=6, container_options=CENC))


@pytest.mark.parametrize(("old", "new"), [(b"avc1", b"drmi"), (b"mp4a", b"drms"), (b"mp4a", b"aavd")])
def test_what_shops_sell(old, new):
    film = encode_film(np.zeros(32000), "aac", "mp4")
    locked = film.replace(old + bytes(7) + b"\1", new + bytes(7) + b"\1")
    assert locked != film
    message = refusal_of_sound(locked) if old == b"mp4a" else refusal_of_video(locked)
    assert ("FairPlay" if new != b"aavd" else "Audible") in message


def test_what_is_not_asked_for_may_be_encrypted():
    film = encode_film(np.zeros(32000), "aac", "mp4")
    assert analyse(io.BytesIO(protected(film, b"mp4a", b"enca", b"cbcs")), LIMITS).num_frames == 20
    assert "cbcs" in refusal_of_sound(protected(film, b"mp4a", b"enca", b"cbcs"))
    assert "scheme 'abcd'" in refusal_of_sound(protected(film, b"mp4a", b"enca", b"abcd"))


@pytest.mark.parametrize("container", ["webm", "matroska"])
def test_webm(container):
    """ContentEncodings of one track, whose sizes are made to fit. AES is algorithm 5."""
    film = encode_video("libvpx", container, num_frames=6, options={"deadline": "realtime"})
    encryption = bytes.fromhex("6d80 92 6240 8f 5031 81 00 5035 88 47e1 81 05 47e2 81 01")
    tracks = film.rindex(b"\x16\x54\xae\x6b")
    entry = tracks + 4 + 9 - film[tracks + 4].bit_length()
    entry += 6 if film[entry : entry + 2] == b"\xbf\x84" else 0  # a checksum
    out = film
    for at in (entry + 1, tracks + 4):  # the inner one first
        width = 9 - out[at].bit_length()
        size = int.from_bytes(out[at : at + width]) + len(encryption)
        out = out[:at] + size.to_bytes(width) + out[at + width :]
    body = entry + 1 + 9 - film[entry + 1].bit_length()
    out = out[:body] + encryption + out[body:]
    segment = out.index(b"\x18\x53\x80\x67") + 4
    out = out[:segment] + b"\x01" + b"\xff" * 7 + out[segment + 8 :]
    assert refusal_of_video(out) == "the video is encrypted (AES): send it decrypted"


def transport_stream() -> bytearray:
    return bytearray(encode_video(container="mpegts", num_frames=24))


def test_a_scrambled_transport_stream():
    data = transport_stream()
    for at in range(0, len(data), 188):
        pid = int.from_bytes(data[at + 1 : at + 3]) & 0x1FFF
        data[at + 3] |= 0x80 if pid == 0x100 else 0
    assert "scrambled MPEG-TS" in refusal_of_video(bytes(data))


def test_samples_encrypted_for_hls():
    data = transport_stream()
    at = data.index(b"\x1b\xe1\x00")  # H.264 in the table of the program
    data[at] = 0xDB
    assert "SAMPLE-AES" in refusal_of_video(bytes(data))


def test_a_scrambled_program_stream():
    data = encode_video("mpeg2video", "vob", num_frames=24)
    parts = data.split(b"\0\0\1\xe0")
    locked = b"\0\0\1\xe0".join([parts[0], *(part[:2] + bytes([part[2] | 0x10]) + part[3:] for part in parts[1:])])
    assert "scrambled MPEG-PS" in refusal_of_video(locked)


CLEAR: dict[str, dict] = {
    "MP4": {},
    "MP4 in fragments": {"container_options": {"movflags": "frag_keyframe+empty_moov"}},
    "QuickTime": {"container": "mov"},
    "Matroska": {"container": "matroska", "audio": True},
    "MPEG-TS": {"container": "mpegts", "audio": True},
    "MPEG-TS with time stamps": {"container": "mpegts", "container_options": {"mpegts_m2ts_mode": "1"}},
    "MPEG-PS": {"codec": "mpeg2video", "container": "vob"},
    "MPEG-1": {"codec": "mpeg1video", "container": "mpeg"},
    "AVI": {"container": "avi"},
}


@pytest.mark.parametrize("name", CLEAR)
def test_clear_files_are_taken(name):
    assert analyse(io.BytesIO(encode_video(num_frames=24, **CLEAR[name])), LIMITS).num_frames == 24


@pytest.mark.parametrize("name", ["MP4", "Matroska", "MPEG-TS", "MPEG-PS"])
def test_whatever_a_head_says_ends(name):
    """No error but a refusal, for files that are cut off or changed anywhere."""
    rng = np.random.default_rng(0)
    whole = encode_video(num_frames=6, **CLEAR[name])
    for number in range(300):
        data = bytearray(whole[: rng.integers(1, len(whole))] if number % 2 else whole)
        for at in rng.integers(0, min(len(data), 2000), 8):
            data[at] = rng.integers(256)
        for kind in ("video", "audio"):
            try:
                check_not_encrypted(io.BytesIO(bytes(data)), kind, UNLIMITED)
            except MediaError as error:
                assert error.status == 422


def test_sound_alone():
    assert len(decode_audio(io.BytesIO(encode_audio(SECOND)), 16000, LIMITS)) == 16000
