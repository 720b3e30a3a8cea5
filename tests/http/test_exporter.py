"""The exporter with a web configuration: as a command, and scraped by Prometheus."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import bcrypt
import pytest
from click.testing import CliRunner

from exporters import Start
from fronts import HASH, Authority, user
from sidestep.cli import cli
from sidestep.config.settings import read

ENVIRON = {key: value for key, value in os.environ.items() if not key.startswith("SIDESTEP_")}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """With a web configuration: TLS, a user, and client certificates if there are any."""
    made = Authority(tmp_path)
    (tmp_path / "web.yml").write_text(
        f"tls_server_config:\n  {made.server()}  client_ca_file: ca.pem\n"
        f"  client_auth_type: VerifyClientCertIfGiven\nbasic_auth_users: {{alice: {HASH}}}\n"
    )
    return made


@pytest.mark.parametrize("path", ["/metrics", "/", "/-/healthy", "/-/ready", "/api/v1/metrics"])
async def test_every_page_asks(start: Start, authority: Authority, path: str) -> None:
    """Every page requires TLS and the password."""
    async with start(web_config_file=str(authority.directory / "web.yml")) as exporter:
        assert exporter.url.startswith("https://")
        url = exporter.url.removesuffix("/metrics") + path
        async with aiohttp.ClientSession() as session:
            for headers, status in ((user("alice", "sesame"), 200), ({}, 401)):
                async with session.get(url, headers=headers, ssl=authority.client()) as answer:
                    assert answer.status == status
        assert exporter.metrics.value("sidestep_auth_denied_total", "no_password") == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot read"),
        ("tls_config: {}", "web.yml: the file: Object contains unknown field `tls_config`"),
        ("basic_auth_users: {a: b}", "is not a bcrypt hash; make one with sidestep hash-password"),
        ("tls_server_config: {cert_file: x, key_file: y}", "No such file or directory"),
        ("[" * 100_000, "is not YAML"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, text: str | None, why: str) -> None:
    """The command exits with code 2 before it listens."""
    file = tmp_path / "web.yml"
    if text is not None:
        file.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "sidestep", "serve", "--web.config.file", file,
         "--web.listen-address", "127.0.0.1:0", "--ingest.endpoint", f"ipc://{tmp_path}/i"],
        capture_output=True, text=True, timeout=60, check=False, env=ENVIRON,
    )  # fmt: skip

    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("sidestep: ")
    assert why in line


def test_the_setting_in_the_file(tmp_path: Path) -> None:
    """Below its table, dotted or as a table of its own."""
    file = tmp_path / "sidestep.toml"
    for text in ('[web]\nconfig.file = "x.yml"\n', '[web.config]\nfile = "x.yml"\n'):
        file.write_text(text)
        assert read({"config_file": str(file)}, {}).web_config_file == "x.yml"
    assert read({}, {"SIDESTEP_WEB_CONFIG_FILE": "y.yml"}).web_config_file == "y.yml"


def test_hash_password() -> None:
    """The command asks twice and prints a valid hash; nothing else is on standard output."""
    done = CliRunner().invoke(cli, ["hash-password"], input="geheim\ngeheim\n")

    assert bcrypt.checkpw(b"geheim", done.stdout.strip().encode())
    assert len(done.stdout.strip()) == 60
    assert "geheim" not in done.output
    long = CliRunner().invoke(cli, ["hash-password"], input=f"{'x' * 73}\n{'x' * 73}\n")
    assert "at most 72 bytes" in str(long.exception)


PROMETHEUS = shutil.which("prometheus")


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (apt: prometheus)")
async def test_prometheus_scrapes_by_tls_and_password(start: Start, authority: Authority) -> None:
    """Prometheus scrapes with TLS, password and certificate, and not without the password."""
    directory = authority.directory
    issued = authority.ca.issue_cert("prometheus")
    issued.cert_chain_pems[0].write_to_path(directory / "client.pem")
    issued.private_key_pem.write_to_path(directory / "client-key.pem")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    async with start(web_config_file=str(directory / "web.yml")) as exporter:
        host, own = exporter.addresses[0]
        job = {
            "job_name": "known",
            "scheme": "https",
            "tls_config": {
                "ca_file": "ca.pem", "cert_file": "client.pem", "key_file": "client-key.pem",
            },
            "basic_auth": {"username": "alice", "password": "sesame"},
            "static_configs": [{"targets": [f"{host}:{own}"]}],
        }  # fmt: skip
        stranger = {**job, "job_name": "stranger", "basic_auth": {"username": "eve"}}
        config = {"global": {"scrape_interval": "500ms"}, "scrape_configs": [job, stranger]}
        (directory / "prometheus.yml").write_text(json.dumps(config))
        prometheus = await asyncio.create_subprocess_exec(
            str(PROMETHEUS), f"--config.file={directory}/prometheus.yml",
            f"--storage.tsdb.path={directory}/data", f"--web.listen-address=127.0.0.1:{port}",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(60):
                health = await scraped(f"http://127.0.0.1:{port}/api/v1/targets")
        finally:
            prometheus.terminate()
            await prometheus.wait()

    assert health["known"] == ("up", "")
    assert health["stranger"] == ("down", "server returned HTTP status 401 Unauthorized")


async def scraped(api: str) -> dict[str, tuple[str, str]]:
    """Health and last error of each job, once both have been scraped."""
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(api) as answer:
                    targets = (await answer.json())["data"]["activeTargets"]
            except aiohttp.ClientError:
                targets = []
            found = {t["labels"]["job"]: (t["health"], t["lastError"]) for t in targets}
            if len(found) == 2 and not any(health == "unknown" for health, _ in found.values()):
                return found
            await asyncio.sleep(0.1)
