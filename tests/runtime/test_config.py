"""The configuration: what is valid, what is refused, and how the refusal reads."""

from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.runtime.config.presets import PRESETS
from mmrt.runtime.config.runtime_config import RuntimeConfig, convert_config, load_config, parse_config, to_data, to_toml
from mmrt.runtime.config.sections import POLICY_NAMES, SchedulingSection
from mmrt.runtime.environment import Environment, read_environment
from mmrt.runtime.errors import ConfigError
from mmrt.runtime.stage_table import ACTORS

TWO_DEVICES = '[[devices]]\nname = "0"\n[[devices]]\nname = "1"\n'

PIPELINE = "[scheduling]\nprefill_pipeline = true\n"


def test_defaults_and_their_toml_agree() -> None:
    assert load_config() == parse_config("") == parse_config(to_toml(RuntimeConfig())) == convert_config(to_data(RuntimeConfig()))


def test_values_are_taken() -> None:
    config = parse_config('[server]\nport = 0\nkeep_alive_s = 5\n[actors.decode]\nthreads = 2\n[model]\npath = "/m"\n')
    assert (config.server.port, config.server.keep_alive_s, config.model.path) == (0, 5.0, "/m")
    assert (config.actor("decode").threads, config.actor("prefill").nice) == (2, 2)
    assert config.actor("prefill").threads == 0, "planned when a run is made"
    assert config.actor("gateway").threads == 1


def test_stages_of_a_pipeline_work_in_the_pool_of_the_first() -> None:
    layout = '[actors]\nlayout = "E@0+P@1+P@0+D@0"\n'
    for text, devices in ((PIPELINE, [1, 1, 0]), ("", [1, 0, 0])):
        config = parse_config(layout + TWO_DEVICES + text)
        assert [config.kv_device(actor) for actor in ("prefill", "prefill.1", "decode")] == devices
    assert parse_config(PIPELINE + '[actors]\nlayout = "E+2P+D"').kv_device("prefill.1") == 0


def test_objectives_by_kind() -> None:
    slo = parse_config("[slo.text]\ntbt_ms = 80\n[slo.image]\nttft_ms = 2500.5\n").slo
    assert (slo.text.ttft_ms, slo.text.tbt_ms) == (1000, 80), "the other key keeps the default of its kind"
    assert (slo.image.ttft_ms, slo.image.tbt_ms, slo.video.ttft_ms, slo.audio.ttft_ms) == (2500.5, 0, 20_000, 4000)


