"""What leaves an engine's processes: all bytes of real publishers, captured on their way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from chaos.proxy import Proxy, Streams

from exporters import Start, until
from fake_vllm import AsyncLLM, Core, Request, config, importable
from pages import get
from ports import free_port
from sidestep.app.exporter import Exporter
from sidestep.metrics.trackers import Trackers
from sidestep.tracking.requests.inflight import UNKNOWN
from sidestep_adapters.vllm.ownership import SCHEDULER_MODULE

ID, SALT, TRACE, SPAN = "acme-4711", "salt-of-acme", "5ec7e7" * 5 + "ab", "fa11ed" * 2 + "cafe"
STATE = "vendor=secret"


class Wire(Proxy):
    """A relay in front of an exporter's port that keeps all bytes that engines send."""

    sent = b""

    async def _dial(self) -> Streams:
        reader, writer = await super()._dial()
        write = writer.write

        def kept(data: bytes) -> None:
            self.sent += data
            write(data)

        writer.write = kept  # type: ignore[assignment,method-assign]
        return reader, writer


def request(number: int) -> Request:
    """Return a request that can be recognised by each of its texts."""
    made: Any = Request(f"chatcmpl-{ID}-{number}")
    made.cache_salt = SALT
    made.trace_headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": STATE}
    made.priority = 0
    found: Request = made
    return found


@pytest.mark.parametrize("mode", ["", "hash", "full"])
async def test_bytes_on_the_wire(mode: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default no id, salt or trace, neither of a core that meets an exporter, nor of a front end."""
    if mode:
        monkeypatch.setenv("SIDESTEP_REQUEST_IDENTITY", mode)
    port = free_port()
    exporter_endpoint = (f"tcp://127.0.0.1:{port}",)
    wire = Wire("tcp://127.0.0.1:0", f"tcp://127.0.0.1:{port}")
    await wire.start()
    try:
        with importable(monkeypatch, wire.near) as ours:
            core = Core(ours.scheduler(config()))

            def stat_logger(vllm_config: Any, **more: Any) -> Any:
                # A front end that sees no tap would end what the tap has told of the engine.
                vllm_config.scheduler_config.scheduler_cls = f"{SCHEDULER_MODULE}.SidestepScheduler"
                return ours.stat_logger(vllm_config=vllm_config, **more)

            front_end = AsyncLLM(SimpleNamespace(), [0], stat_logger)
            (logger,) = front_end.logger_manager.stat_loggers
            try:
                async with start(ingest_endpoint=exporter_endpoint) as exporter:
                    core.call(lambda: core.scheduler.add_request(request(1)))
                    front_end.add_request(f"chatcmpl-{ID}-1", 7)

                    async def has_tokens() -> bool:
                        page = await get(exporter.url)
                        lines = [x for x in page.splitlines() if "vllm:generation_tokens_t" in x]
                        return any(not line.endswith(" 0") for line in lines if line[0] != "#")

                    await until(has_tokens, 60.0, "tokens of the request")
                queued = wire.sent
                wire.sent = b""
                # Another exporter gets the requests in flight as they are.
                async with start(ingest_endpoint=exporter_endpoint) as exporter:

                    def is_known(one: Exporter = exporter) -> bool:
                        engines = one.registry.engines.values()
                        found = [e.part(Trackers).requests for e in engines]
                        trackers = [one for one in found if one is not None]
                        live = [r for t in trackers for r in t.requests.live.values()]
                        return any(one.state != UNKNOWN for one in live)

                    await until(is_known, 60.0, "the request in flight")
                    core.call(core.scheduler.finish_all)
                    front_end.logger_manager.record(30)
                    await until(lambda: not core.scheduler.requests)
            finally:
                core.close()
                logger._publisher.close()
    finally:
        await wire.close()
    texts = [text.encode() for text in (ID, SALT, TRACE, SPAN)]
    for sent in (queued, wire.sent):
        found = [text in sent for text in texts]
        expected = {"full": [True] * 4, "hash": [False, False, True, True]}
        assert found == expected.get(mode, [False] * 4)
        assert STATE.encode() not in sent
