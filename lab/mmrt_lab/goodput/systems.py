"""The systems that are compared: a policy, a file with one, or a preset, each with a layout."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from mmrt.runtime.config.presets import PRESETS, has_same_kinds
from mmrt.runtime.config.runtime_config import RuntimeConfig, convert_config, is_policy_file, to_data
from mmrt.runtime.errors import ConfigError

from .objective import Objective

PIPELINE = ":pipeline"


class System(msgspec.Struct, frozen=True, kw_only=True):
    """``name``: as it was given, a file without its folder."""

    name: str
    config: RuntimeConfig


def parse_systems(text: str, base: RuntimeConfig, objective: Objective) -> list[System]:
    """Parse ``NAME[@LAYOUT[:pipeline]],…``. Raises: ConfigError for a name, a layout or an objective that a run does not take."""
    given = [name.strip() for name in text.split(",")]
    names = [name.rpartition("/")[2] for name in given]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(f"{twice[0]} is named {names.count(twice[0])} times, once is enough")
    return [System(name=name, config=configure(path, base, objective)) for name, path in zip(names, given, strict=True)]


def configure(name: str, base: RuntimeConfig, objective: Objective) -> RuntimeConfig:
    """The configuration of a system: ``base`` with its policy or preset, its layout, behind which ":pipeline" makes prefill a pipeline,
    and the objective, which policies steer by.

    Raises: ConfigError.
    """
    policy, _, layout = name.partition("@")
    is_pipeline = layout.endswith(PIPELINE)  # names of devices have colons as well
    layout = layout.removesuffix(PIPELINE)
    data = to_data(base)
    if layout or policy in PRESETS:
        data["scheduling"]["prefill_pipeline"] = is_pipeline
    data["slo"] = objective.sections
    if policy in PRESETS:
        data["scheduling"]["preset"] = policy
        for key in PRESETS[policy].fixed:
            section, _, field = key.partition(".")
            del data[section][field]
    else:
        data["scheduling"]["policy"] = str(Path(policy).absolute()) if is_policy_file(policy) else policy
    if layout:
        if policy in PRESETS and not has_same_kinds(layout, needed := str(PRESETS[policy].fixed["actors.layout"])):
            raise ConfigError(f"{name}: the preset {policy} needs {needed}, or more of its processes")
        data["actors"]["layout"] = layout
    try:
        return convert_config(data)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def default_systems() -> Sequence[str]:
    """UnifiedServe's comparison (US15): both baselines, its own policy, and mmrt's."""
    return ("monolithic", "split", "unified", "auto")
