"""The components on deployments of other projects, in different kinds and YAML styles."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from injection import assert_injected, built
from manifests import ROOT, Resource, kustomized, pods, template
from schemas import validate

DEPLOYMENTS = ROOT / "tests" / "data" / "deployments"
FILES = sorted(DEPLOYMENTS.iterdir())
KSERVE = {path for path in FILES if path.stem.endswith("inference_service")}
INJECTED = {"Deployment", "StatefulSet", "LeaderWorkerSet"}
OPTIONAL = {"DaemonSet", "Job"}


def is_engine(one: Resource) -> bool:
    """Return whether a resource is to be injected, by its label or its kind."""
    said: str | None = one["metadata"].get("labels", {}).get("sidestep/inject")
    return (
        said == "true" if one["kind"] in OPTIONAL else one["kind"] in INJECTED and said != "false"
    )


def plain(directory: Path, file: Path) -> list[Resource]:
    """Render a file's resources without a component."""
    (directory / "kustomization.yaml").write_text(f"resources: [{file.name}]\n")
    return kustomized(directory)


def plain_and_injected(
    directory: Path, file: Path, component: str
) -> tuple[list[Resource], list[Resource]]:
    """Render a file's resources without and with the component."""
    shutil.copy(file, directory)
    return plain(directory, file), built(directory, component, file.name)


@pytest.mark.parametrize(
    "file", [one for one in FILES if one not in KSERVE], ids=lambda path: path.stem
)
def test_only_engines_are_changed(file: Path, tmp_path: Path) -> None:
    """Every engine gets all of the component; other resources and fields stay unchanged."""
    before, after = plain_and_injected(tmp_path, file, "component")
    whole = template()

    assert len(before) == len(after)
    for was, now in zip(before, after, strict=True):
        assert {**was, "spec": None} == {**now, "spec": None}
        if is_engine(was) and any(pods(was)):
            assert_injected(was, now, whole)
        else:
            assert was == now
    assert any(is_engine(one) and any(pods(one)) for one in after)


@pytest.mark.parametrize("file", sorted(KSERVE), ids=lambda path: path.stem)
def test_kserve_services_are_injected(file: Path, tmp_path: Path) -> None:
    """KServe's services get the same by a component of their own."""
    before, after = plain_and_injected(tmp_path, file, "kserve")
    whole = template()

    for was, now in zip(before, after, strict=True):
        assert_injected(was, now, whole)


@pytest.mark.parametrize("labelled", ["prefill", "worker"])
def test_templates_without_a_label_are_named_as_skipped(labelled: str, tmp_path: Path) -> None:
    """A service names in its annotations which of prefill and worker have no sidecar, and the label that adds it."""
    (skipped,) = {"prefill", "worker"} - {labelled}
    file = tmp_path / "llm.yaml"
    text = (DEPLOYMENTS / "llm_inference_service.yaml").read_text()
    file.write_text(text.replace(f'sidestep/{skipped}: "true"', 'team: "a"'))
    (was,), (now,) = plain(tmp_path, file), built(tmp_path, "kserve", file.name)

    assert now["spec"][skipped] == was["spec"][skipped]
    assert now["spec"][labelled] != was["spec"][labelled]
    (annotation,) = now["metadata"]["annotations"].items()
    assert annotation[0] == f"sidestep/{skipped}"
    assert f'label this service sidestep/{skipped}: "true"' in annotation[1]


def test_injected_resources_are_valid(tmp_path: Path) -> None:
    """Injected resources are valid by the schemas of Kubernetes and the operators."""
    found: list[Resource] = []
    for file in FILES:
        directory = tmp_path / file.stem
        directory.mkdir()
        component = "kserve" if file in KSERVE else "component"
        found += plain_and_injected(directory, file, component)[1]

    validate(found, tmp_path)
