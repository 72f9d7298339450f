"""TLS: real clients over it, renewals while the server runs, and files that cannot be used."""

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from mmrt.actors.gateway.keys import tls
from mmrt.actors.gateway.keys.tls import make_context
from mmrt.cli import endpoint
from mmrt.runtime.config.runtime_config import RuntimeConfig, parse_config
from mmrt.runtime.config.sections import ServerSection
from mmrt.runtime.errors import ConfigError, RunError
from mmrt.runtime.process.run import RunInfo

KINDS = {"ec": ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"], "rsa": ["-newkey", "rsa:2048"]}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Self-signed certificates of this machine, and their keys: ec.pem, ec.key, rsa.pem, rsa.key."""
    path = tmp_path_factory.mktemp("pairs")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    for kind, options in KINDS.items():
        files = ["-keyout", str(path / f"{kind}.key"), "-out", str(path / f"{kind}.pem")]
        subprocess.run(["openssl", "req", "-x509", *options, "-nodes", "-days", "2", *names, *files], check=True, capture_output=True)
    return path


@pytest.fixture
def files(tmp_path: Path, pairs: Path, stage: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setattr(tls, "LOOK_S", 0.01)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    install(pairs, "ec", cert, key)
    stage.configure("server", tls_cert=str(cert), tls_key=str(key))
    return cert, key


def install(pairs: Path, kind: str, *files: Path) -> None:
    """Put a pair in place, a file at a time, as renewals do."""
    for file in files:
        part = file.with_name("part")
        shutil.copy(pairs / f"{kind}.{'pem' if file.name == 'cert.pem' else 'key'}", part)
        part.chmod(0o600)
        os.replace(part, file)


def trust(cert: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=cert)


def served(url: str) -> bytes:
    """The certificate that a new connection gets."""
    host, port = url.removeprefix("https://").rsplit(":", 1)
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port)), timeout=10))


