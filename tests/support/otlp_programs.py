"""Receivers of OTLP that ``tools/setup_otlp.sh`` makes, as processes: a Collector, and Phoenix."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ports import free_port

FOLDER = Path(__file__).parents[2] / "build" / "otlp"
COLLECTOR, PROMETHEUS = FOLDER / "collector", FOLDER / "prometheus"
PHOENIX = FOLDER / "phoenix" / "bin" / "phoenix"
PATIENCE = 300.0
"""Seconds to start: Phoenix takes minutes the first time."""
CONFIG = """
receivers:
  otlp: {{protocols: {{http: {{endpoint: "127.0.0.1:{http}"}}, grpc: {{endpoint: "127.0.0.1:{grpc}"}}}}}}
processors:
  batch: {{timeout: 100ms}}
exporters:
  otlphttp: {{endpoint: "{to}"}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines:
    metrics: {{receivers: [otlp], processors: [batch], exporters: [otlphttp]}}
    traces: {{receivers: [otlp], processors: [batch], exporters: [otlphttp]}}
    logs: {{receivers: [otlp], processors: [batch], exporters: [otlphttp]}}
"""


@contextlib.contextmanager
def collector(folder: Path, to: str, protocol: str) -> Iterator[str]:
    """Run a Collector that forwards all signals to the URL ``to``; yield its own URL for ``protocol``."""
    http, grpc = free_port(), free_port()
    config = folder / "collector.yaml"
    config.write_text(CONFIG.format(http=http, grpc=grpc, to=to))
    ready = f"http://127.0.0.1:{http}/"
    with _running([str(COLLECTOR), "--config", str(config)], folder, ready):
        yield f"http://127.0.0.1:{grpc if protocol == 'grpc' else http}"


@contextlib.contextmanager
def phoenix(folder: Path) -> Iterator[str]:
    """Run a Phoenix with its data in ``folder``; yield its URL."""
    port, grpc = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    environ = {
        "PHOENIX_WORKING_DIR": str(folder / "phoenix"),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(grpc),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with _running([str(PHOENIX), "serve"], folder, f"{url}/healthz", environ):
        yield url


def get_json(url: str) -> Any:
    """Fetch JSON."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


@contextlib.contextmanager
def _running(
    command: list[str], folder: Path, ready: str, environ: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a program from the time at which ``ready`` answers, whatever the status.

    Raises:
        TimeoutError: It does not start.
    """
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **(environ or {})},
            start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE
        while not _answers(ready):
            if process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError((folder / "log").read_text()[-2000:])
            time.sleep(0.1)
        yield
    finally:
        # Phoenix has processes of its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True
