"""``mmrt model check``: what a checkpoint is, whether it is served, and how much memory it takes for which context."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..models.architecture import ModelConfig, WeightFormat
from ..models.checkpoint.files import files_of_tensors, missing_files
from ..models.checkpoint.json_fields import CheckpointFiles
from ..models.checkpoint.weights import FoundWeights, check_weights
from ..models.config import facts_of, weight_bytes
from ..models.errors import CheckpointError
from ..models.families.registry import family_of
from ..models.gguf.made import unused_towers
from ..models.text.chat_template import ChatTemplate
from ..models.text.tokenizer import Tokenizer
from ..models.text.vocabulary_check import check_vocabulary
from ..runtime.config.runtime_config import RuntimeConfig
from ..runtime.environment import Environment
from ..runtime.errors import ConfigError
from ..runtime.pools import is_kv_pool
from ..runtime.process.host_room import read_host_room
from ..runtime.process.memory_layout import MemoryLayout
from ..runtime.process.pool_sizes import saves_by_windows
from ..runtime.process.run import fit_to_machine
from ..serving.card import Card
from .checkpoints import checkpoint_of
from .options import run_path
from .plan import Plan, layout_of, model_of

_CONTEXTS = (2048, 8192, 32768, 131072)
_FORMATS: Sequence[WeightFormat] = ("bfloat16", "int8", "int8g", "int4")
PROCESS_BYTES = 500 << 20  # of a run beside pools, tables and weights: eight processes, a supervisor and a zygote
_MAX_PROBLEMS = 8  # of one kind that are shown
_GIB, _MIB = 1 << 30, 1 << 20


class Report:
    """The lines of one screen: name and text. ``problems``: why the model is not served; none where it is. ``shortage``: the one of
    them that ends when memory becomes free."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.problems: list[str] = []
        self.shortage = ""
        self.facts: dict[str, Any] = {}  # of the model's card

    @property
    def card(self) -> Card:
        return Card(**self.facts, problems=tuple(self.problems))

    def add(self, name: str, text: str) -> None:
        self.lines.append((name, text))


def check_here(
    config: RuntimeConfig, name: str, environment: Environment, memory_bytes: int | None = None, home: Path | None = None
) -> Report:
    """Check the model of a configuration. ``name``: what its user calls it; ``home``: see ``checkpoint_of``. Raises: ConfigError."""
    path, run = checkpoint_of(config, home), run_path(None)
    fitted, reason = fit_to_machine(config, path, run, environment)
    return check_model(Plan(run, fitted, path, 0, environment, reason), name, memory_bytes)


def check_model(plan: Plan, name: str, memory_bytes: int | None = None) -> Report:
    """Read a checkpoint's configuration, headers, tokenizer and template. Nothing is loaded. ``memory_bytes``: that a run may take;
    None: what the machine has left."""
    report, path = Report(), plan.model
    report.add("model", name)
    try:
        model = model_of(plan)
    except ConfigError as error:
        report.problems.append(str(error))
        return report
    trained = family_of(model).parse_config(CheckpointFiles(path)).max_context
    report.add("family", model.family)
    report.add("takes", ", ".join(("text", *model.media_kinds)))
    for said in unused_towers(path):
        report.add("", said)
    report.facts |= {"family": model.family, "kinds": model.media_kinds, "max_context": model.max_context}
    report.facts |= {"hidden_size": model.language.hidden_size, "weight_bytes": _file_bytes(path)}
    absent = missing_files(path, model.null is None)
    report.problems += absent
    _add_weights(report, plan, model, absent)
    _add_text(report, path, model, absent)
    longer = f"; the model was trained for {trained} (--max-model-len)" if trained > model.max_context else ""
    report.add("context", f"{model.max_context} tokens{longer}")
    _add_memory(report, plan, model, memory_bytes)
    return report


def _file_bytes(path: Path) -> int:
    try:
        return sum(file.stat().st_size for file in files_of_tensors(path))
    except (CheckpointError, OSError):
        return 0


def _add_weights(report: Report, plan: Plan, model: ModelConfig, absent: Sequence[str]) -> None:
    if model.null is not None:
        return
    parameters = sum(math.prod(spec.shape) for spec in family_of(model).tensor_specs(model))
    text = f"{parameters / 1e9:.2f} billion parameters" if parameters >= 1e8 else f"{parameters / 1e6:.1f} million parameters"
    try:
        found = check_weights(plan.model, model)
    except CheckpointError as error:
        report.add("weights", text)
        _add_problem(report, plan.model, error, absent)
    else:
        files = f"{found.num_files} file{'s' * (found.num_files != 1)}"
        report.add("weights", f"{text}; {_size(found.num_bytes)} in {files}, {' and '.join(found.dtypes)}")
        if found.unread:
            report.add("not read", ", ".join(_groups(found.unread)))
        report.problems += _some(found)
    text = f"{_size(weight_bytes(model))} in {model.dtype if model.weights == 'auto' else model.weights} here"
    if not plan.config.model.on_cuda:
        others = (f"{_size(weight_bytes(msgspec.structs.replace(model, weights=name)))} in {name}" for name in _FORMATS)
        text += f"; {', '.join(others)} (model.weights)"
    report.add("in memory", text)