@settings(deadline=None)  # the machine may be busy
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_toml(text: str) -> None:
    config = msgspec.structs.replace(RuntimeConfig(), model=msgspec.structs.replace(RuntimeConfig().model, name=text))
    assert parse_config(to_toml(config)) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1", "unknown key 'server.prot': did you mean 'port'? [server] has host, port, api_key"),
        (PIPELINE, 'actors.layout = "E+P+D" has one prefill, expected 2 or more'),
        (
            PIPELINE + 'preset = "monolithic"\n[actors]\nlayout = "2EPD"',
            'scheduling.preset = "monolithic" has none',
        ),
        (
            PIPELINE + '[actors]\nlayout = "E+2P+D"\n[autoscale]\nenabled = true',
            "are set at the start: leave one of them out",
        ),
        ("[serve]\nport = 1", "unknown key 'serve': did you mean 'server'? the top level has model, server"),
        ("port = 1", "unknown key 'port': it belongs to [server]; the top level has model, server"),
        ("[actors.decode]\nthread = 2", "unknown key 'actors.decode.thread': did you mean 'threads'?"),
        ("[actors.decod]\nthreads = 2", "unknown key 'actors.decod': did you mean 'decode'?"),
        ("[server]\nport = 70000", "server.port = 70000: expected `int` <= 65535"),
        ("[server]\nport = -1", "server.port = -1: expected `int` >= 0"),
        ("[server]\nport = 80.5", "server.port = 80.5: expected `int`, got `float`"),
        ("[server]\nport = true", "server.port = true: expected `int`, got `bool`"),
        ('[server]\nport = "80"', 'server.port = "80": expected `int`, got `str`'),
        ('[server]\nhost = ""', 'server.host = "": expected `str` of length >= 1'),
        ("[actors.decode]\nthreads = -1", "actors.decode.threads = -1: expected `int` >= 0"),
        ("[actors.video]\nnice = 20", "actors.video.nice = 20: expected `int` <= 19"),
        ("[actors.video]\nnice = -1", "actors.video.nice = -1: expected `int` >= 0"),
        ("[memory]\nmedia_mib = 0", "memory.media_mib = 0: expected `int` >= 1"),
        ("[media]\nfps = 0", "media.fps = 0: expected `float` >= 0.01"),
        ("[media]\nfps = 1e-9", "media.fps = 1e-09: expected `float` >= 0.01"),
        ("[media]\nfps = nan", "media.fps = nan: expected a finite number"),
        ("[media]\nmax_video_s = inf", "media.max_video_s = inf: expected a finite number"),
        ('[media.fetch]\nallowed_hosts = ["https://a.org"]', 'media.fetch.allowed_hosts[0] = "https://a.org": expected `str` matching'),
        ('[media.fetch]\nallowed_hosts = ["*a.org"]', "media.fetch.allowed_hosts"),
        ('[media.fetch]\nschemes = ["file"]', 'media.fetch.schemes[0] = "file": expected `str` matching'),
        ("[media.fetch]\nports = [0]", "media.fetch.ports[0] = 0: expected `int` >= 1"),
        ('[media.fetch]\nallowed_networks = ["10.0.0.1/8"]', "10.0.0.1/8 has host bits set"),
        ('[media.fetch]\nallowed_networks = ["home"]', "'home' does not appear to be an IPv4 or IPv6 network"),
        ('[media.fetch]\nallowed_roots = ["pictures"]', 'media.fetch.allowed_roots[0] = "pictures": expected `str` matching'),
        ('[media.fetch]\nallowed_roots = ["/"]', 'media.fetch.allowed_roots[0] = "/": expected `str` matching'),
        ("[media.fetch]\ntimeout_s = 0", "media.fetch.timeout_s = 0"),
        ("[media.fetch]\nallowed_host = []", "unknown key 'media.fetch.allowed_host': did you mean 'allowed_hosts'?"),
        ("[slo.text]\nttft_ms = 0", "slo.text.ttft_ms = 0: expected `float` >= 1"),
        ("[slo.video]\ntbt_ms = -1", "slo.video.tbt_ms = -1: expected `float` >= 0"),
        ("[slo.audio]\ntbt_ms = 1e7", "slo.audio.tbt_ms = 10000000.0: expected `float` <= 3600000"),
        ("[slo.texts]\ntbt_ms = 1", "unknown key 'slo.texts': did you mean 'text'? [slo] has text, image, video, audio"),
        ("[slo]\nttft_ms = 1", "unknown key 'slo.ttft_ms'"),
        ("[slo.image]\nttft = 1", "unknown key 'slo.image.ttft': did you mean 'ttft_ms'?"),
        ("[slo]\nimage = 3", "slo.image = 3: expected a table [slo.image]"),
        (
            '[model]\nweights = "int3"',
            "model.weights = \"int3\": expected one of 'auto', 'float32', 'bfloat16', 'float16', 'int8', 'int8g'",
        ),
        (
            '[model]\nweights = "int8"\ndevice = "cuda"',
            'model.weights = "int8": on model.device = "cuda" weights are kept in model.dtype, expected \'auto\'',
        ),
        (
            '[model]\nweights = "float16"\ndtype = "bfloat16"',
            "model.weights = \"float16\": such weights are multiplied in float32, expected model.dtype 'auto' or 'float32'",
        ),
        ('[model]\nweights = "float32"\ndtype = "bfloat16"', 'model.weights = "float32": such weights are multiplied in float32'),
        ('[model]\ndtype = "fp8"', "model.dtype = \"fp8\": expected one of 'auto', 'float32', 'bfloat16'"),
        (
            '[actors]\nlayout = "PD"',
            "actors.layout = \"PD\": 'PD' has no encoder (E)",
        ),
        (
            '[scheduling]\npolicy = "unifed"',
            "scheduling.policy = \"unifed\": did you mean 'unified'? expected one of "
            + ", ".join(POLICY_NAMES)
            + ", or a file NAME.py",
        ),
        ('[scheduling]\npreset = "split"\n[actors]\nlayout = "EPD"', 'actors.layout = "EPD": scheduling.preset = "split" needs "EP+D"'),
        (
            '[scheduling]\npreset = "monolithic"\npolicy = "slack"',
            'scheduling.policy = "slack": scheduling.preset = "monolithic" needs',
        ),
        (
            '[scheduling]\npreset = "split"\n[actors]\nturns = "layers"',
            'actors.turns = "layers": scheduling.preset = "split" needs "off"',
        ),
        ('[scheduling]\npreset = "mono"', "scheduling.preset = \"mono\": expected one of '', 'monolithic', 'split'"),
        ("[actors]\nturns = true", "actors.turns = true: expected `str`, got `bool`"),
        ('[actors]\nturns = "steps"', "actors.turns = \"steps\": expected one of 'off', 'plans', 'layers'"),
        ('[actors]\nlayout = "EP@0+D@1"', "actors.layout = \"EP@0+D@1\": encoder and prefill on '0': no such device, there are none"),
        (TWO_DEVICES + '[actors]\nlayout = "EP@0+D@2"', "decode on '2': no such device, there are 0, 1"),
        ('[[devices]]\nname = "0"\n[[devices]]\nname = "0"', 'devices[1].name = "0": another device has this name'),
        ('[[devices]]\nname = "*"', 'devices[0].name = "*": expected `str` matching'),
        ('[[devices]]\nname = "0"\ncpus = "1-"', 'devices[0].cpus = "1-": expected `str` matching'),
        ('[[devices]]\nname = "0"\ncpus = "3-1"', 'devices[0].cpus = "3-1": names no processor'),
        ('[[devices]]\nname = "0"\ncores = "1"', "devices[0]"),
        ('[[devices]]\ncpus = "1"', "devices[0]"),
        ("[devices]\nname = 1", "devices"),
        ("devices = 3", "devices = 3: expected `array`, got `int`"),
        ("[[devices]]\nname = '1'\n" * 9, "devices = "),
        (
            TWO_DEVICES + '[model]\ndevice = "cuda"',
            'devices: are parts of a CPU; model.device = "cuda" is one device: leave [[devices]] out',
        ),
        (TWO_DEVICES + '[scheduling]\npreset = "split"', 'devices: scheduling.preset = "split" has a layout without devices'),
        (
            '[memory]\nkv_transfer_dtype = "int4"',
            'memory.kv_transfer_dtype = "int4": packs KV pages on their way between [[devices]], at least 2 are needed, not 0',
        ),
        (
            '[memory]\nkv_transfer_dtype = "int4"\nkv_dtype = "int8"\n[[devices]]\nname = "a"\n[[devices]]\nname = "b"',
            'memory.kv_transfer_dtype = "int4": pages of memory.kv_dtype = "int8" are packed already, expected "auto"',
        ),
        (
            '[memory]\nkv_transfer_dtype = "int2"',
            "memory.kv_transfer_dtype = \"int2\": expected one of 'auto', 'int8', 'int4'",
        ),
        ('[memory]\nkv_dtype = "int4"', "memory.kv_dtype = \"int4\": expected one of 'auto', 'int8', 'fp8'"),
        ('[server]\nallow_origins = ["app.example"]', 'server.allow_origins[0] = "app.example": expected `str` matching'),
        ('[server]\nallow_origins = ["https://app.example/"]', 'server.allow_origins[0] = "https://app.example/": expected'),
        ("server = 3", "server = 3: expected a table [server]"),
        ('[tracing]\notlp_endpoint = "localhost:4318"', 'tracing.otlp_endpoint = "localhost:4318": expected http://HOST:PORT'),
        ('[tracing]\notlp_endpoint = "ftp://a/b"', "expected http://HOST:PORT or https://HOST:PORT"),
        ('[tracing]\notlp_endpoint = "http://:4318"', "expected http://HOST:PORT"),
        ('[tracing]\notlp_endpoint = "http://a:99999"', "its port is not from 1 to 65535"),
        ('[tracing]\notlp_endpoint = "http://a:port"', "its port is not from 1 to 65535"),
        ('[tracing]\notlp_endpoint = "http://a b/"', "expected http://HOST:PORT"),
        ('[tracing]\notlp_endpoint = "http://[::1"', "tracing.otlp_endpoint"),
        ('[tracing]\notlp_endpoint = "http://u:p@a/"', "OTEL_EXPORTER_OTLP_HEADERS"),
        ('[tracing]\notlp_endpoint = "http://a/?x=1"', "it has a query or a fragment"),
        ("[tracing]\nsample_ratio = 1.5", "tracing.sample_ratio = 1.5: expected `float` <= 1"),
        ('[logging]\nformat = "xml"', "logging.format = \"xml\": expected one of 'text', 'json'"),
        ("[supervisor]\nbackoff_s = 9", "supervisor.backoff_max_s = 5.0 is less than supervisor.backoff_s = 9.0"),
        ("[server]\nport = ", "not valid TOML: Invalid value"),
        ("x = " + "[" * 5000, "not valid TOML: nested too deep"),
        (f"[server]\nport = {'9' * 5000}", "not valid TOML: a number has more than 4300 digits"),
        (f"[server]\nport = {'9' * 4000}", "server.port: is a number of 13288 bits, TOML's have at most 63"),
        (f"[server]\nallow_origins = [0x{'f' * 5000}]", "server.allow_origins[0]: is a number of 20000 bits"),
        ("[memory]\nkv_tokens = 9223372036854775808", "memory.kv_tokens: is a number of 64 bits, TOML's have at most 63 and a sign"),
        (f"[[devices]]\nname = '{'a' * 4097}'", "devices[0].name: is a text of 4097 characters, the limit is 4096"),
        (f"{'k' * 5000} = 1", f"unknown key '{'k' * 120}':"),
    ],
)
def test_refusals_name_key_value_and_limit(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config(text)
    assert message in str(refusal.value)
    assert refusal.value.exit_code == 2


def test_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration .*/none.toml: No such file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    with pytest.raises(ConfigError, match="latin.toml: not UTF-8 at byte 2"):
        load_config(tmp_path / "latin.toml")
    (tmp_path / "typo.toml").write_text("[memory]\nkv_token = 3")
    with pytest.raises(ConfigError, match="typo.toml: unknown key 'memory.kv_token': did you mean 'kv_tokens'"):
        load_config(tmp_path / "typo.toml")


def test_a_file_has_a_size(tmp_path: Path) -> None:
    file = tmp_path / "long.toml"
    file.write_bytes(b"#" * (1 << 20))
    assert load_config(file) == RuntimeConfig()
    file.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="long.toml: a configuration has at most 1 MiB, this file has more"):
        load_config(file)
    with pytest.raises(ConfigError, match="/dev/zero: a configuration has at most 1 MiB"):
        load_config(Path("/dev/zero"))
    file.write_text(f'[scheduling]\npolicy = "{"x" * 300}.py"')
    with pytest.raises(ConfigError, match="long.toml: scheduling.policy = .*: there is no file"):
        load_config(file)


