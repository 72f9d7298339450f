"""llama.cpp's converter is run for both files, and a tokenizer that it does not know is no reason to end. The converter here is a small
one: llama.cpp's source is in no package that tests have."""

import subprocess
import sys
from pathlib import Path

BASE = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        if tokenizer == "known":
            return "llama-bpe"
        raise NotImplementedError
"""
PROGRAM = """
import sys
from conversion.base import TextModel
kinds = [TextModel().get_vocab_base_pre(name) for name in ("known", "made")]
open(sys.argv[sys.argv.index("--outfile") + 1], "w").write(" ".join([*kinds, sys.argv[1], *sys.argv[6:]]))
"""


def test_both_files_are_written(tmp_path: Path) -> None:
    (tmp_path / "source" / "conversion").mkdir(parents=True)
    (tmp_path / "source" / "conversion" / "base.py").write_text(BASE)
    (tmp_path / "source" / "convert_hf_to_gguf.py").write_text(PROGRAM)
    paths = [str(tmp_path / name) for name in ("source", "checkpoint", "files")]
    subprocess.run([sys.executable, "-m", "mmrt_lab.peers.convert", *paths], check=True, timeout=60)
    said = {file.name: file.read_text() for file in (tmp_path / "files").iterdir()}
    assert said == {"model.gguf": f"llama-bpe qwen2 {paths[1]}", "mmproj.gguf": f"llama-bpe qwen2 {paths[1]} --mmproj"}
