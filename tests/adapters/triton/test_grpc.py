"""Triton over gRPC: recorded answers, and a real server that fails in every way."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import msgspec
import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given
from hypothesis import strategies as st

from fronts import Authority
from polled import polled, stall
from sidestep.config.scrape_targets import Header, Target
from sidestep.errors import ConfigError, PollError, WireError
from sidestep_adapters.triton import grpc as triton_grpc
from sidestep_adapters.triton import proto as triton_proto
from sidestep_adapters.triton import statistics as triton_statistics
from sidestep_adapters.triton.fields import EXTENSION
from sidestep_adapters.triton.grpc import MAX_BYTES, GrpcApi, address
from sidestep_adapters.triton.model_config import ModelConfig
from sidestep_adapters.triton.proto import MESSAGES
from sidestep_adapters.triton.statistics import ModelVersion
from sidestep_adapters.triton.wire import ModelStats
from triton_grpc_server import FakeTriton, serving
from tritons import recording

Code = grpc.StatusCode


def over_http(name: str) -> dict[ModelVersion, ModelStats]:
    """Return the statistics of a recorded answer over HTTP."""
    pieces = triton_statistics.split(recording(name).rpartition(b"\r\n")[2])
    return {
        triton_statistics.version_of(piece): triton_statistics.read(piece, has_cache=True)
        for piece in pieces
    }


def over_grpc(answer: bytes) -> dict[ModelVersion, ModelStats]:
    """Return the statistics of an answer over gRPC."""
    pieces = MESSAGES["ModelStatisticsResponse"].FromString(answer).model_stats
    return {
        triton_proto.version_of(piece): triton_proto.read(piece, has_cache=True) for piece in pieces
    }


def message(found: dict[str, Any]) -> bytes:
    """Return the message of a version whose JSON form the real server's client wrote."""
    entries = found.pop("response_stats")
    stats = ParseDict(found, MESSAGES["ModelStatistics"]())
    for key, responses in entries.items():
        value = stats.response_stats.add(key=key).value
        for name in ("compute_infer", "compute_output", "success"):
            ParseDict(responses[name], getattr(value, name))
        for name in ("fail", "empty_response", "cancel"):
            timed = ParseDict(responses[name], MESSAGES["StatisticDuration"]())
            setattr(value, name, timed.SerializeToString())
    whole: bytes = stats.SerializeToString()
    return whole


def test_statistics_are_equal_over_http_and_grpc() -> None:
    """Both answers of a real server have the same numbers for every version."""
    found = over_grpc(recording("grpc_stats_all.pb"))

    assert over_http("stats_all.http") == found
    assert ModelVersion("cached", "3") in found
    assert len(found) == 7


def test_responses_are_equal_over_http_and_grpc() -> None:
    """Most submessages of a decoupled model are empty."""
    recorded = msgspec.json.decode(recording("grpc_stats_respstat.json"))
    answer = MESSAGES["ModelStatisticsResponse"](
        model_stats=[message(found) for found in recorded["model_stats"]]
    )
    found = over_grpc(answer.SerializeToString())
    (stats,) = found.values()

    assert over_http("stats_respstat.json") == found
    assert stats.response_stats is not None
    assert stats.response_stats.empty_response.count


def fields(message: str, before: str = "") -> Iterator[str]:
    """Yield the paths of all plain fields in and below a message."""
    for name, form in triton_proto.TABLE[message].values():
        kind = form.removeprefix("repeated ").replace("bytes", "StatisticDuration")
        path = f"{before}{name}{'[]' if form.startswith('repeated ') else ''}"
        if kind in triton_proto.TABLE:
            yield from fields(kind, f"{path}.")
        else:
            yield path.replace(".value.", ".")


def test_messages_have_every_field_of_the_extension() -> None:
    """Fields that the messages lacked would be missing over gRPC only."""
    assert set(fields("ModelStatistics")) == set(EXTENSION)


@given(st.binary(max_size=300))
def test_any_bytes_are_statistics_or_an_error(piece: bytes) -> None:
    """No other exception is raised."""
    with contextlib.suppress(PollError):
        triton_proto.version_of(piece)
    with contextlib.suppress(WireError):
        triton_proto.read(piece, has_cache=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""},
        {"name": "n" * 257},
        {"name": "a\nb"},
        {"name": "m", "version": "1" * 257},
        {"name": "m", "batch_stats": [{"batch_size": 4}, {"batch_size": 4}]},
        {"name": "m", "batch_stats": [{"batch_size": n} for n in range(4097)]},
        {"name": "m", "memory_usage": [{"type": "CPU"}] * 257},
        {"name": "m", "memory_usage": [{"type": "C" * 257}]},
        {"name": "m", "memory_usage": [{"type": "CPU", "id": -(1 << 63)}]},
        {"name": "m", "response_stats": [{"key": "1", "value": {"fail": b"\xff"}}]},
    ],
)
def test_invalid_statistics_are_rejected(fields: dict[str, Any]) -> None:
    """Over HTTP the field types reject them."""
    piece = MESSAGES["ModelStatistics"](**fields).SerializeToString()

    with pytest.raises(WireError):
        triton_proto.read(piece, has_cache=False)