@pytest.mark.parametrize("name", ["MMRT_LIFELINE_FD", "MMRT_LISTEN_FDS", "LISTEN_FDS", "LISTEN_PID"])
@pytest.mark.parametrize("value", ["9" * 5000, "4194305", "-1", "x", "٣"])
def test_numbers_of_the_environment_have_bounds(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"environment variable {name} = '.{{1,40}}' is not a number up to"):
        read_environment({name: value})


def test_the_environment() -> None:
    assert read_environment({"HOME": "/home/u"}) == Environment(
        state_home=Path("/home/u/.local/state/mmrt"), cache_home=Path("/home/u/.cache/mmrt")
    )
    found = read_environment(
        {
            "MMRT_RUN_DIR": "/dev/shm/x",
            "MMRT_CONFIG": "/etc/c.toml",
            "NOTIFY_SOCKET": "@n",
            "MMRT_LIFELINE_FD": "3",
            "XDG_STATE_HOME": "/s",
            "XDG_CACHE_HOME": "/c",
            "NO_COLOR": "1",
            "CUDA_MPS_PIPE_DIRECTORY": "/run/mps",
        }
    )
    assert (found.run_dir, found.config_file, found.notify_socket) == (Path("/dev/shm/x"), Path("/etc/c.toml"), "@n")
    assert (found.lifeline_fd, found.plain_output) == (3, True)
    assert (found.state_home, found.cache_home) == (Path("/s/mmrt"), Path("/c/mmrt"))
    assert found.mps_pipe == Path("/run/mps") and read_environment({}).mps_pipe == Path("/tmp/nvidia-mps")
    with pytest.raises(ConfigError, match="MMRT_LIFELINE_FD = 'x' is not a number"):
        read_environment({"MMRT_LIFELINE_FD": "x"})


