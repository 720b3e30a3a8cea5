"""The files that ``make dist`` builds without root, and the one place of the version."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml
from click import Context
from tools.dist import notes
from tools.dist.release import ROOT

from sidestep import __version__
from sidestep.app.cli import cli
from sidestep.config.settings import SETTINGS

PARTS = ("packages", "charts", "kustomize", "dashboards", "man", "notes")
PLACE = ROOT / "exporter" / "sidestep" / "__init__.py"
DECLARED = re.compile(r"sidestep|version|tag", re.IGNORECASE)
"""Words of a line in which a version may be sidestep's."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the directories of two builds that do not run at the same time."""
    found = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    for folder in found:
        command: list[str | Path] = [sys.executable, "-m", "tools.dist", *PARTS, "--into", folder]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return found


@pytest.fixture(scope="module")
def dist(built: tuple[Path, Path]) -> Path:
    """Return the directory of a build."""
    return built[0]


def unpacked(dist: Path, name: str) -> dict[str, str]:
    """Return the texts of an archive by their names in it."""
    with tarfile.open(dist / name) as tar:
        return {
            one.name: found.read().decode()
            for one in tar
            if (found := tar.extractfile(one)) and not one.name.endswith((".png", ".gz"))
        }


def tracked() -> list[Path]:
    """Return the files that git tracks."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    return [ROOT / name for name in listed.rstrip("\0").split("\0")]


def repeats(version: str, text: str) -> bool:
    """Return whether a line of a text declares this version of sidestep."""
    number = re.compile(rf"(?<![\w.]){re.escape(version)}(?![\w.]*\w)")
    return any(
        number.search(line) and DECLARED.search(line) and "openmetrics" not in line
        for line in text.splitlines()
    )


def test_the_version_is_in_one_place() -> None:
    """Charts, manifests, the Dockerfile and documents have placeholders, which a release fills in."""
    others = [
        path
        for path in tracked()
        if path.is_file()
        and not path.is_relative_to(ROOT / "tests")
        and path.name != "CHANGELOG.md"
        and path.suffix not in (".gz", ".png", ".woff2")
    ]

    assert [path for path in others if repeats(__version__, path.read_text())] == [PLACE]
    assert repeats("1.0.0", "  tag: 1.0.0")
    assert repeats("1.0.0", "docker build -t sidestep:1.0.0 .")
    assert not repeats("1.0.0", "version: 11.0.0 or 1.0.0.1")


def test_two_builds_are_equal(built: tuple[Path, Path]) -> None:
    """Every file has the same bytes."""
    first, second = ({path.name: path.read_bytes() for path in each.iterdir()} for each in built)

    assert first == second
    assert len(first) == 9


def test_the_sums_are_right(dist: Path) -> None:
    """SHA256SUMS lists every other file."""
    sums = dict(line.split("  ")[::-1] for line in (dist / "SHA256SUMS").read_text().splitlines())

    assert sums == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in dist.iterdir()
        if path.name != "SHA256SUMS"
    }


def test_the_wheel_has_the_packages(dist: Path) -> None:
    """All modules and data that git tracks are in it, and nothing else; its metadata has the version."""
    with zipfile.ZipFile(dist / f"sidestep-{__version__}-py3-none-any.whl") as wheel:
        info = f"sidestep-{__version__}.dist-info"
        names = {name for name in wheel.namelist() if not name.startswith(info)}
        metadata = message_from_bytes(wheel.read(f"{info}/METADATA"))
        entries = wheel.read(f"{info}/entry_points.txt").decode()
    folders = ROOT / "exporter", ROOT / "adapters"

    assert names == {
        path.relative_to(folder).as_posix()
        for path in tracked()
        for folder in folders
        if path.is_relative_to(folder)
    }
    assert (metadata["Name"], metadata["Version"]) == ("sidestep", __version__)
    assert "vllm.stat_logger_plugins" in entries


def test_the_source_distribution_has_what_git_tracks(dist: Path) -> None:
    """The archive has no other files but its metadata."""
    with tarfile.open(dist / f"sidestep-{__version__}.tar.gz") as tar:
        names = {one.name.partition("/")[2] for one in tar}

    wanted = {path.relative_to(ROOT).as_posix() for path in tracked()}
    assert names - wanted == {"PKG-INFO"}
    assert {"pyproject.toml", "Makefile", "tests/conftest.py"} <= names


@pytest.mark.parametrize("chart", ["sidestep", "sidestep-lib"])
def test_charts_have_the_version(dist: Path, chart: str) -> None:
    """Charts name this release and its image, and have a README."""
    files = unpacked(dist, f"{chart}-{__version__}.tgz")
    described = yaml.safe_load(files[f"{chart}/Chart.yaml"])
    image = yaml.safe_load(files[f"{chart}/values.yaml"]).get("image", {"tag": __version__})

    assert {described["version"], described["appVersion"], image["tag"]} == {__version__}
    assert chart in files[f"{chart}/README.md"]
    assert ("sidestep/templates/NOTES.txt" in files) is (described["type"] == "application")
    assert not any("/ci/" in name for name in files)


def test_manifests_have_the_version(dist: Path) -> None:
    """All components run the release's image."""
    files = unpacked(dist, f"sidestep-kustomize-{__version__}.tar.gz")
    images = {
        tag
        for text in files.values()
        for tag in re.findall(r"\bsidestep:([\w.]+)$", text, re.MULTILINE)
    }

    assert images == {__version__}
    assert f"sidestep-kustomize-{__version__}/kustomize/component/kustomization.yaml" in files


