"""The exporter's own families, which have samples for each engine and stream."""

from __future__ import annotations

from intakes import Fed, discard
from pages import parse
from sidestep.exposition.own_families import own_values, write
from sidestep.protocol.messages import EngineInfo
from sidestep.telemetry.self_metrics import own_registry


def info(number: int) -> EngineInfo:
    """Return one of many engines."""
    return EngineInfo(f"e{number}", "vllm", {"engine": str(number), "model_name": "m"})


def fleet(engines: int) -> Fed:
    """Return an ingest of so many engines, each with a stream."""
    fed = Fed()
    for number in range(engines):
        fed.send_hello(f"s{number % 250}", [info(n) for n in range(number % 250, engines, 250)])
    return fed


def test_the_exporters_own_families_have_a_sample_for_each_engine() -> None:
    """After engines come, go and change their labels."""
    fed = fleet(2)
    registry = fed.intake.registry
    own = own_registry(fed.intake.metrics, ())

    def named() -> set[tuple[str, str]]:
        page = parse(b"".join(write(own_values(own), "text")).decode())
        samples = page["sidestep_engine_up"].samples
        return {(dict(labels)["engine"], dict(labels)["model_name"]) for _, labels in samples}

    assert named() == {("0", "m"), ("1", "m")}
    fed.send_hello("other", [info(7)])
    assert named() == {("0", "m"), ("1", "m"), ("7", "m")}
    discard(registry, registry.engines["e0"])
    registry.engines["e1"].labels["model_name"] = "other"
    registry.engines["e1"].renew_label_version()
    assert named() == {("1", "other"), ("7", "m")}
