"""The Helm charts, rendered with Go's templates."""

from __future__ import annotations

import subprocess
from pathlib import Path

from manifests import ROOT, Resource, resources, tool

CHARTS = ROOT / "deploy" / "helm"
LIBRARY = CHARTS / "sidestep-lib"
CHART = CHARTS / "sidestep"
ENGINE = ROOT / "tests" / "data" / "charts" / "engine"
VALUES = sorted(CHART.glob("ci/*-values.yaml"))
"""Values of the chart with all of its options."""


def rendered(
    chart: Path, *values: Path, library: Path | None = None, name: str = "release"
) -> list[Resource]:
    """Render a chart as Helm does."""
    more = [f"-name={name}", *([f"-library={library}"] if library else [])]
    done = subprocess.run(
        [tool("helm-render"), *more, chart, *values], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return resources(done.stdout)
