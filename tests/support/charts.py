"""The Helm charts, rendered with Go's templates."""

from __future__ import annotations

import subprocess
from pathlib import Path

from manifests import ROOT, Resource, tool
from sidestep.config.yaml_reader import read_documents

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
    # Flux and Argo CD pass charts through kustomize, which refuses duplicate keys, as this reader does.
    return [one for one in read_documents(done.stdout) if one]
