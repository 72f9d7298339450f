"""The video actor's worker on real pools: plans in, rows in pages out, whatever is cached, restarted or broken."""

import io
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from mmrt.actors.video import worker as video_actor
from mmrt.actors.video.worker import VideoWorker, _jpeg_decoder
from mmrt.media.audio import decode_audio
from mmrt.media.limits import MediaLimits, TimeBudget
from mmrt.media.mel import LogMel
from mmrt.media.preprocess import image_rows, video_rows
from mmrt.models.architecture import AttentionConfig, LanguageConfig, LayerConfig, MlpConfig, ModelConfig, RopeConfig
from mmrt.models.media_config import AudioConfig, AudioRules, VisionConfig, VisionRules
from mmrt.runtime.bus.messages import Analysed, Done, ItemError, MediaItem, Overran, PageRun
from mmrt.runtime.bus.plans import Analyse, Plan, PreprocessSegment
from mmrt.runtime.config.runtime_config import parse_config
from mmrt.runtime.config.sections import MediaSection
from mmrt.schema.media import ItemShape, MediaOptions
from mmrt.shm.errors import StalePage
from mmrt.shm.pool import PagePool
from mmrt.shm.run_directory import RunDirectory

LANGUAGE = LanguageConfig(
    vocab_size=512,
    hidden_size=64,
    rms_norm_eps=1e-6,
    layers=(
        LayerConfig(mixer=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=64), feed_forward=MlpConfig(intermediate_size=64)),
    ),
    ropes=(RopeConfig(theta=1e6),),
)
VISION = VisionConfig(
    depth=1, hidden_size=64, intermediate_size=64, num_heads=4, in_channels=3, patch_size=14, temporal_patch_size=2, merge_size=2,
    window_size=112, out_hidden_size=64, full_attention_blocks=(0,),
)  # fmt: skip
AUDIO = AudioConfig(num_mel_bins=128, num_layers=1, num_heads=1, ffn_size=64, hidden_size=64, out_hidden_size=64,
                    max_source_positions=1500, n_window=100)  # fmt: skip
TEXT_MODEL = ModelConfig(family="qwen2_5_omni", language=LANGUAGE, dtype="float32", max_context=4096, eos_token_ids=(0,))
MODEL = msgspec.structs.replace(TEXT_MODEL, vision=VISION, audio=AUDIO, vision_rules=VisionRules(), audio_rules=AudioRules())
ROW_BYTES = 1176
NO_OPTIONS = MediaOptions()


