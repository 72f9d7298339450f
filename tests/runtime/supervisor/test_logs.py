"""Logs: whole lines from a pipe, rotated files, and reading them back in the order of time."""

import asyncio
import os
from pathlib import Path

from mmrt.runtime.supervisor.launcher import pipe_to_logs
from mmrt.runtime.supervisor.logs import MAX_LINE_BYTES, NUM_OLD_FILES, LogFile, LogPump, LogReader


def pump(*chunks: bytes) -> tuple[list[str], list[str]]:
    """(lines handed on, tail) after these writes to the pipe."""

    async def main() -> tuple[list[str], list[str]]:
        lines: list[str] = []
        read_end, write_end = pipe_to_logs()
        log = LogPump(read_end, lines.extend)
        for chunk in chunks:
            os.write(write_end, chunk)
            await asyncio.sleep(0)
        log.finish()
        os.close(write_end)
        return lines, list(log.tail)

    return asyncio.run(main())


def test_lines_are_whole_whatever_the_writes() -> None:
    lines, tail = pump(b"one\ntw", b"o\n\nthree \xff", b"\nfour")
    assert lines == tail == ["one", "two", "", "three \ufffd", "four"]


def test_a_progress_bar_counts_as_its_last_state() -> None:
    assert pump(b"10 %\r50 %\r100 %\nrest\r\n")[0] == ["100 %", "rest"]


def test_an_endless_line_is_cut() -> None:
    lines, _ = pump(b"x" * 30_000, b"\n")
    assert [len(line) for line in lines] == [MAX_LINE_BYTES, 30_000 - MAX_LINE_BYTES]


def test_a_grandchild_that_keeps_the_pipe_does_not_hold_up_the_end() -> None:
    async def main() -> list[str]:
        lines: list[str] = []
        read_end, write_end = pipe_to_logs()
        log = LogPump(read_end, lines.extend)
        os.write(write_end, b"last words")
        log.finish()
        os.close(write_end)
        return lines

    assert asyncio.run(main()) == ["last words"]


def test_files_rotate_and_none_is_lost_to_a_reader(tmp_path: Path) -> None:
    errors: list[str] = []
    file = LogFile(tmp_path / "logs" / "decode.log", errors.append, max_bytes=400)
    reader = LogReader(tmp_path / "logs")
    seen = []
    for number in range(100):
        file.write([f"line {number}"])
        seen += reader.new()
    file.close()
    reader.close()
    assert [line.partition(" ")[2] for _, line in seen] == [f"line {number}" for number in range(100)]
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["decode.log", *(f"decode.log.{number}" for number in range(1, NUM_OLD_FILES + 1))]
    assert all(path.stat().st_size <= 400 for path in (tmp_path / "logs").iterdir())
    assert not errors


def test_actors_are_merged_by_time_and_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("2026-01-01 z first\n2026-01-01 a second\n2026-01-03 fifth\nunfinis")
    (tmp_path / "b.log").write_text("2026-01-02 third\n2026-01-02 fourth\n")
    reader = LogReader(tmp_path)
    lines = [f"{actor} {line.split()[-1]}" for actor, line in reader.last(10)]
    assert lines == ["a first", "a second", "b third", "b fourth", "a fifth"]
    with (tmp_path / "a.log").open("a") as file:
        file.write("hed\n")
    assert reader.new() == [("a", "unfinished")]
    assert reader.new() == []
    assert reader.last(0) == []
    reader.close()
    only = LogReader(tmp_path, ("b",))
    assert [actor for actor, _ in only.last(10)] == ["b", "b"]
    only.close()


def test_long_lines_are_last_lines_too(tmp_path: Path) -> None:
    lines = [f"{number} {'x' * 3000}" for number in range(8)]
    (tmp_path / "a.log").write_text("".join(f"{line}\n" for line in lines))
    for num_lines in (1, 3, 8, 20):
        reader = LogReader(tmp_path)
        assert [line for _, line in reader.last(num_lines)] == lines[-num_lines:]
        reader.close()


def test_no_place_for_logs_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    errors: list[str] = []
    log = LogFile(tmp_path / "file" / "decode.log", errors.append)
    log.write(["lost"])
    log.write(["lost too"])
    log.close()
    assert errors == [f"no log file {tmp_path}/file/decode.log: File exists"]
