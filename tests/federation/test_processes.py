"""Exporters that forward over real sockets, and as real processes."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest
import zmq
import zmq.asyncio

from command_line import one_line, serving, sidestep
from exporters import Start, until
from key_ring import Ring
from pages import get
from peers import count, generated, publisher
from sidestep.app import Exporter
from sidestep.config.settings import read
from sidestep.errors import ConfigError
from sidestep.federation import sender, store
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import Nack, encode
from sidestep.telemetry import peer_log

PATH = "ipc:///x/y"
TOKENS = "vllm:generation_tokens_total"


@pytest.fixture
def upstream_path(tmp_path: Path) -> str:
    """Return the ingest endpoint of the upstream exporter."""
    return f"ipc://{tmp_path}/upstream/i.ipc"


def tokens(exporter: Exporter) -> int:
    """Return the generated tokens of all engines."""
    registry: Registry = exporter.registry
    return sum(generated(exporter, engine) for engine in registry.engines)


async def test_exporter_without_pages_is_exposed_two_exporters_upstream(
    start: Start, upstream_path: str
) -> None:
    """Its engines have the labels that the exporters in between add."""
    downstream = {
        "web_listen_address": ("",),
        "forward": upstream_path + "2",
        "forward_interval": "0.05",
    }
    between = {
        "ingest_endpoint": (upstream_path + "2",),
        "forward": upstream_path,
        "forward_interval": "0.05",
        "forward_label": ("rack=r1",),
    }
    async with (
        start(ingest_endpoint=(upstream_path,)) as upstream,
        start(**between) as middle,
        start(**downstream) as last,
    ):
        with closing(publisher(last.endpoints[0])) as engine:
            engine.push(count(5))
            await until(lambda: tokens(upstream) == 5)
            engine.push(count(2))
            await until(lambda: tokens(upstream) == 7)
        (shown,) = upstream.registry.engines.values()

        assert (last.addresses, last.url) == ([], "no page")
        assert shown.labels == {"engine": "0", "model_name": "m", "rack": "r1"}
        assert "rack" not in next(iter(middle.registry.engines.values())).labels
        assert upstream.metrics.value("sidestep_forward_records_total") == 0
        assert last.metrics.value("sidestep_forward_records_total") >= 2
        async with aiohttp.ClientSession() as session, session.get(upstream.url) as answer:
            page = await answer.text()
        assert 'sidestep_engine_up{engine="0",model_name="m",origin=""} 1.0' in page
        assert "sidestep_forward_sources 1.0" in page


async def test_restarted_upstream_exporter_gets_all_records_at_once(
    start: Start, upstream_path: str
) -> None:
    """Idle engines are sent again, too."""
    flags = {"forward": upstream_path, "forward_interval": "0.05", "web_listen_address": ("",)}
    async with start(**flags) as downstream:
        with closing(publisher(downstream.endpoints[0])) as engine:
            async with start(ingest_endpoint=(upstream_path,)) as upstream:
                engine.push(count(5))
                await until(lambda: tokens(upstream) == 5)
            engine.push(count(2))
            async with start(ingest_endpoint=(upstream_path,)) as upstream:
                await until(lambda: tokens(upstream) == 7)
            async with start(ingest_endpoint=(upstream_path,)) as upstream:
                # Long before unchanged records are sent again.
                await until(lambda: tokens(upstream) == 7, timeout=5.0)


async def test_stopping_exporter_forwards_everything_it_applied(
    start: Start, upstream_path: str, tmp_path: Path
) -> None:
    """This holds with and without a state directory."""
    for state in ("", str(tmp_path / "state")):
        flags = {"forward": upstream_path, "forward_interval": "10", "state_dir": state}
        async with start(ingest_endpoint=(upstream_path,)) as upstream:
            async with start(**flags, web_listen_address=("",)) as downstream:
                with closing(publisher(downstream.endpoints[0])) as engine:
                    engine.push(count(5))
                    await until(lambda: engine.drained and tokens(downstream) == 5)
            await until(lambda: tokens(upstream) == 5)


async def test_key_limits_the_engines_that_may_be_forwarded(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other engines are rejected, and the sender logs it."""
    ring = Ring(tmp_path)
    ring.environ(monkeypatch, ring.engine("downstream", "e*"))
    caplog.set_level(logging.WARNING)
    async with start(**ring.flags) as upstream:
        port = next(e for e in upstream.endpoints if e.startswith("tcp://"))
        path = f"ipc://{ring.directory}/downstream/i.ipc"
        flags = {"forward": port, "forward_interval": "0.05", "web_listen_address": ("",)}
        async with start(**flags, ingest_endpoint=(path,)) as downstream:
            with (
                closing(publisher(path, "s", "e1")) as one,
                closing(publisher(path, "t", "f1")) as other,
            ):
                one.push(count(5))
                other.push(count(7))
                await until(lambda: tokens(downstream) == 12 and tokens(upstream) == 5)
                name = "sidestep_forward_errors_total"
                await until(lambda: downstream.metrics.value(name, "unauthorised") > 0)
        assert tokens(upstream) == 5
    assert "rejects forwarded records: unauthorised: this key may not forward engine f1" in (
        caplog.text
    )


