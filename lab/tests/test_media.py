"""The media bench makes its clips, compares what is there, and says what it misses."""

import io
from pathlib import Path

import av
import msgspec
import pytest
from rich.console import Console

from mmrt.bench.output import progress
from mmrt.bench.serve.errors import BenchError
from mmrt.cli.main import run
from mmrt_lab.media.clips import CODECS, make_clips, repeat_clip
from mmrt_lab.media.command import MediaBench, main
from mmrt_lab.media.methods import METHODS, Trial, is_available, run_trial, sample
from mmrt_lab.media.trials import run_apart


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clips")


@pytest.fixture(scope="module")
def clip(directory: Path) -> Path:
    return make_clips(directory, ["h264"], 1, 72, 128)["h264"]


def test_the_whole_bench(directory: Path, tmp_path: Path, clip: Path) -> None:
    figures = tmp_path / "figures.json"
    sizes = ["--codecs", "h264", "--seconds", "1", "--height", "72", "--rounds", "1", "--long", "3"]
    assert main([*sizes, "--clips", str(directory), "--json", str(figures)]) in (0, 1)
    bench = msgspec.json.decode(figures.read_bytes(), type=MediaBench)
    assert [task.name for task in bench.tasks] == ["h264, sampled", "h264, all", "two videos", "3 s of video", "JPEG"]
    frames = {task.name: task.medians["mmrt"].num_frames for task in bench.tasks if "mmrt" in task.medians}
    assert frames == {"h264, sampled": 1, "h264, all": 30, "JPEG": 1}
    assert all(task.value > 0 for task in bench.tasks)
    assert clip.exists(), "clips that were asked for stay"


@pytest.mark.parametrize("method", ["mmrt", "mmrt at once", "pyav", "pyav single"])
def test_every_way_gives_the_frames(method: str, clip: Path) -> None:
    trial = run_trial(method, 0, [clip, clip])
    assert trial.num_frames == 60 and trial.wall_s > 0 and trial.cpu_s > 0


def test_a_long_clip_holds_the_packets_of_the_short_one(directory: Path, clip: Path) -> None:
    long = repeat_clip(clip, directory / "long.mp4", 3, 1)
    with av.open(long) as container:
        times = [frame.time for frame in container.decode(video=0)]
    assert times == pytest.approx([number / 30 for number in range(90)])


def test_samples() -> None:
    assert sample(100, 3) == [0, 50, 99]
    assert sample(4, 0) == [0, 1, 2, 3]


def test_a_way_that_fails_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.mp4"
    broken.write_text("no video")
    with pytest.raises(BenchError, match="mmrt failed: .*text"):
        run_apart("methods", ["mmrt", "1", str(broken)], Trial, "mmrt")


def test_only_what_is_installed_is_tried() -> None:
    assert is_available("mmrt") and is_available("pyav")
    assert set(METHODS) >= {"opencv", "torchcodec", "ffmpeg"} and set(CODECS) == {"h264", "hevc", "vp9"}


@pytest.mark.parametrize("option", ["--seconds", "--rounds", "--long", "--height", "--files"])
def test_bad_numbers(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([option, "0"])
    assert stopped.value.code == 2 and "at least" in capsys.readouterr().err


def test_it_says_at_once_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "media", "--longest", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mmrt bench media …\n") and "--longest 1 is not from 2 to 7200" in error
    output = io.StringIO()
    with progress(Console(file=output)) as tell:
        tell("making clips: frame 1 of 9")
        tell("making clips: frame 2 of 9")
    assert output.getvalue() == "making clips: frame 1 of 9\n", "and what follows within seconds is left out where nobody watches"
    screen = io.StringIO()
    with progress(Console(file=screen, force_terminal=True)) as tell:
        tell("making clips: frame 1 of 9")
    assert "frame 1 of 9" in screen.getvalue()


def test_it_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--help"]) == 0
    assert "Decoding beside PyAV, OpenCV and torchcodec." in capsys.readouterr().out