class Bench:
    """Two pools, and a controller's part: granting pages, wording plans, reading rows back."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.media = PagePool.create(run, "media", 64, 4096)
        self.patch = PagePool.create(run, "patch", 96, 256 * ROW_BYTES)
        self._random = np.random.default_rng(0)
        self.worker = VideoWorker(self.media, self.patch, MODEL, MediaSection())

    def new_worker(self, model: ModelConfig = MODEL, cache_bytes: int = 1 << 28, **media) -> VideoWorker:
        """In place of the one before, which ends."""
        self.worker.close()
        self.worker = VideoWorker(self.media, self.patch, model, MediaSection(**media), cache_bytes)
        return self.worker

    def grant(self, pool: PagePool, num_pages: int) -> PageRun:
        """Pages in no particular order, of a new generation each; what they held before is noise."""
        pages = self._random.permutation(pool.num_pages)[:num_pages].tolist()
        pool.generations[pages] += np.uint64(1)
        pool.data[pages] = 0xAB
        return PageRun(pages, pool.generations[pages].tolist())

    def analyse_plan(
        self, kind: str, data: bytes, row: int = 0, generation: int = 1, item: int = 0, options: MediaOptions = NO_OPTIONS
    ) -> Analyse:
        source = self.grant(self.media, -(-len(data) // self.media.page_bytes))
        self.media.write_bytes(source.pages, data)
        return Analyse(row, generation, item, MediaItem(kind, len(data), options=options), source)

    def analyse(self, kind: str, data: bytes, **more: Any) -> tuple[Analyse, ItemShape]:
        plan = self.analyse_plan(kind, data, **more)
        result = self.worker.execute(plan)
        assert isinstance(result, Analysed), result
        return plan, result.shape

    def refusal(self, plan: Plan) -> ItemError:
        result = self.worker.execute(plan)
        assert isinstance(result, ItemError), result
        return result

    def segment_plan(self, plan: Analyse, shape: ItemShape, segment: int) -> PreprocessSegment:
        part = shape.segments[segment]
        target = self.grant(self.patch, -(-part.num_rows // self.patch.rows_per_page(part.row_bytes)))
        return PreprocessSegment(plan.row, plan.row_generation, plan.item, segment, plan.media, shape, plan.source, target)

    def rows(self, plan: Analyse, shape: ItemShape, segment: int) -> np.ndarray:
        command = self.segment_plan(plan, shape, segment)
        assert self.worker.execute(command) == Done()
        part = shape.segments[segment]
        return self.patch.gather_rows(command.target.pages, part.row_bytes, part.num_rows).copy()

    def all_rows(self, plan: Analyse, shape: ItemShape) -> np.ndarray:
        return np.concatenate([self.rows(plan, shape, segment) for segment in range(len(shape.segments))])


@pytest.fixture
def bench() -> Iterator[Bench]:
    path = Path(tempfile.mkdtemp(prefix="mmrt-test-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    run = RunDirectory.create(path / "run", {})
    try:
        bench = Bench(run)
        yield bench
        bench.worker.close()
    finally:
        run.destroy()
        shutil.rmtree(path)


@pytest.fixture(scope="module")
def picture(make_picture) -> np.ndarray:
    return make_picture(0, 150, 211)


def encoded(image: Image.Image, format: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def png(picture) -> bytes:
    return encoded(Image.fromarray(picture))


@pytest.fixture(scope="module")
def video(make_video) -> bytes:
    return make_video(options={"bf": "2"})


def test_an_image(bench, png, picture):
    plan, shape = bench.analyse("image", png)
    assert (shape.kind, shape.grid, shape.num_tokens, len(shape.segments)) == ("image", (1, 10, 16), 40, 1)
    assert np.array_equal(bench.all_rows(plan, shape), image_rows(picture, 140, 224, VisionRules()))


def test_a_unit_for_jpegs_comes_before_the_processor(bench, picture, png):
    """What it takes has its pixels; what it refuses the processor decodes."""
    asked: list[tuple[int, int]] = []
    grey = np.full_like(picture, 77)

    def unit(data: bytes, width: int, height: int) -> np.ndarray | None:
        asked.append((width, height))
        return grey if len(asked) == 1 else None

    jpeg = encoded(Image.fromarray(picture), "JPEG")
    bench.worker.close()
    bench.worker = VideoWorker(bench.media, bench.patch, MODEL, MediaSection(), jpeg_decoder=unit)
    for row, pixels in enumerate((grey, simplejpeg.decode_jpeg(jpeg))):
        plan, shape = bench.analyse("image", jpeg, row=row)
        assert np.array_equal(bench.all_rows(plan, shape), image_rows(pixels, 140, 224, VisionRules()))
    assert asked == 2 * [(picture.shape[1], picture.shape[0])]
    bench.analyse("image", png, row=2)
    assert len(asked) == 2, "it is for JPEGs alone"


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ('[media]\ngpu_jpegs = true\n[model]\ndevice = "cpu"', type(None)),
        ('[model]\ndevice = "cuda"', type(None)),
        ('[media]\ngpu_jpegs = true\n[model]\ndevice = "cuda"', str),
    ],
)
def test_units_for_jpegs_are_used_where_they_are_asked_for(monkeypatch, config, kind):
    monkeypatch.setattr("mmrt.media.nvjpg.nvjpg_decoder", lambda: "unit")
    assert isinstance(_jpeg_decoder(parse_config(config)), kind)


def test_a_video_in_segments(bench, video, decode_sequentially):
    """All 48 frames, in segments of several temporal patches, taken one after the other."""
    bench.new_worker(fps=24)
    plan, shape = bench.analyse("video", video, options=MediaOptions(max_pixels=30_000))
    t, h, w = shape.grid
    assert t == 24 and [part.grid[0] for part in shape.segments] == 12 * [2]
    expected = np.concatenate(list(video_rows(decode_sequentially(video), 14 * h, 14 * w, VisionRules())))
    assert np.array_equal(bench.all_rows(plan, shape), expected)


def test_frames_are_sampled_as_configured(bench, video):
    bench.new_worker(fps=6)
    assert bench.analyse("video", video)[1].grid[0] == 6
    bench.new_worker(fps=24, max_frames=8)
    assert bench.analyse("video", video)[1].grid[0] == 4


def test_options_of_an_item_count_for_it_alone(bench, video, decode_sequentially):
    bench.new_worker(fps=24)
    options = MediaOptions(fps=6.0, max_frames=10, min_pixels=784, max_pixels=2000)
    plan, shape = bench.analyse("video", video, row=1, options=options)
    assert shape.grid == (5, 2, 2)
    frames = decode_sequentially(video)
    expected = np.concatenate(list(video_rows([frames[int(4.8 * k + 1e-6)] for k in range(10)], 28, 28, VisionRules())))
    assert np.array_equal(bench.all_rows(plan, shape), expected)
    assert bench.analyse("video", video)[1].grid[0] == 24


def test_a_fresh_process_decodes_any_segment_alike(bench, video):
    bench.new_worker(fps=24)
    plan, shape = bench.analyse("video", video)
    expected = [bench.rows(plan, shape, segment) for segment in range(len(shape.segments))]
    for segment in (2, 0, 3, 1):
        bench.new_worker(fps=24)
        assert np.array_equal(bench.rows(plan, shape, segment), expected[segment])
        assert np.array_equal(bench.rows(plan, shape, segment), expected[segment])


def test_a_small_cache_changes_nothing(bench, video, png):
    bench.new_worker(fps=24, cache_bytes=1)
    plans = [bench.analyse("video", video, item=0), bench.analyse("image", png, item=1)]
    interleaved = [bench.rows(*plans[item], segment) for segment, item in ((0, 0), (0, 1), (1, 0), (2, 0), (3, 0))]
    bench.new_worker(fps=24)
    direct = [bench.rows(*plans[item], segment) for segment, item in ((0, 0), (0, 1), (1, 0), (2, 0), (3, 0))]
    assert all(np.array_equal(a, b) for a, b in zip(interleaved, direct, strict=True))


def test_sound_in_segments(bench, make_audio):
    """70 s are 7000 mel frames in segments of whole tower windows; the spectrogram is that of the whole clip."""
    samples = 0.2 * np.random.default_rng(0).standard_normal((1, 8000 * 70))
    data = make_audio(samples, 8000, "libmp3lame", "mp3", "fltp")
    bench.media = PagePool.create(bench.run, "large-media", 32, 65536)
    bench.new_worker()
    plan, shape = bench.analyse("audio", data)
    assert [part.num_rows for part in shape.segments] == [3000, 3000, 1000]
    rows = bench.all_rows(plan, shape).view(np.float32)
    waveform = decode_audio(io.BytesIO(data), 16000, MediaLimits())
    assert np.array_equal(rows, LogMel(AudioRules())(waveform))


def test_a_row_taken_by_another_request_is_analysed_anew(bench, png, video):
    bench.analyse("image", png, row=3, generation=1)
    _, shape = bench.analyse("video", video, row=3, generation=2)
    assert shape.kind == "video"


def test_items_of_requests_that_have_ended_are_let_go(bench, png, video):
    """A video that nobody wants any more would be decoded ahead of all younger ones."""
    bench.new_worker(fps=24)
    plan, shape = bench.analyse("video", video, row=3, generation=1)
    bench.rows(plan, shape, 0)
    bench.analyse("image", png, row=4, generation=1)
    pool = bench.worker._pool
    assert len(pool._dispatch.requests) == 1
    bench.worker.close_unwanted(lambda plan: plan.row == 3)
    assert list(bench.worker._open) == [(4, 1, 0)] and pool._dispatch.requests == ()


def test_plans_done_alone_give_the_same_rows_and_leave_no_engine_at_work(bench, video):
    """Nothing is decoded but what the plan asks for."""
    bench.new_worker(fps=24)
    plan, shape = bench.analyse("video", video)
    expected = bench.all_rows(plan, shape)
    decoded: list[int] = []
    add = bench.worker._pool.add_decoding_request
    bench.worker._pool.add_decoding_request = lambda *of: decoded.append(len(of[1])) or add(*of)
    for segment in reversed(range(len(shape.segments))):
        command = bench.segment_plan(plan, shape, segment)
        assert bench.worker.execute(command, alone=True) == Done()
        part = shape.segments[segment]
        rows = bench.patch.gather_rows(command.target.pages, part.row_bytes, part.num_rows)
        first = sum(one.num_rows for one in shape.segments[:segment])
        assert np.array_equal(rows, expected[first : first + part.num_rows])
        assert not bench.worker._open and bench.worker._pool._dispatch.requests == ()
    assert decoded == [2 * part.grid[0] for part in reversed(shape.segments)]


def test_analysing_a_video_pushes_out_none_that_is_decoded(bench, video):
    bench.new_worker(fps=24, cache_bytes=100 << 20)
    plans = [bench.analyse("video", video, row=row) for row in range(3)]
    assert len(bench.worker._open) == 3
    for row in range(2):
        bench.rows(*plans[row], 0)
    assert [key[0] for key in bench.worker._open] == [2, 0, 1]
    bench.analyse("video", video, row=9)
    held = sum(entry.opened.num_bytes for entry in bench.worker._open.values())
    assert [key[0] for key in bench.worker._open] == [2, 0, 1, 9] and held <= 100 << 20


def test_time_counts_anew_when_a_video_is_decoded_again(bench, video):
    """Its patch pages were taken from it, and the item is still open."""
    bench.new_worker(fps=24)
    plan, shape = bench.analyse("video", video)
    first, _ = [bench.rows(plan, shape, segment) for segment in range(2)]
    (entry,) = bench.worker._open.values()
    entry.budget._limit_s = 0.0
    assert np.array_equal(bench.rows(plan, shape, 0), first)


def test_closed_in_the_middle_it_leaves_no_thread_and_another_goes_on(bench, video):
    """As in a hot restart: all engines are ahead of what has been asked for."""
    before = threading.active_count()
    bench.new_worker(fps=24)
    plan, shape = bench.analyse("video", video)
    expected = bench.all_rows(plan, shape)
    first = bench.rows(plan, shape, 0)
    assert threading.active_count() > before
    bench.worker.close()
    assert threading.active_count() == before
    bench.new_worker(fps=24)
    others = [bench.rows(plan, shape, segment) for segment in range(1, len(shape.segments))]
    assert np.array_equal(np.concatenate([first, *others]), expected)


def test_an_item_is_let_go_with_its_last_segment(bench, video):
    bench.new_worker(fps=24)
    plan, shape = bench.analyse("video", video)
    bench.all_rows(plan, shape)
    assert not bench.worker._open


@pytest.mark.parametrize(
    ("kind", "name", "status", "says"),
    [
        ("image", "video", 422, "messages: this is an MP4 video, not an image: send it as video_url"),
        ("video", "png", 422, "a PNG image, not a video"),
        ("audio", "png", 422, "a PNG image, not an audio"),
        ("image", "cut", 422, "broken or cut off"),
        ("image", "empty", 422, "empty"),
        ("video", "text", 422, "this is text"),
        ("audio", "short", 400, "too short, at least 3"),
    ],
)
def test_bad_media_are_item_errors_and_the_worker_goes_on(bench, png, video, make_audio, kind, name, status, says):
    data = {
        "video": video,
        "png": png,
        "cut": png[:-2000],
        "empty": b"",
        "text": b"hello",
        "short": make_audio(np.zeros((1, 200))),
    }
    error = bench.refusal(bench.analyse_plan(kind, data[name]))
    assert error.status == status
    assert says in error.message
    assert not bench.worker._open
    bench.analyse("image", png)


def test_limits_of_the_configuration(bench, png, video, make_audio):
    bench.new_worker(max_pixels=100, max_video_s=1, max_audio_s=0.5)
    assert "limit of 100 pixels" in bench.refusal(bench.analyse_plan("image", png)).message
    assert "limit of 100 pixels" in bench.refusal(bench.analyse_plan("video", video)).message
    sound = bench.analyse_plan("audio", make_audio(np.zeros((1, 16000))))
    assert "limit of 0.5 s" in bench.refusal(sound).message
    bench.new_worker(item_timeout_s=1e-9)
    assert "took longer than the limit" in bench.refusal(bench.analyse_plan("video", video)).message


def test_sound_longer_than_the_model_takes(bench, make_audio):
    bench.new_worker(msgspec.structs.replace(MODEL, audio_rules=AudioRules(max_s=1)))
    error = bench.refusal(bench.analyse_plan("audio", make_audio(np.zeros((1, 16001)))))
    assert "limit of 1 s" in error.message


def test_a_model_without_towers(bench, png):
    bench.new_worker(TEXT_MODEL)
    error = bench.refusal(bench.analyse_plan("image", png))
    assert (error.status, error.message) == (400, "messages: this model takes no image")


def test_pages_that_were_given_away_are_not_touched(bench, png):
    plan, shape = bench.analyse("image", png)
    command = bench.segment_plan(plan, shape, 0)
    bench.patch.generations[command.target.pages[0]] += np.uint64(1)
    before = bench.patch.data.copy()
    with pytest.raises(StalePage):
        bench.worker.execute(command)
    assert np.array_equal(bench.patch.data, before)
    bench.media.generations[plan.source.pages[0]] += np.uint64(1)
    bench.new_worker()
    with pytest.raises(StalePage):
        bench.worker.execute(plan)


def test_another_shape_than_analysed_before_is_an_error(bench, png):
    plan, shape = bench.analyse("image", png)
    command = bench.segment_plan(plan, msgspec.structs.replace(shape, num_tokens=shape.num_tokens + 1), 0)
    assert bench.refusal(command).status == 500


def test_a_lack_of_memory_is_the_items_fault_or_the_process_ends(bench, png, monkeypatch):
    """Where there is room again once the item has been let go, it alone was too large."""

    def fail(*_: object) -> None:
        raise MemoryError

    plan = bench.analyse_plan("image", png)
    monkeypatch.setattr(video_actor, "open_item", fail)
    monkeypatch.setattr(video_actor, "memory_left", lambda: 700 << 20)
    error = bench.refusal(plan)
    assert (error.status, error.message) == (400, "messages: decoding the image takes more memory than the limit of 700 MiB")
    monkeypatch.setattr(video_actor, "memory_left", lambda: 1 << 20)
    with pytest.raises(MemoryError):
        bench.worker.execute(plan)


def test_work_that_is_larger_than_it_seemed_is_given_up_where_others_wait(bench, monkeypatch):
    """A picture of one pixel in a file of very many chunks, each of which costs more than its bytes do."""
    data = encoded(Image.new("L", (30, 30)))
    chunk = b"\0\0\0\0teSt" + zlib.crc32(b"teSt").to_bytes(4)
    plan = bench.analyse_plan("image", data[:33] + 10_000 * chunk + data[33:])
    seconds = iter(range(1_000_000))
    monkeypatch.setattr(video_actor, "TimeBudget", lambda limit_s, *_: TimeBudget(limit_s, lambda: next(seconds)))
    worker = VideoWorker(bench.media, bench.patch, MODEL, MediaSection(), yields=True)
    assert worker.execute(plan) == Overran()
    monkeypatch.undo()
    worker.close()
    assert isinstance(bench.worker.execute(plan), Analysed)


def test_an_item_too_large_for_the_sandbox_is_refused_and_the_next_one_is_not(bench, tmp_path):
    """In a process of its own, with 128 MiB to spare: 6000 x 6000 transparent pixels take Pillow more than that."""
    for size in (6000, 30):
        (tmp_path / f"{size}.png").write_bytes(encoded(Image.new("RGBA", (size, size))))
    code = f"""