async def test_rejections_are_counted_and_logged_downstream(
    start: Start,
    upstream_path: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both exporters count them by reason."""
    monkeypatch.setattr(store, "MAX_BYTES", 10)
    caplog.set_level(logging.WARNING)
    flags = {"forward": upstream_path, "forward_interval": "0.05", "web_listen_address": ("",)}
    async with start(ingest_endpoint=(upstream_path,)) as upstream, start(**flags) as downstream:
        with closing(publisher(downstream.endpoints[0])) as engine:
            engine.push(count(5))
            name = "sidestep_forward_errors_total"
            await until(lambda: downstream.metrics.value(name, "over_limit") > 0)
        assert upstream.metrics.value("sidestep_rejected_total", "over_limit") > 0
    assert "rejects forwarded records: over_limit: records of other exporters exceed" in caplog.text


async def test_unknown_codes_of_rejections_share_a_series(start: Start, tmp_path: Path) -> None:
    """A hostile upstream exporter does not choose the values of a label."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as hostile:
        hostile.bind(f"ipc://{tmp_path}/hostile")
        flags = {"forward": f"ipc://{tmp_path}/hostile", "forward_interval": "0.05"}
        async with start(**flags) as exporter:
            with closing(publisher(exporter.endpoints[0])) as engine:
                engine.push(count(5))
                peer, *_ = await hostile.recv_multipart()
            for number in range(20):
                await hostile.send_multipart([peer, encode(Nack(1, 0, f"code{number}"))])
            name = "sidestep_forward_errors_total"
            await until(lambda: exporter.metrics.value(name, "other") == 20)
            assert "code1" not in await get(exporter.url)


async def test_two_processes_forward(tmp_path: Path) -> None:
    """They are started like an operator starts them."""
    paths = [f"ipc://{tmp_path}/{name}/i.ipc" for name in ("upstream", "downstream")]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    upper = ("--ingest.endpoint", paths[0], "--web.listen-address", f"127.0.0.1:{port}")
    lower = ("--ingest.endpoint", paths[1], "--web.listen-address=", "--forward", paths[0])
    async with (
        serving("serve", *upper),
        serving("serve", *lower, "--forward.interval", "0.1") as (_, line),
    ):
        assert "metrics on no page" in line
        with closing(publisher(paths[1])) as engine:
            engine.push(count(5))
            async with aiohttp.ClientSession() as session, asyncio.timeout(20):
                page = ""
                while f'{TOKENS}{{engine="0",model_name="m"}} 5' not in page:
                    async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                        page = await answer.text()


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"web_listen_address": ("",)}, "set --web.listen-address, --forward or --otlp.endpoint"),
        ({"forward": "http://x"}, "'http://x': must begin with ipc:// or tcp://"),
        ({"forward_label": ("a=b",)}, "requires --forward"),
        ({"forward_label": ("a",)}, "must be NAME=VALUE"),
        ({"forward_label": ("__a=b",)}, "must be NAME=VALUE"),
        ({"forward_label": ("a=\n",)}, "must have a printable value"),
        ({"forward_source": "x" * 129}, "must be printable, 128 characters at most"),
        ({"forward": PATH, "forward_label": ("engine=b",)}, "label of that name"),
        ({"forward": PATH, "forward_label": ("le=b",)}, "label of that name"),
        ({"forward": PATH, "forward_label": ("lora=b",)}, ""),
        ({"forward": PATH, "forward_label": ("a=b", "a=c")}, "give each label once"),
        ({"forward": PATH, "ingest_endpoint": (PATH,)}, "own ingest endpoint"),
        ({"forward": f"{PATH}/../y", "ingest_endpoint": (PATH,)}, "own ingest endpoint"),
        *(
            ({"forward": forward, "ingest_endpoint": (PATH, ingest)}, error)
            for forward, ingest, error in (
                ("tcp://127.0.0.1:9858", "tcp://0.0.0.0:9858", "own ingest endpoint"),
                ("tcp://127.0.0.1:9858", "tcp://*:9858", "own ingest endpoint"),
                ("tcp://localhost:9858", "tcp://*:9858", "own ingest endpoint"),
                ("tcp://localhost:9858", "tcp://127.0.0.1:9858", "own ingest endpoint"),
                ("tcp://0.0.0.0:9858", "tcp://127.0.0.1:9858", "own ingest endpoint"),
                ("tcp://[::1]:9858", "tcp://[::]:9858", "own ingest endpoint"),
                (f"tcp://{socket.gethostname()}:9858", "tcp://*:9858", "own ingest endpoint"),
                ("tcp://127.0.0.1:9859", "tcp://*:9858", ""),
                ("tcp://192.0.2.1:9858", "tcp://*:9858", ""),
                ("tcp://127.0.0.1:9858", "tcp://127.0.0.2:9858", ""),
                ("tcp://name.invalid:9858", "tcp://*:9858", ""),
                ("tcp://127.0.0.1:9858", "tcp://*:0", ""),
            )
        ),
        ({"forward": PATH, "forward_interval": "0"}, "above 0"),
        ({"forward": PATH, "forward_interval": "60"}, "10 seconds at most"),
    ],
)
def test_invalid_settings_are_rejected(flags: dict[str, object], error: str) -> None:
    """The error says what to change."""
    if not error:
        Exporter(read(flags, {}))
        return
    with pytest.raises(ConfigError) as raised:
        Exporter(read(flags, {}))

    assert error in str(raised.value)


