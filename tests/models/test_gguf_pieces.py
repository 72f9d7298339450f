"""Tokenizers of SentencePiece's kind in GGUF files: beside the algorithm as it is defined, transformers' reader and the
package sentencepiece; and what the gateway makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.models.checkpoint.weights import check_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.gguf.directory import gguf_directory
from mmrt.models.gguf.tokenizer import make_tokenizer
from mmrt.models.grammar.vocabulary import load_vocabulary
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.models.text.tokenizer import IncrementalDecoder, PromptGuard, Tokenizer
from mmrt.tests.models.gguf_files import with_fields, write_gguf

SPACE = "\u2581"
TEXTS = [
    *("", " ", "  ", "a", " a", "Hello world", " Hello  world ", "one\ntwo\n\n three\t", "don't 12345 3.14", "naïve café"),
    *("日本語のテキスト", "😀 smile 👩‍👩‍👧", "\u0000\u0001", "▁low line▁", "<s>", "<0x41>", "[INST] hi [/INST]", "ab" * 200),
    *("    deep   ", "\u200b", "e\u0301"),
]
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "a model that sees pictures and hears sounds answers questions about them",
    "Hello world, how are you today? I am fine, thank you; and you?",
    "In 1999 there were 12 ways to say it, and 345 more in 2024.",
    "the theory of everything that there is, then and there",
]


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and kinds as Llama's: <unk>, <s>, </s>, bytes; merges in the order in which they were found in a corpus, which
    byte-pair encoding finds; then characters, the most frequent first; two added tokens."""
    words = [[SPACE, *word] for text in CORPUS for word in text.split()]
    characters = sorted({character for word in words for character in word})
    merged: list[str] = []
    for _ in range(200):
        pairs: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] = pairs.get(pair, 0) + 1
        (first, second), count = max(pairs.items(), key=lambda item: (item[1], item[0]))
        if count < 2:
            break
        merged.append(first + second)
        words = [join(word, first, second) for word in words]
    merged = list(dict.fromkeys(merged)) + [SPACE * 2, SPACE * 3, SPACE * 4]
    plain = [*merged, *characters]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *plain, "<|im_end|>", "[INST]"]
    scores = [0.0] * 259 + [-float(number) for number in range(len(plain))] + [0.0, 0.0]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(plain), 3, 4]
    return tokens, scores, kinds


def join(word: list[str], first: str, second: str) -> list[str]:
    found: list[str] = []
    for piece in word:
        if found and found[-1] == first and piece == second:
            found[-1] += piece
        else:
            found.append(piece)
    return found


