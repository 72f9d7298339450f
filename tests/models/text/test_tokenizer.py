"""Encoding equals transformers'; text of a user never becomes a control token; decoding in pieces equals decoding at once."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.models.errors import CheckpointError
from mmrt.models.text import tokenizer_trial
from mmrt.models.text.tokenizer import IncrementalDecoder, PromptGuard, Tokenizer
from mmrt.tests.settings import examples


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


def control_texts(tokenizer: Tokenizer) -> st.SearchStrategy[str]:
    """Text made of whole and broken control tokens and ordinary characters."""
    tokens = sorted(tokenizer.control_ids)
    pieces = [token[i:j] for token in tokens for i in (0, 1, 3) for j in (2, 5, len(token)) if i < j]
    return st.lists(st.sampled_from([*pieces, *tokens, " ", "a", "é", "\n"]), max_size=6).map("".join)


def test_encoding_equals_transformers(checkpoint: Path, tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    for text in ["", "Hello, world!", "<|im_start|>user\nZwölf 😀<|im_end|>\n", "é<tool_call>12 345", "e\u0301 \u212b \x00"]:
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_a_prompt_has_the_tokens_that_the_file_puts_around_it(checkpoint: Path, tmp_path: Path) -> None:
    """As Llama 3 does; a rendered template has its own."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    copy = tmp_path / "model"
    shutil.copytree(checkpoint, copy)
    backend = Backend.from_file(str(copy / "tokenizer.json"))
    begin = backend.token_to_id("<|endoftext|>")
    backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begin)])
    backend.save(str(copy / "tokenizer.json"))
    tokenizer, theirs = Tokenizer.load(copy), PreTrainedTokenizerFast.from_pretrained(copy)
    assert tokenizer.encode_prompt("Hello") == theirs("Hello")["input_ids"] == [begin, *tokenizer.encode("Hello")]


@settings(max_examples=examples(100), deadline=None)
@given(text=st.text())
def test_encoding_equals_transformers_for_any_text(checkpoint: Path, text: str) -> None:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(checkpoint / "tokenizer.json"))
    ours = Tokenizer(backend)
    assert PromptGuard(ours).encode(text) == backend.encode(text, add_special_tokens=False).ids


