"""Hosts of requests: no web site reads an exporter on loopback through a browser."""

from __future__ import annotations

import socket
from pathlib import Path

import aiohttp
import pytest

from exporters import Start
from fronts import HASH, front, user
from pages import get
from sidestep.protocol.limits import escape

USUAL = (
    "127.0.0.1", "127.0.0.1:9857", "localhost", "LocalHost.:9857", "[::1]:9857", "10.1.2.3", "node1:9857",
    "app.localhost:9857", "",
)  # fmt: skip
OTHERS = ("evil.example", "evil.example:9857", "127.0.0.1.evil.example", "localhost.evil.example.")


@pytest.mark.parametrize("host", USUAL)
async def test_addresses_and_names_without_a_dot_are_answered(host: str, tmp_path: Path) -> None:
    """No web site has such a name."""
    async with front(tmp_path) as site:
        assert (await site.get(headers={"Host": host})).status == 200


@pytest.mark.parametrize("path", ["/", "/-/healthy", "/nothing"])
@pytest.mark.parametrize("host", OTHERS)
async def test_other_names_are_refused_over_loopback(
    host: str, path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says what to do, and the log has one."""
    async with front(tmp_path) as site:
        answer = await site.get(path, headers={"Host": host})
        assert (answer.status, site.refused("host")) == (421, 1)

    assert answer.body.count(b"\n") == 1
    assert b"--web.allowed-hosts" in answer.body
    assert repr(host) in caplog.text


async def test_allowed_names_are_answered(start: Start) -> None:
    """They are compared without case and port."""
    async with start(web_allowed_hosts=["Metrics.Example"]) as exporter:
        assert "sidestep_" in await get(exporter.url, Host="metrics.example:80")


async def test_a_password_takes_the_place_of_the_name(tmp_path: Path) -> None:
    """A browser does not send it for another site."""
    async with front(tmp_path, f"basic_auth_users:\n  alice: {HASH}\n") as site:
        given = {"Host": "evil.example", **user("alice", "sesame")}
        assert (await site.get(headers=given)).status == 200


@pytest.mark.parametrize("own", ["127.0.0.1", ""])
async def test_the_address_of_the_connection_decides(own: str, tmp_path: Path) -> None:
    """A listener on all addresses answers any name over a network: Services have names with dots."""
    reached = own or own_address()
    async with front(tmp_path, address="0.0.0.0") as site:
        url = f"http://{reached}:{site.port}/"
        given = {"Host": "sidestep.monitoring.svc:9857"}
        async with aiohttp.ClientSession() as session, session.get(url, headers=given) as answer:
            assert answer.status == (421 if own else 200)


def own_address() -> str:
    """Return an address of this machine's network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        try:
            found.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return str(found.getsockname()[0])


@pytest.mark.parametrize(
    ("config", "status"),
    [("", 403), (f"basic_auth_users: {{alice: {HASH}}}\n", 200)],
    ids=["open", "login"],
)
async def test_the_debug_page_needs_a_login_over_a_network(
    config: str, status: int, start: Start, tmp_path: Path
) -> None:
    """Over loopback it needs none: settings and stacks are no secrets to a process of the pod."""
    file = tmp_path / "\udcff.yml"
    file.write_text(config)
    flags = {"web_listen_address": ["0.0.0.0:0"], "web_config_file": str(file)}
    async with start(**flags) as exporter, aiohttp.ClientSession() as session:
        url = exporter.url.removesuffix("/metrics") + "/-/debug"
        login = user("alice", "sesame")
        answer = await session.get(url, headers=login)
        assert answer.status == 200
        text = await answer.text()
        answer = await session.get(url.replace("127.0.0.1", own_address()), headers=login)
        assert answer.status == status

    for line in (
        "== settings",
        f"web.config.file {escape(str(file))}",
        "MainThread:",
        "Stack for <Task",
    ):
        assert line in text
