"""The exporter with a web configuration, read by a client and scraped by Prometheus."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import bcrypt
import pytest
from click.testing import CliRunner

from exporters import Start
from fronts import HASH, Authority, user
from prometheus_server import BINARIES, Prometheus
from sidestep.app.cli import cli


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return an authority beside a web configuration with TLS, a user and optional client certificates."""
    made = Authority(tmp_path)
    (tmp_path / "web.yml").write_text(
        f"tls_server_config:\n  {made.server()}  client_ca_file: ca.pem\n"
        f"  client_auth_type: VerifyClientCertIfGiven\nbasic_auth_users: {{alice: {HASH}}}\n"
    )
    return made


async def test_every_page_needs_tls_and_password(start: Start, authority: Authority) -> None:
    """A request without the password gets 401 and is counted."""
    paths = (
        *("/metrics", "/", "/-/healthy", "/-/ready", "/-/engines"),
        *("/api/v1/metrics", "/api/v1/live", "/api/v1/live/history"),
    )
    async with start(web_config_file=str(authority.directory / "web.yml")) as exporter:
        assert exporter.url.startswith("https://")
        base = exporter.url.removesuffix("/metrics")
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=authority.client())
        ) as session:
            for path in paths:
                for headers, status in ((user("alice", "sesame"), 200), ({}, 401)):
                    async with session.get(base + path, headers=headers) as answer:
                        assert answer.status == status, path
        assert exporter.metrics.value("sidestep_auth_denied_total", "no_password") == len(paths)


def test_hash_password() -> None:
    """The command asks twice and prints a valid hash; nothing else is on standard output."""
    done = CliRunner().invoke(cli, ["hash-password"], input="geheim\ngeheim\n")

    assert bcrypt.checkpw(b"geheim", done.stdout.strip().encode())
    assert len(done.stdout.strip()) == 60
    assert "geheim" not in done.output
    long = CliRunner().invoke(cli, ["hash-password"], input=f"{'x' * 73}\n{'x' * 73}\n")
    assert "at most 72 bytes" in str(long.exception)


@pytest.mark.skipif(BINARIES["2"] is None, reason="prometheus is not installed (apt: prometheus)")
async def test_prometheus_scrapes_by_tls_and_password(start: Start, authority: Authority) -> None:
    """Prometheus scrapes with TLS, password and certificate, and not without the password."""
    directory = authority.directory
    issued = authority.ca.issue_cert("prometheus")
    issued.cert_chain_pems[0].write_to_path(directory / "client.pem")
    issued.private_key_pem.write_to_path(directory / "client-key.pem")
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
        server = Prometheus(
            str(BINARIES["2"]),
            directory / "prometheus.yml",
            f"--storage.tsdb.path={directory}/data",
        )
        health = await asyncio.to_thread(health_of_jobs, server)

    assert health["known"] == ("up", "")
    assert health["stranger"] == ("down", "server returned HTTP status 401 Unauthorized")


def health_of_jobs(server: Prometheus) -> dict[str, tuple[str, str]]:
    """Return health and last error of both jobs, once they have been scraped."""
    try:
        server.start()
        server.until("count(up)", lambda jobs: jobs == {"": 2})
        targets = server.get("targets")["activeTargets"]
    finally:
        server.stop()
    return {one["labels"]["job"]: (one["health"], one["lastError"]) for one in targets}
