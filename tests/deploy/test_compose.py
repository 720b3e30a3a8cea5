"""deploy/compose: the demo with Prometheus and Grafana, as far as it can be checked without Docker."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import promtool
from boards import DASHBOARDS
from manifests import ROOT, defaults, tool
from prometheus_server import VERSIONS
from promtool import PROMTOOLS, needs_promtool

COMPOSE = ROOT / "deploy" / "compose"
FILE = COMPOSE / "compose.yaml"
CONFIG = "etc/prometheus/prometheus.yml"
"""Configuration that the image of Prometheus reads, in the container."""
PROVISIONING = "etc/grafana/provisioning"
"""Directory that the image of Grafana reads, in the container."""


def services() -> dict[str, Any]:
    """Return the services of the file."""
    found: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]
    return found


def container(name: str, root: Path) -> Path:
    """Copy what a service mounts into ``root``, at the paths of the container."""
    for volume in services()[name]["volumes"]:
        source, target, mode = volume.split(":")
        assert mode == "ro"
        origin = (COMPOSE / source).resolve()
        copy = root / target.removeprefix("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        if origin.is_dir():
            shutil.copytree(origin, copy)
        else:
            shutil.copyfile(origin, copy)
    return root


def provisioned(root: Path, kind: str) -> list[dict[str, Any]]:
    """Return what Grafana is given of ``kind``."""
    (file,) = (root / PROVISIONING / kind).iterdir()
    content = yaml.safe_load(file.read_text())
    assert content["apiVersion"] == 1
    found: list[dict[str, Any]] = content["providers" if kind == "dashboards" else kind]
    return found


def test_the_file_fits_the_schema() -> None:
    """The compose specification accepts it."""
    command: list[str | Path] = [
        tool("check-jsonschema"),
        "--builtin-schema",
        "vendor.compose-spec",
        FILE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def test_services_are_pinned_checked_and_local() -> None:
    """Every service has an image of one version, a health check, and ports of this host alone."""
    for service in services().values():
        # A release puts its version in the place of dev.
        assert re.fullmatch(r"sidestep:dev|[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
        assert service["healthcheck"]["test"][0] == "CMD"
        assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for port in service["ports"])
        for needed, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}
            assert "healthcheck" in services()[needed]


def test_ports_are_those_that_the_images_listen_on() -> None:
    """The exporter's is that of its image; the scrape and the data source use the same ones."""
    (port,) = services()["sidestep"]["ports"]
    scrape = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"]

    assert port.endswith(defaults()["SIDESTEP_WEB_LISTEN_ADDRESS"])
    assert scrape[0]["static_configs"] == [{"targets": [f"sidestep:{port.split(':')[2]}"]}]
    for name, service in services().items():
        (port,) = service["ports"]
        # The health check asks inside of the container.
        assert f"127.0.0.1:{port.split(':')[2]}/" in " ".join(service["healthcheck"]["test"]), name


def test_grafana_finds_the_dashboards_and_prometheus(tmp_path: Path) -> None:
    """Providers read mounted directories, and the data source is the service Prometheus."""
    root = container("grafana", tmp_path)
    (provider,) = provisioned(root, "dashboards")
    (source,) = provisioned(root, "datasources")
    boards = root / provider["options"]["path"].removeprefix("/")
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    (port,) = services()["prometheus"]["ports"]

    assert [path.name for path in sorted(boards.glob("*.json"))] == [p.name for p in DASHBOARDS]
    assert (root / home.removeprefix("/")).exists()
    assert source["url"] == f"http://prometheus:{port.split(':')[2]}"
    assert (source["type"], source["isDefault"]) == ("prometheus", True)


@needs_promtool
@pytest.mark.parametrize("version", VERSIONS)
def test_promtool_accepts_what_prometheus_reads(version: str, tmp_path: Path) -> None:
    """Configuration and rules are valid where they are mounted, and the rules are found."""
    if PROMTOOLS[version] is None:
        pytest.skip(f"there is no promtool {version}")
    config = container("prometheus", tmp_path) / CONFIG
    checked = promtool.run("check", "config", config, binary=PROMTOOLS[version])
    rules = sorted((config.parent / "rules").iterdir())
    done = promtool.run("check", "rules", *rules, binary=PROMTOOLS[version])

    assert checked.returncode == 0, checked.stderr
    assert f"{len(rules)} rule files found" in checked.stdout
    assert done.returncode == 0, done.stderr
