"""Check a model that is not here yet, by a draft of it: for ``mmrt model check``, and before it is fetched."""

import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from ..hub.errors import HubError
from ..hub.fetch import check_disk
from ..hub.names import HubName
from ..runtime.config.runtime_config import RuntimeConfig
from ..runtime.environment import Environment
from ..runtime.errors import ConfigError
from ..runtime.supervisor.supervisor import Reporter
from .fetching import Judge, examine_model
from .model_check import Report, check_here
from .terminal import size


def judge_of(config: RuntimeConfig, environment: Environment, reporter: Reporter | None, *, is_for_now: bool) -> Judge:
    """Return the check of a model before it is fetched. Memory that only lacks now is a reason not to fetch it if it ``is_for_now``;
    else ``reporter`` is told."""

    def judge(draft: Path, name: str) -> list[str]:
        report = check_draft(draft, name, config, environment)
        if not report.shortage or is_for_now or report.facts["needs_bytes"] > _memory_bytes():
            return report.problems
        if reporter is not None:
            reporter.message(f"it could not be served at present: {report.shortage}")
        return [problem for problem in report.problems if problem != report.shortage]

    return judge


def _memory_bytes() -> int:
    """Of this machine, taken or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_remote(name: HubName, config: RuntimeConfig, environment: Environment, memory_bytes: int | None) -> Report:
    """Check a model that is not in the cache, by what is fetched of it first. Raises: HubError."""
    with tempfile.TemporaryDirectory(prefix="mmrt-check-") as folder:
        found = examine_model(name, Path(folder))
        report = check_draft(found.draft, str(name), config, environment, memory_bytes)
    free = shutil.disk_usage(next(path for path in (found.cache.folder, *found.cache.folder.parents) if path.exists())).free
    text = f"{size(found.missing_bytes)} at commit {found.repository.commit}, into {found.cache.folder.parent} ({size(free)} free)"
    report.lines.insert(1, ("to fetch", text))
    try:
        check_disk(found.cache, found.weights)
    except HubError as error:
        report.problems.append(str(error))
    return report


def check_draft(draft: Path, name: str, config: RuntimeConfig, environment: Environment, memory_bytes: int | None = None) -> Report:
    """Check a model by a draft of it (``hub/headers``): a checkpoint directory, or a GGUF file."""
    folder = draft if draft.is_dir() else draft.parent
    settings = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(draft)))
    try:
        report = check_here(settings, name, environment, memory_bytes, folder / ".made")
    except ConfigError as error:
        report = Report()
        report.add("model", name)
        report.problems.append(str(error).removeprefix(f"model.path = {str(draft)!r}: "))
    report.problems = [_without(folder, problem, name) for problem in report.problems]
    report.lines = [(label, _without(folder, text, name)) for label, text in report.lines]
    return report


def _without(folder: Path, text: str, name: str) -> str:
    return text.replace(f"{folder}/", "").replace(str(folder), name)
