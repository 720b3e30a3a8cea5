"""Exporters that forward to each other over real sockets, and as real processes."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from command_line import one_line, serving, sidestep
from exporters import Start, until
from key_ring import Ring
from peers import count, generated, publisher
from sidestep.app import Exporter
from sidestep.config.settings import read
from sidestep.errors import ConfigError
from sidestep.metrics.registry import Registry

PATH = "ipc:///x/y"
TOKENS = "vllm:generation_tokens_total"


@pytest.fixture
def root_path(tmp_path: Path) -> str:
    """Where the root takes what is forwarded."""
    return f"ipc://{tmp_path}/root/i.ipc"


def tokens(exporter: Exporter) -> int:
    """On the page, of all engines."""
    registry: Registry = exporter.registry
    return sum(generated(exporter, engine) for engine in registry.engines)


async def test_a_leaf_without_pages_is_seen_at_the_root(start: Start, root_path: str) -> None:
    """What it counts, two exporters away, with the labels that those on the way add."""
    leaf = {"web_listen_address": ("",), "forward": root_path + "2", "forward_interval": "0.05"}
    between = {
        "ingest_endpoint": (root_path + "2",),
        "forward": root_path,
        "forward_interval": "0.05",
        "forward_label": ("rack=r1",),
    }
    async with (
        start(ingest_endpoint=(root_path,)) as root,
        start(**between) as middle,
        start(**leaf) as last,
    ):
        with closing(publisher(last.endpoints[0])) as engine:
            engine.push(count(5))
            await until(lambda: tokens(root) == 5)
            engine.push(count(2))
            await until(lambda: tokens(root) == 7)
        (shown,) = root.registry.engines.values()

        assert (last.addresses, last.url) == ([], "no page")
        assert shown.labels == {"engine": "0", "model_name": "m", "rack": "r1"}
        assert "rack" not in next(iter(middle.registry.engines.values())).labels
        assert root.metrics.value("sidestep_forward_records_total") == 0
        assert last.metrics.value("sidestep_forward_records_total") >= 2
        async with aiohttp.ClientSession() as session, session.get(root.url) as answer:
            page = await answer.text()
        assert 'sidestep_engine_up{engine="0",model_name="m",origin=""} 1.0' in page
        assert "sidestep_forward_sources 1.0" in page


async def test_a_root_that_comes_back_is_told_all_at_once(start: Start, root_path: str) -> None:
    """Of engines that say nothing new, too; what is counted meanwhile is there as well."""
    flags = {"forward": root_path, "forward_interval": "0.05", "web_listen_address": ("",)}
    async with start(**flags) as leaf:
        with closing(publisher(leaf.endpoints[0])) as engine:
            async with start(ingest_endpoint=(root_path,)) as root:
                engine.push(count(5))
                await until(lambda: tokens(root) == 5)
            engine.push(count(2))
            async with start(ingest_endpoint=(root_path,)) as root:
                await until(lambda: tokens(root) == 7)
            async with start(ingest_endpoint=(root_path,)) as root:
                # Long before all is said again anyway.
                await until(lambda: tokens(root) == 7, timeout=5.0)


async def test_the_last_word_is_said_at_the_end(
    start: Start, root_path: str, tmp_path: Path
) -> None:
    """An exporter that is stopped has told all that it has applied."""
    for state in ("", str(tmp_path / "state")):
        flags = {"forward": root_path, "forward_interval": "10", "state_dir": state}
        async with start(ingest_endpoint=(root_path,)) as root:
            async with start(**flags, web_listen_address=("",)) as leaf:
                with closing(publisher(leaf.endpoints[0])) as engine:
                    engine.push(count(5))
                    await until(lambda: engine.drained and tokens(leaf) == 5)
            await until(lambda: tokens(root) == 5)


async def test_keys_say_who_may_tell_of_what(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A leaf uses its keys as an engine does; what is another key's it may not tell."""
    ring = Ring(tmp_path)
    ring.environ(monkeypatch, ring.engine("leaf", "e*"))
    caplog.set_level(logging.WARNING)
    async with start(**ring.flags) as root:
        port = next(e for e in root.endpoints if e.startswith("tcp://"))
        path = f"ipc://{ring.directory}/leaf/i.ipc"
        flags = {"forward": port, "forward_interval": "0.05", "web_listen_address": ("",)}
        async with start(**flags, ingest_endpoint=(path,)) as leaf:
            with (
                closing(publisher(path, "s", "e1")) as one,
                closing(publisher(path, "t", "f1")) as other,
            ):
                one.push(count(5))
                other.push(count(7))
                await until(lambda: tokens(leaf) == 12 and tokens(root) == 5)
                name = "sidestep_forward_errors_total"
                await until(lambda: leaf.metrics.value(name, "unauthorised") > 0)
        assert tokens(root) == 5
    assert "rejects forwarded records: unauthorised: this key may not forward engine f1" in (
        caplog.text
    )


