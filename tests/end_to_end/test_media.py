"""Images, video, audio and all of them at once: greedy tokens are transformers' argmax, from the file's bytes on."""

import base64
import io
import threading
import wave
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageSequence

from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.status import ActorTable
from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.oracle import Media, Oracle


def picture(seed: int, height: int, width: int) -> NDArray[np.uint8]:
    """Smooth coloured shapes."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin((seed + k + 1) * (x / width + k * y / height) * 3) for k in range(3)]
    return (127 + 120 * np.stack(waves, axis=-1)).astype(np.uint8)


def as_url(mime: str, data: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def image_part(pixels: NDArray[np.uint8]) -> dict[str, Any]:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return {"type": "image_url", "image_url": {"url": as_url("image/png", out.getvalue())}}


def video(num_frames: int, height: int, width: int, fps: int) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """An H.264 file and its frames as PyAV decodes them."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1
        for index in range(num_frames):
            frame = av.VideoFrame.from_ndarray(picture(index, height, width), format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with av.open(io.BytesIO(out.getvalue())) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    return {"type": "video_url", "video_url": {"url": as_url("video/mp4", out.getvalue())}}, frames


def sound(seconds: float, hertz: float) -> tuple[dict[str, Any], NDArray[np.float32]]:
    samples = (np.sin(np.arange(int(16000 * seconds)) * 2 * np.pi * hertz / 16000) * 12000).astype(np.int16)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(samples.tobytes())
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(out.getvalue()).decode(), "format": "wav"}}
    return part, samples.astype(np.float32) / 32768


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def check(server: Server, oracle: Oracle, content: list[dict[str, Any]], media: Media, **options: Any) -> list[int]:
    """Ask the server with the files, transformers with what is in them."""
    kinds = {"image_url": "image", "video_url": "video", "input_audio": "audio"}
    plain = [part if part["type"] == "text" else {"type": kinds[part["type"]]} for part in content]
    _, ids = server.chat(content, **options)
    oracle.check_greedy(oracle.inputs([{"role": "user", "content": plain}], media), ids)
    return ids


@pytest.mark.parametrize("size", [(56, 56), (150, 213), (31, 400), (337, 336)])
def test_one_image(server: Server, oracle: Oracle, size: tuple[int, int]) -> None:
    pixels = picture(1, *size)
    check(server, oracle, [image_part(pixels), text("What is it?")], Media(images=[pixels]))


def test_different_images_give_different_answers(server: Server) -> None:
    answers = {tuple(server.chat([image_part(picture(seed, 112, 112)), text("Hm?")])[1]) for seed in range(4)}
    assert len(answers) > 1


def test_several_images_between_words(server: Server, oracle: Oracle) -> None:
    pixels = [picture(seed, 60 + 30 * seed, 200 - 20 * seed) for seed in range(3)]
    content = [text("First"), image_part(pixels[0]), text("then"), image_part(pixels[1]), image_part(pixels[2]), text("Compare.")]
    check(server, oracle, content, Media(images=pixels))


@pytest.mark.parametrize(("num_frames", "fps"), [(8, 2), (30, 10), (9, 2)])
def test_video(server: Server, oracle: Oracle, num_frames: int, fps: int) -> None:
    """Sampled at 2 frames per second by torch.arange, as transformers' processor does."""
    part, frames = video(num_frames, 96, 128, fps)
    wanted = frames[sample(num_frames, fps)]
    check(server, oracle, [part, text("What moves?")], Media(videos=[(wanted, 2.0)]))


