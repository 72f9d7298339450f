"""The video bench starts a run, asks it about a video, and puts its stages alone beside it."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.models.make.checkpoint import make_checkpoint
from mmrt_lab.media.trace_stages import StageSlice, overlap_s, stage_slices
from mmrt_lab.media.video import VideoBench, main
from mmrt_lab.media.video_stages import STAGES


@pytest.mark.slow
def test_the_whole_bench(tmp_path: Path) -> None:
    checkpoint, figures, picture = tmp_path / "tiny", tmp_path / "figures.json", tmp_path / "stages.svg"
    make_checkpoint("tiny", checkpoint)
    small = ["--seconds", "3", "--height", "90", "--fps", "2", "--max-pixels", "3136", "--rounds", "1"]
    assert main(["--checkpoint", str(checkpoint), *small, "--plot", str(picture), "--json", str(figures)]) in (0, 1)
    bench = msgspec.json.decode(figures.read_bytes(), type=VideoBench)
    assert list(bench.alone) == list(STAGES)
    assert bench.alone["decode"].num_units == 3, "temporal patches of six frames"
    assert bench.alone["encode"].num_units == bench.alone["prefill"].num_units < bench.num_prompt_tokens
    assert 0 <= bench.overlap_s < bench.ttft_s  # stages of milliseconds may have no core at once
    assert bench.ratio == pytest.approx(bench.ttft_s / bench.floor_s)
    assert "<svg" in picture.read_text()


def test_what_is_no_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--checkpoint", "/nowhere", "--seconds", "1", "--height", "36", "--rounds", "1"]) == 1
    assert "mmrt bench video: mmrt up" in capsys.readouterr().err


def test_slices_of_a_trace() -> None:
    def event(name: str, begin_us: float, dur_us: float) -> dict[str, object]:
        return {"ph": "X", "name": name, "ts": begin_us, "dur": dur_us}

    events = [
        event("encode", 3e6, 5e5),
        event("preprocess", 2e6, 1e6),
        event("tick", 2e6, 1.0),
        event("prefill", 9e6, 1.0),
        event("analyse", 1.5e6, 1.0),
        {"ph": "i", "name": "encode", "ts": 2.5e6},
    ]
    assert stage_slices({"traceEvents": events}, 2.0, 8.0) == [
        StageSlice("video", "preprocess", 0.0, 1.0),
        StageSlice("encoder", "encode", 1.0, 1.5),
    ]


INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=8)


@given(INTERVALS, INTERVALS)
def test_overlap_is_the_moments_at_which_both_work(video: list[tuple[int, int]], encoder: list[tuple[int, int]]) -> None:
    busy = {stage: _apart(lengths) for stage, lengths in (("video", video), ("encoder", encoder))}
    slices = [StageSlice(stage, "plan", begin, end) for stage, spans in busy.items() for begin, end in spans]
    moments = [{second for begin, end in spans for second in range(begin, end)} for spans in busy.values()]
    assert overlap_s(slices) == len(moments[0] & moments[1])


def _apart(lengths: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans one after another: (gap before, length) each."""
    spans, at = [], 0
    for gap, length in lengths:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    return spans
