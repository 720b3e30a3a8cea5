"""Deployments as others have them, in files of their own style: the components fit, and change nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from injection import assert_injected, built
from manifests import ROOT, Resource, kustomized, ours, pods, template
from schemas import validate

DEPLOYMENTS = ROOT / "tests" / "data" / "deployments"
FILES = sorted(DEPLOYMENTS.iterdir())
KSERVE = {path for path in FILES if path.stem.endswith("inference_service")}
OPTIONAL = {"DaemonSet", "Job"}


def engines(one: Resource) -> bool:
    """Whether it says, or is taken to say, that it runs engines."""
    said: str | None = one["metadata"].get("labels", {}).get("sidestep/inject")
    return said == "true" if one["kind"] in OPTIONAL else said != "false"


def alone(directory: Path, file: Path) -> list[Resource]:
    """A file's resources, as kustomize reads them."""
    (directory / "kustomization.yaml").write_text(f"resources: [{file.name}]\n")
    return kustomized(directory)


def applied(directory: Path, file: Path, component: str) -> tuple[list[Resource], list[Resource]]:
    """A file's resources without and with the component."""
    shutil.copy(file, directory)
    return alone(directory, file), built(directory, component, file.name)


@pytest.mark.parametrize("component", ["component", "forward"])
@pytest.mark.parametrize(
    "file", [one for one in FILES if one not in KSERVE], ids=lambda path: path.stem
)
def test_engines_get_all_of_it_and_all_else_stays(
    file: Path, component: str, tmp_path: Path
) -> None:
    """Whatever kind, names, quotes and order there are."""
    before, after = applied(tmp_path, file, component)
    whole = template(component)

    assert len(before) == len(after)
    for was, now in zip(before, after, strict=True):
        assert {**was, "spec": None} == {**now, "spec": None}
        if engines(was) and any(pods(was)):
            assert_injected(was, now, whole)
        else:
            assert was == now
    assert any(engines(one) and any(pods(one)) for one in after)


@pytest.mark.parametrize("file", sorted(KSERVE), ids=lambda path: path.stem)
def test_kserves_services_as_well(file: Path, tmp_path: Path) -> None:
    """By the component that is for them; KServe makes pods of it."""
    before, after = applied(tmp_path, file, "kserve")
    whole = template()

    for was, now in zip(before, after, strict=True):
        assert_injected(was, now, whole)


@pytest.mark.parametrize("component", ["component", "forward"])
def test_schemas_allow_what_comes_out(component: str, tmp_path: Path) -> None:
    """Kubernetes', strictly, and those of the operators that there are."""
    found: list[Resource] = []
    for file in FILES:
        directory = tmp_path / file.stem
        directory.mkdir()
        found += applied(directory, file, "kserve" if file in KSERVE else component)[1]

    validate(found, tmp_path)


def test_images_and_prefixes_reach_what_is_injected(tmp_path: Path) -> None:
    """By the same lines as for anything else in a kustomization, whatever kind it is."""
    for name, component in (
        ("leader_and_workers.yaml", "forward"),
        ("inference_service.yaml", "kserve"),
    ):
        directory = tmp_path / component
        directory.mkdir()
        shutil.copy(DEPLOYMENTS / name, directory)
        built(directory, component, name)
        with (directory / "kustomization.yaml").open("a") as file:
            file.write(
                "images: [{name: sidestep, newName: registry.example/ours, digest: sha256:1}]\n"
            )
            file.write("namespace: llm\nnamePrefix: a-\n")
        (after,) = kustomized(directory)

        assert (after["metadata"]["name"][:2], after["metadata"]["namespace"]) == ("a-", "llm")
        for _, pod in pods(after):
            found = {one["image"] for one in pod["initContainers"] if ours(one)}
            assert found == {"registry.example/ours@sha256:1"}


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("workers_only.yaml", ", sidestep/leader: none", ""),
        ("leader_and_workers.yaml", "maxSurge: 1", "maxSurges: 1"),
        ("leader_and_workers.yaml", "size: 2", 'size: "2"'),
        ("inference_service.yaml", "minReplicas: 1", "minReplica: 1"),
        ("inference_service.yaml", "maxReplicas: 4", "maxReplicas: many"),
        ("llm_inference_service.yaml", "tolerations:", "toleration:"),
        ("many.yaml", "[{port: metrics}]", "[{port: 8000}]"),
        ("per_pod_claims.yaml", "hostIPC: true", "hostIpc: true"),
    ],
)
def test_schemas_refuse_what_the_api_server_would(
    file: str, right: str, wrong: str, tmp_path: Path
) -> None:
    """A leader without a template that does not say so, and typing errors in all kinds that have a schema."""
    text = (DEPLOYMENTS / file).read_text()
    assert right in text
    given = tmp_path / file
    given.write_text(text.replace(right, wrong))
    component = "kserve" if DEPLOYMENTS / file in KSERVE else "component"
    found = built(tmp_path, component, file)

    with pytest.raises(AssertionError):
        validate(found, tmp_path)
