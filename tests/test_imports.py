"""The modules that an import loads, in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded(module: str) -> set[str]:
    """Return the modules that importing ``module`` loads."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["sidestep_adapters.publisher.publisher", "sidestep_adapters.vllm.stats"]
)
def test_the_engine_loads_the_pure_part_only(module: str) -> None:
    """The engine's side loads neither the exporter nor libraries that only the exporter needs."""
    found = loaded(module)

    assert not {"aiohttp", "asyncio", "click", "prometheus_client"} & found
    assert (
        not {
            "sidestep.app.run",
            "sidestep.http.routes",
            "sidestep.ingest.socket_loop",
            "sidestep.config.settings",
        }
        & found
    )


def test_nothing_here_is_called_exporter_or_adapters() -> None:
    """No package is importable as ``exporter`` or ``adapters``, names that others own."""
    code = "import importlib.util as u; print(u.find_spec('exporter'), u.find_spec('adapters'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )

    assert done.stdout.split() == ["None", "None"]


def test_help_loads_no_server() -> None:
    """The command line loads no server before a command runs."""
    assert not {"aiohttp", "zmq"} & loaded("sidestep.app.cli, sidestep_tools.commands")
