"""Rows of each family beside llama.cpp's server. llama.cpp is in no package that tests have: its converter is a small program here,
and its server one that ends, or another run of mmrt."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mmrt.models.families.registry import FAMILIES
from mmrt_lab.peers import rows
from mmrt_lab.peers.rows import compared, complaint, main
from mmrt_lab.peers.rows_table import Row, table
from mmrt_lab.peers.shapes import SHAPES, recipe_of, text_of

REFUSES = 'import sys\nprint("ERROR:hf-to-gguf:Model X is not supported", file=sys.stderr)\nsys.exit(1)\n'
WRITES = 'import sys\nopen(sys.argv[sys.argv.index("--outfile") + 1], "w").write("a file")\n'
HANGS = 'import os, sys, time\nopen(sys.argv[sys.argv.index("--outfile") + 1], "w").write(str(os.getpid()))\ntime.sleep(600)\n'
ENDS = '#!/bin/sh\necho "error: no such tensor in $2"\nexit 3\n'
SERVES = f"""#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in -m) file=$2 ;; --port) port=$2 ;; esac
    shift
done
dir=$(dirname "$file")
MMRT_RUN_DIR="$MMRT_RUN_DIR-peer" exec {sys.executable} -m mmrt.cli.main up "$dir/checkpoint" --port "$port"
"""


def llama_cpp(folder: Path, converter: str, server: str = ENDS) -> Path:
    """A directory with both programs."""
    (folder / "conversion").mkdir(parents=True)
    (folder / "conversion" / "base.py").write_text("class TextModel:\n    get_vocab_base_pre = None\n")
    (folder / "gguf-py" / "gguf").mkdir(parents=True)
    (folder / "gguf-py" / "gguf" / "utility.py").write_text("class SafetensorsLocal:\n    pass\n")
    (folder / "gguf-py" / "gguf" / "__init__.py").touch()
    (folder / "convert_hf_to_gguf.py").write_text(converter)
    program = folder / "build" / "bin" / "llama-server"
    program.parent.mkdir(parents=True)
    program.write_text(server)
    program.chmod(0o755)
    return folder


def test_every_family_has_a_shape() -> None:
    assert {*SHAPES} == {*FAMILIES} - {"null"}


@pytest.mark.parametrize("family", SHAPES)
def test_a_shape_changes_its_published_size(family: str) -> None:
    shape = SHAPES[family]
    recipe = recipe_of(family, shape)
    names = [*recipe.special_tokens, *recipe.plain_tokens]
    files = recipe.files({name: number for number, name in enumerate(names)})
    config = files["config.json"]
    text = config.get("text_config", config)
    assert text["vocab_size"] == recipe.vocab_size == text.get("vocab_size_per_layer_input", recipe.vocab_size)
    assert len(text.get("layer_types", range(text["num_hidden_layers"]))) == text["num_hidden_layers"]
    changes = {"vision_config": shape.vision, "audio_config": shape.audio}
    assert all(fields.items() <= config[part].items() for part, fields in changes.items() if fields)
    assert shape.image.items() <= files.get("preprocessor_config.json", {}).items()
    assert shape.text.items() <= text.items() and shape.size in text_of(shape)


def test_a_family_that_is_not_converted_has_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(llama_cpp(tmp_path / "source", REFUSES)), str(tmp_path / "rows"), "minicpmv4_7"]
    (tmp_path / "rows" / "minicpmv4_7").mkdir(parents=True)
    (tmp_path / "rows" / "minicpmv4_7" / "model.gguf").touch()  # of a run that was ended
    assert main(arguments) == 0
    assert "- `minicpmv4_7`: the converter: Model X is not supported" in (tmp_path / "rows" / "table.md").read_text()
    assert not (tmp_path / "rows" / "minicpmv4_7" / "checkpoint").exists()
    capsys.readouterr()
    assert main(arguments) == 0  # nothing is done again
    assert capsys.readouterr().out.startswith("| family |")


def test_a_converter_that_does_not_end_leaves_nothing_but_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the families behind it have their rows."""
    monkeypatch.setattr(rows, "_SECONDS", 5)
    source, folder = llama_cpp(tmp_path / "source", HANGS), tmp_path / "rows" / "minicpmv4_7"
    assert main([str(source), str(tmp_path / "rows"), "minicpmv4_7"]) == 0
    assert "- `minicpmv4_7`: the converter: it took more than 5 s" in (tmp_path / "rows" / "table.md").read_text()
    assert {file.name for file in folder.iterdir()} == {"refused.txt", "row.json"}