async def test_what_the_root_refuses_is_said_at_the_leaf(
    start: Start,
    root_path: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where somebody looks for what is missing, by its reason."""
    monkeypatch.setattr("sidestep.federation.store.MAX_BYTES", 10)
    caplog.set_level(logging.WARNING)
    flags = {"forward": root_path, "forward_interval": "0.05", "web_listen_address": ("",)}
    async with start(ingest_endpoint=(root_path,)) as root, start(**flags) as leaf:
        with closing(publisher(leaf.endpoints[0])) as engine:
            engine.push(count(5))
            name = "sidestep_forward_errors_total"
            await until(lambda: leaf.metrics.value(name, "over_limit") > 0)
        assert root.metrics.value("sidestep_rejected_total", "over_limit") > 0
    assert "rejects forwarded records: over_limit: records of other exporters exceed" in caplog.text


async def test_processes_forward_to_each_other(tmp_path: Path) -> None:
    """As an operator starts them."""
    paths = [f"ipc://{tmp_path}/{name}/i.ipc" for name in ("root", "leaf")]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    upper = ("--ingest.endpoint", paths[0], "--web.listen-address", f"127.0.0.1:{port}")
    lower = ("--ingest.endpoint", paths[1], "--web.listen-address=", "--forward", paths[0])
    async with (
        serving("serve", *upper),
        serving("serve", *lower, "--forward.interval", "0.1") as (_, said),
    ):
        assert "metrics on no page" in said
        with closing(publisher(paths[1])) as engine:
            engine.push(count(5))
            async with aiohttp.ClientSession() as session, asyncio.timeout(20):
                page = ""
                while f'{TOKENS}{{engine="0",model_name="m"}} 5' not in page:
                    async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                        page = await answer.text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"web_listen_address": ("",)}, "set --web.listen-address or --forward"),
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
            ({"forward": forward, "ingest_endpoint": (PATH, ingest)}, said)
            for forward, ingest, said in (
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
def test_a_mistake_is_told(flags: dict[str, object], said: str) -> None:
    """In words that say what to do."""
    if not said:
        Exporter(read(flags, {}))
        return
    with pytest.raises(ConfigError) as raised:
        Exporter(read(flags, {}))

    assert said in str(raised.value)


def test_an_endpoint_that_cannot_be_is_one_line() -> None:
    """And ends the command."""
    one_line(sidestep("serve", "--forward", "tcp://nowhere"), 2, "--forward tcp://nowhere")


def test_the_removed_flag_says_what_to_use_instead(tmp_path: Path) -> None:
    """In one line, wherever it is given."""
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
def test_a_host_of_everybodys_name_has_to_give_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of two such hosts would be taken for those of one."""
    monkeypatch.setattr("socket.gethostname", lambda: name)
    exporter = Exporter(read({"forward": PATH}, {}))
    with pytest.raises(ConfigError, match=r"--forward\.source"):
        exporter._forwarder(None)


async def test_an_exporter_that_is_not_there_is_said(
    start: Start, root_path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A leaf has no page that would show it."""
    monkeypatch.setattr("sidestep.federation.sender.ALONE", 0.1)
    async with start(forward=root_path, forward_interval="0.05"):
        await until(lambda: f"no exporter accepts it at {root_path}" in caplog.text)
