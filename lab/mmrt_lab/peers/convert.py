"""Writes a checkpoint as llama.cpp's two files, its decoder's and its towers', by llama.cpp's own converter.

``python -m mmrt_lab.peers.convert LLAMA_CPP CHECKPOINT DIR`` writes DIR/model.gguf and, of a model with towers, DIR/mmproj.gguf in
bfloat16. LLAMA_CPP: its source, which the archive of llama-cpp-python has in ``vendor/llama.cpp``. The converter needs transformers and
sentencepiece. It knows tokenizers by a digest; one of ``mmrt model make``, which it does not know, counts as Qwen2's. It reads the
checkpoint with the configuration, the tokenizer and the tensors' names of ``converter_config``; the tensors are the same.
"""

import json
import runpy
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from .converter_config import converter_config, converter_name, converter_tokenizer

_KIND = "qwen2"  # of a tokenizer of bytes
_CHANGED = ("config.json", "tokenizer.json", "model.safetensors.index.json")  # without the last it reads all files


def main() -> None:
    source, checkpoint, folder = (Path(name).resolve() for name in sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    _take_any_tokenizer()
    config = json.loads((checkpoint / "config.json").read_text())
    _rename_tensors(config["model_type"])
    files = [("model", ()), ("mmproj", ("--mmproj",))] if {"vision_config", "audio_config"} & {*config} else [("model", ())]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        seen = Path(scratch) / checkpoint.name
        _link(checkpoint, seen, converter_config(config))
        for name, more in files:
            sys.argv[1:] = [str(seen), "--outtype", "bf16", "--outfile", str(folder / f"{name}.gguf"), *more]
            runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


def _link(checkpoint: Path, seen: Path, config: dict[str, Any]) -> None:
    """Make the directory ``seen`` of links to the checkpoint's files, with the converter's configuration and tokenizer."""
    seen.mkdir()
    for file in checkpoint.iterdir():
        if file.name not in _CHANGED:
            (seen / file.name).symlink_to(file)
    (seen / "config.json").write_text(json.dumps(config))
    if (tokenizer := checkpoint / "tokenizer.json").exists():
        changed = converter_tokenizer(json.loads(tokenizer.read_text()), config["model_type"])
        (seen / "tokenizer.json").write_text(json.dumps(changed))


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


def _rename_tensors(model_type: str) -> None:
    Tensors = import_module("gguf.utility").SafetensorsLocal
    read = Tensors.__init__

    def read_and_rename(self: Any, file: Path) -> None:
        read(self, file)
        self.tensors = {converter_name(name, model_type): tensor for name, tensor in self.tensors.items()}

    Tensors.__init__ = read_and_rename


if __name__ == "__main__":
    main()
