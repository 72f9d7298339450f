"""The stage table: every stage is in every list and order that follows from it, and so is a stage that is added."""

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mmrt
from mmrt.runtime.config import RuntimeConfig, actors_section, parse_config
from mmrt.runtime.errors import ConfigError
from mmrt.runtime.stage_table import (
    ACTORS,
    LAYOUTS,
    RECORDERS,
    STAGES,
    WORKERS,
    InstanceId,
    ProcessSpec,
    Stage,
    check_layout,
    device_pools,
    layouts,
    parse_layout,
    process_in,
    restart_order,
    starts_after,
    torch_actors,
    workers,
)
from mmrt.runtime.supervisor.reload import actor_roots
from mmrt.runtime.supervisor.specs import actor_specs, stop_order
from mmrt.runtime.supervisor.systemd import TARGET, service_name, unit_files

TALKER = Stage(
    name="talker",
    letter="T",
    module="talker.loop",
    stop_rank=1,
    restart_rank=1,
    takes_plans=True,
    inputs=("tokens",),
    output="speech",
    imports="torch",
    nice=3,
    threads=2,
    step_limit_s=7.0,
)


@pytest.fixture
def talker() -> Iterator[Stage]:
    """A stage that is added to the table."""
    assert isinstance(STAGES, dict)
    STAGES["talker"] = TALKER
    yield TALKER
    del STAGES["talker"]


def test_the_lists_of_today() -> None:
    # Their numbers stand in shared memory and in the journal.
    assert ACTORS == ("memory", "controller", "gateway", "video", "encoder", "prefill", "decode", "detokenizer")
    assert WORKERS == ("video", "encoder", "prefill")
    assert RECORDERS == (*ACTORS, "supervisor")
    assert set(torch_actors()) == {"memory", "video", "encoder", "prefill", "decode"}
    assert restart_order() == ["memory", "video", "encoder", "prefill", "decode", "detokenizer", "controller", "gateway"]
    assert device_pools() == {"embedding", "kv"}
    assert LAYOUTS == ("E+P+D", "EP+D", "ED+P", "E+PD", "EPD")
    assert [[spec.name for spec in group] for group in stop_order(actor_specs(RuntimeConfig()))] == [
        ["gateway"],
        ["video", "encoder", "prefill", "decode", "detokenizer"],
        ["controller"],
        ["memory"],
    ]
    assert [RuntimeConfig().step_limit_s(name) for name in ACTORS] == [0.0, 0.0, 0.0, 90.0, 300.0, 300.0, 120.0, 0.0]
    assert {name: RuntimeConfig().actor(name).nice for name in ("video", "encoder", "prefill", "decode", "memory")} == {
        "video": 8, "encoder": 5, "prefill": 5, "decode": 0, "memory": 0,
    }  # fmt: skip


def test_every_stage_is_in_every_order() -> None:
    for layout in LAYOUTS:
        specs = actor_specs(parse_config(f'[actors]\nlayout = "{layout}"\n'))
        assert sorted(role for group in stop_order(specs) for spec in group for role in spec.roles) == sorted(STAGES)
        assert sorted(stage for process in parse_layout(layout) for stage in process.stages) == ["decode", "encoder", "prefill"]
    assert sorted(restart_order()) == sorted(STAGES)
    fed = {stage.output for stage in STAGES.values()}
    assert all(name in fed for stage in STAGES.values() for name in stage.inputs)


@pytest.mark.parametrize("name", ACTORS)
def test_a_record_says_what_the_module_is(name: str) -> None:
    path = Path(mmrt.__path__[0]) / "actors" / f"{STAGES[name].module.replace('.', '/')}.py"
    tree = ast.parse(path.read_text())
    assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    assert ("import uvloop" in path.read_text()) == (STAGES[name].loop == "asyncio")