def der(file: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(file.read_text())


def test_clients_speak_https(stage: Any, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cert = files[0]

    async def test(scene: Any) -> None:
        assert scene.url.startswith("https://127.0.0.1:")
        async with openai.AsyncOpenAI(
            base_url=f"{scene.url}/v1", api_key="none", http_client=openai.DefaultAsyncHttpxClient(verify=trust(cert)), max_retries=0
        ) as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True, max_tokens=9
            )
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello, größer 😀 world"
        async with httpx2.AsyncClient(base_url=scene.url, verify=trust(cert)) as http:
            page = await http.get("/")
            assert page.status_code == 200 and "Content-Security-Policy" in page.headers
            assert (await http.get("/page/state", headers={"Origin": scene.url})).status_code == 200
        # `mmrt ask` and `mmrt chat` of this machine trust the run's own certificate.
        port = int(scene.url.rsplit(":", 1)[1])
        info = RunInfo(config=RuntimeConfig(server=ServerSection(port=port, tls_cert=str(cert), tls_key="-")))
        monkeypatch.setattr(endpoint, "running", lambda *_: info)
        own = endpoint.find_endpoint(None, None, None)
        assert (
            await asyncio.to_thread(lambda: "".join(own.stream(scene.chat(stream=True), list[str]().append)))
            == "Hello, größer 😀 world"
        )
        with pytest.raises(RunError, match="certificate verify failed: self.signed certificate"):
            await asyncio.to_thread(endpoint.Endpoint(scene.url, "").first_model)
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        assert await asyncio.to_thread(endpoint.Endpoint(scene.url, "").first_model) == "tiny"

    stage.run(test)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_versions_and_plain_http_are_refused(stage: Any, files: tuple[Path, Path]) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1

    def connect(url: str, context: ssl.SSLContext) -> str | None:
        host, port = url.removeprefix("https://").rsplit(":", 1)
        with socket.create_connection((host, int(port)), 10) as plain, context.wrap_socket(plain, server_hostname=host) as connection:
            return connection.version()

    async def test(scene: Any) -> None:
        assert make_context(*files).minimum_version == ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            await asyncio.to_thread(connect, scene.url, old)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert await asyncio.to_thread(connect, scene.url, old) == "TLSv1.2"
        async with httpx2.AsyncClient() as http:
            with pytest.raises(httpx2.TransportError):
                await http.get(scene.url.replace("https", "http") + "/health")
        assert await asyncio.to_thread(connect, scene.url, trust(files[0])) == "TLSv1.3"

    stage.run(test)


def test_a_renewal_is_followed_and_a_broken_one_is_not(stage: Any, files: tuple[Path, Path], pairs: Path) -> None:
    cert, key = files

    async def test(scene: Any) -> None:
        async with httpx2.AsyncClient(base_url=scene.url, verify=trust(cert)) as kept:
            assert (await kept.get("/health")).status_code == 200
            assert await asyncio.to_thread(served, scene.url) == der(pairs / "ec.pem")
            install(pairs, "rsa", cert)
            await scene.until(lambda: stage.statuses[-1] != "active")
            assert stage.statuses[-1] == (
                f"server.tls_key = '{key}' is not the key of server.tls_cert = '{cert}'; the certificate read before stays in use"
            )
            assert await asyncio.to_thread(served, scene.url) == der(pairs / "ec.pem")
            install(pairs, "rsa", key)
            await scene.until(lambda: stage.statuses[-1] == "active")
            for _ in range(3):
                assert await asyncio.to_thread(served, scene.url) == der(pairs / "rsa.pem")
            assert (await kept.get("/health")).status_code == 200, "open connections go on"

    stage.run(test)


def test_files_that_could_not_be_read_for_a_moment_are_read_again(
    stage: Any, files: tuple[Path, Path], pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Path) -> ssl.SSLContext:
        raise ConfigError("cannot be read: Too many open files")

    async def test(scene: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(tls, "make_context", fail)
            install(pairs, "rsa", *files)
            await scene.until(lambda: stage.statuses[-1].startswith("cannot be read"))
        await scene.until(lambda: stage.statuses[-1] == "active")
        assert await asyncio.to_thread(served, scene.url) == der(pairs / "rsa.pem")

    stage.run(test)


def test_silent_connections_do_not_last(stage: Any, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmrt.actors.gateway.connections.HANDSHAKE_S", 0.1)

    async def test(scene: Any) -> None:
        host, port = scene.url.removeprefix("https://").rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()

    stage.run(test)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("no cert", "server.tls_cert = '{cert}' cannot be read: No such file or directory"),
        ("no key", "server.tls_key = '{key}' cannot be read: No such file or directory"),
        ("cert is text", "server.tls_cert = '{cert}' has no certificate in PEM (-----BEGIN CERTIFICATE-----)"),
        ("key is text", "server.tls_key = '{key}' has no private key in PEM (-----BEGIN PRIVATE KEY-----)"),
        ("cert is cut", "server.tls_cert = '{cert}' is no certificate in PEM: "),
        ("key is cut", "server.tls_cert = '{cert}' and server.tls_key = '{key}' cannot be used: "),
        ("key is encrypted", "server.tls_key = '{key}' is encrypted, and nobody is there to give its password"),
        ("other type", "server.tls_key = '{key}' is not the key of server.tls_cert = '{cert}'"),
        ("other key", "server.tls_key = '{key}' is not the key of server.tls_cert = '{cert}'"),
        ("open key", "server.tls_key = '{key}' has mode 0644, others may use it: expected 0600 (chmod 600)"),
        ("large", "server.tls_cert = '{cert}' is larger than 1048576 bytes"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, pairs: Path, harm: str, message: str) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    install(pairs, "ec", cert, key)
    match harm:
        case "no cert":
            cert.unlink()
        case "no key":
            key.unlink()
        case "cert is text":
            cert.write_text("hello")
        case "key is text":
            key.write_text("hello")
        case "cert is cut":
            cert.write_text(cert.read_text()[:300] + "\n-----END CERTIFICATE-----\n")
        case "key is cut":
            key.write_text(key.read_text()[:90] + "\n-----END PRIVATE KEY-----\n")
        case "key is encrypted":
            command = ["openssl", "pkcs8", "-topk8", "-in", str(pairs / "ec.key"), "-out", str(key), "-passout", "pass:secret"]
            subprocess.run(command, check=True, capture_output=True)
        case "other type":
            install(pairs, "rsa", key)
        case "other key":
            command = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key)]
            subprocess.run(command, check=True, capture_output=True)
        case "open key":
            key.chmod(0o644)
        case "large":
            cert.write_text(cert.read_text() + "x" * (1 << 20))
    with pytest.raises(ConfigError) as caught:
        make_context(cert, key)
    assert str(caught.value).startswith(message.format(cert=cert, key=key))


def test_one_file_needs_the_other() -> None:
    for given, missing in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        with pytest.raises(ConfigError, match=f'server.{given} = "a.pem": needs server.{missing} besides'):
            parse_config(f'[server]\n{given} = "a.pem"\n')
