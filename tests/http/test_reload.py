"""Reload of the web configuration: valid changes apply, invalid ones do not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from exporters import until
from fronts import HASH, Authority, front, user
from sidestep.http.current_config import ActiveConfig, CurrentConfig
from sidestep.telemetry.self_metrics import SelfMetrics

ALICE = f"basic_auth_users:\n  alice: {HASH}\n"
BOTH = f"{ALICE}  bob: {HASH}\n"
HEALTH = "sidestep_web_config_current"


async def refreshed(current: CurrentConfig) -> ActiveConfig:
    """Return the configuration that is active after a check of the files."""
    await current.refresh()
    return current.active


async def test_changes_reach_requests(tmp_path: Path) -> None:
    """Users, headers and rate change; a removed user's cached password is dropped."""
    async with front(tmp_path, BOTH) as site:
        for name in ("alice", "bob"):
            assert await site.status(headers=user(name, "sesame")) == 200
        more = "http_server_config: {headers: {X-Frame-Options: deny}}\n"
        site.file.write_text(ALICE + more)
        await until(lambda: len(site.front.current.active.config.users) == 1)
        assert await site.status(headers=user("bob", "sesame")) == 401
        answer = await site.get(headers=user("alice", "sesame"))
        assert answer.headers["X-Frame-Options"] == "deny"
        site.file.write_text(f"{ALICE}rate_limit: {{interval: 1h, burst: 1}}\n")
        await until(lambda: site.front.current.active.config.rate_limit is not None)
        found = [await site.status(headers=user("alice", "sesame")) for _ in range(2)]

        assert found == [200, 429]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("basic_auth_users: {alice: secret}\n", "is not a bcrypt hash"),
        ("nonsense", "the file: Expected `object`"),
        ("a: [", "is not YAML"),
        ("tls_server_config: {cert_file: gone.pem}", "gone.pem: No such file"),
        ("", "the last of basic_auth_users goes, which takes a restart"),
        ("basic_auth_users:\n", "the last of basic_auth_users goes"),
        (None, "No such file or directory"),
    ],
)
async def test_an_invalid_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None, why: str
) -> None:
    """Admission is unchanged; one log line has the reason and a metric the state."""
    file, metrics = tmp_path / "web.yml", SelfMetrics()
    file.write_text(ALICE)
    current = CurrentConfig(file, metrics)
    good = current.active
    assert metrics.value(HEALTH) == 1
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    for _ in range(5):
        assert await refreshed(current) is good

    (line,) = caplog.records
    assert line.levelno == logging.ERROR
    assert why in line.getMessage()
    assert line.exc_info is None
    assert metrics.value(HEALTH) == 0

    file.write_text(BOTH)
    assert len((await refreshed(current)).config.users) == 2
    assert metrics.value(HEALTH) == 1


async def test_a_reload_removes_no_protection(tmp_path: Path) -> None:
    """A file without its end, still being written, removes no protection; a restart applies it."""
    authority = Authority(tmp_path)
    authority.server()
    base = "tls_server_config:\n  cert_file: server.pem\n  key_file: server-key.pem\n"
    verified = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"
    full = f"{base}{verified}  client_allowed_sans: [a]\n{ALICE}"
    given = verified.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven")
    file = tmp_path / "web.yml"
    file.write_text(full)
    current = CurrentConfig(file, SelfMetrics())
    good = current.active
    for less in ("", base + ALICE, base + verified + ALICE, base + given + ALICE, ALICE):
        file.write_text(less)
        assert await refreshed(current) is good
    for length in range(len(full)):
        file.write_text(full[:length])
        config = (await refreshed(current)).config
        assert config.users
        assert config.tls is not None
        assert config.tls.allowed_sans is not None
        assert config.tls.client_auth == "RequireAndVerifyClientCert"


async def test_a_certificate_applies_once_its_key_is_there(tmp_path: Path) -> None:
    """The new pair applies once both files are there; the old pair serves until then."""
    authority = Authority(tmp_path)
    authority.server()
    file = tmp_path / "web.yml"
    file.write_text("tls_server_config: {cert_file: server.pem, key_file: server-key.pem}")
    current = CurrentConfig(file, SelfMetrics())
    good = current.active
    authority.server("next")
    (tmp_path / "next.pem").rename(tmp_path / "server.pem")
    assert await refreshed(current) is good
    (tmp_path / "next-key.pem").rename(tmp_path / "server-key.pem")

    assert await refreshed(current) is not good


async def test_a_mounted_secret_is_replaced_by_a_symlink(tmp_path: Path) -> None:
    """Kubernetes swaps a directory link; the file's own link never changes."""
    for number, text in enumerate((BOTH, ALICE)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "web.yml").write_text(text)
    (tmp_path / ".data").symlink_to("0")
    (tmp_path / "web.yml").symlink_to(".data/web.yml")
    current = CurrentConfig(tmp_path / "web.yml", SelfMetrics())
    assert len(current.active.config.users) == 2
    (tmp_path / ".next").symlink_to("1")
    (tmp_path / ".next").rename(tmp_path / ".data")

    assert len((await refreshed(current)).config.users) == 1
