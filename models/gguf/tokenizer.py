"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json.

A file of kind "gpt2" has tokens, merges and the name of an expression that splits texts (``tokenizer.ggml.pre``): the expressions are
those of the models' own tokenizers. One of kind "llama" has tokens and scores, one of kind "gemma4" merges; see ``sentence_pieces``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from ..checkpoint.json_fields import JsonObject
from ..errors import CheckpointError
from ..text.tokenizer_trial import MAX_ADDED_TOKENS
from .contents import strings_of
from .fields import END_TOKENS, token_of
from .sentence_pieces import make_pieces, pieces_of

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens
_GEMMA4 = "gemma4"


class _Splitting(NamedTuple):
    """``expression``: None for GPT-2's own, with digits apart if ``digits``. ``normalizes``: to NFC. ``ignore_merges``: a word that is
    a token stays whole. ``begins``: texts begin with bos_token unless the file says otherwise."""

    expression: str | None = None
    digits: bool = False
    normalizes: bool = False
    ignore_merges: bool = False
    begins: bool = False


_QWEN2 = _Splitting(_WORDS + r"\p{L}+|\p{N}" + _REST, normalizes=True)
_QWEN35 = _Splitting(_WORDS + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+", normalizes=True)
_LLAMA3 = _Splitting(_WORDS + r"\p{L}+|\p{N}{1,3}" + _REST, ignore_merges=True, begins=True)
_GPT4O_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = _Splitting(
    _MARKED
    + r"*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    + _MARKED
    + r"+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignore_merges=True,
    begins=True,
)
_GPT4O = _Splitting(
    _MARKED
    + r"*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _GPT4O_END
    + "|"
    + _MARKED
    + r"+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _GPT4O_END
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SPLITTINGS = {
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LLAMA3._replace(ignore_merges=False, begins=False)),
    "glm4": _LLAMA3._replace(begins=False),
    "gpt-4o": _GPT4O,
    "seed-coder": _Splitting(_WORDS + r"\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _Splitting(digits=True)),
    "gpt-2": _Splitting(),
}


def make_tokenizer(metadata: Mapping[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """tokenizer.json and the fields of tokenizer_config.json. Raises: CheckpointError naming the key and its value."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", _GEMMA4):
        expected = "'gpt2' (byte-level BPE), 'llama' or 'gemma4' (SentencePiece)"
        raise CheckpointError(f"{where}: tokenizer.ggml.model is {kind!r}, expected {expected}")
    tokens, kinds = _tokens(metadata, where)
    named = {name: token_of(metadata, f"{name}_token_id", tokens) for name in ("bos", "eos", "unknown", "padding")}
    facts = JsonObject(metadata, where)
    if kind == _GEMMA4:
        begins, pairs = True, _merges(metadata, where)
        tokenizer = pieces_of(tokens, pairs, where, unknown=named["unknown"], has_prefix=False)
    elif kind == "llama":
        begins, has_prefix = True, facts.boolean("tokenizer.ggml.add_space_prefix", default=True)
        scores = metadata.get("tokenizer.ggml.scores")
        tokenizer = make_pieces(tokens, kinds, scores, where, unknown=named["unknown"], has_prefix=has_prefix)
    else:
        tokenizer, begins = _byte_level(metadata, tokens, where)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _of_kind(_CONTROL, tokens, kinds)])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _of_kind(_USER_DEFINED, tokens, kinds)])
    if facts.boolean("tokenizer.ggml.add_bos_token", default=begins) and (bos := named["bos"]) is not None:
        tokenizer.post_processor = _beginning(bos, tokens.index(bos), where)
    names = {"bos_token": named["bos"], "eos_token": named["eos"], "unk_token": named["unknown"], "pad_token": named["padding"]}
    return tokenizer.to_str(), {name: token for name, token in names.items() if token is not None}


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], where: str) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer without added tokens, and whether texts begin with bos_token unless the file says otherwise."""
    pre = metadata.get("tokenizer.ggml.pre", "")
    if not isinstance(pre, str) or pre not in SPLITTINGS:
        raise CheckpointError(f"{where}: tokenizer.ggml.pre is {pre!r}, expected one of {', '.join(SPLITTINGS)}")
    splitting = SPLITTINGS[pre]
    merges = _merges(metadata, where)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        tokenizer = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=splitting.ignore_merges))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{where}: tokenizer.ggml.merges do not fit the tokens: {error}") from None
    if splitting.normalizes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(splitting)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.begins


def _merges(metadata: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    found = list[tuple[str, str]]()
    for pair in strings_of(metadata, "tokenizer.ggml.merges", where):
        first, space, second = pair.partition(" ")
        if not space:
            raise CheckpointError(f"{where}: tokenizer.ggml.merges has {pair!r}, expected two tokens with a space between")
        found.append((first, second))
    return found


def _beginning(token: str, number: int, where: str) -> processors.PostProcessor:
    try:
        return processors.TemplateProcessing(single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, number)])
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{where}: tokenizer.ggml.bos_token_id: texts cannot begin with {token!r}: {error}") from None


def _pre_tokenizer(splitting: _Splitting) -> pre_tokenizers.PreTokenizer:
    if splitting.expression is not None:
        split = pre_tokenizers.Split(Regex(splitting.expression), behavior="isolated", invert=False)
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole]) if splitting.digits else whole


def _tokens(metadata: Mapping[str, Any], where: str) -> tuple[list[str], list[int]]:
    """The tokens and their kinds. Those that end answers are control tokens, also where a file does not say so."""
    tokens = strings_of(metadata, "tokenizer.ggml.tokens", where)
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or not all(type(kind) is int for kind in kinds):
        raise CheckpointError(f"{where}: tokenizer.ggml.token_type is no list of integers")
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{where}: tokenizer.ggml.token_type has {len(kinds)} numbers, for {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{where}: tokenizer.ggml.tokens has {len(tokens) - len(set(tokens))} tokens twice")
    kinds = [_CONTROL if token in END_TOKENS else kind for token, kind in zip(tokens, kinds, strict=True)]
    if (num_added := kinds.count(_CONTROL) + kinds.count(_USER_DEFINED)) > MAX_ADDED_TOKENS:
        raise CheckpointError(f"{where}: tokenizer.ggml.token_type has {num_added} added tokens, the limit is {MAX_ADDED_TOKENS}")
    return tokens, kinds


def _of_kind(kind: int, tokens: list[str], kinds: list[int]) -> list[str]:
    return [token for token, its in zip(tokens, kinds, strict=True) if its == kind]
