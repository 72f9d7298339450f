"""The arguments of ``mmrt bench sim``: parsed, checked, and frozen, before anything runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from mmrt.actors.controller.policy_file import PolicyFile
from mmrt.bench.output import JSON_HELP, json_file
from mmrt.bench.serve.load_options import LOAD_NAMES, LoadOptions, add_load, load_values, number, refuse_options
from mmrt.runtime.config.runtime_config import RuntimeConfig, convert_config, is_policy_file, load_config, to_data
from mmrt.runtime.controller.scheduling.policy import POLICIES, Policy
from mmrt.runtime.errors import ConfigError

from .costs import Costs, CostsError, load_costs, shipped_costs
from .link_options import add_link, link_of
from .links import Link

DEFAULT_COSTS = "demo-cpu"


class SimOptions(LoadOptions, frozen=True, kw_only=True):
    """The options of a simulation. ``caches``: prefix and embedding caches are on. ``link``: between devices; None: there is one."""

    costs: str
    policy: str
    layout: str
    caches: bool
    link: Link | None = None


def parse_sim(argv: Sequence[str]) -> tuple[SimOptions, RuntimeConfig, Costs, Policy, argparse.Namespace]:
    """Parse the command line. Exits with status 2 and a message for a bad one."""
    parser = make_parser()
    given = parser.parse_args(argv)
    values = load_values(parser, given)
    try:
        costs = load_costs(given.costs)
        config = base_config(given, costs)
        policy = load_policy(config.scheduling.policy)
    except (ConfigError, CostsError) as error:
        parser.error(str(error))
    if given.validate:
        refuse_options(parser, given, ("plot",), "--validate has many loads")
        refuse_options(parser, given, ("link",), "--validate compares with runs on one device")
        refuse_options(parser, given, LOAD_NAMES, "--validate has loads of its own")
        if costs.origin == "roofline":
            parser.error(f"--costs {given.costs}: --validate compares with runs on this machine, and nobody measured this model")
        if given.profile is not None:
            refuse_options(parser, given, ("costs",), "--profile measures the costs")
            if config.scheduling.prefill_pipeline:
                parser.error("--profile: a stage of scheduling.prefill_pipeline shows a part of the layers' time: measure without it")
    elif given.checkpoint or given.profile:
        parser.error("--checkpoint and --profile are for the live runs of --validate")
    if given.rate == float("inf") and given.trace:
        parser.error("--rate inf: a trace is stretched to a finite rate")
    options = SimOptions(
        **values,
        costs=given.costs,
        policy=policy.name,
        layout=config.actors.layout,
        caches=config.memory.prefix_cache,
        link=link_of(parser, given),
    )
    return options, config, costs, policy, given


def cost_file(text: str) -> Path:
    """The file for a cost model, for argparse: a measurement of minutes must not end without a place for it."""
    path = json_file(text)
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"{text}: the name of a cost file ends with .json")
    return path


def load_policy(policy: str) -> Policy:
    """Return one of mmrt's policies by its name, or that of a user's file. Raises: ConfigError, also for whatever the file raises."""
    if not is_policy_file(policy):
        return POLICIES[policy]
    try:
        file = PolicyFile.read(Path(policy))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the policy {policy}: {error}") from None
    try:
        return file.load()
    except Exception as error:  # of a user's code
        raise ConfigError(f"the policy {policy} cannot be loaded: {file.explain(error)}") from None


def base_config(given: argparse.Namespace, costs: Costs | None) -> RuntimeConfig:
    """The configuration with the flags in it. ``costs``: of a simulation. Raises: ConfigError."""
    data = to_data(load_config(given.config))
    if costs is not None:
        data["model"]["device"] = "cpu" if costs.device == "cpu" else "cuda"
    policy, layout = getattr(given, "policy", None), getattr(given, "layout", None)
    if policy is not None:
        data["scheduling"]["policy"] = str(Path(policy).absolute()) if is_policy_file(policy) else policy
    if layout is not None:
        data["actors"]["layout"] = layout
    if given.rows is not None:
        data["memory"]["max_sequences"] = given.rows
    if given.kv_tokens is not None:
        data["memory"]["kv_tokens"] = given.kv_tokens
    if not given.caches:
        data["memory"]["prefix_cache"] = data["memory"]["embedding_cache"] = False
    data["cache"]["dir"] = ""  # files are not simulated
    configured = convert_config(data)
    if costs is not None and configured.actors.turns == "layers":
        raise ConfigError('actors.turns = "layers": the simulator does not interrupt plans')
    if costs is not None and configured.num_kv_pools > 1:
        hint = "the simulator has one; --link gives each process a device"
        raise ConfigError(f"[[devices]] makes {configured.num_kv_pools} KV pools: {hint}")
    return configured


def make_parser() -> argparse.ArgumentParser:
    """The options of a load, and what it is simulated on."""
    parser = argparse.ArgumentParser(
        prog="mmrt bench sim",
        description="Simulate a load on the controller's own code with modelled actors: the report of bench serve, without a server.",
        epilog="Exit status: 0 when every request went well, 1 when one failed, 2 for a bad command line. See lab/docs/simulator.md.",
    )
    add = parser.add_argument
    add_run(parser)
    add("--policy", metavar="NAME|FILE", help=f"{', '.join(POLICIES)}, or a file NAME.py (the configuration's)")
    add("--layout", metavar="LAYOUT", help="as actors.layout, e.g. 2E+P+D")
    add_link(parser, None, "none: all processes share one device")
    add_load(parser)
    add(
        "--validate",
        type=number("rounds", int, least=1),
        metavar="ROUNDS",
        help="run three loads so many times live and simulated, and compare; --num-requests is for each",
    )
    add("--checkpoint", type=Path, metavar="DIR", help="of the live runs (the demo model)")
    add(
        "--profile",
        type=cost_file,
        metavar="FILE",
        help="measure the costs between the rounds of --validate, in place of --costs, and write them to this .json file",
    )
    add("--plot", type=Path, metavar="FILE", help="draw the times between tokens over the time of the load")
    add("--json", type=json_file, metavar="FILE", help=JSON_HELP)
    return parser


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of a simulated run that do not say how it schedules."""
    add = parser.add_argument
    add(
        "--costs",
        default=DEFAULT_COSTS,
        metavar="NAME|FILE",
        help=f"the cost model: {', '.join(shipped_costs())}, or a .json file of mmrt bench profile (%(default)s)",
    )
    add("--config", type=Path, metavar="FILE", help="the configuration of the run, in TOML")
    add("--rows", type=int, metavar="N", help="memory.max_sequences")
    add("--kv-tokens", type=int, metavar="N", help="memory.kv_tokens")
    add("--no-caches", dest="caches", action="store_false", help="neither prefix nor embedding cache")