from pathlib import Path
from mmrt.actors.video.sandbox import enter_sandbox
from mmrt.shm.run_directory import RunDirectory
from mmrt.actors.video.worker import load
from mmrt.tests.actors.video.test_worker import MODEL, Bench
run, folder = Path({str(bench.run.path)!r}), Path({str(tmp_path)!r})
bench = Bench(RunDirectory.create(run / "of its own", {{}}))
pictures = [(folder / f"{{size}}.png").read_bytes() for size in (6000, 6000, 30)]
load(MODEL)
enter_sandbox(memory_bytes=128 << 20, file_bytes=1 << 20)
for picture in pictures:
    plan = bench.analyse_plan("image", picture)
    print(getattr(bench.worker.execute(plan), "message", "analysed"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    *refused, analysed = done.stdout.splitlines()
    assert analysed == "analysed", done.stderr
    pattern = r"messages: decoding the image takes more memory than the limit of \d+ MiB"
    assert len(refused) == 2 and all(re.fullmatch(pattern, line) for line in refused), refused


@pytest.mark.parametrize(
    ("with_sound", "max_audio_s", "status", "says"),
    [(False, 60, 422, "the video has no sound track"), (True, 0.5, 400, "the sound track is longer than the limit of 0.5 s")],
)
def test_sound_tracks_that_cannot_be_used(bench, make_video, with_sound, max_audio_s, status, says):
    bench.new_worker(max_audio_s=max_audio_s)
    plan = bench.analyse_plan("video", make_video(audio=with_sound), item=1, options=MediaOptions(use_audio_in_video=True))
    assert bench.worker.execute(plan) == ItemError(status, f"messages: {says}")
