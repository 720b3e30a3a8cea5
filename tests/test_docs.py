"""Documents: generated ones are current, and every name in them exists."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from tools import docs

from boards import family
from sidestep.catalog.buckets import DEFAULTS
from sidestep.engines.common_names import TOKEN_TYPE
from sidestep.engines.dialects import DIALECTS
from sidestep.telemetry.rows import BY_NAME

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FAMILIES = {
    row.name for one in DIALECTS.values() for row in (*one.rows, *one.common_rows)
} | BY_NAME.keys()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_modules_that_exist(path: Path) -> None:
    """A guide leads to a file: a path to a module is the end of one in the repository."""
    named = set(re.findall(r"`([\w./-]+\.py)`", path.read_text()))
    tops = ("exporter", "adapters", "tests", "tools", "benchmarks", "chaos", "fuzz")
    modules = [f"/{file}" for top in tops for file in (ROOT / top).rglob("*.py")]

    assert {name for name in named if not any(m.endswith(f"/{name}") for m in modules)} == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_families_that_exist(path: Path) -> None:
    """Every name that looks like a metric is one, or the beginning of one."""
    text = path.read_text()
    found = re.findall(r"\b(?:vllm:|sglang:|gen_ai_|nv_|sidestep_)[a-z0-9_]+", text)
    named = {family(name) for name in found}
    # A document may have a prefix of several names.
    unknown = {
        name for name in named - FAMILIES if not any(family.startswith(name) for family in FAMILIES)
    } - {
        *DEFAULTS,
        TOKEN_TYPE,
        "sidestep_adapters",
        "sidestep_tools",
    }

    assert unknown == set()


def test_no_text_installs_the_package_by_its_name() -> None:
    """No index has it: texts install a clone or a wheel."""
    texts = [*DOCUMENTS, *ROOT.glob("exporter/**/*.py"), *ROOT.glob("adapters/**/*.py")]
    by_name = re.compile(r"pip install (?:-\S+ )*['\"]?sidestep\b|\bsidestep\[\w+\]")

    assert [path for path in texts if by_name.search(path.read_text())] == []


def test_the_readmes_figures_are_those_of_the_table() -> None:
    """README.md has every figure, as it is in the table."""
    measured = (ROOT / "docs" / "performance.md").read_text()
    table = (ROOT / "README.md").read_text().partition(docs.PERFORMANCE)[2].partition(docs.END)[0]
    figures = re.findall(r"(?<=\| )[\d.]+(?= \|)", table)

    assert len(figures) == len(docs.FIGURES) * len(docs.MODES)
    assert all(re.search(rf"(?<![\d.]){each}(?![\d.])", measured) for each in figures)


def undocumented(paths: Iterable[str]) -> list[str]:
    """Return which of the exporter's paths no document names."""
    texts = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    named = [path.replace("{engine:.+}", "ID") for path in paths]
    return [path for path in named if not re.search(rf"{re.escape(path)}(?![\w/-])", texts)]


def test_every_endpoint_is_in_the_documents() -> None:
    """But for the files that the live page loads."""
    tree = ast.parse((ROOT / "exporter" / "sidestep" / "http" / "routes.py").read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    paths = sorted(text for text in texts if isinstance(text, str) and re.match("/[a-z-]", text))

    assert {"/-/healthy", "/api/v1/engines", "/api/v1/engines/{engine:.+}/stack"} <= {*paths}
    assert undocumented(path for path in paths if not path.startswith("/ui/")) == []
    assert undocumented(["/api/v1/orphan", "/api/v1"]) == ["/api/v1/orphan", "/api/v1"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_the_example_configuration_is_valid() -> None:
    """Promtool accepts deploy/prometheus.yml."""
    subprocess.run(
        [str(shutil.which("promtool")), "check", "config", ROOT / "deploy" / "prometheus.yml"],
        check=True,
        capture_output=True,
    )
