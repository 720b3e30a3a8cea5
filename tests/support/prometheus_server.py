"""A real Prometheus as a process, in any role: tests start, stop and ask it, also after what it scraped is gone."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
BINARIES = {
    "2": shutil.which("prometheus"),
    "3": shutil.which("prometheus", path=ROOT / "build" / "prometheus-3" / "usr" / "bin"),
}
"""Debian's, and a later Debian's (``make tools``)."""
AGENT = {"2": "--enable-feature=agent", "3": "--agent"}
"""What makes one an agent."""
PATIENCE = 60.0
"""Seconds for which anything is waited for."""
Samples = list[tuple[float, float]]


class Prometheus:
    """One process, which keeps its port and its directory when it is started again.

    Every call waits for its answer: where exporters live in an event loop, ask from a thread.

    Args:
        binary: Of any version.
        config: Its configuration.
        flags: Such as where it stores, and its role.
    """

    def __init__(self, binary: str, config: Path, *flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            binary, f"--config.file={config}", f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=error", *flags,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it answers.

        Raises:
            TimeoutError: It does not.
        """
        self._process = subprocess.Popen(self._command)
        self._wait(lambda: "Ready" in self.page("/-/ready"))

    def stop(self) -> None:
        """As Kubernetes does."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def page(self, path: str) -> str:
        """What it says there."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=20) as answer:
            text: str = answer.read().decode()
        return text

    def get(self, path: str, **params: object) -> Any:
        """The data of an answer.

        Raises:
            ValueError: It did not understand.
        """
        url = f"/api/v1/{path}?{urllib.parse.urlencode(params, doseq=True)}"
        try:
            return json.loads(self.page(url))["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from None

    def ask(self, query: str) -> list[dict[str, Any]]:
        """Series of an instant query."""
        found: list[dict[str, Any]] = self.get("query", query=query)["result"]
        return found

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

    def samples(self, selector: str) -> dict[str, Samples]:
        """All that is stored of a series in the last ten minutes, by instance."""
        return {
            one["metric"]["instance"]: [(at, float(value)) for at, value in one["values"]]
            for one in self.ask(f"{selector}[10m]")
        }

    def until(self, query: str, holds: Callable[[Mapping[str, float]], bool]) -> None:
        """Return when an instant query's values by instance are so."""
        self._wait(
            lambda: holds(
                {
                    one["metric"].get("instance", ""): float(one["value"][1])
                    for one in self.ask(query)
                }
            )
        )

    def scraped(self, targets: int, since: float) -> None:
        """Return when it has scraped all targets after ``since``, a Unix time."""
        self._wait(
            lambda: len(self.ask("up == 1")) == len(self.ask(f"timestamp(up) > {since}")) == targets
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
    server = Prometheus(
        binary,
        directory / "prometheus.yml",
        f"--storage.tsdb.path={directory}/tsdb",
        "--enable-feature=native-histograms",
    )
    try:
        server.start()
        yield server
    finally:
        server.stop()