def test_numbers_have_64_bits() -> None:
    """Nanoseconds of a busy model exceed the exact range of a float."""
    most = 2**64 - 1
    piece = MESSAGES["ModelStatistics"](
        name="m", inference_stats={"success": {"count": most, "ns": most}}
    ).SerializeToString()
    stats = triton_proto.read(piece, has_cache=False)

    assert (most, most) == (stats.inference_stats.success.count, stats.inference_stats.success.ns)


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[GrpcApi]:
    """Return a client of the server at ``url``."""
    server = GrpcApi(Target(url, **{"timeout": 5.0, **options}))
    try:
        yield server
    finally:
        await server.close()


async def outcome(server: GrpcApi) -> str:
    """Return the outcome of a query for statistics."""
    try:
        await server.statistics()
    except PollError as error:
        return error.cause if str(error).isprintable() else "unprintable"
    return "ok"


async def test_all_queries_are_answered() -> None:
    """The requests have the configured headers."""
    triton = FakeTriton()
    triton.answers["ModelStatistics"] = recording("grpc_stats_all.pb")
    triton.answer("ServerMetadata", extensions=["trace", "statistics"])
    states = {"b": "READY", "a": "READY", "c": "UNAVAILABLE"}
    triton.answer("RepositoryIndex", models=[{"name": n, "state": s} for n, s in states.items()])
    triton.answer(
        "ModelConfig",
        config={
            "platform": "",
            "instance_group": [
                {"kind": 1, "count": 2, "gpus": [0, 1]},
                {"kind": 2, "count": 3},
                {"kind": 2, "count": 9, "passive": True},
            ],
            "metric_tags": [{"key": "team", "value": "blue"}],
            "response_cache": {"enable": True},
        },
    )
    header = Header("triton-grpc-protocol-Key", "s3cret")
    async with serving(triton) as host, connected(f"grpc://{host}", headers=(header,)) as server:
        extensions = await server.extensions()
        pieces = await server.statistics("m", "3")
        ready = await server.ready()
        config = await server.config("n")
        triton.answer("ModelConfig", config={"platform": "ensemble"})
        ensemble = await server.config("e")

    assert extensions == ["trace", "statistics"]
    assert len(pieces) == 7
    assert server.stats(pieces[0], True).execution_count == 1
    assert server.version_of(pieces[0]) == ModelVersion("cached", "1")
    assert ready == ["a", "b"]
    assert config == ModelConfig({"_team": "blue"}, 7, has_cache=True, executes=True)
    assert ensemble == ModelConfig(executes=False)
    asked_for = [(method, asked.name) for method, asked, _ in triton.asked if method[0] == "M"]
    assert triton.asked[1][1].version == "3"
    assert asked_for == [
        ("ModelStatistics", "m"),
        ("ModelConfig", "n"),
        ("ModelConfig", "e"),
    ]
    assert {metadata["triton-grpc-protocol-key"] for *_, metadata in triton.asked} == {"s3cret"}


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (
            Code.UNAVAILABLE,
            "This protocol is restricted, expecting header 'triton-grpc-protocol-x'",
            "restricted",
        ),
        (Code.UNAVAILABLE, "the server does not support model statistics", "unsupported"),
        (Code.UNIMPLEMENTED, "", "unsupported"),
        (Code.UNAVAILABLE, "Server not ready", "not_ready"),
        (Code.UNAVAILABLE, "going away", "unreachable"),
        (Code.INVALID_ARGUMENT, "requested model 'x' is not available", "unknown_model"),
        (Code.INTERNAL, "two\nlines", "grpc_internal"),
        (Code.UNAUTHENTICATED, "", "grpc_unauthenticated"),
    ],
)
async def test_each_status_has_a_cause(code: grpc.StatusCode, text: str, expected: str) -> None:
    """The next query succeeds after any of them."""
    triton = FakeTriton()
    triton.answers["ModelStatistics"] = (code, text)
    async with serving(triton) as host, connected(f"grpc://{host}") as server:
        first = await outcome(server)
        triton.answer("ModelStatistics")
        second = await outcome(server)

    assert (expected, "ok") == (first, second)


async def test_slow_is_not_unreachable() -> None:
    """A server does not answer, stops, and answers again."""
    triton = FakeTriton()
    triton.answer("ModelStatistics")
    found = []
    async with serving(triton) as host, connected(f"grpc://{host}", timeout=0.3) as server:
        found.append(await outcome(server))
        triton.stalls = True
        found.append(await outcome(server))
        triton.stalls = False
        found.append(await outcome(server))
    async with connected(f"grpc://{host}", timeout=0.3) as server:
        found.append(await outcome(server))
        async with serving(triton, port=triton.port):
            found.append(await outcome(server))

    assert found == ["ok", "slow", "ok", "unreachable", "ok"]


