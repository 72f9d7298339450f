"""Whether the vocabulary is the output head of a model that sees, by config.json and by the files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError

PART = "model-00001-of-00001.safetensors"


def say(path: Path, root: bool | None, text: bool | None) -> None:
    """Let config.json say this of the model and of its decoder; None: nothing."""
    config = json.loads((path / "config.json").read_text())
    for place, said in ((config, root), (config["text_config"], text)):
        place.pop("tie_word_embeddings", None)
        place |= {} if said is None else {"tie_word_embeddings": said}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", ["internvl", "pixtral", "mistral3", "lighton_ocr", "llava", "llava_next", "llava_onevision"])
def test_files_tell_of_a_head_where_config_does_not(family: str, checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """A file that says that there is a head and has none is refused: transformers draws one at random."""
    shutil.copytree(checkpoints(family), made := tmp_path / "made")
    tensors = load_file(made / "model.safetensors")
    headless = {name: values for name, values in tensors.items() if "lm_head." not in name}
    (made / "model.safetensors").rename(made / PART)

    def is_tied(names: object) -> bool:
        (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, PART)}))
        return load_model_config(made).language.tie_embeddings

    for root, text, whole, without in (
        (None, None, False, True),
        (None, True, False, True),
        (False, True, False, True),
        (True, False, True, True),
        (False, False, False, False),
        (False, None, False, False),
    ):
        say(made, root, text)
        assert (is_tied(tensors), is_tied(headless)) == (whole, without), (root, text)
    (made / "model.safetensors.index.json").unlink()
    (made / PART).unlink()
    save_file(headless, made / "model.safetensors")
    with pytest.raises(
        CheckpointError, match="tensor 'lm_head.weight' of shape .* is missing; tie_word_embeddings: true in config.json"
    ):
        read_weights(made, load_model_config(made))
    say(made, False, True)
    assert "lm_head" not in read_weights(made, load_model_config(made))
    (made / "model.safetensors").unlink()
    say(made, None, None)
    assert load_model_config(made).language.tie_embeddings
    (made / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0{{{{{")
    assert load_model_config(made).language.tie_embeddings