def _add_problem(report: Report, path: Path, error: CheckpointError, absent: Sequence[str]) -> None:
    """Add a problem, unless it is one of a missing file, which is told already."""
    told = str(error).removeprefix(f"{path}: ").replace(f"{path}/", "")
    if told not in absent:
        report.problems.append(str(error))


def _some(found: FoundWeights) -> Iterator[str]:
    yield from found.problems[:_MAX_PROBLEMS]
    if (more := len(found.problems) - _MAX_PROBLEMS) > 0:
        yield f"and {more} other tensors"


def _groups(names: Sequence[str]) -> Iterator[str]:
    """Names of tensors, those with a common beginning told as one."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        groups.setdefault(parts[0] if parts[0] != "model" else ".".join(parts[:2]), []).append(name)
    for beginning, members in groups.items():
        yield members[0] if len(members) == 1 else f"{beginning}.* ({len(members)} tensors)"


def _add_text(report: Report, path: Path, model: ModelConfig, absent: Sequence[str]) -> None:
    try:
        num_tokens = check_vocabulary(path, model)
        report.add("tokenizer", f"{num_tokens} tokens, of a vocabulary of {model.language.vocab_size}")
        tokenizer = Tokenizer.load(path)
        template = ChatTemplate.load(path, tokenizer.special_tokens)
    except CheckpointError as error:
        _add_problem(report, path, error, absent)
        return
    report.facts |= {"takes_tools": template.calls_are_known, "thinks": template.tells_thoughts(tokenizer)}
    takes = ["tools" if template.takes_tools and template.calls_are_known else "", *sorted(template.options)]
    report.add("template", f"takes {', '.join(filter(None, takes))}" if any(takes) else "takes messages alone")


def _add_memory(report: Report, plan: Plan, model: ModelConfig, memory_bytes: int | None) -> None:
    try:
        layout = layout_of(plan)
    except ConfigError as error:
        report.problems.append(str(error))
        return
    weights, device = weight_bytes(model), plan.config.model.device
    host = layout.num_bytes + PROCESS_BYTES + (0 if plan.config.model.on_cuda else weights)
    room = read_host_room(plan.path).num_bytes if memory_bytes is None else memory_bytes
    whose = "this machine has left" if memory_bytes is None else "it may take"
    parts = f"{_size(layout.num_bytes)} of pools and tables, about {_size(PROCESS_BYTES)} of processes"
    parts += f"; {_size(weights)} of weights on {device}" if plan.config.model.on_cuda else f" and {_size(weights)} of weights"
    text = f"{parts}, of {_size(room)} that {whose}"
    report.facts["needs_bytes"] = host
    report.add("memory", text)
    if host > room:
        report.shortage = f'memory: it takes {text}; model.weights = "int8" or "int4" takes less, [memory] has the pools'
        report.problems.append(report.shortage)
    kv_token = model.kv_page_bytes(layout.kv_page_tokens) / layout.kv_page_tokens
    report.add("KV cache", f"{kv_token / 1024:.1f} KiB for a token, in {layout.kv_dtype}")
    if layout.has_windows:
        apart = layout.pools["window"].page_bytes / layout.kv_page_tokens
        report.add("", f"of these {apart / 1024:.1f} KiB for the last {model.language.window} tokens of a request alone")
    elif saves_by_windows(plan.config, facts_of(model, layout.kv_page_tokens)) and not plan.config.model.on_cuda:
        alone = f"for all tokens, also in layers that read {model.language.window} alone"
        report.add("", f"{alone}: memory.kv_transfer_dtype packs whole pages; less without")
    for name, text in _rows(layout, model.max_context, model.language.window):
        report.add(name, text)


def _rows(layout: MemoryLayout, max_context: int, window: int) -> Iterator[tuple[str, str]]:
    """Yield a line for each length of requests: how many of them fit at once. A row has two recurrent states and a log, if the model
    has some; and pages of its ``window`` where these lie in a pool of their own."""
    pools = [pool for name, pool in layout.pools.items() if is_kv_pool(name)]
    most, states = layout.num_rows, 0
    if layout.has_states:
        most = min(most, len(pools) * layout.pools["log"].num_pages)
        states = 2 * layout.pools["state"].page_bytes + layout.pools["log"].page_bytes
    contexts = [context for context in _CONTEXTS if context < max_context] + [max_context]
    name = "at once"
    for context in contexts:
        num_pages = -(-context // layout.kv_page_tokens)
        rows, size = min(most, sum(pool.num_pages // num_pages for pool in pools)), num_pages * pools[0].page_bytes + states
        if layout.has_windows:
            windows, num_live = layout.pools["window"], min(num_pages, -(-window // layout.kv_page_tokens) + 1)
            rows, size = min(rows, len(pools) * (windows.num_pages // num_live)), size + num_live * windows.page_bytes
        yield name, f"{rows:>4} of {context:>7} tokens, {_size(size)} each"
        name = ""


def print_report(report: Report, name: str) -> None:
    """Print the lines, and the verdict below them."""
    verdict = report.problems or [f"yes: mmrt up {name}"]
    lines = [*report.lines, ("served", f"no: {verdict[0]}" if report.problems else verdict[0]), *(("", more) for more in verdict[1:])]
    for label, text in lines:
        print(f"{label:<11} {text}")


def _size(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.0f} MiB"