def test_special_tokens_are_those_of_the_configuration(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_text_of_a_user_never_becomes_a_control_token(tokenizer: Tokenizer, data: st.DataObject) -> None:
    texts = data.draw(st.lists(control_texts(tokenizer), min_size=1, max_size=4))
    guard = PromptGuard(tokenizer)
    ids = guard.encode("<|im_start|>" + "".join(guard.hide(texts)) + "<|im_end|>")
    control = set(tokenizer.control_ids.values())
    assert [id for id in ids if id in control] == [1, 2]
    assert b"".join(tokenizer.token_bytes[id] for id in ids).decode() == "".join(texts)


def test_a_control_token_written_by_a_user_is_its_characters(tokenizer: Tokenizer) -> None:
    guard = PromptGuard(tokenizer)
    (hidden,) = guard.hide(["see <|image_pad|> there"])
    assert "<|image_pad|>" not in hidden
    ids = guard.encode(hidden)
    assert tokenizer.control_ids["<|image_pad|>"] not in ids
    assert tokenizer.decode(ids) == "see <|image_pad|> there"


def test_a_control_token_cut_over_parts_stays_text(tokenizer: Tokenizer) -> None:
    guard = PromptGuard(tokenizer)
    ids = guard.encode("".join(guard.hide(["a<|ima", "ge_", "pad|>", "b"])))
    assert not set(tokenizer.control_ids.values()) & set(ids)
    assert tokenizer.decode(ids) == "a<|image_pad|>b"


def test_ordinary_text_is_not_touched(tokenizer: Tokenizer) -> None:
    texts = ["plain", " text", "<not a token>", "<|"]
    assert PromptGuard(tokenizer).hide(texts) == texts


def test_placeholders_that_the_file_does_not_call_special_are_control_tokens_too(checkpoint: Path) -> None:
    plain = Tokenizer.load(checkpoint)
    (id,) = plain.encode("<tool_call>")
    tokenizer = Tokenizer.load(checkpoint, control_ids=[id])
    guard = PromptGuard(tokenizer)
    ids = guard.encode("<tool_call>" + guard.hide(["<tool_call>"])[0])
    assert ids.count(id) == 1
    assert tokenizer.decode(ids) == "<tool_call><tool_call>"


def cuts(ids: list[int], data: st.DataObject) -> list[list[int]]:
    at = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in pairwise([0, *at, len(ids)])]


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data())
def test_joined_pieces_equal_the_whole_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Any ids at all, so also broken UTF-8 and special tokens, cut anywhere."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push(piece) for piece in cuts(ids, data)]
    assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids)


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(max_size=30), data=st.data())
def test_deltas_of_real_text_never_show_broken_characters(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = tokenizer.encode(text)
    decoder = IncrementalDecoder(tokenizer)
    whole = tokenizer.decode(ids)
    shown = ""
    for piece in cuts(ids, data):
        shown += decoder.push(piece)
        assert whole.startswith(shown)


def broken_copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


def test_a_broken_tokenizer_is_named(checkpoint: Path, tmp_path: Path) -> None:
    path = broken_copy(checkpoint, tmp_path)
    (path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(path)


def test_another_decoder_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = broken_copy(checkpoint, tmp_path)
    content = json.loads((path / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}
    (path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="only ByteLevel is supported"):
        Tokenizer.load(path)


def test_tokens_of_the_configuration_alone_are_added(checkpoint: Path, tmp_path: Path) -> None:
    path = broken_copy(checkpoint, tmp_path)
    next_id = Tokenizer.load(path).vocab_size
    config = {"added_tokens_decoder": {str(next_id): {"content": "<|extra|>", "special": True}}}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("<|extra|>") == [next_id]
    assert tokenizer.control_ids["<|extra|>"] == next_id
    config["added_tokens_decoder"] = {str(next_id + 5): {"content": "<|extra|>", "special": True}}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="should have id"):
        Tokenizer.load(path)


def test_too_many_added_tokens_are_refused_before_they_are_loaded(checkpoint: Path, tmp_path: Path) -> None:
    contents = json.loads((checkpoint / "tokenizer.json").read_text())
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    contents["added_tokens"] += [{"id": 600 + number, "content": f"<|{number}|>", **token} for number in range(70_000)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    with pytest.raises(CheckpointError, match=r"tokenizer.json has 70009 added tokens, the limit is 65536"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    stated = {str(number): {"content": f"<|{number}|>"} for number in range(70_000)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": stated}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json has 70000 added tokens, the limit is 65536"):
        Tokenizer.load(tmp_path)


def test_many_added_tokens_are_loaded(checkpoint: Path, tmp_path: Path) -> None:
    contents = json.loads((checkpoint / "tokenizer.json").read_text())
    first = 1 + max(*contents["model"]["vocab"].values(), *(token["id"] for token in contents["added_tokens"]))
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    contents["added_tokens"] += [{"id": first + number, "content": f"<|{number}|>", **token} for number in range(8000)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    stated = {str(first + 8000 + number): {"content": f"<|and {number}|>", "special": True} for number in range(8000)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": stated}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("<|7999|><|and 7999|>") == [first + 7999, first + 15_999] and len(tokenizer.control_ids) > 16_000


GROWS = {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 60}
BACKTRACKS = {"type": "Split", "pattern": {"Regex": r".*.*.*.*[^\s\S]"}, "behavior": "Isolated", "invert": False}
HARMLESS = {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "Lowercase"}]}


def test_one_that_takes_for_ever_ends_with_a_reason(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_trial, "TRIAL_CPU_S", 3)
    contents = json.loads((checkpoint / "tokenizer.json").read_text()) | {"normalizer": GROWS}
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    with pytest.raises(CheckpointError, match="its normalizer or pre-tokenizer takes too long or too much: .* more than"):
        Tokenizer.load(tmp_path)


def test_one_that_fails_on_text_ends_with_a_reason(checkpoint: Path, tmp_path: Path) -> None:
    contents = json.loads((checkpoint / "tokenizer.json").read_text()) | {"pre_tokenizer": BACKTRACKS}
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    with pytest.raises(CheckpointError, match="its normalizer or pre-tokenizer fails on a sample of text: .*retry-limit-in-match over"):
        Tokenizer.load(tmp_path)


def test_an_unusual_one_that_is_fast_is_loaded(checkpoint: Path, tmp_path: Path) -> None:
    contents = json.loads((checkpoint / "tokenizer.json").read_text()) | {"normalizer": HARMLESS}
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    assert Tokenizer.load(tmp_path).encode("AB") == Tokenizer.load(tmp_path).encode("ab")
