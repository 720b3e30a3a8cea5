"""What an engine's process logs of its environment."""

from __future__ import annotations

import pytest

from python_programs import run_python
from sidestep_adapters.publisher import environment

VLLM = """
    import importlib, logging, sys, pytest, fake_vllm

    logging.getLogger("vllm").addHandler(logging.StreamHandler(sys.stdout))
    with pytest.MonkeyPatch.context() as patch:
        fake_vllm.install(patch)
        plugin = importlib.import_module("sidestep_adapters.vllm.plugin")
        tap = importlib.import_module("sidestep_adapters.vllm.scheduler")
        for _ in range(2):
            plugin.SidestepStatLogger(fake_vllm.config(), [0])
            tap.SidestepScheduler(fake_vllm.config())
"""
SGLANG = """
    import logging, sys
    from sidestep_adapters.sglang.plugin import plugin

    logging.getLogger("sglang").addHandler(logging.StreamHandler(sys.stdout))
    plugin()
    plugin()
"""
UNKNOWN = {
    "SIDESTEP_ENDPONT": "SIDESTEP_ENDPONT (did you mean SIDESTEP_ENDPOINT?)",
    "SIDESTEP_COLOUR": "SIDESTEP_COLOUR",
}
KNOWN = {
    "SIDESTEP_NAMESPACE": "pod",
    "SIDESTEP_STACKS": "off",
    "SIDESTEP_PASSWORD": "x",
    "SIDESTEP_INGEST_ENDPOINT": "ipc:///x",
    "SIDESTEP_SLO": "ttft=1s",
    "SIDESTEP_PORT": "tcp://10.0.0.1:9857",
    "SIDESTEP_SERVICE_HOST": "10.0.0.1",
}
"""Variables of an engine, of a command, of an exporter in the same pod, and of Kubernetes."""


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_unknown_variables_are_logged_once(engine: str) -> None:
    """By the engine's own logger; the containers of a pod may share a list of variables."""
    said = run_python(engine, **KNOWN, **dict.fromkeys(UNKNOWN, "beside")).splitlines()

    assert len(said) == 1
    assert said[0].startswith("sidestep: unknown environment variables: ")
    assert all(text in said[0] for text in UNKNOWN.values())
    assert not any(name in said[0] for name in KNOWN)


@pytest.mark.parametrize(
    ("given", "why"), [("http://h:1", "must begin with"), ("tcp://a..b:1", "is no name or address")]
)
def test_an_endpoint_that_cannot_be_used_is_logged_once(
    given: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine runs without a publisher, which would try it again each second."""
    monkeypatch.setenv("SIDESTEP_ENDPOINT", given)
    environment.usable_endpoint.cache_clear()
    assert not any(environment.usable_endpoint() for _ in range(5))
    environment.usable_endpoint.cache_clear()
    (record,) = caplog.records

    assert why in record.getMessage()
    assert record.exc_info is None
