"""Writes a checkpoint as llama.cpp's two files, its decoder's and its towers', by llama.cpp's own converter.

``python -m mmrt_lab.peers.convert LLAMA_CPP CHECKPOINT DIR`` writes DIR/model.gguf and, of a model with towers, DIR/mmproj.gguf in
bfloat16. LLAMA_CPP: its source, which the archive of llama-cpp-python has in ``vendor/llama.cpp``. The converter needs transformers and
sentencepiece. It knows tokenizers by a digest; one of ``mmrt model make``, which it does not know, counts as Qwen2's. It reads the
checkpoint with the files and the tensors' names of ``converter_config``; the tensors are the same.
"""

import json
import runpy
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from .converter_config import converter_config, converter_name, converter_processor, converter_tokenizer, model_options

_KIND = "qwen2"  # of a tokenizer of bytes
SCRATCH = "converting-"  # how the directory begins that the converter reads, beside the files
_INDEX = "model.safetensors.index.json"  # has the tensors' names; without it all files are read


def main() -> None:
    source, checkpoint, folder = (Path(name).resolve() for name in sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    _take_any_tokenizer()
    config = json.loads((checkpoint / "config.json").read_text())
    _rename_tensors(config["model_type"])
    files = {"model": model_options(config)} | ({"mmproj": ("--mmproj",)} if {"vision_config", "audio_config"} & {*config} else {})
    with tempfile.TemporaryDirectory(dir=folder, prefix=SCRATCH) as scratch:
        seen = Path(scratch) / checkpoint.name
        _link(checkpoint, seen, converter_config(config))
        for name, more in files.items():
            sys.argv[1:] = [str(seen), "--outtype", "bf16", "--outfile", str(folder / f"{name}.gguf"), *more]
            runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


def _link(checkpoint: Path, seen: Path, config: dict[str, Any]) -> None:
    """Make the directory ``seen`` of links to the checkpoint's files, with those files that the converter finds changed."""
    seen.mkdir()
    for file in checkpoint.iterdir():
        if file.name != _INDEX:
            (seen / file.name).symlink_to(file)
    _replace(seen / "config.json", lambda _: config)
    _replace(seen / "tokenizer.json", lambda data: converter_tokenizer(data, config["model_type"]))
    _replace(seen / "processor_config.json", converter_processor)


def _replace(link: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A changed copy in place of the link, if there is one."""
    if link.exists():
        data = json.loads(link.read_text())
        link.unlink()
        link.write_text(json.dumps(change(data)))


def _take_any_tokenizer() -> None:
    """Where the converter wants a file of another kind of tokenizer, it takes the one of bytes that there is."""
    TextModel = import_module("conversion.base").TextModel
    known, made = TextModel.get_vocab_base_pre, TextModel.__init__

    def kind_of(self: Any, tokenizer: Any) -> str:
        try:
            found: str = known(self, tokenizer)
            return found
        except NotImplementedError:
            return _KIND

    def make(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        usual = self.set_vocab

        def set_vocab() -> None:
            try:
                usual()
            except FileNotFoundError:
                self._set_vocab_gpt2()

        self.set_vocab = set_vocab

    TextModel.get_vocab_base_pre, TextModel.__init__ = kind_of, make


def _rename_tensors(model_type: str) -> None:
    Tensors = import_module("gguf.utility").SafetensorsLocal
    read = Tensors.__init__

    def read_and_rename(self: Any, file: Path) -> None:
        read(self, file)
        self.tensors = {converter_name(name, model_type): tensor for name, tensor in self.tensors.items()}

    Tensors.__init__ = read_and_rename


if __name__ == "__main__":
    main()