def test_dashboards_and_rules_are_complete(dist: Path) -> None:
    """Each is as it is in the repository."""
    files = unpacked(dist, f"sidestep-dashboards-and-rules-{__version__}.tar.gz")
    wanted = [*ROOT.glob("grafana/**/*.json"), *ROOT.glob("deploy/rules/*.yaml")]

    assert sorted(files.values()) == sorted(path.read_text() for path in wanted)


def test_the_man_page_has_every_command_and_flag(dist: Path) -> None:
    """The man page has the release in its footer."""
    name = f"sidestep-man-and-completions-{__version__}"
    page = unpacked(dist, f"{name}.tar.gz")[f"{name}/man/sidestep.1"].replace("\\-", "-")

    assert f'"sidestep {__version__}"' in page.splitlines()[0]
    for command in cli.list_commands(Context(cli)):
        assert f".SS {command}\n" in page
    for setting in SETTINGS:
        assert page.count(f"--{setting.usage}\\fR\n") == 1


@pytest.mark.skipif(shutil.which("man") is None, reason="man-db is not installed")
def test_the_man_page_is_rendered_without_a_warning(dist: Path) -> None:
    """Roff knows every command in it, and no line of text was taken for one."""
    name = f"sidestep-man-and-completions-{__version__}"
    page = unpacked(dist, f"{name}.tar.gz")[f"{name}/man/sidestep.1"]
    command = ["man", "--warnings=w", "--local-file", "--encoding=UTF-8", "-"]
    done = subprocess.run(command, input=page, capture_output=True, text=True, check=True)

    assert done.stderr == ""
    assert "--ingest.endpoint" in re.sub(".\b", "", done.stdout)


@pytest.mark.parametrize(
    ("shell", "name"), [("bash", "sidestep"), ("zsh", "_sidestep"), ("fish", "sidestep.fish")]
)
def test_shells_accept_the_completions(dist: Path, shell: str, name: str) -> None:
    """Each parses its own."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    folder = f"sidestep-man-and-completions-{__version__}"
    text = unpacked(dist, f"{folder}.tar.gz")[f"{folder}/completions/{name}"]
    subprocess.run([shell, "-n"], input=text, text=True, check=True)

    assert "_SIDESTEP_COMPLETE" in text


def test_notes_are_those_of_the_version(tmp_path: Path) -> None:
    """A version without a section has the newest, and the heading says so."""
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(
        "# Changelog\n\n## 1.1.0 - 2026-12-01\n\n### Added\n\n- B.\n\n## 1.0.0\n\nA.\n"
    )

    assert notes.release_notes(changelog, "1.1.0") == "# sidestep 1.1.0\n\n### Added\n\n- B.\n"
    assert notes.release_notes(changelog, "1.0.0") == "# sidestep 1.0.0\n\nA.\n"
    assert notes.release_notes(changelog, "0.9").startswith("# sidestep 0.9, before 1.1.0\n")


def test_another_tag_is_refused() -> None:
    """The release's workflow ends before anything is built."""
    command = [sys.executable, "-m", "tools.dist", "--tag", "v0.0.1"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 1
    assert done.stderr == f"v0.0.1 is not the tag of this release: v{__version__}\n"