def test_sigterm_ends_the_converter_too(tmp_path: Path) -> None:
    """Which would go on to write the files that the next run writes."""
    command = [sys.executable, "-m", "mmrt_lab.peers.rows", str(llama_cpp(tmp_path / "source", HANGS)), str(tmp_path), "minicpmv4_7"]
    file = tmp_path / "minicpmv4_7" / "model.gguf"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        until_s = time.monotonic() + 60
        while not (file.exists() and file.read_text()) and time.monotonic() < until_s:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)
    assert {one.name for one in file.parent.iterdir()} == {"checkpoint", "model.gguf"}


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{", b"?\r\n"]
)
def test_a_server_that_answers_nonsense_is_the_reason_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    place = rows.place_of(tmp_path)
    place.refused.touch()
    place.model.touch()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(rows, "_measure", lambda *_: rows.greedy(url))
        row = rows.row_of("llama", SHAPES["llama"], tmp_path, place, 1)
    assert row.reasons and not row.values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "reason"), [(ENDS, "llama-server ended with status 3: error: no such tensor in model.gguf"), (SERVES, "")]
)
def test_both_sides_are_measured(tmp_path: Path, server: str, reason: str) -> None:
    arguments = [str(llama_cpp(tmp_path / "source", WRITES, server)), str(tmp_path / "rows"), "minicpmv4_7"]
    assert main([*arguments, "--prepare"]) == 0
    assert not (tmp_path / "rows" / "table.md").exists()
    assert main(arguments) == 0
    row = json.loads((tmp_path / "rows" / "minicpmv4_7" / "row.json").read_text())
    if reason:
        assert row["reasons"] == [reason] and not row["values"]
        assert (tmp_path / "rows" / "minicpmv4_7" / "model.gguf").exists()
    else:
        assert {file.name for file in (tmp_path / "rows" / "minicpmv4_7").iterdir()} == {"row.json", "llama.log"}
        assert row["same"] == "yes" and not row["reasons"] and all(all(pair) for pair in row["values"].values())


def test_an_unknown_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), str(tmp_path), "--keep", "llama", "gpt2"])  # options stand anywhere
    assert "no family gpt2" in capsys.readouterr().err


def test_the_table() -> None:
    values: dict[str, tuple[float | None, float | None]] = {
        "one picture: TTFT, ms": (1200.0, 2400.0),
        "one picture: tokens of a prompt": (170.0, 170.0),
        "one clip of 10 s: TTFT, ms": (300.0, None),
        "one request of 100 tokens: TTFT, ms": (90.0, 100.0),
        "one request of 100 tokens: mean TBT, ms": (20.0, 25.0),
    }
    rows = [
        Row(family="a", shape="1b", values=values, same="yes", load=1.04),
        Row(family="b", shape="2b", reasons=["the converter: no"]),
    ]
    lines = table(rows).splitlines()
    assert lines[2] == "| `a` | 1.20, 2.40 s (0.50), 170 tokens | 300, – ms | 90, 100 ms (0.90) | 50, 40 (0.80) | yes | 1.0 |"
    assert "- `a`: 1b" in lines and "- `b`: 2b" not in lines and lines[-1] == "- `b`: the converter: no"


def test_the_words_of_a_row() -> None:
    assert compared("abc", "abc") == "yes" and compared("abcd", "abX") == "2 of 4 characters"
    assert complaint("INFO: x\nERROR:hf-to-gguf:Model Y is not supported\n\n") == "Model Y is not supported"
    assert complaint("") == "it said nothing"