TOKENS, SCORES, KINDS = vocabulary()
METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": SCORES,
    "tokenizer.ggml.token_type": KINDS,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def as_defined(text: str, has_prefix: bool = True) -> list[int]:
    """The ids of a text without added tokens: the two neighbours whose token has the highest score are joined, the first of equal ones;
    what is no token is written in bytes."""
    numbers = {token: number for number, token in enumerate(TOKENS) if KINDS[number] == 1}
    pieces = list((SPACE * has_prefix + text).replace(" ", SPACE)) if text else []
    while True:
        found = [(-SCORES[numbers[pair]], at) for at in range(len(pieces) - 1) if (pair := pieces[at] + pieces[at + 1]) in numbers]
        if not found:
            break
        at = min(found)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [id for piece in pieces for id in ([numbers[piece]] if piece in numbers else [3 + byte for byte in piece.encode()])]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a file whose model is a tiny Llama."""
    folder = tmp_path_factory.mktemp("pieces")
    make_checkpoint("tiny", folder / "checkpoint", "llama")
    write_gguf(folder / "checkpoint", folder / "byte-level.gguf")
    with_fields(
        folder / "byte-level.gguf", folder / "model.gguf", _padded() | {"tokenizer.ggml.merges": None, "tokenizer.ggml.pre": None}
    )
    return gguf_directory(folder / "model.gguf", folder / "home")


def _padded() -> dict[str, Any]:
    """As many tokens as the tiny model has, the last of them unused."""
    more = 1216 - len(TOKENS)
    return METADATA | {
        "tokenizer.ggml.tokens": [*TOKENS, *(f"[PAD{number}]" for number in range(more))],
        "tokenizer.ggml.scores": [*SCORES, *[-1e6] * more],
        "tokenizer.ggml.token_type": [*KINDS, *[5] * more],
    }


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


WORDS = st.one_of(st.text(), st.text(alphabet="aeht o\n▁日", max_size=40), st.lists(st.sampled_from([*CORPUS, *TEXTS])).map(" ".join))


def plain(text: str) -> bool:
    """Without the text of an added token; runs of spaces may be cut in several ways of one score."""
    added = [token for token, kind in zip(TOKENS, KINDS, strict=True) if kind in (3, 4)]
    return not any(token in text for token in added) and "  " not in text.replace(SPACE, " ")


@settings(max_examples=300, deadline=None)
@given(text=WORDS)
def test_ids_are_as_the_algorithm_is_defined(tokenizer: Tokenizer, text: str) -> None:
    if plain(f" {text}"):
        assert tokenizer.encode(text) == as_defined(text)
        assert tokenizer.encode_going_on([text]) == [as_defined(text, has_prefix=False)]


@settings(max_examples=300, deadline=None)
@given(text=WORDS)
def test_texts_come_back_however_they_are_cut(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace(SPACE, " ")
    ids = tokenizer.encode_going_on([text])[0]
    if plain(text):
        assert tokenizer.decode(ids) == text
    decoder = IncrementalDecoder(tokenizer)
    assert "".join([*(decoder.push([id]) for id in ids), decoder.flush()]) == tokenizer.decode(ids)


def test_bytes_that_are_no_character_are_as_in_the_stream(tokenizer: Tokenizer) -> None:
    for ids in ([3 + 0xE6, 3 + 0x97], [3 + 0xF0, 3 + 0x9F, 3 + 0x41], [3 + 0x80, *tokenizer.encode("a")]):
        decoder = IncrementalDecoder(tokenizer)
        assert "".join([*(decoder.push([id]) for id in ids), decoder.flush()]) == tokenizer.decode(ids)


def test_texts_begin_and_added_tokens_are_found(tokenizer: Tokenizer) -> None:
    im_end, inst = TOKENS.index("<|im_end|>"), TOKENS.index("[INST]")
    assert tokenizer.encode_prompt("Hello") == [1, *as_defined("Hello")]
    assert tokenizer.encode("Hello<|im_end|>world") == [*as_defined("Hello"), im_end, *as_defined("world")]
    assert tokenizer.encode("a[INST]b") == [*as_defined("a"), inst, *as_defined("b")]
    assert set(tokenizer.control_ids) == {"<s>", "</s>", "<|im_end|>"} and tokenizer.special_tokens["bos_token"] == "<s>"
    assert tokenizer.decode([1, *as_defined("Hello"), 2]) == " Hello"
    assert tokenizer.decode([1, *as_defined("Hello"), 2], with_control_tokens=True) == "<s> Hello</s>"


@pytest.mark.parametrize("text", ["Hello </s> world", "</s>", "a<s>", "<s></s>b  ", "no control"])
def test_a_users_control_tokens_are_text_and_add_no_space(tokenizer: Tokenizer, text: str) -> None:
    """The pieces around a hidden token are one text: their ids make it up. In front of a hidden token there is no space."""
    guard = PromptGuard(tokenizer)
    ids = guard.encode(f"<s>{guard.hide([text])[0]}</s>")
    assert ids[0] == 1 and ids[-1] == 2 and not {1, 2} & set(ids[1:-1])
    assert tokenizer.decode(ids[1:-1]) == (text if text.startswith("<") else f" {text}")
    within = guard.encode(guard.hide([text])[0], begins=False)
    assert tokenizer.decode(within) == text


def test_strings_that_are_kept_apart_add_no_space(tokenizer: Tokenizer) -> None:
    guard = PromptGuard(tokenizer)
    rendered = f"<s>user: {guard.hide_apart('the fox')} and{guard.hide_apart(' you')}</s>"
    assert tokenizer.decode(guard.encode(rendered)[1:-1]) == " user: the fox and you"
    assert guard.encode(f"<s>{guard.hide_apart('the')}</s>") == [1, *as_defined("the"), 2]


def test_a_grammar_asks_for_what_goes_on(directory: Path, tokenizer: Tokenizer) -> None:
    words = load_vocabulary(directory, load_model_config(directory))
    assert words(b"the") == as_defined("the", has_prefix=False)


def test_transformers_reads_the_same_tokens(directory: Path, tokenizer: Tokenizer) -> None:
    """It knows such files, and takes added tokens of its own kind."""
    import transformers

    (file,) = directory.glob("model.gguf")
    theirs = transformers.AutoTokenizer.from_pretrained(file.resolve().parent, gguf_file="model.gguf")
    for text in [*TEXTS, *CORPUS]:
        if plain(f" {text}"):
            assert tokenizer.encode(text) == theirs(text, add_special_tokens=False).input_ids, text


def test_the_package_sentencepiece_gives_the_same_ids() -> None:
    """A vocabulary that it has trained on ``CORPUS``, as llama.cpp's converter reads it, and its ids of many texts."""
    theirs = json.loads(Path(__file__).with_name("sentence_pieces.json").read_text())
    metadata = METADATA | {
        "tokenizer.ggml.tokens": theirs["tokens"],
        "tokenizer.ggml.scores": theirs["scores"],
        "tokenizer.ggml.token_type": theirs["kinds"],
    }
    ours = tokenizers.Tokenizer.from_str(make_tokenizer(metadata, "m")[0])
    assert len(theirs["ids"]) > 200
    for text, ids in theirs["ids"].items():
        assert ours.encode(text, add_special_tokens=False).ids == ids, text