def test_invalid_endpoint_is_a_one_line_error() -> None:
    """The command exits with code 2."""
    one_line(sidestep("serve", "--forward", "tcp://nowhere"), 2, "--forward tcp://nowhere")


def test_removed_flag_names_its_replacement(tmp_path: Path) -> None:
    """This holds for the flag, the variable and the file."""
    gone = (
        "forward.merge was removed: engines of different exporters are separate; sum them in PromQL"
    )
    one_line(sidestep("serve", "--forward.merge"), 2, f"--{gone}")
    file = tmp_path / "sidestep.toml"
    file.write_text("[forward]\nmerge = true\n")
    for flags, environ in (
        ({}, {"SIDESTEP_FORWARD_MERGE": "true"}),
        ({"config_file": str(file)}, {}),
    ):
        with pytest.raises(
            ConfigError, match="was removed: engines of different exporters are separate"
        ):
            read(flags, environ)


@pytest.mark.parametrize("name", ["localhost", "localhost.localdomain"])
def test_host_without_unique_name_needs_a_source_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of two such hosts would be taken for those of one."""
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    with pytest.raises(ConfigError, match=r"--forward\.source"):
        Exporter(read({"forward": PATH}, {}))


async def test_unreachable_upstream_exporter_is_logged(
    start: Start,
    upstream_path: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A downstream exporter may have no page that would show it."""
    monkeypatch.setattr(peer_log, "PATIENCE", 0.1)
    caplog.set_level(logging.INFO, sender.log.name)
    absent = f"--forward: no connection to the exporter at {upstream_path} for 0 s: No such file"
    async with start(forward=upstream_path, forward_interval="0.05"):
        await until(lambda: absent in caplog.text)
        async with start(ingest_endpoint=(upstream_path,)):
            await until(lambda: f"connected to the exporter at {upstream_path}" in caplog.text)
