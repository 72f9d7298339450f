"""Writes a checkpoint as llama.cpp's two files, its decoder's and its towers', by llama.cpp's own converter.

``python -m mmrt_lab.peers.convert LLAMA_CPP CHECKPOINT DIR`` writes DIR/model.gguf and DIR/mmproj.gguf in bfloat16. LLAMA_CPP: its
source, which the archive of llama-cpp-python has in ``vendor/llama.cpp``. The converter needs transformers and sentencepiece. It knows
tokenizers by a digest; one of ``mmrt model make``, which it does not know, counts as Qwen2's.
"""

import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

_KIND = "qwen2"  # of a tokenizer of bytes


def main() -> None:
    source, checkpoint, folder = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    _take_any_tokenizer()
    for name, more in (("model", ()), ("mmproj", ("--mmproj",))):
        sys.argv[1:] = [str(checkpoint), "--outtype", "bf16", "--outfile", str(folder / f"{name}.gguf"), *more]
        runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


def _take_any_tokenizer() -> None:
    TextModel = import_module("conversion.base").TextModel
    known = TextModel.get_vocab_base_pre

    def kind_of(self: Any, tokenizer: Any) -> str:
        try:
            found: str = known(self, tokenizer)
            return found
        except NotImplementedError:
            return _KIND

    TextModel.get_vocab_base_pre = kind_of


if __name__ == "__main__":
    main()