def test_without_a_prefix(directory: Path) -> None:
    """As in Gemma's files."""
    text, _ = make_tokenizer(METADATA | {"tokenizer.ggml.add_space_prefix": False}, "m")
    found = tokenizers.Tokenizer.from_str(text)
    assert found.encode("the fox").ids == [1, *as_defined("the fox", has_prefix=False)]
    assert found.encode("a</s>the").ids == [1, *as_defined("a", has_prefix=False), 2, *as_defined("the", has_prefix=False)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no scores": ({"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores is missing, or no list of finite numbers"),
    "texts": ({"tokenizer.ggml.scores": ["x"] * len(TOKENS)}, "tokenizer.ggml.scores is missing, or no list of finite numbers"),
    "infinite": ({"tokenizer.ggml.scores": [float("inf")] * len(TOKENS)}, "or no list of finite numbers"),
    "fewer": ({"tokenizer.ggml.scores": [0.0]}, rf"tokenizer.ggml.scores has 1 numbers, for {len(TOKENS)} tokens"),
    "no bytes": ({"tokenizer.ggml.tokens": [t.replace("<0x41>", "A!") for t in TOKENS]}, "has no '<0x41>': all bytes are expected"),
    "another kind": ({"tokenizer.ggml.model": "t5"}, "is 't5', expected 'gpt2' .*, 'llama' or 'gemma4'"),
    "a text as prefix": ({"tokenizer.ggml.add_space_prefix": "x"}, "add_space_prefix is 'x', expected true or false"),
}