def sample(num_frames: int, fps: int, sampled_fps: float = 2.0, max_frames: int = 768) -> list[int]:
    import torch

    count = num_frames / fps * sampled_fps
    count = min(min(max(count, 4), max_frames), num_frames)
    count = int(count // 2 * 2)
    indices: list[int] = torch.arange(0, num_frames, num_frames / count).int().tolist()
    return indices


def num_prompt_tokens(server: Server, content: list[dict[str, Any]], **options: Any) -> int:
    """As the usage says."""
    *_, last = server.stream(content, max_tokens=1, stream_options={"include_usage": True}, **options)
    return int(last.usage.prompt_tokens)


def test_an_image_of_fewer_pixels(server: Server, oracle: Oracle) -> None:
    """The same tokens as transformers with these bounds, by an option of the part and by one for all media."""
    pixels = picture(4, 300, 400)
    part, words = image_part(pixels), text("What is it?")
    media = Media(images=[pixels], image_pixels=(56 * 56, 20_000))
    ids = check(server, oracle, [{**part, "max_pixels": 20_000}, words], media)
    assert check(server, oracle, [part, words], media, extra_body={"mm_processor_kwargs": {"max_pixels": 20_000}}) == ids
    assert (
        num_prompt_tokens(server, [part, words]) - num_prompt_tokens(server, [{**part, "max_pixels": 20_000}, words]) == 11 * 14 - 4 * 5
    )


def test_a_picture_with_a_quarter_of_its_tokens(server: Server, oracle: Oracle) -> None:
    """VL9: those of transformers with as many pixels, and the usage says the share. An idle run leaves all tokens to ``auto``."""
    pixels = picture(4, 300, 400)
    part, words = image_part(pixels), text("What is it?")
    media = Media(images=[pixels], image_pixels=(28 * 28, 11 * 14 * 28 * 28 // 4))
    check(server, oracle, [{**part, "token_share": 0.25}, words], media)
    check(server, oracle, [{**part, "token_share": "auto"}, words], Media(images=[pixels]))
    for share, expected in ((0.25, 0.25), ("auto", None)):
        *_, last = server.stream([{**part, "token_share": share}, words], max_tokens=1, stream_options={"include_usage": True})
        assert (last.usage.prompt_tokens_details.model_extra or {}).get("media_share") == expected


@pytest.mark.parametrize(
    ("options", "wanted", "fps"),
    [
        ({"token_share": 0.5}, sample(40, 8, 1.0), 1.0),
        ({"fps": 1.0}, sample(40, 8, 1.0), 1.0),
        ({"max_frames": 6}, sample(40, 8, max_frames=6), 2.0),
        ({"fps": 0.5, "min_frames": 2, "max_pixels": 30_000, "min_pixels": 784}, [0, 20], 0.5),
    ],
)
def test_a_video_of_fewer_frames(server: Server, oracle: Oracle, options: dict[str, Any], wanted: list[int], fps: float) -> None:
    part, frames = video(40, 96, 128, 8)
    media = Media(videos=[(frames[wanted], fps)])
    if "max_pixels" in options:
        media.video_pixels = (options["min_pixels"], options["max_pixels"])
    check(server, oracle, [{**part, **options}, text("What moves?")], media)


def test_an_animated_webp(server: Server, oracle: Oracle) -> None:
    """12 frames in 3 s, lossless: 6 of them count."""
    frames = np.stack([picture(index, 96, 128) for index in range(12)])
    out = io.BytesIO()
    first, *others = map(Image.fromarray, frames)
    first.save(out, "WEBP", save_all=True, append_images=others, duration=250, lossless=True)
    part = {"type": "video_url", "video_url": {"url": as_url("image/webp", out.getvalue())}}
    check(server, oracle, [part, text("What moves?")], Media(videos=[(frames[::2], 2.0)]))


def test_an_animated_avif(server: Server, oracle: Oracle) -> None:
    """The same, of what Pillow shows."""
    first, *others = (Image.fromarray(picture(index, 96, 128)) for index in range(12))
    out = io.BytesIO()
    first.save(out, "AVIF", save_all=True, append_images=others, duration=250, quality=90, speed=9)
    frames = np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(Image.open(out))])
    part = {"type": "video_url", "video_url": {"url": as_url("image/avif", out.getvalue())}}
    check(server, oracle, [part, text("What moves?")], Media(videos=[(frames[::2], 2.0)]))


def test_an_option_above_the_limit_is_refused(server: Server) -> None:
    part, _ = video(4, 64, 64, 2)
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[0\].fps: is 4, allowed are 0.01 to 2"):
        server.chat([{**part, "fps": 4}, text("Hm?")])


@pytest.mark.parametrize("seconds", [0.3, 2.0, 7.7])
def test_audio(server: Server, oracle: Oracle, seconds: float) -> None:
    part, samples = sound(seconds, 440)
    check(server, oracle, [part, text("What do you hear?")], Media(audios=[samples]))


def test_everything_at_once(server: Server, oracle: Oracle) -> None:
    pixels = picture(5, 120, 90)
    moving, frames = video(8, 56, 84, 2)
    noise, samples = sound(1.5, 300)
    content = [text("A picture"), image_part(pixels), text("a film"), moving, text("a sound"), noise, text("Do they match?")]
    wanted = frames[sample(8, 2)]
    check(server, oracle, content, Media([pixels], [(wanted, 2.0)], [samples]))


def test_many_images_at_once(server: Server, oracle: Oracle) -> None:
    """Encoding, prefill and decoding of different requests interleave; nothing leaks between them."""
    pixels = [picture(seed, 84 + 14 * seed, 140) for seed in range(8)]
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            check(server, oracle, [image_part(pixels[index]), text(f"Number {index}?")], Media(images=[pixels[index]]))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(pixels))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    server.wait_until_empty()