@pytest.mark.parametrize(
    ("layout", "processes"),
    [
        ("E+P+D", {"encoder": ("encoder",), "prefill": ("prefill",), "decode": ("decode",)}),
        ("EP+D", {"prefill": ("encoder", "prefill"), "decode": ("decode",)}),
        ("ED+P", {"decode": ("encoder", "decode"), "prefill": ("prefill",)}),
        ("E+PD", {"encoder": ("encoder",), "decode": ("prefill", "decode")}),
        ("EPD", {"decode": ("encoder", "prefill", "decode")}),
    ],
)
def test_layouts(layout: str, processes: dict[str, tuple[str, ...]]) -> None:
    config = parse_config(f'[actors]\nlayout = "{layout}"\n')
    alone = [name for name in ACTORS if name not in ("encoder", "prefill", "decode")]
    assert config.processes == {**{name: (name,) for name in alone}, **processes}
    assert {name: config.process_of(name) for name in ACTORS} == {
        name: process for process, names in config.processes.items() for name in names
    }


def test_tls_ends_in_one_gateway() -> None:
    text = '[actors]\nlayout = "2G+EPD"\n[server]\n'
    assert parse_config(text).num_gateways == 2 and parse_config("").num_gateways == 1
    with pytest.raises(ConfigError, match=r'actors.layout = "2G\+EPD": TLS ends in one gateway'):
        parse_config(text + 'tls_cert = "/c.pem"\ntls_key = "/k.pem"\n')