def test_gemma_4s_kind_has_merges_in_place_of_scores() -> None:
    """The same ids as where scores say the same; texts begin with <bos>, and get no space in front."""
    plain_tokens = {token for token, kind in zip(TOKENS, KINDS, strict=True) if kind == 1}
    order = sorted(plain_tokens, key=lambda token: -SCORES[TOKENS.index(token)])
    pairs = [(token[:end], token[end:]) for token in order for end in range(1, len(token))]
    merges = [f"{first} {second}" for first, second in pairs if {first, second} <= plain_tokens]
    metadata = METADATA | {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.scores": None, "tokenizer.ggml.merges": merges}
    found = tokenizers.Tokenizer.from_str(make_tokenizer(metadata, "m.gguf")[0])
    for text in filter(plain, [*CORPUS, *TEXTS]):
        assert found.encode(text, add_special_tokens=False).ids == as_defined(text, has_prefix=False), text
    assert found.encode("a").ids == [1, *as_defined("a", has_prefix=False)]
    with pytest.raises(CheckpointError, match="tokenizer.ggml.merges do not fit the tokens"):
        make_tokenizer(metadata | {"tokenizer.ggml.merges": ["no such"]}, "m.gguf")


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_is_named(fault: str) -> None:
    changes, message = REFUSED[fault]
    with pytest.raises(CheckpointError, match=f"^m: .*{message}"):
        make_tokenizer(METADATA | changes, "m")


def test_a_model_with_such_a_tokenizer_is_whole(directory: Path) -> None:
    config = load_model_config(directory)
    assert not check_weights(directory, config).problems and 2 in config.eos_token_ids
    assert json.loads((directory / "tokenizer_config.json").read_text())["unk_token"] == "<unk>"


def test_a_checkpoint_whose_decoder_strips_the_first_space(directory: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """As in the tokenizer.json of Llama 2: an answer keeps it all the same."""
    file = json.loads((directory / "tokenizer.json").read_text())
    file["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    stripping, ids = Tokenizer.load(tmp_path), as_defined("the fox")
    assert stripping.encode("the fox") == ids and stripping.decode(ids) == tokenizer.decode(ids) == " the fox"


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_checkpoint_whose_pre_tokenizer_makes_the_spaces(directory: Path, tmp_path: Path, scheme: str) -> None:
    """As in newer files of Llama and Mistral: with "first" nothing gets a space but a text's beginning. Whole texts have the ids that
    the library gives; what goes on a text, however it is cut, has those behind it."""
    file = json.loads((directory / "tokenizer.json").read_text())
    file["normalizer"] = None
    file["pre_tokenizer"] = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    ours, library = Tokenizer.load(tmp_path), tokenizers.Tokenizer.from_str(json.dumps(file))
    for text in [*TEXTS, *CORPUS]:
        rest = text.lstrip(" ")
        assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids
        assert ours.encode(f"<s>{text}") == library.encode(f"<s>{text}", add_special_tokens=False).ids
        if plain(f" {rest}"):
            assert ours.encode_going_on([rest])[0] == as_defined(rest, has_prefix=False)
    guard = PromptGuard(ours)
    for text in ("the fox", "</s> the fox", "the</s>fox"):
        prefix = " " if scheme == "always" and not text.startswith("<") else ""
        assert ours.decode(guard.encode(f"<s>{guard.hide([text])[0]}</s>")[1:-1]) == prefix + text
    rendered = f"<s>[INST] {guard.hide_apart('the fox')} [/INST]"
    assert ours.decode(guard.encode(rendered)) == "[INST] the fox [/INST]"
    assert guard.encode(f"<s>{guard.hide_apart('the')}</s>") == [1, *as_defined("the", has_prefix=scheme == "always"), 2]


def test_another_normalizer_is_named(directory: Path, tmp_path: Path) -> None:
    file = json.loads((directory / "tokenizer.json").read_text())
    for normalizer, splitting in (("Lowercase", None), (None, "Whitespace"), ("Lowercase", "Metaspace")):
        file["normalizer"] = normalizer and {"type": normalizer}
        file["pre_tokenizer"] = splitting and {"type": splitting, "replacement": SPACE, "prepend_scheme": "first", "split": False}
        (tmp_path / "tokenizer.json").write_text(json.dumps(file))
        with pytest.raises(CheckpointError, match="the normalizer is .*expected Prepend and Replace"):
            Tokenizer.load(tmp_path)
