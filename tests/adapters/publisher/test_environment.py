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
    "SIDESTEP_VLM_MODE": "SIDESTEP_VLM_MODE (did you mean SIDESTEP_VLLM_MODE?)",
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
@pytest.mark.parametrize(("name", "named"), UNKNOWN.items())
def test_an_unknown_variable_is_logged_once(engine: str, name: str, named: str) -> None:
    """By the engine's own logger, even where it is the endpoint that is misspelt."""
    said = run_python(engine, **KNOWN, **{name: "beside"}).splitlines()

    assert said == [
        f"sidestep: unknown environment variables: {named}; docs/configuration.md lists the known ones"
    ]


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_variables_that_others_read_are_not_logged(engine: str) -> None:
    """The containers of a pod may share a list of variables."""
    assert run_python(engine, **KNOWN) == ""


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
