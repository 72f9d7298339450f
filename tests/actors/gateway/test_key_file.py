"""The file of API keys: what is read, who may read it, and what is said of a bad one."""

import hashlib
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from mmrt.actors.gateway.keys.key_file import MAX_FILE_BYTES, MAX_KEYS, parse_keys, read_keys
from mmrt.runtime.errors import ConfigError

SECRET = "sk-0123456789abcdef"
SHA = hashlib.sha256(b"another-secret-key").hexdigest()
GOOD = f"""\
[[key]]
name = "alice"
key = "{SECRET}"
requests_per_minute = 60
tokens_per_minute = 100_000
max_requests = 4
cache_salt = "team"
may_command = true

[[key]]
name = "bob"
sha256 = "{SHA.upper()}"
"""


def test_toml_and_json_lines_mean_the_same() -> None:
    alice, bob = parse_keys(GOOD, is_json=False)
    assert (alice.name, alice.requests_per_minute, alice.tokens_per_minute, alice.max_requests) == ("alice", 60, 100_000, 4)
    assert alice.digest == hashlib.sha256(SECRET.encode()).digest() and alice.may_command
    assert bob.digest.hex() == SHA and not bob.may_command and bob.requests_per_minute == bob.max_requests == 0
    assert len({alice.salt, bob.salt, b""}) == 3
    lines = [
        {"name": "alice", "key": SECRET, "requests_per_minute": 60, "tokens_per_minute": 100_000, "max_requests": 4}
        | {"cache_salt": "team", "may_command": True},
        {"name": "bob", "sha256": SHA},
    ]
    assert parse_keys("\n".join(map(json.dumps, lines)) + "\n\n", is_json=True) == (alice, bob)


def test_keys_of_one_salt_share_and_others_do_not() -> None:
    def salt(key: str, **more: str) -> bytes:
        return parse_keys(json.dumps({"name": "x", "key": key, **more}), is_json=True)[0].salt

    one, other = "a" * 16, "b" * 16
    assert salt(one, cache_salt="team") == salt(other, cache_salt="team") != salt(one) != salt(other)


BAD_FIELDS: dict[str, tuple[Any, str]] = {
    "name": ("a b", "name = 'a b': expected 1 to 64 letters, digits, hyphens and underscores"),
    "requests_per_minute": (0, "requests_per_minute = 0: expected a whole number from 1 to 1000000000"),
    "tokens_per_minute": (True, "tokens_per_minute = True: expected a whole number from 1 to 1000000000"),
    "max_requests": (1_000_001, "max_requests = 1000001: expected a whole number from 1 to 1000000"),
    "may_command": ("yes", "may_command = 'yes': expected true or false"),
    "cache_salt": ("", "cache_salt = a text of 0 characters: expected 1 to 256 characters"),
    "key": ("short-secret", "key = a text of 12 characters: expected 16 to 512 visible ASCII characters"),
    "sha256": ("zz", "sha256 = a text of 2 characters: expected 64 hexadecimal digits"),
    "limit": (3, "unknown field 'limit': a key has name, key, sha256, requests_per_minute"),
}


@pytest.mark.parametrize("field", BAD_FIELDS)
def test_a_bad_field_is_named_with_its_line(field: str) -> None:
    value, message = BAD_FIELDS[field]
    fields = {"name": "eve", "key": SECRET} | {field: value}
    with pytest.raises(ConfigError) as caught:
        parse_keys(f"{json.dumps({'name': 'first', 'sha256': SHA})}\n{json.dumps(fields)}", is_json=True)
    assert str(caught.value).startswith("line 2: ") and message in str(caught.value) and "secret" not in str(caught.value)
    toml = "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())
    with pytest.raises(ConfigError) as caught:
        parse_keys(f"# keys\n\n[[key]]\n{toml}", is_json=False)
    assert str(caught.value).startswith(f"line {4 + list(fields).index(field)}: ") and message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"holds 0 keys, expected 1 to {MAX_KEYS}"),
        ("[[key]]\nname = 'a'\nkey = secret", "not valid TOML: Invalid value (at line 3, column 7)"),
        ("[[keys]]\nname = 'a'", "unknown key 'keys': expected tables [[key]]"),
        ("key = ['a-secret-key-in-a-list']", "expected each key as a table [[key]] on lines of its own"),
        ('key = ["""\n[[key]]\n"""]', "expected each key as a table [[key]] on lines of its own"),
        (f"[[key]]\nmax_requests = {'9' * 5000}", "not valid TOML: Exceeds the limit"),
        (f"[[key]]\nmax_requests = 0x{'f' * 5000}", "line 2: max_requests = a number of 20000 bits: expected a whole number"),
        (f"[[key]]\nkey = '{SECRET}'", "line 1: a key without a name"),
        ("[[key]]\nname = 'a'", "line 1: 'a' needs one of key and sha256, and not both"),
        (f"[[key]]\nname = 'a'\nkey = '{SECRET}'\nsha256 = '{SHA}'", "line 1: 'a' needs one of key and sha256, and not both"),
        (f"{GOOD}[[key]]\nname = 'bob'\nkey = 'yet-another-secret'", "line 13: name = 'bob' is also that of line 10"),
        (f"{GOOD}[[key]]\nname = 'eve'\nkey = '{SECRET}'", "line 13: 'eve' has the same key as line 1"),
    ],
)
def test_a_bad_toml_file(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(text, is_json=False)
    assert message in str(caught.value) and "secret" not in str(caught.value) and SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"name": "a", "key": "a-secret', "line 1: not valid JSON"),
        ('{"name": "a", "name": "b"}', "line 1: a field is given twice"),
        ("[1]", "line 1: expected a JSON object"),
        ('{"cache_salt": "\\ud800"}', "line 1: cache_salt = a text of 1 characters: expected 1 to 256 characters"),
        ("[" * 100_000, "line 1: not valid JSON"),
        ("\n".join(json.dumps({"name": f"n{i}", "key": f"{i:016}"}) for i in range(MAX_KEYS + 1)), f"expected 1 to {MAX_KEYS}"),
    ],
)
def test_bad_json_lines(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(line, is_json=True)
    assert message in str(caught.value) and "secret" not in str(caught.value)


def test_others_may_not_use_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(GOOD)
    for mode in (0o644, 0o640, 0o620, 0o602, 0o604):
        file.chmod(mode)
        with pytest.raises(
            ConfigError, match=rf"server.api_keys_file = '{file}' has mode {mode:04o}, others may use it: expected 0600"
        ):
            read_keys(file)
    for mode in (0o600, 0o400):
        file.chmod(mode)
        assert len(read_keys(file)) == 2


def test_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "keys.jsonl"
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        read_keys(file)
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_keys(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_keys(tmp_path / "pipe")
    file.touch(0o600)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=f"{file}: not UTF-8 at byte 0"):
        read_keys(file)
    file.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match=f"has {MAX_FILE_BYTES + 1} bytes, the limit is {MAX_FILE_BYTES}"):
        read_keys(file)
    file.write_text(json.dumps({"name": "a"}))
    with pytest.raises(ConfigError, match=f"{file}: line 1: 'a' needs one of key and sha256"):
        read_keys(file)


def test_one_free_descriptor_is_enough(tmp_path: Path) -> None:
    """A flood of connections may leave no more when the file changes."""
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text(GOOD)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
    try:
        assert len(read_keys(file)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
