"""The stage table: every stage is in every list and order that follows from it, and so is a stage that is added."""

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mmrt
from mmrt.runtime.config.runtime_config import RuntimeConfig, parse_config
from mmrt.runtime.config.sections import actors_section
from mmrt.runtime.errors import ConfigError
from mmrt.runtime.stage_table import (
    ACTORS,
    ALL_ACTORS,
    DEFAULT_LAYOUT,
    STAGES,
    WORKERS,
    InstanceId,
    ProcessSpec,
    Stage,
    actors_of,
    check_layout,
    device_pools,
    devices_of,
    expand_layout,
    format_layout,
    instance_id,
    join_layouts,
    number_of,
    parse_instance,
    parse_layout,
    process_in,
    processes_of,
    replaceable,
    restart_order,
    scale_layout,
    spread_layout,
    stage_of,
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
    has_device=True,
    module="talker.loop",
    stop_rank=1,
    restart_rank=1,
    takes_plans=True,
    inputs=("tokens",),
    output="speech",
    imports_torch=True,
    nice=3,
    core_share=0.5,
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
    assert set(torch_actors()) == {"memory", "video", "encoder", "prefill", "decode"}
    assert replaceable() == ("video", "encoder", "prefill", "decode", "detokenizer")
    assert restart_order(ACTORS) == ["memory", "video", "encoder", "prefill", "decode", "detokenizer", "controller", "gateway"]
    assert device_pools() == {"embedding", "kv"}
    assert DEFAULT_LAYOUT == "E+P+D" and actors_of(DEFAULT_LAYOUT) == ACTORS
    assert [[spec.name for spec in group] for group in stop_order(actor_specs(RuntimeConfig()))] == [
        ["gateway"],
        ["video", "encoder", "prefill", "decode", "detokenizer"],
        ["controller"],
        ["memory"],
    ]
    assert [RuntimeConfig().step_limit_s(name) for name in ACTORS] == [0.0, 0.0, 0.0, 90.0, 300.0, 300.0, 120.0, 0.0]
    assert {name: RuntimeConfig().actor(name).nice for name in ("video", "encoder", "prefill", "decode", "memory")} == {
        "video": 4, "encoder": 2, "prefill": 2, "decode": 0, "memory": 0,
    }  # fmt: skip


def test_every_stage_is_in_every_order() -> None:
    for layout in ("E+P+D", "EP+D", "ED+P", "E+PD", "EPD"):
        specs = actor_specs(parse_config(f'[actors]\nlayout = "{layout}"\n'))
        assert sorted(role for group in stop_order(specs) for spec in group for role in spec.roles) == sorted(STAGES)
        assert sorted(stage for process in parse_layout(layout) for stage in process.stages) == ["decode", "encoder", "prefill"]
    fed = {stage.output for stage in STAGES.values()}
    assert all(name in fed for stage in STAGES.values() for name in stage.inputs)


@pytest.mark.parametrize("name", ACTORS)
def test_a_record_says_what_the_module_is(name: str) -> None:
    path = Path(mmrt.__path__[0]) / "actors" / f"{STAGES[name].module.replace('.', '/')}.py"
    tree = ast.parse(path.read_text())
    assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    assert ("import uvloop" in path.read_text()) == (STAGES[name].loop == "asyncio")


def test_a_stage_that_is_added_is_started_stopped_and_restarted(talker: Stage) -> None:
    config = parse_config('[actors]\nlayout = "E+P+D+T"\n')
    assert config.processes[InstanceId("talker")] == ("talker",) and config.step_limit_s("talker") == 7.0
    specs = {spec.name: spec for spec in actor_specs(config)}
    assert (specs["talker"].needs, specs["talker"].handover_grace_s, specs["talker"].listens) == ("torch", 12.0, False)
    groups = [[spec.name for spec in group] for group in stop_order(list(specs.values()))]
    assert "talker" in groups[1] and {name for group in groups for name in group} == set(STAGES)
    order = restart_order(config.instances)
    assert set(order) == set(STAGES) and order.index(InstanceId("talker")) < order.index(InstanceId("controller"))
    assert "mmrt.actors.talker.loop" in actor_roots(["talker"], True, ())
    files = unit_files(config, "/usr/bin/mmrt", {"MMRT_RUN_DIR": "/r"}, Path("/d"))
    assert service_name("talker") in files[TARGET]
    assert f"\nAfter={service_name('memory')} {service_name('controller')}\n" in files[service_name("talker")]
    assert "\nWatchdogSec=37\n" in files[service_name("talker")] and "\nCPUWeight=100\n" in files[service_name("talker")]


def test_a_stage_that_is_added_is_in_every_list(talker: Stage) -> None:
    assert workers(STAGES)[-1] == torch_actors(STAGES)[-1] == "talker" and "talker" not in starts_after("gateway")
    assert device_pools() == {"embedding", "kv", "speech"}
    assert "talker" in replaceable() and actors_of("2ET+P+D")[-1] == "talker.1"
    assert process_in("EPD+T", "talker") == "talker" and process_in("EPDT", "encoder") == "talker"
    section = msgspec.convert({"talker": {"nice": 4}}, actors_section(STAGES))
    assert (section.talker.nice, section.talker.threads) == (4, 0)


@pytest.mark.parametrize(
    ("layout", "processes"),
    [
        ("2E+P+D", {"encoder": ("encoder",), "encoder.1": ("encoder.1",), "prefill": ("prefill",), "decode": ("decode",)}),
        ("E+E+P+D", {"encoder": ("encoder",), "encoder.1": ("encoder.1",), "prefill": ("prefill",), "decode": ("decode",)}),
        ("D+2PE", {"prefill": ("encoder", "prefill"), "prefill.1": ("encoder.1", "prefill.1"), "decode": ("decode",)}),
        ("E+P+2D", {"encoder": ("encoder",), "prefill": ("prefill",), "decode": ("decode",), "decode.1": ("decode.1",)}),
        ("2EPD", {"decode": ("encoder", "prefill", "decode"), "decode.1": ("encoder.1", "prefill.1", "decode.1")}),
        ("EPD+2P", {"decode": ("encoder", "prefill", "decode"), "prefill.1": ("prefill.1",), "prefill.2": ("prefill.2",)}),
    ],
)
def test_several_of_a_stage(layout: str, processes: dict[str, tuple[str, ...]]) -> None:
    check_layout(layout)
    found = processes_of(layout)
    assert {name: together for name, together in found.items() if STAGES[stage_of(together[0])].has_device} == processes
    assert [*dict.fromkeys(stage_of(actor) for actor in actors_of(layout))] == list(STAGES)
    assert sorted(actors_of(layout)) == sorted(actor for together in found.values() for actor in together)


@pytest.mark.parametrize(
    ("layout", "stage", "count", "scaled"),
    [
        ("E+P+D", "decode", 2, "E+P+2D"),
        ("E+P+D", "encoder", 3, "3E+P+D"),
        ("3E+P+D", "encoder", 1, "E+P+D"),
        ("EP+D", "encoder", 2, "EP+E+D"),
        ("EP+E+D", "encoder", 1, "EP+D"),
        ("EPD", "decode", 3, "EPD+2D"),
        ("D+2PE", "decode", 2, "2D+2EP"),
        ("2E+P+D", "encoder", 2, "2E+P+D"),
        ("E+P+D", "video", 2, "E+P+D+2V"),
        ("3V+E+P+D", "video", 2, "2V+E+P+D"),
        ("E+2V+PD", "video", 1, "E+PD"),
        ("EPD@a+D@b", "video", 2, "EPD@a+D@b+2V"),
    ],
)
def test_a_stage_is_scaled_by_processes_of_its_own(layout: str, stage: str, count: int, scaled: str) -> None:
    assert scale_layout(layout, stage, count) == scaled
    before, after = processes_of(layout), processes_of(scaled)
    assert all(before[name] == after[name] for name in before.keys() & after.keys()), "the others keep their names"
    assert sum(stage_of(actor) == stage for actor in actors_of(scaled)) == count


@pytest.mark.parametrize(
    ("layout", "stage", "count", "message"),
    [
        ("E+P+2D", "decode", 0, "decode=0: a run has 1 to 8 of decode"),
        ("E+P+D", "encoder", 9, "encoder=9: a run has 1 to 8 of encoder"),
        ("E+P+D", "talker", 2, "talker=2: no stage 'talker' to scale, there are video, encoder, prefill, decode"),
        ("E+P+D", "gateway", 2, "gateway=2: no stage 'gateway' to scale"),
        ("2EP+D", "encoder", 1, "encoder=1: encoder.1 shares its process with prefill, which would go as well"),
    ],
)
def test_what_cannot_be_scaled_is_refused(layout: str, stage: str, count: int, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        scale_layout(layout, stage, count)
    assert message in str(refusal.value)


@given(st.lists(st.tuples(st.integers(1, 2), st.sampled_from(["E", "P", "D", "EP", "ED", "PD", "EPD"])), min_size=1, max_size=4))
def test_a_layout_and_its_text(parts: list[tuple[int, str]]) -> None:
    text = "+".join(f"{count}{letters}" for count, letters in parts)
    assert processes_of(format_layout(parse_layout(text))) == processes_of(text)
    assert processes_of(join_layouts(text, text)) == processes_of(text)


def test_several_gateways() -> None:
    assert [actor for actor in actors_of("2G+E+2PD") if stage_of(actor) == "gateway"] == ["gateway", "gateway.1"]
    assert processes_of("EPD")["gateway"] == processes_of("G+EPD")["gateway"] == ("gateway",) and "gateway.1" not in processes_of("EPD")
    assert format_layout(parse_layout("G+G+EPD")) == "2G+EPD" and scale_layout("2G+E+P+D", "decode", 2) == "2G+E+P+2D"
    assert spread_layout("2G+EPD", ("a",)) == "2G+EPD@a"


def test_two_layouts_are_joined() -> None:
    assert join_layouts("2E+P+D", "E+P+3D") == "2E+P+3D" and join_layouts("EP+D", "EP+E+2D") == "EP+D+E+D"


@pytest.mark.parametrize(
    ("layout", "videos", "text"),
    [
        ("E+P+D", ["video"], "E+P+D"),
        ("E+V+P+D", ["video"], "E+P+D"),
        ("2V+EPD", ["video", "video.1"], "2V+EPD"),
        ("V+E+P+D+V", ["video", "video.1"], "V+E+P+D+V"),
    ],
)
def test_a_layout_need_not_name_the_only_video(layout: str, videos: list[str], text: str) -> None:
    check_layout(layout)
    assert [actor for actor in actors_of(layout) if stage_of(actor) == "video"] == videos
    assert all(processes_of(layout)[InstanceId(name)] == (name,) for name in videos)
    assert format_layout(expand_layout(layout)) == text and format_layout(expand_layout(text)) == text
    assert {*devices_of(spread_layout(layout, ("a",)))} == {"encoder", "prefill", "decode"}


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
        ("E+PX+D", "'PX': no stage 'X', there are G, V, E, P, D"),
        ("E+P+9D", "'E+P+9D' has 9 of decode, a run has at most 8"),
        ("9E+P+D", "'9E+P+D' has 9 of encoder, a run has at most 8"),
        ("4E+4EP+E+D", "has 9 of encoder"),
        ("EE+P+D", "'EE+P+D' has a process with encoder twice"),
        ("EP@cuda:0+D", "encoder and prefill on 'cuda:0': no such device, there are none ([[devices]])"),
        ("E+P", "'E+P' has no decode (D)"),
        ("VE+P+D", "'VE+P+D': video (V) has a process of its own, on no device"),
        ("V@a+E+P+D", "'V@a+E+P+D': video (V) has a process of its own, on no device"),
        ("GE+P+D", "'GE+P+D': gateway (G) has a process of its own, on no device"),
        ("9G+E+P+D", "'9G+E+P+D' has 9 of gateway, a run has at most 8"),
        ("9V+E+P+D", "'9V+E+P+D' has 9 of video, a run has at most 8"),
    ],
)
def test_other_layouts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_layout(text)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "spread"),
    [
        ("EP@a+D@b", "EP@a+D@b"),
        ("2EPD@*", "EPD@a+EPD@b"),
        ("3EPD@*+D@b", "EPD@a+EPD@b+EPD@a+D@b"),
        ("E+P+2D@*", "E@a+P@a+D@a+D@b"),
        ("E+2P+D@b", "E@a+2P@a+D@b"),
    ],
)
def test_processes_are_spread_over_devices(text: str, spread: str) -> None:
    devices = ("a", "b")
    assert spread_layout(text, devices) == spread == spread_layout(spread, devices)
    check_layout(spread, devices)
    assert processes_of(spread).keys() == processes_of(text).keys()
    assert devices_of(spread).keys() == {actor for actor in actors_of(spread) if STAGES[stage_of(actor)].has_device}


