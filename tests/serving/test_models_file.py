"""The file of ``mmrt serve``: what each run is configured with, and every way in which a file can be wrong."""

from pathlib import Path

import pytest

from mmrt.cli.main import run
from mmrt.runtime.errors import ConfigError
from mmrt.runtime.process.run import DEFAULT_MODEL
from mmrt.serving.models_file import EMBEDDING_TOKENS, KV_TOKENS, MAX_SUFFIX, ModelsFile, load_models
from mmrt.serving.sizes import read_size


def loaded(folder: Path, text: str, **options: str | int) -> ModelsFile:
    file = folder / "models.toml"
    file.write_text(text)
    return load_models(file, options)


def test_runs_have_the_fronts_keys_and_limits_and_serve_it_alone(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    found = loaded(
        tmp_path,
        """
        [server]
        host = "0.0.0.0"
        api_key = "secret"
        api_keys_file = "keys.toml"
        max_body_mib = 5
        allow_origins = ["*"]
        [front]
        memory = "1.5 GiB"
        [[model]]
        path = "small"
        pinned = true
        [model.memory]
        max_sequences = 3
        [[model]]
        name = "Org/Other:Q4"
        path = "Org/Other"
        max_context = 100_000
        [[model]]
        [[model]]
        path = "hf.co/Org/A-model-with-a-very-long-name-that-goes-on:Q4@main"
        """,
        port=7,
    )
    small, other, demo, long = found.models
    assert long.name == "Org/A-model-with-a-very-long-name-that-goes-on:Q4" and len(long.run_suffix) == MAX_SUFFIX
    assert (small.name, small.pinned, small.run_suffix) == ("small", True, "small")
    assert small.config.model.path == str(tmp_path / "small") and small.config.model.name == "small"
    assert (other.config.model.path, other.run_suffix, other.pinned) == ("Org/Other", "Org-Other-Q4", False)
    assert (demo.name, demo.config.model.path) == ("demo", str(DEFAULT_MODEL))
    assert (small.config.memory.kv_tokens, other.config.memory.kv_tokens) == (KV_TOKENS, 100_000)
    assert (small.config.memory.max_sequences, small.config.memory.embedding_tokens) == (3, EMBEDDING_TOKENS)
    assert found.memory_bytes == 3 << 29 and (found.server.host, found.server.port) == ("0.0.0.0", 7)
    for model in found.models:
        server = model.config.server
        assert (server.host, server.port, server.allow_origins, server.max_body_mib) == ("127.0.0.1", 0, (), 5)
        assert (server.api_key, server.api_keys_file) == ("secret", str(tmp_path / "keys.toml"))
    assert len({model.digest for model in found.models}) == 4


def test_a_run_of_another_configuration_is_another_one(tmp_path: Path) -> None:
    text = '[server]\napi_key = "a"\n[[model]]\nname = "m"\n'
    (first,) = loaded(tmp_path, text).models
    assert loaded(tmp_path, text, port=7).models[0].digest == first.digest, "where the front serves is none of a run's business"
    for other in (text.replace('"a"', '"b"'), text + "max_context = 100\n"):
        assert loaded(tmp_path, other).models[0].digest != first.digest


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "model: there is none, expected at least one table [[model]]"),
        ("[[models]]\nname = 'a'", "unknown key 'models': did you mean 'model'?"),
        ("model = 3", "model = 3: expected `array`, got `int`"),
        ("[model]\nname = 'a'", "model: is one table, expected an array of tables: write [[model]] above each"),
        ("model = [1]", "model[0] = 1: expected `object`, got `int`"),
        ("[[model]]\n" * 65, "expected `array` of length <= 64"),
        ("[[model]]\nkv_tokens = 1", "unknown key model[0].kv_tokens: a model has adapter, device"),
        ("[[model]]\nserver = 1", "unknown key model[0].server"),
        ("[[model]]\nname = 'a b'", 'model[0].name = "a b": expected 1 to 160 letters'),
        (f"[[model]]\nname = '{161 * 'a'}'", "expected 1 to 160 letters"),
        ("[[model]]\nname = 3", "model[0]: model.name = 3: expected `str`, got `int`"),
        ("[[model]]\nname = 'a'\n[[model]]\nname = 'a'", 'model[1].name = "a": model[0] has this name'),
        ("[[model]]\nname = 'a/b'\n[[model]]\nname = 'A-b'", 'model[1].name = "A-b": model[0] "a/b" has a run of the same name'),
        ("[[model]]\npinned = 1", "model[0].pinned = 1: expected true or false"),
        ("[[model]]\ndtype = 'fp8'", "model[0]: model.dtype = \"fp8\": expected one of 'auto'"),
        ("[[model]]\n[[model]]\nname = 'b'\n[model.memory]\nkv_tokens = -1", "model[1]: memory.kv_tokens = -1: expected `int` >= 0"),
        ("[[model]]\n[model.memory]\nkv = 1", "model[0]: unknown key 'memory.kv': [memory] has max_sequences"),
        ("[front]\nidle = 1\n[[model]]", "unknown key 'front.idle': did you mean 'idle_s'?"),
        ("[front]\nidle_s = -1\n[[model]]", "front.idle_s = -1: expected `float` >= 0"),
        ("[front]\nmemory = '4 apples'\n[[model]]", 'front.memory = "4 apples": expected a size above 0, such as "20 GiB"'),
        ("[front]\nmemory = 20\n[[model]]", "front.memory = 20: expected `str`, got `int`"),
        ("[front]\nmemory = '0 GB'\n[[model]]", 'front.memory = "0 GB": expected a size above 0'),
        ("[server]\nport = 70000\n[[model]]", "server.port = 70000: expected `int` <= 65535"),
        ("[server]\ntls_cert = 'x'\n[[model]]", 'server.tls_cert = "x": needs server.tls_key besides'),
        ("server = 1\n[[model]]", "server = 1: expected a table [server]"),
        ("[runs]\n[[model]]", "unknown key 'runs': the top level has server, front, logging, model"),
        ("[[model]", "not valid TOML"),
        ("\udcff", "not UTF-8 at byte 0"),
    ],
)
def test_errors_name_file_key_value_and_limit(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "models.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        load_models(file, {})
    assert str(caught.value).startswith(f"{file}: ") and problem in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot read the configuration {tmp_path}/no.toml: No such file"):
        load_models(tmp_path / "no.toml", {})


def test_sizes() -> None:
    assert [read_size(text, "key") for text in ("1KiB", "1.5 GiB", "20 GB")] == [1024, 3 << 29, 20 * 10**9]
    for text in ("", "1", "GiB", "-1 GiB", "1 gib", "1 GiBs", "1e3 GiB"):
        with pytest.raises(ConfigError, match="key = "):
            read_size(text, "key")


@pytest.mark.parametrize(
    ("text", "status", "problem"),
    [
        ("[server]\napi_keys_file = 'no.toml'\n[[model]]", 2, "no.toml"),
        ("[server]\nhost = 'a..b'\n[[model]]", 1, "cannot serve on a..b:8000 (server.host, server.port)"),
        ("[[model]]\npinned = 2", 2, "model[0].pinned = 2: expected true or false"),
    ],
)
def test_the_command_says_what_is_wrong_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, status: int, problem: str
) -> None:
    monkeypatch.setenv("MMRT_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = tmp_path / "models.toml"
    file.write_text(text)
    assert run(["serve", str(file)]) == status
    error = capsys.readouterr().err
    assert error.startswith("error: ") and problem in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()