def test_each_process_is_on_a_device() -> None:
    config = parse_config(TWO_DEVICES + 'cpus = "0,2-3"\n[actors]\nlayout = "2EPD@*"\n')
    assert config.actors.layout == "EPD@0+EPD@1" and config.num_kv_pools == 2 and config.devices[1].cpus == "0,2-3"
    assert config.actor_devices == {
        "encoder": 0, "prefill": 0, "decode": 0, "encoder.1": 1, "prefill.1": 1, "decode.1": 1,
    }  # fmt: skip
    assert parse_config(to_toml(config)) == convert_config(to_data(config)) == config
    assert parse_config(TWO_DEVICES).actors.layout == "E@0+P@0+D@0"
    assert (parse_config("").num_kv_pools, parse_config("").actor_devices) == (1, {})


def test_a_policy_can_be_a_file_beside_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mmrt.toml"
    file.write_text('[scheduling]\npolicy = "mine.py"\n')
    with pytest.raises(ConfigError, match=f'scheduling.policy = "mine.py": there is no file {tmp_path / "mine.py"}'):
        load_config(file)
    (tmp_path / "mine.py").touch()
    config = load_config(file)
    assert config.scheduling.policy == str(tmp_path / "mine.py") and parse_config(to_toml(config)) == config


def test_a_preset_sets_what_is_not_configured_otherwise() -> None:
    config = parse_config('[scheduling]\npreset = "monolithic"\n')
    assert (config.actors.layout, config.actors.turns, config.scheduling.policy) == ("EPD", "plans", "monolithic")
    assert (config.scheduling.prefill_budget_tokens, config.scheduling.encode_budget_tokens) == (2048, 8192)
    assert parse_config(to_toml(config)) == convert_config(to_data(config)) == config
    config = parse_config('[scheduling]\npreset = "split"\nprefill_budget_tokens = 512\n')
    assert (config.actors.layout, config.scheduling.policy, config.scheduling.prefill_budget_tokens) == ("EP+D", "split", 512)

    config = parse_config('[scheduling]\npreset = "split"\n[actors]\nlayout = "2V+2EP+3D"\n')
    assert (config.actors.layout, config.scheduling.policy, config.actors.turns) == ("2V+2EP+3D", "split", "off"), "several instances"


def test_every_preset_can_be_named() -> None:
    assert {"", *PRESETS} == set(get_args(get_type_hints(SchedulingSection)["preset"]))
    for name in PRESETS:
        assert parse_config(f"[scheduling]\npreset = {name!r}\n").scheduling.preset == name
