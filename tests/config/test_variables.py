"""Environment variables that nothing reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sidestep.config.settings import CONFIG_FILE, SETTINGS
from sidestep.config.variables import BESIDE_SETTINGS, unknown, unknown_to_engines

ROOT = Path(__file__).parents[2]
SET = [setting.variable for setting in (*SETTINGS, CONFIG_FILE)]
KUBERNETES = {
    "SIDESTEP_SERVICE_HOST": "10.0.0.1",
    "SIDESTEP_SERVICE_PORT": "9857",
    "SIDESTEP_SERVICE_PORT_METRICS": "9857",
    "SIDESTEP_PORT": "tcp://10.0.0.1:9857",
    "SIDESTEP_PORT_9857_TCP": "tcp://10.0.0.1:9857",
    "SIDESTEP_PORT_9857_TCP_PROTO": "tcp",
    "SIDESTEP_PORT_9857_TCP_PORT": "9857",
    "SIDESTEP_PORT_9857_TCP_ADDR": "10.0.0.1",
}
"""What it sets in every container of a namespace with a Service ``sidestep``."""


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("SIDESTEP_LOG_LEVL", "SIDESTEP_LOG_LEVEL"),
        ("SIDESTEP_LISTEN_ADDRESS", "SIDESTEP_WEB_LISTEN_ADDRESS"),
        ("SIDESTEP_INGEST_ENDPOINTS", "SIDESTEP_INGEST_ENDPOINT"),
        ("SIDESTEP_ENDPONT", "SIDESTEP_ENDPOINT"),
        ("SIDESTEP_SGLANG_MODES", "SIDESTEP_SGLANG_MODE"),
        ("SIDESTEP_CONFIG", "SIDESTEP_CONFIG_FILE"),
        ("SIDESTEP_PORT", ""),
        ("SIDESTEP_", ""),
        ("SIDESTEP_QQQQ", ""),
    ],
)
def test_an_unknown_variable_has_its_nearest(name: str, nearest: str) -> None:
    """None if no known one is similar; an empty variable counts as unset."""
    assert unknown({name: "9857"}, SET) == [(name, nearest)]
    assert unknown({name: ""}, SET) == []


@pytest.mark.parametrize("service", ["SIDESTEP", "SIDESTEP_AGGREGATOR", "SIDESTEP_1"])
def test_variables_of_kubernetes_services_are_known(service: str) -> None:
    """Whatever follows "sidestep" in the name of the Service."""
    environ = {name.replace("SIDESTEP", service): value for name, value in KUBERNETES.items()}

    assert unknown(environ, SET) == []
    assert unknown_to_engines(environ) == []


def test_every_variable_is_known_to_all_processes() -> None:
    """Those of settings and engines, of whatever the code reads, and of the manifests."""
    files = [
        file
        for folder in ("exporter", "adapters", "deploy", "docs")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".md", ".yaml", ".yml", ".tpl") or file.name == "Dockerfile"
    ]
    named = {
        name
        for file in files
        for name in re.findall(r"\bSIDESTEP_[A-Z_]*[A-Z]\b", file.read_text(encoding="utf-8"))
    }

    assert {"SIDESTEP_ENDPOINT", "SIDESTEP_PASSWORD", "SIDESTEP_STATE_DIR"} < named
    assert unknown(dict.fromkeys([*named, *SET, *BESIDE_SETTINGS], "x"), SET) == []
    assert unknown_to_engines(dict.fromkeys([*named, *SET, *BESIDE_SETTINGS], "x")) == []
