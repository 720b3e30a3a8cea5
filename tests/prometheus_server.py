"""A real Prometheus as a process that tests scrape and ask with, also after what it scraped is gone."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
BINARIES = {
    "2": shutil.which("prometheus"),
    "3": shutil.which("prometheus", path=ROOT / "build" / "prometheus-3" / "usr" / "bin"),
}
"""Debian's, and a later Debian's (``make tools``)."""


class Prometheus:
    """One that runs."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **params: object) -> Any:
        """The data of an answer.

        Raises:
            ValueError: It did not understand.
        """
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(params, doseq=True)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from None

    def range(self, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Series with their values, as a panel asks for them."""
        found: list[dict[str, Any]] = self.get(
            "query_range", query=expr, start=start, end=end, step=step
        )["result"]
        return found

    def answers(self, expr: str, start: float, end: float, step: float = 1.0) -> bool:
        """Whether there is a number, or a histogram, at the end or anywhere before."""
        first = end - math.floor((end - start) / step) * step
        return any(
            "histograms" in series or any(not math.isnan(float(v)) for _, v in series["values"])
            for series in self.range(expr, first, end, step)
        )

    def scraped(self, targets: int, since: float, timeout: float = 60.0) -> None:
        """Return when it has scraped all targets after ``since``, a Unix time."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                found = self.get("query", query="up == 1")["result"]
                fresh = self.get("query", query=f"timestamp(up) > {since}")["result"]
                if len(found) == len(fresh) == targets:
                    return
            time.sleep(0.1)
        raise TimeoutError


def labels(instance: str) -> dict[str, str]:
    """Of a target, as Kubernetes' service discovery makes them; the first pod does prefill."""
    stage = "prefill" if instance.endswith("-0") else "decode"
    return {
        "instance": instance,
        "namespace": "llm",
        "pod": f"{instance}-{stage}-0",
        "service": "llm",
    }


def _often(rules: Path, directory: Path) -> Path:
    """A copy of rules that are worked out as often as all others."""
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
) -> Iterator[Prometheus]:
    """Scrapes URLs by job and instance, as pods of these names; native histograms are on."""
    jobs = [
        {
            "job_name": job,
            "static_configs": [
                {"targets": [url.split("/")[2]], "labels": labels(instance)}
                for instance, url in urls.items()
            ],
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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            binary, f"--config.file={directory}/prometheus.yml",
            f"--storage.tsdb.path={directory}/tsdb", f"--web.listen-address=127.0.0.1:{port}",
            "--enable-feature=native-histograms", "--log.level=error",
        ]
    )  # fmt: skip
    try:
        yield Prometheus(port)
    finally:
        process.kill()
        process.wait()
