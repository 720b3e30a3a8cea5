"""TLS with real handshakes and real certificates."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest

from exporters import until
from fronts import Authority, Site, front, only

TLS12, TLS13 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return an authority that has issued the server's certificate."""
    made = Authority(tmp_path)
    made.server()
    return made


def config(*more: str) -> str:
    """Return a web configuration with these lines in ``tls_server_config``."""
    lines = ("cert_file: server.pem", "key_file: server-key.pem", *more)
    return "tls_server_config:\n" + "".join(f"  {line}\n" for line in lines)


def mutual(*more: str, kind: str = "RequireAndVerifyClientCert") -> str:
    """Return a web configuration with client certificates."""
    return config(f"client_auth_type: {kind}", "client_ca_file: ca.pem", *more)


async def ending(reader: asyncio.StreamReader) -> bytes:
    """Read until the server closes or resets the connection."""
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


async def test_only_https_is_served(authority: Authority) -> None:
    """A client with plain HTTP or another authority gets no response."""
    async with front(authority.directory, config()) as site:
        assert (await site.get(tls=authority.client())).body == b"short\n"
        assert await site.status() == 0
        assert await site.status(tls=Authority(authority.directory, "b").client()) == 0
        assert site.refused("handshake") >= 1
        assert site.front.scheme == "https"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (config(), [200, 200, 200]),
        (config("client_auth_type: NoClientCert"), [200, 200, 200]),
        (mutual(kind="VerifyClientCertIfGiven"), [200, 200, 0]),
        (mutual(), [200, 0, 0]),
    ],
    ids=["nothing", "NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"],
)
@pytest.mark.parametrize("version", [TLS12, TLS13], ids=["TLS12", "TLS13"])
async def test_client_certificates(
    authority: Authority, text: str, expected: list[int], version: ssl.TLSVersion
) -> None:
    """Each type admits clients with a certificate, without one, or with another authority's.

    Rejected clients are counted.
    """
    stranger = Authority(authority.directory, "stranger").ca.issue_cert("prometheus")
    anothers = only(authority.client(), version)
    stranger.configure_cert(anothers)
    async with front(authority.directory, text) as site:
        found = [
            await site.status(tls=only(authority.client("prometheus"), version)),
            await site.status(tls=only(authority.client(), version)),
            await site.status(tls=anothers),
        ]

        assert found == expected
        # aiohttp's client tries again if it is rejected after its side of the handshake.
        await until(lambda: site.denied("client_cert") >= expected.count(0))


SANS = "client_allowed_sans: [a.example, 10.0.0.1, '2001:db8::1', a@b.example, spiffe://td/prom]"


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (["a.example"], 200),
        (["other.example", "a.example"], 200),
        (["10.0.0.1"], 200),
        (["2001:0DB8:0::1"], 200),
        (["a@b.example"], 200),
        (["b.example"], 0),
        (["sub.a.example"], 0),
        (["*.example"], 0),
        (["10.0.0.2"], 0),
        (["c@b.example"], 0),
    ],
)
async def test_names_of_client_certificates(
    authority: Authority, names: list[str], status: int
) -> None:
    """With a list of names, a certificate of the authority is not enough."""
    async with front(authority.directory, mutual(SANS)) as site:
        assert await site.status(tls=authority.client(*names)) == status
        assert (site.denied("client_cert") > 0) == (status == 0)


@pytest.mark.parametrize(
    ("lines", "taken"),
    [
        ([], "TLS12 TLS13"),
        (["min_version: TLS13"], "TLS13"),
        (["max_version: TLS12"], "TLS12"),
        (["cipher_suites: [TLS_AES_128_GCM_SHA256]"], "TLS13"),
        (["cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256]"], "TLS12 TLS13"),
        (["cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]"], "TLS13"),
    ],
)
async def test_versions(authority: Authority, lines: list[str], taken: str) -> None:
    """Versions within the limits work, others fail; suites do not affect TLS 1.3."""
    versions = {"TLS10": ssl.TLSVersion.TLSv1, "TLS11": ssl.TLSVersion.TLSv1_1}
    versions |= {"TLS12": TLS12, "TLS13": TLS13}
    async with front(authority.directory, config(*lines)) as site:
        found = [
            name
            for name, version in versions.items()
            if await site.status(tls=only(authority.client(), version))
        ]

    assert " ".join(found) == taken


async def test_ciphers_and_curve(authority: Authority) -> None:
    """The configured cipher and curve are negotiated; a client without them fails."""
    suite = "cipher_suites: [TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256]"
    async with front(authority.directory, config(suite, "curve_preferences: [CurveP384]")) as site:
        client = only(authority.client(), TLS12)
        _, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=client)
        spoken = writer.get_extra_info("cipher")
        writer.close()
        await writer.wait_closed()
        client.set_ciphers("ECDHE-ECDSA-AES256-GCM-SHA384")
        other = authority.client()
        other.set_ecdh_curve("prime256v1")

        assert spoken[0] == "ECDHE-ECDSA-CHACHA20-POLY1305"
        assert await site.status(tls=client) == 0
        assert await site.status(tls=other) == 0
        assert await site.status(tls=authority.client()) == 200


async def test_a_renewed_certificate_applies_to_the_next_handshake(authority: Authority) -> None:
    """The next handshake gets the new certificate; an open connection continues."""
    async with front(authority.directory, config()) as site:
        former = await served(site, authority)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", site.port, ssl=authority.client()
        )
        authority.server()
        async with asyncio.timeout(10):
            while await served(site, authority) == former:
                await asyncio.sleep(0.05)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        answer = await reader.read()
        writer.close()

    assert answer.endswith(b"short\n")


async def served(site: Site, authority: Authority) -> bytes | None:
    """Return the server's certificate."""
    _, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=authority.client())
    found: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return found


async def test_a_changed_authority_closes_connections(authority: Authority) -> None:
    """Connections that a former authority admitted end when the authority changes."""
    authority.server()
    async with front(authority.directory, mutual()) as site:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", site.port, ssl=authority.client("prometheus")
        )
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"short" in await reader.readuntil(b"short\n")
        other = Authority(authority.directory, "other")
        site.file.write_text(mutual().replace("ca.pem", "other.pem"))
        async with asyncio.timeout(10):
            assert await ending(reader) == b""
        writer.close()
        client = authority.client()
        other.ca.issue_cert("prometheus").configure_cert(client)

        assert await site.status(tls=client) == 200
        assert await site.status(tls=authority.client("prometheus")) == 0
