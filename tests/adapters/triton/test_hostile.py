"""Servers that send invalid statistics: only their own series are affected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exporters import Start, until
from pages import parse
from rendered import render
from sidestep.app.exporter import Exporter
from sidestep.metrics import description_limits as descriptions
from sidestep.metrics.description_limits import check_engines
from sidestep.protocol.messages import EngineInfo
from tritons import Model, Triton, answer, tritons

BULK = "/v2/models/stats"
BIG = 2**64 - 1


def flag(server: Triton, *options: str) -> tuple[str, ...]:
    """Return the flag for a server polled twenty times a second."""
    return (",".join((server.url, "interval=0.05", *options)),)


def shown(exporter: Exporter) -> dict[str, float]:
    """Return successful requests by model."""
    families = parse(render(exporter.registry).decode())
    if "nv_inference_request_success" not in families:
        return {}
    samples = families["nv_inference_request_success"].samples
    return {dict(labels)["model"]: value for (_, labels), value in samples.items()}


async def polled(server: Triton, more: int = 2) -> None:
    """Wait for ``more`` polls."""
    before = server.asked[BULK]
    await until(lambda: server.asked[BULK] >= before + more, timeout=30)


async def test_sums_beyond_64_bits_break_no_snapshot(start: Start, tmp_path: Path) -> None:
    """Responses are added up, so a sum may overflow although no number does."""
    async with tritons("good") as server:
        server.models["good", "1"].infer(3)
        bad = Model().reported("bad", "1")
        bad["response_stats"] = {str(i): {"success": {"count": BIG, "ns": 1}} for i in range(3)}
        good = server.models["good", "1"].reported("good", "1")
        server.respond(BULK, answer(json.dumps({"model_stats": [bad, good]}).encode()))
        flags = {"triton": flag(server), "state_dir": str(tmp_path / "state")}
        async with start(**flags) as exporter:
            await until(lambda: shown(exporter) == {"good": 3})
        async with start(**flags) as exporter:
            await until(lambda: shown(exporter) == {"good": 3})


NAMES = (
    "a/b",
    "a%2fb",
    "..",
    "ä ö",
    '"\\',
    "two\nERROR lines",
    "",
    "\u2028",
    "q" * 300,
    "q" * 9999,
)


async def test_any_name_of_a_model(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Invalid label values are left out and not queried; no name adds a line to the log."""
    caplog.set_level("INFO", "sidestep")
    async with tritons(*NAMES) as server:
        async with start(triton=flag(server)) as exporter:
            await until(lambda: set(shown(exporter)) == set(NAMES[:5]))
            await polled(server)

        configs = [path for path in server.asked if path.endswith("/config")]
        assert sorted(configs) == sorted(
            f"/v2/models/{name}/config"
            for name in ("a%2Fb", "a%252fb", "..", "%C3%A4%20%C3%B6", "%22%5C")
        )
        lines = [record.getMessage() for record in caplog.records if "sidestep" in record.name]
        assert lines
        assert all("\n" not in line and len(line) < 1000 for line in lines)


async def test_many_models_leave_capacity_for_others(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for many models at once, and for many names one after the other."""
    monkeypatch.setattr(descriptions, "MAX_ENGINES", 40)
    monkeypatch.setattr(descriptions, "MAX_PARTS", 30)
    async with tritons() as server, start(triton=flag(server)) as exporter:
        registry = exporter.registry
        for number in range(4):
            server.models.clear()
            for model in range(10):
                server.load(f"{number}-{model}")
            names = {name for name, _ in server.models}
            await until(lambda: set(shown(exporter)) == names and registry.parts == 10)  # noqa: B023
        for model in range(40):
            server.load(f"more-{model}")
        await until(lambda: registry.limited["engines"] > 0)

        assert len(shown(exporter)) == registry.parts == 30
        check_engines(registry, 0, [EngineInfo("v", "vllm", {"engine": "0", "model_name": "m"})])


async def test_an_oversized_configuration_is_ignored(start: Start) -> None:
    """Decoding it would block the event loop for seconds."""
    async with tritons("a", "b") as server:
        server.configs["a"] = {"instance_group": [{}] * 20_000}
        server.configs["b"] = {"metric_tags": {f"tag{i}": "x" for i in range(10_000)}}
        async with start(triton=flag(server)) as exporter:
            await until(lambda: set(shown(exporter)) == {"a", "b"})
            page = render(exporter.registry).decode()

            assert "_tag0" not in page
            assert "sidestep_triton_instances{" not in page
