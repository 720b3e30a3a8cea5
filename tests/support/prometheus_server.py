"""A real Prometheus as a process: tests start, stop and query it."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from ports import free_port

ROOT = Path(__file__).parents[2]
BINARIES = {
    "2": shutil.which("prometheus"),
    "3": shutil.which("prometheus", path=ROOT / "build" / "prometheus-3" / "usr" / "bin"),
}
"""Prometheus of Debian, and of a later Debian (``make tools``), by major version."""
VERSIONS = [pytest.param("2", marks=pytest.mark.long), "3"]
"""Parameters of tests: ``make test`` runs the newest, ``make test-all`` both."""
PATIENCE = 60.0
"""Seconds to wait for a condition."""
Samples = list[tuple[float, float]]


class Prometheus:
    """One Prometheus process, which keeps its port and directory when it is started again.

    Calls block: where exporters run in an event loop, call from a thread.
    """

    def __init__(self, binary: str, config: Path, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            binary, f"--config.file={config}", f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=error", *flags,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it is ready."""
        self._process = subprocess.Popen(self._command)
        self._wait(lambda: "Ready" in self.page("/-/ready"))

    def stop(self) -> None:
        """Stop it with SIGTERM, as Kubernetes does."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def page(self, path: str) -> str:
        """Fetch the body at ``path``."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=20) as answer:
            text: str = answer.read().decode()
        return text

    def get(self, path: str, **params: object) -> Any:
        """Fetch the data of an API answer."""
        url = f"/api/v1/{path}?{urllib.parse.urlencode(params, doseq=True)}"
        try:
            return json.loads(self.page(url))["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from None

    def ask(self, query: str, at: float | None = None) -> list[dict[str, Any]]:
        """Return the series of an instant query, now or at a Unix time."""
        when = {} if at is None else {"time": at}
        found: list[dict[str, Any]] = self.get("query", query=query, **when)["result"]
        return found

    def range(self, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Return the series of a range query, whose last value is that of ``end``."""
        first = end - math.floor((end - start) / step) * step
        found: list[dict[str, Any]] = self.get(
            "query_range", query=expr, start=first, end=end, step=step
        )["result"]
        return found

    def answers(self, expr: str, start: float, end: float) -> bool:
        """Return whether a query has a number or a histogram in any second."""
        return any(
            "histograms" in series or any(not math.isnan(float(v)) for _, v in series["values"])
            for series in self.range(expr, start, end, 1.0)
        )

    def samples(self, selector: str) -> dict[str, Samples]:
        """Return what is stored of a series in the last ten minutes, by instance."""
        return {
            one["metric"]["instance"]: [(at, float(value)) for at, value in one["values"]]
            for one in self.ask(f"{selector}[10m]")
        }

    def until(self, query: str, holds: Callable[[Mapping[str, float]], bool]) -> None:
        """Wait until the values of an instant query, by instance, fulfil ``holds``."""
        self._wait(
            lambda: holds(
                {
                    one["metric"].get("instance", ""): float(one["value"][1])
                    for one in self.ask(query)
                }
            )
        )

    def scraped(self, targets: int, since: float) -> None:
        """Wait until all targets are up and were scraped after ``since``, a Unix time."""
        self._wait(
            lambda: len(self.ask("up == 1")) == len(self.ask(f"timestamp(up) > {since}")) == targets
        )

    def evaluated(self) -> None:
        """Wait until all rules have been evaluated."""
        self._wait(
            lambda: all(
                rule["health"] != "unknown"
                for group in self.get("rules")["groups"]
                for rule in group["rules"]
            )
        )

    @staticmethod
    def _wait(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                if holds():
                    return
            time.sleep(0.05)
        raise TimeoutError


def labels(instance: str) -> dict[str, str]:
    """Return the labels of a target as Kubernetes' service discovery makes them; pod 0 does prefill.

    Targets with native histograms are outside of Kubernetes.
    """
    if instance.endswith("-native"):
        return {"instance": instance}
    stage = "prefill" if instance.endswith("-0") else "decode"
    return {
        "instance": instance,
        "cluster": "east",
        "namespace": "llm",
        "pod": f"{instance}-{stage}-0",
        "service": "llm",
    }


def _often(rules: Path, directory: Path) -> Path:
    """Write a copy of a rule file without evaluation intervals of its own, and return its path."""
    groups = yaml.safe_load(rules.read_text())["groups"]
    copy = directory / f"{rules.stem}.json"
    copy.write_text(
        json.dumps(
            {"groups": [{k: v for k, v in group.items() if k != "interval"} for group in groups]}
        )
    )
    return copy


@contextlib.contextmanager
def prometheus(
    binary: str,
    directory: Path,
    targets: Mapping[str, Mapping[str, str]],
    *,
    interval: str = "500ms",
    rules: Sequence[Path] = (),
    settings: Mapping[str, object] = {},
    features: Sequence[str] = (),
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes URLs by job and instance, native histograms included.

    ``settings`` are further settings of every job, ``features`` further ones of its own to enable.
    """
    jobs = [
        {
            "job_name": job,
            "static_configs": [
                {"targets": [url.split("/")[2]], "labels": labels(instance)}
                for instance, url in urls.items()
            ],
            **settings,
        }
        for job, urls in targets.items()
    ]
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "global": {
            "scrape_interval": interval,
            "scrape_timeout": interval,
            "evaluation_interval": interval,
        },
        "rule_files": [str(_often(path, directory)) for path in rules],
        "scrape_configs": jobs,
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))
    server = Prometheus(
        binary,
        directory / "prometheus.yml",
        f"--storage.tsdb.path={directory}/tsdb",
        f"--enable-feature={','.join(('native-histograms', *features))}",
    )
    try:
        server.start()
        yield server
    finally:
        server.stop()
