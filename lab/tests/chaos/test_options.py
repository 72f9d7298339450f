"""Every bad word on the command line is named, with what it may be."""

from pathlib import Path

import pytest

from mmrt.runtime.config.sections import SupervisorSection
from mmrt.runtime.stage_table import DEFAULT_LAYOUT
from mmrt_lab.chaos.command import main
from mmrt_lab.chaos.faults import KINDS, targets_of
from mmrt_lab.chaos.options import parse_options
from mmrt_lab.chaos.storm_config import storm_config


def test_defaults() -> None:
    options = parse_options([])
    assert (options.seed, options.num_faults, options.minutes, options.num_drains) == (1, 30, None, 1)
    assert options.kinds == list(KINDS) and options.targets == list(targets_of(DEFAULT_LAYOUT))


def test_the_actors_are_those_of_the_layout() -> None:
    options = parse_options(["--layout", "2E+P+D", "--actors", "encoder.1"])
    assert options.targets == ["encoder.1"] and options.filters == "--actors encoder.1 --layout 2E+P+D "
    assert "encoder.1" in parse_options(["--layout", "2E+P+D"]).targets


def test_the_devices_are_those_of_the_layout(tmp_path: Path) -> None:
    options = parse_options(["--layout", "EP@0+D@1"])
    config = storm_config(tmp_path, options.layout)
    assert config.device_names == ("0", "1") and config.actor_devices["decode"] == 1
    assert storm_config(tmp_path, DEFAULT_LAYOUT).devices == ()


@pytest.mark.parametrize(
    ("arguments", "is_exact"),
    [
        ([], True),
        (["--weights", "float16"], True),
        (["--weights", "bfloat16"], True),
        (["--weights", "int8"], False),
        (["--dtype", "bfloat16", "--weights", "int4"], False),
        (["--dtype", "bfloat16"], False),
    ],
)
def test_formats_of_numbers(arguments: list[str], is_exact: bool, tmp_path: Path) -> None:
    options = parse_options(arguments)
    assert options.is_exact is is_exact and options.filters == "".join(f"{word} " for word in arguments)
    model = storm_config(tmp_path, options.layout, dtype=options.dtype, weights=options.weights).model
    assert (model.dtype, model.weights) == (options.dtype, options.weights)


def test_a_soak_is_kills_at_fixed_times() -> None:
    options = parse_options(["--soak"])
    assert (options.minutes, options.num_faults, options.interval_s, options.cancel_share) == (30.0, None, 10.0, 0.01)
    assert {cell.kind for cell in options.storm_cells} == {"kill"} and options.num_drains == 0


def test_kills_a_minute_apart_under_the_restart_limit_that_users_have(tmp_path: Path) -> None:
    options = parse_options(["--kinds", "kill", "--interval", "60", "--minutes", "30", "--default-restarts"])
    assert (options.interval_s, options.minutes, options.has_default_restarts) == (60.0, 30.0, True)
    assert options.filters == "--kinds kill --default-restarts "
    supervisor, usual = (
        storm_config(tmp_path, options.layout, has_default_restarts=options.has_default_restarts).supervisor,
        SupervisorSection(),
    )
    assert (supervisor.restart_limit, supervisor.backoff_max_s) == (usual.restart_limit, usual.backoff_max_s)
    assert storm_config(tmp_path, options.layout).supervisor.restart_limit > 1000


def test_a_replay_takes_its_seed_and_one_fault() -> None:
    options = parse_options(["--replay", "9:41"])
    assert (options.seed, options.replay, options.num_faults, options.num_drains) == (9, (9, False, 41), 1, 0)
    assert parse_options(["--replay", "9:d3"]).num_drains == 1


def test_filters_are_part_of_a_fault_s_name() -> None:
    assert parse_options([]).filters == ""
    arguments = ["--kinds", "kill,stop", "--phases", "idle", "--layout", "EPD", "--turns", "layers", "--pairs", "0.5"]
    assert parse_options(arguments).filters == " ".join(arguments) + " "
    assert parse_options([*parse_options(arguments).filters.split(), "--seed", "3"]).storm_cells == parse_options(arguments).storm_cells


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "-1"], "'-1' is not a whole number of at least 0"),
        (["--seed", "x"], "'x' is not a whole number"),
        (["--faults", "1.5"], "'1.5' is not a whole number"),
        (["--minutes", "0"], "'0' must be above 0"),
        (["--minutes", "nan"], "'nan' is not a number"),
        (["--interval", "-1"], "not a number of at least 0"),
        (["--cancel", "1.1"], "'1.1' is not between 0 and 1"),
        (["--kinds", "kill,flood"], "'flood' is none of kill, stop"),
        (["--kinds", ""], "nothing was chosen of kill"),
        (["--actors", "supervisor"], "'supervisor' is none of memory"),
        (["--layout", "2E+P+D", "--actors", "encoder.2"], "argument --actors: 'encoder.2' is none of memory"),
        (["--phases", "lunch"], "'lunch' is none of idle"),
        (["--kinds", "oom", "--actors", "zygote"], "no kind of fault in --kinds fits"),
        (["--concurrency", "0"], "at least 1"),
        (["--max-tokens", "7"], "at least 8"),
        (["--quiet-every", "0"], "at least 1"),
        (["--replay", "12"], "'12' is not SEED:INDEX"),
        (["--soak", "--kinds", "stop"], "do not go with it"),
        (["--layout", "E+P"], "'E+P' has no decode"),
        (["--layout", "2EPD@*"], "'2EPD@*' does not name each device"),
        (["--layout", "X@0"], "no stage 'X'"),
        (["--weights", "int3"], "invalid choice: 'int3'"),
        (["--dtype", "bfloat16", "--weights", "float16"], "--weights float16 are multiplied in float32"),
        (["--wat"], "--wat"),
    ],
)
def test_bad_command_lines(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_options(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_help_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0 and all(kind in printed for kind in KINDS) and "hand-over" in printed
