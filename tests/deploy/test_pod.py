"""The injected containers: a sidecar that Kubernetes can run, and an unchanged engine."""

from __future__ import annotations

import subprocess

import pytest

from manifests import ROOT, Resource, defaults, named, settings, template, tool

SIDECAR = named(template()["initContainers"], "sidestep")
PLUGIN = named(template()["initContainers"], "sidestep-plugin")
ROOM = 192
"""MiB that peers can add until the exporter notices: nearly twice what was measured."""
ENGINE = named(template()["containers"], "engine")
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def mebibytes(text: str) -> int:
    """Parse a quantity in Mi."""
    assert text.endswith("Mi")
    return int(text.removesuffix("Mi"))


def test_flags_and_settings_are_valid() -> None:
    """Flags of the manifest and settings of the image are valid."""
    config = settings(SIDECAR, defaults())

    assert config.ingest_ipc_group == str(SIDECAR["securityContext"]["runAsGroup"])
    assert config.web_listen_address == (("", SIDECAR["ports"][0]["containerPort"]),)


def test_the_plugin_is_on_the_engines_pythonpath() -> None:
    """The engine's PYTHONPATH is the directory into which the init container copies the plugin."""
    source, target = PLUGIN["command"][2:]
    paths = named(ENGINE["env"], "PYTHONPATH")["value"]
    mount = named(ENGINE["volumeMounts"], "sidestep-plugin")

    assert (target, paths) == (PLUGIN["volumeMounts"][0]["mountPath"], mount["mountPath"])
    assert mount["readOnly"]
    assert f"--target {source.removesuffix('/.')} " in DOCKERFILE


@pytest.mark.parametrize("container", [SIDECAR, PLUGIN], ids=lambda one: one["name"])
def test_containers_are_hardened(container: Resource) -> None:
    """Containers fulfil the restricted Pod Security Standard, with a read-only file system."""
    assert container["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert "USER 65532:65532" in DOCKERFILE


@pytest.mark.parametrize("container", [SIDECAR, PLUGIN], ids=lambda one: one["name"])
def test_an_engines_pod_stays_guaranteed(container: Resource) -> None:
    """Requests equal limits, so the pod keeps the QoS class Guaranteed."""
    resources = container["resources"]

    assert set(resources["limits"]) == {"cpu", "memory"}
    assert resources["requests"] == resources["limits"]


def test_the_memory_limit_is_below_the_containers() -> None:
    """The exporter's memory limit leaves the room that floods need until it notices them."""
    config = settings(SIDECAR, defaults())
    limit = mebibytes(SIDECAR["resources"]["limits"]["memory"])

    assert config.limits_memory_soft < config.limits_memory_hard <= limit - ROOM


def test_the_sidecar_starts_before_the_engine_and_ends_after_it() -> None:
    """A native sidecar lingers after SIGTERM for a scrape, at an interval of 15 s."""
    probes = {name: SIDECAR[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness")}

    assert SIDECAR["restartPolicy"] == "Always"
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/-/ready",
        "liveness": "/-/healthy",
    }
    assert {probe["port"] for probe in probes.values()} == {SIDECAR["ports"][0]["name"]}
    # Kubernetes counts a sidecar's readiness for the pod, and runs hooks too early.
    assert not {"lifecycle", "readinessProbe"} & SIDECAR.keys()
    assert settings(SIDECAR, defaults()).shutdown_linger == 16.0


def test_hadolint_finds_nothing() -> None:
    """The Dockerfile follows all rules of hadolint."""
    done = subprocess.run(
        [tool("hadolint"), ROOT / "deploy" / "Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "")