async def test_concurrent_queries_fail_independently() -> None:
    """A timeout affects neither other queries nor the calling task."""
    triton = FakeTriton()
    triton.stalls = True
    async with serving(triton) as host, connected(f"grpc://{host}", timeout=0.3) as server:
        asked = [asyncio.create_task(outcome(server)) for _ in range(3)]
        async with asyncio.timeout(5):
            while len(triton.asked) < 3:
                await asyncio.sleep(0.01)
        late = asyncio.create_task(outcome(server))
        found = await asyncio.gather(*asked, late)

    assert found == ["slow"] * 4


async def test_a_peer_that_only_listens_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that accepts the connection and does not speak gRPC is unreachable."""
    monkeypatch.setattr(triton_grpc, "CONNECT_SECONDS", 0.3)
    async with (
        polled(stall()) as peer,
        connected(f"grpc://{urlsplit(peer.url).netloc}") as server,
    ):
        assert await outcome(server) == "unreachable"


async def test_an_invalid_answer_is_bad() -> None:
    """An answer that is too large is not received."""
    triton = FakeTriton()
    triton.answers["ModelStatistics"] = b"\xff\xff"
    async with serving(triton) as host, connected(f"grpc://{host}") as server:
        bad = await outcome(server)
        triton.answers["ModelStatistics"] = bytes(MAX_BYTES + 1)
        large = await outcome(server)

    assert (bad, large) == ("bad_answer", "bad_answer")


async def test_tls_both_ways(tmp_path: Path) -> None:
    """The server's certificate is verified, and the client's, if the server requires one."""
    authority = Authority(tmp_path)
    authority.server()
    issued = authority.ca.issue_cert("client.example")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "client.pem")
    other = Authority(tmp_path, "other").file
    pair = (tmp_path / "server-key.pem").read_bytes(), (tmp_path / "server.pem").read_bytes()
    triton = FakeTriton()
    triton.answer("ModelStatistics")
    roots = authority.file.read_bytes()
    mutual = grpc.ssl_server_credentials([pair], roots, require_client_auth=True)
    ca, cert = str(authority.file), str(tmp_path / "client.pem")
    found = []
    for credentials in (grpc.ssl_server_credentials([pair]), mutual):
        async with serving(triton, credentials) as host:
            for scheme, options in (
                ("grpc", {}),
                ("grpcs", {"ca": str(other)}),
                ("grpcs", {"ca": ca}),
                ("grpcs", {"ca": ca, "cert": cert}),
            ):
                async with connected(f"{scheme}://{host}", timeout=3.0, **options) as server:
                    found.append(await outcome(server))

    assert found == [
        *("unreachable", "unreachable", "ok", "ok"),
        *("unreachable", "unreachable", "unreachable", "ok"),
    ]


@pytest.mark.parametrize("option", ["ca", "cert"])
def test_an_invalid_certificate_file_is_an_error(tmp_path: Path, option: str) -> None:
    """An invalid certificate file ends the start with one line."""
    (tmp_path / "x.pem").write_text("nonsense")
    for name in ("x.pem", "absent.pem"):
        options: dict[str, Any] = {option: str(tmp_path / name)}
        with pytest.raises(ConfigError, match=str(tmp_path)):
            GrpcApi(Target("grpcs://h:1", **options)).check()


@pytest.mark.parametrize("name", ["x-bin", "grpc-timeout", "a!b", "a*"])
def test_an_invalid_header_name_is_an_error(name: str) -> None:
    """Metadata keys are more restricted than HTTP headers."""
    with pytest.raises(ConfigError, match="cannot be sent over gRPC"):
        GrpcApi(Target("grpc://h:1", headers=(Header(name, "x"),)))


async def test_a_secret_is_read_for_every_query(tmp_path: Path) -> None:
    """A secret's file may change between queries, or be missing."""
    file = tmp_path / "secret"
    file.write_text("one\n")
    triton = FakeTriton()
    triton.answer("ModelStatistics")
    found = []
    header = Header("Authorization", "Bearer ", str(file))
    async with serving(triton) as host, connected(f"grpc://{host}", headers=(header,)) as server:
        found.append(await outcome(server))
        file.write_text("two\n")
        found.append(await outcome(server))
        file.unlink()
        found.append(await outcome(server))

    assert found == ["ok", "ok", "unreadable"]
    assert [metadata["authorization"] for *_, metadata in triton.asked] == [
        "Bearer one",
        "Bearer two",
    ]


def test_triton_has_its_own_port() -> None:
    """Triton's gRPC port applies to URLs without a port."""
    assert address("grpc://h") == "h:8001"
    assert address("grpcs://[::1]") == "[::1]:8001"
    assert address("grpc://h:7/x") == "h:7"


def test_without_grpc_the_error_names_the_extra() -> None:
    """The extra is not installed by default."""
    code = (
        "import sys; sys.modules['grpc'] = None\n"
        "try: import sidestep_adapters.triton.grpc\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.startswith("ConfigError a URL with grpc://")
    assert "pip install '.[grpc]' in a clone" in done.stdout
    assert done.stdout.count("\n") == 1