def test_devices_of_actors() -> None:
    assert devices_of("EP@a+D@b+D@a") == {"encoder": "a", "prefill": "a", "decode": "b", "decode.1": "a"}
    assert spread_layout("2EPD@*") == "2EPD@*" and devices_of("E+P+D") == {}
    assert scale_layout("EP@a+D@b", "decode", 2) == "EP@a+2D@b"


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        ("EP@a+D@c", ("a", "b"), "decode on 'c': no such device, there are a, b"),
        ("2EPD@*", (), "encoder and prefill and decode on '*': no such device, there are none ([[devices]])"),
    ],
)
def test_unknown_devices_are_refused(text: str, devices: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_layout(spread_layout(text, devices), devices)
    assert str(refusal.value) == message


@given(st.data(), st.sampled_from([*STAGES.values()]))
def test_an_instance_is_known_by_its_name(data: st.DataObject, record: Stage) -> None:
    stage, number = record.name, data.draw(st.integers(0, record.max_count - 1))
    instance = instance_id(stage, number)
    assert parse_instance(instance) == instance and (stage_of(instance), number_of(instance)) == (stage, number)
    assert instance == (f"{stage}.{number}" if number else stage) and instance in ALL_ACTORS


@given(st.one_of(st.text(), st.from_regex(r"(encoder|decode)\.?[0-9]{0,4}", fullmatch=True)))
def test_an_instance_has_one_name(text: str) -> None:
    try:
        instance = parse_instance(text)
    except ConfigError as error:
        assert repr(text) in str(error)
    else:
        assert instance == text == instance_id(stage_of(instance), number_of(instance))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("encoder.0", "no actor 'encoder.0': '0' is no number from 1 to 7"),
        ("encoder.", "'' is no number"),
        ("encoder.8", "'8' is no number"),
        ("encoder.\u0661", "is no number"),
        ("talker.1", "no actor 'talker.1'; there are memory, controller"),
        ("decode.8", "no actor 'decode.8': '8' is no number from 1 to 7"),
        ("detokenizer.1", "no actor 'detokenizer.1': a run has one detokenizer"),
        ("video.8", "no actor 'video.8': '8' is no number from 1 to 7"),
    ],
)
def test_other_names_of_instances_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_instance(text)
    assert message in str(refusal.value)
