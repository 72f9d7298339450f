"""The table of families as docs/models.md has it: ``python -m mmrt.tests.models.models_markdown docs/models.md`` writes it there."""

import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from mmrt.models.architecture import ModelConfig
from mmrt.models.checkpoint.weight_specs import TensorSpec
from mmrt.models.config import NULL_TYPE, facts_of, kept_bytes, load_model_config
from mmrt.models.families.family import CheckpointRecipe
from mmrt.models.families.registry import FAMILIES, family_named, family_of
from mmrt.models.make.checkpoint import write_configs
from mmrt.models.make.tokenizer import write_tokenizer
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.process.pool_sizes import has_windows_apart

BEGIN, END = "<!-- the table of families -->\n", "<!-- its end -->\n"
CONTEXT = 8192
_HEADINGS = (
    "family",
    "`model_type`",
    "takes",
    "size",
    "parameters",
    "weights: bfloat16, int8, int4",
    "KV cache and states for 8k tokens",
)
NOT_PUBLISHED = ("tiny", "small")


def table() -> str:
    """Return the table, with a row for each published size of each family."""
    rows = [_HEADINGS, ("---",) * len(_HEADINGS)]
    for name, entry in FAMILIES.items():
        if NULL_TYPE not in entry.model_types:
            rows += _of_family(name, entry.model_types)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _of_family(name: str, model_types: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    first = (f"`{name}`", ", ".join(f"`{one}`" for one in model_types))
    for size, recipe in family_named(name).recipes().items():
        if size in NOT_PUBLISHED:
            continue
        config = _config(recipe)
        takes = ", ".join(("text", *config.media_kinds))
        specs = tuple(family_of(config).tensor_specs(config))  # of experts there are many thousands
        yield (*first, takes, size, _parameters(specs), _weights(specs, config), _row(config))


def _config(recipe: CheckpointRecipe) -> ModelConfig:
    added = (*recipe.special_tokens, *recipe.plain_tokens)
    with tempfile.TemporaryDirectory() as folder:
        ids = write_tokenizer(Path(folder), recipe._replace(vocab_size=256 + len(added), num_merges=0))
        write_configs(Path(folder), recipe, ids)
        return load_model_config(folder, "bfloat16")


def _parameters(specs: Sequence[TensorSpec]) -> str:
    number = sum(math.prod(spec.shape) for spec in specs)
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"


def _weights(specs: Sequence[TensorSpec], config: ModelConfig) -> str:
    sizes = (kept_bytes(specs, replace(config, weights=name)) for name in ("auto", "int8", "int4"))
    return ", ".join(f"{size / 2**30:.1f}" for size in sizes) + " GiB"


def _row(config: ModelConfig) -> str:
    """Of so many tokens, or of the longest context that is served."""
    facts, context = facts_of(config, 16), min(CONTEXT, config.max_context)
    if not has_windows_apart(RuntimeConfig(), facts):
        facts = replace(facts, window_page_bytes=0)
    size = _gib(facts.kv_bytes(context, 16) + facts.member_bytes)
    return size if context == CONTEXT else f"{size} for {context // 1024}k"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")