@pytest.mark.slow
def test_a_small_picture_overtakes_large_ones_of_others(server: Server) -> None:
    """Each of these large ones is a file of 10 kB, and costs more than a second."""
    out = io.BytesIO()
    Image.new("1", (9000, 9000)).save(out, "PNG")
    large = {"type": "image_url", "image_url": {"url": as_url("image/png", out.getvalue())}}
    order: list[str] = []

    def ask(what: str, *parts: dict[str, Any]) -> None:
        server.chat([*parts, text("Hm?")], max_tokens=1)
        order.append(what)

    threads = [threading.Thread(target=ask, args=("large", large, large)) for _ in range(3)]
    for thread in threads:
        thread.start()
    run = RunDirectory.attach(server.run_path)
    table = ActorTable.attach(run, writable=False)
    while not table.read("video").step_deadline_ns:
        assert any(thread.is_alive() for thread in threads)
    table.close()
    run.leave()
    ask("small", image_part(picture(1, 84, 84)))
    for thread in threads:
        thread.join()
    assert order == ["small", "large", "large", "large"]
    server.wait_until_empty()


def test_pictures_of_too_many_pixels_are_refused_by_the_gateway(server: Server) -> None:
    out = io.BytesIO()
    Image.new("1", (13000, 13000)).save(out, "PNG")
    large = {"type": "image_url", "image_url": {"url": as_url("image/png", out.getvalue())}}
    with pytest.raises(
        openai.BadRequestError, match="makes 676000000 pixels .* the limit is 536870912 .media.max_request_pixels."
    ) as caught:
        server.chat([large] * 4)
    assert caught.value.param == "messages[0].content[3].image_url.url"


@pytest.mark.slow
def test_a_small_prefill_budget_changes_nothing(launch: Callable[..., Server], oracle: Oracle) -> None:
    server = launch(settings="[scheduling]\nprefill_budget_tokens = 16\nencode_budget_tokens = 64\n")
    pixels = picture(3, 200, 170)
    check(server, oracle, [text("Some words before it. " * 5), image_part(pixels), text("Why?")], Media(images=[pixels]))
    server.wait_until_empty()
    server.down()


@pytest.mark.slow  # another family of its kind answers in test_seeing_families
def test_the_vl_family(launch: Callable[..., Server]) -> None:
    """Qwen2.5-VL answers about an image; its numbers are compared with transformers in tests/models."""
    server = launch("qwen2_5_vl")
    first, again = (server.chat([image_part(picture(2, 90, 90)), text("What?")])[1] for _ in range(2))
    assert first == again
    server.down()
