"""The corpus follows from its seed, holds what it promises, and every frame that is sampled from it is that of PyAV in sequence."""

import io
import sys
from pathlib import Path

import av
import msgspec
import pytest
from rich.console import Console

from mmrt.bench.environment import read_environment
from mmrt_lab.media.command import main
from mmrt_lab.media.corpus import LONGEST_S, Recipe, make_corpus, recipes
from mmrt_lab.media.corpus_speed import CorpusBench, FileResult, show_corpus, why_absent


def short(recipe: Recipe) -> Recipe:
    return msgspec.structs.replace(recipe, seconds=3.0, height=90)


def test_recipes() -> None:
    found = recipes(3)
    assert found == recipes(3) != recipes(4)
    assert len({recipe.file_name for recipe in found}) == 100
    for codec, least in (("h264", 45), ("hevc", 25), ("vp9", 20), ("mpeg4", 10)):
        assert sum(recipe.codec == codec for recipe in found) == least
    lengths = sorted(recipe.seconds for recipe in found)
    assert 2 <= lengths[0] < 3 and 10 < lengths[50] < 30 and 600 < lengths[95] < lengths[99] == LONGEST_S
    assert {recipe.cut for recipe in found} == {"", "mid", "open"} and any(recipe.is_varying for recipe in found)
    assert len({recipe.container for recipe in found}) == 5 and len({recipe.rate for recipe in found}) > 5
    assert any(recipe.b_frames for recipe in found) and len({recipe.gop for recipe in found}) == 5


def test_the_same_recipe_makes_the_same_file(tmp_path: Path) -> None:
    kinds = {(recipe.container, recipe.codec): short(recipe) for recipe in recipes(0)}
    wanted = list(kinds.values())
    said: list[str] = []
    first, again = (make_corpus(tmp_path / name, wanted, said.append) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    assert said[0] == f"making videos in {tmp_path}/a" and said[-1].endswith(f"{len(wanted)} of {len(wanted)}")
    times = [path.stat().st_mtime_ns for path in first]
    make_corpus(tmp_path / "a", wanted, said.append)
    assert [path.stat().st_mtime_ns for path in first] == times, "what is there is not made anew"


def test_what_a_recipe_says_is_in_the_file(tmp_path: Path) -> None:
    """The number of frames, the time between them, and where the first key frame is."""
    plain, varying, mid = (
        next(short(recipe) for recipe in recipes(0) if recipe.codec == "h264" and recipe.gop <= 30 and want(recipe))
        for want in (
            lambda recipe: not recipe.cut and not recipe.is_varying and recipe.gop > 1,
            lambda recipe: recipe.is_varying,
            lambda recipe: recipe.cut == "mid",
        )
    )
    for recipe, path in zip((plain, varying, mid), make_corpus(tmp_path, [plain, varying, mid], str), strict=True):
        with av.open(path) as container:
            assert (container.streams.video[0].width, container.streams.video[0].height) == (160, 90)
            packets = [packet for packet in container.demux(video=0) if packet.size]
        stamps = sorted(float(packet.pts * packet.time_base) for packet in packets if packet.pts is not None)
        gaps = {round((later - earlier) * float(recipe.rate) * 4) for earlier, later in zip(stamps, stamps[1:], strict=False)}
        assert len(packets) == -(-3 * recipe.rate // 1) - (recipe.cut == "mid")
        assert (len(gaps) > 2) == recipe.is_varying
        assert packets[0].is_keyframe == (not recipe.cut)


def test_the_whole_corpus_at_a_small_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of videos that begin with a key frame no sampled frame is another one."""
    figures = tmp_path / "figures.json"
    options = ["--corpus", "--files", "8", "--longest", "4", "--clips", str(tmp_path / "corpus"), "--json", str(figures)]
    main(options)
    printed = capsys.readouterr().out
    bench = msgspec.json.decode(figures.read_bytes(), type=CorpusBench)
    assert len(bench.files) == 8 and not any(file.failures for file in bench.files)
    assert all({"mmrt", "pyav"} <= file.seconds.keys() for file in bench.files)
    assert all(file.is_right for file in bench.files)
    assert "frames differ from those of PyAV in sequence" in printed and "P50" in printed
    assert "torchcodec" not in bench.absent or f"torchcodec {bench.absent['torchcodec']}; it is not compared with" in printed


def test_what_cannot_be_made_or_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    options = ["--corpus", "--files", "1", "--longest", "2", "--clips"]
    assert main([*options, str(tmp_path / "file")]) == 1
    (recipe,) = recipes(0, 1, 2.0)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / recipe.file_name).write_bytes(b"no video")
    assert main([*options, str(tmp_path / "corpus")]) == 1
    first, second = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mmrt bench media: ")]
    assert "File exists" in first and recipe.file_name in second


def test_a_peer_that_cannot_be_imported_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchcodec where FFmpeg's libraries are missing."""
    (tmp_path / "torchcodec.py").write_text("raise RuntimeError('Could not load libtorchcodec.\\nMore lines')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchcodec"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    assert why_absent("torchcodec") == "cannot be imported: Could not load libtorchcodec."
    assert why_absent("pyav") == ""


def test_what_is_wrong_is_named() -> None:
    right = FileResult(
        name="a.mp4", codec="h264", num_wanted=9, num_frames=90, num_sequential=90, num_different=0,
        seconds={"mmrt": 1.0, "pyav": 2.0}, failures={},
    )  # fmt: skip
    replace = msgspec.structs.replace
    other = replace(right, name="b.mp4", num_different=4)
    fewer = replace(right, name="c.mp4", num_frames=88)
    failed = replace(right, name="d.mp4", seconds={"pyav": 2.0}, failures={"mmrt": "MediaError: bad"})
    bench = CorpusBench(
        environment=read_environment(), seed=0, rounds=1, absent={"torchcodec": "cannot be imported: no ffmpeg"},
        files=[right, other, fewer, failed],
    )  # fmt: skip
    output = io.StringIO()
    show_corpus(Console(file=output, width=120), bench)
    printed = output.getvalue()
    assert not bench.is_right and replace(bench, files=[right]).is_right
    assert "4 frames differ from those of PyAV in sequence; the number of frames does in 1 files" in printed
    assert "b.mp4: 4 of 9 differ, 90 frames of 90" in printed and "c.mp4: 0 of 9 differ, 88 frames of 90" in printed
    assert "d.mp4: MediaError: bad" in printed and "a.mp4" not in printed
    assert "torchcodec cannot be imported: no ffmpeg; it is not compared with" in printed
    assert ["pyav", "all", "3", "2.00", "2.00", "2.00"] in [line.replace("│", " ").split() for line in printed.splitlines()]
