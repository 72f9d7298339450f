"""The text side of a made checkpoint: a byte-level BPE tokenizer trained on the spot with Qwen's control tokens, and a template.

``make`` calls it. The corpus comes from the word list below and a fixed seed, so the same call gives the same files.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ..families.family import CheckpointRecipe
from ..text.tokenizer_trial import QWEN_SPLIT

_WORDS = (
    "the of and to a in is it you that he was for on are with as I his they be at one have this from or had by hot word but what "
    "some we can out other were all there when up use your how said an each she which do their time if will way about many then "
    "them write would like so these her long make thing see him two has look more day could go come did number sound no most "
    "people my over know water than call first who may down side been now find any new work part take get place made live where "
    "after back little only round man year came show every good me give our under name very through just form sentence great "
    "think say help low line differ turn cause much mean before move right boy old too same tell does set three want air well "
    "also play small end put home read hand port large spell add even land here must big high such follow act why ask men change "
    "went light kind off need house picture try us again animal point mother world near build self earth father head stand own "
    "page should country found answer school grow study still learn plant cover food sun four between state keep eye never last "
    "let thought city tree cross farm hard start might story saw far sea draw left late run while press close night real life "
    "few north image video audio frame pixel colour red green blue dog cat street window river mountain music voice river"
).split()
_MARKS = ". . . , , ; : ! ? - ( ) \" ' / % & + = * # @ _ { } [ ]".split()
_FOREIGN = "über naïve café señor 日本語 中文 文字 привет мир γειά שלום 안녕 🙂 🎵 🚀 – — … “quoted” ½ €".split()


def write_tokenizer(out: Path, recipe: CheckpointRecipe, corpus: Sequence[str] | None = None) -> dict[str, int]:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja. Returns the ids of the added tokens.

    Merges are learned from ``corpus`` or from made-up lines; the rest of the recipe's ``vocab_size`` is filled with words
    that never result from text, but that a random model may output.
    """
    added, specials = [*recipe.special_tokens, *recipe.plain_tokens], set(recipe.special_tokens)
    lines = _corpus(recipe.num_merges) if corpus is None else corpus
    tokenizer = _train(recipe.vocab_size - len(added), recipe.num_merges, lines)
    tokenizer.add_tokens([AddedToken(text, special=text in specials, normalized=False) for text in added])
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    ids = {text: vocabulary[text] for text in added}
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": recipe.end,
        "pad_token": recipe.special_tokens[0],
        "unk_token": None,
        "extra_special_tokens": dict(recipe.token_names),
        "added_tokens_decoder": {
            str(i): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": text in specials,
            }
            for text, i in ids.items()
        },
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    (out / "chat_template.jinja").write_text(recipe.chat_template)
    return ids


def _train(vocab_size: int, num_merges: int, corpus: Sequence[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE of ``vocab_size`` tokens with Qwen's pre-tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, len(alphabet) + num_merges), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        state = json.loads(tokenizer.to_str())
        _fill(state["model"]["vocab"], vocab_size)
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    return tokenizer


def _fill(vocab: dict[str, int], size: int) -> None:
    number = 0
    while len(vocab) < size:
        number += 1
        word = "Ġ" + _pseudo_word(number)
        if word not in vocab:
            vocab[word] = len(vocab)


def _pseudo_word(number: int) -> str:
    """A different pronounceable word for each number."""
    consonants, vowels, word = "bdfghklmnprstvz", "aeiou", ""
    while number or len(word) < 4:
        number, digit = divmod(number, 75)
        word += consonants[digit // 5] + vowels[digit % 5]
    return word


def _corpus(num_merges: int) -> list[str]:
    """Sentences, code and foreign words, about as much as ``num_merges`` merges can be learned from."""
    rng = random.Random(0)
    words = _WORDS + [_pseudo_word(i) for i in range(num_merges // 2)]
    weights = [1.0 / (rank + 5) for rank in range(len(words))]
    lines = []
    for i in range(400 + num_merges):
        chosen = rng.choices(words, weights, k=rng.randint(4, 14))
        if i % 3 == 0:
            chosen[0] = chosen[0].capitalize()
        if i % 11 == 0:
            chosen.insert(rng.randrange(len(chosen)), rng.choice(_FOREIGN))
        if i % 13 == 0:
            chosen.append(f"{rng.randint(0, 9999)}")
        if i % 17 == 0:
            chosen = [f"    def {chosen[0]}_{chosen[1]}(self, {chosen[2]}):\n        return {chosen[3]}[{rng.randint(0, 99)}]"]
        lines.append(" ".join(chosen) + rng.choice(_MARKS))
    return lines