def test_a_stage_that_is_added_is_started_stopped_and_restarted(talker: Stage) -> None:
    config = RuntimeConfig()
    assert config.processes["talker"] == ("talker",) and config.step_limit_s("talker") == 7.0
    specs = {spec.name: spec for spec in actor_specs(config)}
    assert (specs["talker"].needs, specs["talker"].handover_grace_s, specs["talker"].listens) == ("torch", 12.0, False)
    groups = [[spec.name for spec in group] for group in stop_order(list(specs.values()))]
    assert "talker" in groups[1] and {name for group in groups for name in group} == set(STAGES)
    assert set(restart_order()) == set(STAGES) and restart_order().index("talker") < restart_order().index("controller")
    assert "mmrt.actors.talker.loop" in actor_roots(["talker"], True, ())
    files = unit_files(config, "/usr/bin/mmrt", {"MMRT_RUN_DIR": "/r"}, Path("/d"))
    assert service_name("talker") in files[TARGET]
    assert f"\nAfter={service_name('memory')} {service_name('controller')}\n" in files[service_name("talker")]
    assert "\nWatchdogSec=37\n" in files[service_name("talker")] and "\nCPUWeight=100\n" in files[service_name("talker")]


def test_a_stage_that_is_added_is_in_every_list(talker: Stage) -> None:
    assert workers(STAGES)[-1] == torch_actors(STAGES)[-1] == "talker" and "talker" not in starts_after("gateway")
    assert device_pools() == {"embedding", "kv", "speech"}
    assert len(layouts(STAGES)) == 15 and layouts(STAGES)[0] == "E+P+D+T" and layouts(STAGES)[-1] == "EPDT"
    assert process_in("EPD+T", "talker") == "talker" and process_in("EPDT", "encoder") == "talker"
    section = msgspec.convert({"talker": {"nice": 4}}, actors_section(STAGES))
    assert (section.talker.nice, section.talker.threads) == (4, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layouts_of_a_run(layout: str) -> None:
    check_layout(layout)
    assert "+".join("".join(STAGES[name].letter for name in process.stages) for process in parse_layout(layout)) == layout


def test_a_layout_is_processes() -> None:
    assert parse_layout("2E+PD@cuda:1+8EPD@*") == (
        ProcessSpec(("encoder",), 2),
        ProcessSpec(("prefill", "decode"), 1, "cuda:1"),
        ProcessSpec(("encoder", "prefill", "decode"), 8, "*"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not [COUNT]STAGES[@DEVICE], such as EP"),
        ("E+P+", "'' is not"),
        ("E2+P+D", "'E2' is not"),
        ("0E+P+D", "'0E' is not"),
        ("E P D", "'E P D' is not"),
        ("epd", "'epd' is not"),
        ("E+PX+D", "'PX': no stage 'X', there are E, P, D"),
        ("2E+P+D", "2 processes of encoder: a run has one of each stage"),
        ("EP@cuda:0+D", "encoder and prefill on 'cuda:0': model.device places all stages"),
        ("E+P", "expected one of 'E+P+D', 'EP+D', 'ED+P', 'E+PD', 'EPD'"),
        ("E+E+P+D", "expected one of"),
        ("PD+E", "expected one of"),
    ],
)
def test_other_layouts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_layout(text)
    assert message in str(refusal.value)


@given(st.sampled_from(ACTORS), st.integers(0, 999))
def test_an_instance_is_known_by_its_name(stage: str, index: int) -> None:
    instance = InstanceId(stage, index)
    assert InstanceId.parse(str(instance)) == instance
    assert str(instance) == (f"{stage}.{index}" if index else stage)


@given(st.one_of(st.text(), st.from_regex(r"(encoder|decode)\.?[0-9]{0,4}", fullmatch=True)))
def test_an_instance_has_one_name(text: str) -> None:
    try:
        instance = InstanceId.parse(text)
    except ConfigError as error:
        assert repr(text) in str(error)
    else:
        assert str(instance) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("encoder.0", "'encoder.0': '0' is no number from 1 to 999"),
        ("encoder.", "'' is no number"),
        ("encoder.1000", "'1000' is no number"),
        ("encoder.\u0661", "is no number"),
        ("talker.1", "no stage 'talker', there are memory, controller"),
    ],
)
def test_other_names_of_instances_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        InstanceId.parse(text)
    assert message in str(refusal.value)
