"""A real VictoriaMetrics that takes pushes: it has the samples of the page under the names of the page."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporters import Start
from otlp_pushes import RUNS, pushed, replay_all
from otlp_receiver import Samples, as_text
from ports import free_port

ROOT = Path(__file__).parents[2]
BINARY = shutil.which("victoria-metrics", path=ROOT / "build" / "victoria-metrics" / "usr" / "bin")
"""VictoriaMetrics of a later Debian (``make tools``)."""
PATIENCE = 60.0


class VictoriaMetrics:
    """A running VictoriaMetrics; calls block.

    Attributes:
        otlp: URL that takes metrics by OTLP.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.otlp = f"{url}/opentelemetry/v1/metrics"

    def get(self, path: str, **query: str) -> str:
        """Fetch the body at ``path``."""
        url = f"{self._url}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            text: str = answer.read().decode()
        return text

    def samples(self) -> tuple[Samples, set[str]]:
        """Return the last value of each series without NaN, and the labels that it has made itself.

        Those are resource attributes and the scope; their names have a dot.
        """
        self.get("/internal/force_flush")
        found: Samples = {}
        own: set[str] = set()
        for line in self.get("/api/v1/export", **{"match[]": '{__name__!=""}'}).splitlines():
            series = json.loads(line)
            labels = series["metric"]
            name = labels.pop("__name__")
            own |= {label for label in labels if "." in label}
            if name.endswith("_bucket") and "le" in labels:
                # It writes 2 for 2.0.
                labels["le"] = as_text(float(labels["le"]))
            key = tuple(sorted(pair for pair in labels.items() if "." not in pair[0]))
            if series["values"][-1] is not None:
                found[name, key] = float(series["values"][-1])
        return found, own


@contextlib.contextmanager
def victoria_metrics(directory: Path, *flags: str) -> Iterator[VictoriaMetrics]:
    """Run a VictoriaMetrics with its data in ``directory``.

    Raises:
        TimeoutError: It does not start.
    """
    assert BINARY is not None
    port = free_port()
    process = subprocess.Popen(
        [
            BINARY, f"-storageDataPath={directory}", f"-httpListenAddr=127.0.0.1:{port}",
            "-search.latencyOffset=0s", "-loggerLevel=ERROR", *flags,
        ]
    )  # fmt: skip
    try:
        made = VictoriaMetrics(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError):
                made.get("/health")
                break
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.05)
        yield made
    finally:
        process.terminate()
        process.wait()


OWN_LABELS = {"service.name", "service.instance.id", "host.name"}
pytestmark = pytest.mark.skipif(BINARY is None, reason="there is no VictoriaMetrics (make tools)")


async def test_it_has_the_samples_of_the_page(start: Start, tmp_path: Path) -> None:
    """Those of recorded runs of vLLM, SGLang and Triton, and the exporter's own."""
    with victoria_metrics(tmp_path / "data", "-maxLabelsPerTimeseries=80") as server:
        async with start(otlp_endpoint=server.otlp, otlp_interval="1") as exporter:
            await replay_all(exporter, RUNS)
            assert await pushed(exporter, lambda: server.samples()[0]) > 3000
        assert server.samples()[1] >= OWN_LABELS
