"""The load of engines as routers receive it: messages in SGLang's form, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
import zmq

from exporters import Start, recorded_run, until
from ports import free_ports
from recorded import read
from sidestep.config.settings import read as read_config
from sidestep.engines.vllm.wire import SchedulerStats, VllmStep
from sidestep.errors import ConfigError
from sidestep.exposition.text_page import render
from sidestep.protocol.iteration_stats import IterationStats, PromptTokenStats
from sidestep.protocol.messages import EngineInfo
from sidestep.routers.load_message import Load, encode
from sidestep.routers.load_publisher import LoadPublisher
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.recording.replay import Replay

MESSAGES = "sidestep_published_load_messages_total"
CACHE = {"cache_config": {"block_size": "16", "num_gpu_blocks": "100"}}


class Router:
    """A subscriber, as a router has one for each rank.

    Attributes:
        sequences: Sequence numbers received.
        loads: Payloads received.
    """

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"load")
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self.sequences: list[int] = []
        self.loads: list[list[object]] = []

    def receive(self) -> int:
        """Receive what has arrived; return the number of all messages."""
        with contextlib.suppress(zmq.Again):
            while True:
                topic, sequence, payload = self._socket.recv_multipart(zmq.NOBLOCK)
                assert topic == b"load"
                self.sequences.append(int.from_bytes(sequence, "big"))
                self.loads.append(msgspec.msgpack.decode(payload))
        return len(self.loads)

    def close(self) -> None:
        """Close the connection."""
        self._context.destroy(linger=0)


@pytest.fixture
def ports() -> tuple[int, int]:
    """Return two ports in a row that nothing listens on."""
    while True:
        port = free_ports(1)[0]
        with contextlib.suppress(OSError), _listener(port + 1):
            return port, port + 1


@pytest.fixture
def routers(ports: tuple[int, int]) -> Iterator[tuple[Router, Router]]:
    """Return a router of each rank."""
    made = Router(ports[0]), Router(ports[1])
    yield made
    for router in made:
        router.close()


def _listener(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def engine(name: str = "e", rank: str = "0") -> EngineInfo:
    """Return an engine with a cache of 1,600 tokens."""
    return EngineInfo(name, "vllm", {"engine": rank, "model_name": name}, CACHE)


def step(running: int, usage: float = 0.25, computed: int = 10) -> VllmStep:
    """Return a step of a vLLM."""
    stats = SchedulerStats(num_running_reqs=running, num_waiting_reqs=2, kv_cache_usage=usage)
    prompts = PromptTokenStats(computed=computed, total=computed)
    iteration = IterationStats(num_generation_tokens=1, prompt_token_stats=prompts)
    return VllmStep(0, time.monotonic(), time.time(), stats, iteration)


def test_messages_have_the_form_of_recorded_ones() -> None:
    """Byte for byte, those that a real SGLang published."""
    for name in ("sglang_load_stat", "sglang_load_stat_dp2_rank0"):
        for found in read(name):
            load = Load(*found.payload[1:])

            assert encode(load, found.seq) == found.frames


async def test_each_step_is_published(
    start: Start, ports: tuple[int, int], routers: tuple[Router, Router]
) -> None:
    """With the values of the page, consecutive numbers, and nothing at the port of the other rank."""
    router, other = routers
    async with start(publish_load=f"tcp://127.0.0.1:{ports[0]}") as exporter:
        with contextlib.closing(
            Publisher(exporter.endpoints[0], "s", [engine()], flush_interval=0.01)
        ) as sender:
            # A subscription takes effect after a moment; until then, messages are lost.
            await until(lambda: _push(sender, step(1)) and router.receive() > 0)
            for running in range(2, 30):
                sender.push(step(running))
                await until(partial(_has_received, router, running))

    assert router.loads[-1][:6] == ["LoadStat", 29, 2, 400, 1600, 0]
    computed = router.loads[-1][9]
    assert computed == exporter.intake.items * 10
    assert router.sequences == [*range(router.sequences[0], router.sequences[-1] + 1)]
    assert other.receive() == 0


def _has_received(router: Router, running: int) -> bool:
    return router.receive() > 0 and router.loads[-1][1] == running


def _push(sender: Publisher, item: VllmStep) -> bool:
    sender.push(item)
    return True


async def test_an_idle_engine_is_published_again(
    start: Start, ports: tuple[int, int], routers: tuple[Router, Router]
) -> None:
    """About once a second while its process is connected, and not after it has ended."""
    router, other = routers
    async with start(publish_load=f"tcp://127.0.0.1:{ports[0]}") as exporter:
        endpoint = exporter.endpoints[0]
        with contextlib.closing(Publisher(endpoint, "t", [engine("f", "1")])) as lasting:
            with contextlib.closing(Publisher(endpoint, "s", [engine()])) as sender:
                lasting.push(step(4))
                sender.push(step(3))
                await until(lambda: router.receive() >= 3)
            await until(lambda: not exporter.registry.engines["e"].streams)
            router.receive()
            last, resent = router.sequences[-1], other.receive()
            await until(lambda: other.receive() >= resent + 2)

            assert exporter.intake.items == 2
            assert {load[1] for load in router.loads} == {3}
            router.receive()
            assert router.sequences[-1] == last


async def test_ranks_have_ports_of_their_own(
    start: Start, ports: tuple[int, int], routers: tuple[Router, Router]
) -> None:
    """A recorded run of two ranks: the last messages have what the page has."""
    async with start(publish_load=f"tcp://127.0.0.1:{ports[0]}") as exporter:
        while not all(router.receive() for router in routers):
            player = Replay(
                recorded_run("core_dp"), exporter.endpoints[0], realtime=False, namespace="t"
            )
            await asyncio.to_thread(player.run)
        page = render(exporter.registry).decode()
    for rank, router in enumerate(routers):
        _, running, waiting, _, _, found, *_ = router.loads[-1]
        assert found == rank
        for name, value in (("running", running), ("waiting", waiting)):
            lines = [
                line
                for line in page.splitlines()
                if line.startswith(f"vllm:num_requests_{name}{{") and f'engine="{rank}"' in line
            ]
            assert [float(line.rpartition(" ")[2]) for line in lines] == [value]


async def test_another_exporter_reads_it(start: Start, ports: tuple[int, int]) -> None:
    """By its own subscription to the load of engines."""
    async with (
        start(publish_load=f"tcp://127.0.0.1:{ports[0]}") as one,
        start(
            subscribe=(f"load=tcp://127.0.0.1:{ports[0]},model=m",),
            ingest_endpoint=(f"{one.endpoints[0]}2",),
        ) as other,
    ):
        with contextlib.closing(Publisher(one.endpoints[0], "s", [engine()])) as sender:
            sender.push(step(7))
            await until(
                lambda: (
                    'sidestep_load_running_requests{engine="0",model_name="m"} 7'
                    in render(other.registry).decode()
                )
            )
            assert 'sidestep_load_max_kv_tokens{engine="0",model_name="m"} 1600' in (
                render(other.registry).decode()
            )


async def test_two_engines_with_one_rank_are_told_apart_by_nobody(
    start: Start, ports: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """The first one is published, and a line says why the other is not."""
    caplog.set_level(logging.WARNING)
    async with start(publish_load=f"tcp://127.0.0.1:{ports[0]}") as exporter:
        engines = [engine("one"), engine("two")]
        with contextlib.closing(Publisher(exporter.endpoints[0], "s", engines)) as sender:
            sender.push(step(1))
            second = step(2)
            second.engine = 1
            sender.push(second)
            await until(lambda: "the load of engine 'two' is not published" in caplog.text)


async def test_a_port_in_use_is_an_error(start: Start, ports: tuple[int, int]) -> None:
    """One line names the flag and the endpoint."""
    endpoint = f"tcp://127.0.0.1:{ports[0]}"
    with (
        _listener(ports[0]),
        pytest.raises(ConfigError, match=f"--publish.load {endpoint}: Address"),
    ):
        async with start(publish_load=endpoint):
            pass


@pytest.mark.parametrize(
    "value", ["127.0.0.1:1", "tcp://x", "tcp://:5657", "ipc:///x", "tcp://h:0"]
)
def test_other_endpoints_are_refused(value: str) -> None:
    """Routers connect by tcp, to a port that they know."""
    with pytest.raises(ConfigError, match=r"publish.load .*: must be"):
        read_config({"publish_load": value}, {})


async def test_messages_of_an_interval_are_one(start: Start, ports: tuple[int, int]) -> None:
    """A hundred steps within ``--publish.interval`` need two messages at most, and the last step counts."""
    flags = {"publish_load": f"tcp://127.0.0.1:{ports[0]}", "publish_interval": "0.4"}
    async with start(**flags) as exporter:
        with contextlib.closing(
            Publisher(exporter.endpoints[0], "s", [engine()], flush_interval=0.01)
        ) as sender:
            began = time.monotonic()
            for running in range(100):
                sender.push(step(running))
            await until(lambda: exporter.intake.items == 100)
            await until(lambda: exporter.metrics.value(MESSAGES) >= 1)
            most = 1 + (time.monotonic() - began) / 0.4
            assert exporter.metrics.value(MESSAGES) <= most


async def test_a_stalled_engine_falls_silent(
    start: Start, ports: tuple[int, int], routers: tuple[Router, Router]
) -> None:
    """Routers notice it by the missing messages, as with a scheduler of SGLang that hangs."""
    stalled, idle = routers
    async with start() as exporter:
        engines = [engine(), engine("f", "1")]
        publisher = LoadPublisher(exporter.registry, exporter.metrics, "127.0.0.1", ports[0])
        publisher.open()
        with contextlib.closing(Publisher(exporter.endpoints[0], "s", engines)):
            await until(lambda: len(exporter.registry.engines) == 2)
            for one in exporter.registry.engines.values():
                exporter.intake.put(one, step(5))
            resending = asyncio.create_task(publisher.run(lambda one: one.id == "e"))
            for one in exporter.registry.engines.values():
                publisher.note(one)
            await until(lambda: idle.receive() >= 2)
            assert stalled.receive() <= 1
            resending.cancel()
        publisher.close()
