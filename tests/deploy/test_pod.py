"""What is injected: one exporter that Kubernetes can run, beside an engine that cannot tell the difference."""

from __future__ import annotations

import re
import subprocess

import pytest

from manifests import ROOT, Resource, defaults, named, settings, template, tool
from sidestep import __version__
from sidestep.config.settings import SETTINGS

SIDECAR = named(template()["initContainers"], "sidestep")
PLUGIN = named(template()["initContainers"], "sidestep-plugin")
ENGINE = named(template()["containers"], "engine")
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def mebibytes(text: str) -> int:
    """Of a quantity that we write."""
    assert text.endswith("Mi")
    return int(text.removesuffix("Mi"))


def test_every_flag_exists_and_every_value_is_taken() -> None:
    """The manifest's, and those the image has in its environment."""
    config = settings(SIDECAR, defaults())

    assert config.ingest_ipc_group == str(SIDECAR["securityContext"]["runAsGroup"])
    assert config.web_listen_address == (("", SIDECAR["ports"][0]["containerPort"]),)


def test_the_image_sets_settings_that_exist() -> None:
    """A variable with a typing error would say nothing."""
    set_there = set(re.findall(r"\b(SIDESTEP_[A-Z_]+)=", DOCKERFILE))

    assert set_there - {setting.variable for setting in SETTINGS} == set()
    assert {"SIDESTEP_STATE_DIR", "SIDESTEP_WEB_LISTEN_ADDRESS"} < set_there


def test_engine_and_exporter_meet() -> None:
    """At one path, on a volume that both have, in a directory below what everybody may write to."""
    endpoint = named(ENGINE["env"], "SIDESTEP_ENDPOINT")["value"]
    volume = named(template()["volumes"], "sidestep-socket")
    mounts = [named(each["volumeMounts"], "sidestep-socket") for each in (ENGINE, SIDECAR)]

    assert settings(SIDECAR, defaults()).ingest_endpoint == (endpoint,)
    assert mounts[0] == mounts[1]
    below = endpoint.removeprefix(f"ipc://{mounts[0]['mountPath']}/")
    assert below.count("/") == 1
    assert volume["emptyDir"]["medium"] == "Memory"


def test_the_plugin_gets_where_python_looks() -> None:
    """What the one container copies is what the other one mounts and names."""
    source, target = PLUGIN["command"][2:]
    paths = named(ENGINE["env"], "PYTHONPATH")["value"]
    mount = named(ENGINE["volumeMounts"], "sidestep-plugin")

    assert (target, paths) == (PLUGIN["volumeMounts"][0]["mountPath"], mount["mountPath"])
    assert mount["readOnly"]
    assert f"--target {source.removesuffix('/.')} " in DOCKERFILE


def test_state_outlives_the_process_in_memory() -> None:
    """The snapshot lies on a volume that only this container has."""
    mount = named(SIDECAR["volumeMounts"], "sidestep-state")

    assert settings(SIDECAR, defaults()).state_dir.startswith(mount["mountPath"] + "/")
    assert "Memory" in str(named(template()["volumes"], "sidestep-state"))


@pytest.mark.parametrize("container", [SIDECAR, PLUGIN], ids=lambda one: one["name"])
def test_containers_are_hardened(container: Resource) -> None:
    """All that the restricted profile of Kubernetes asks for, and no way to write but volumes."""
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
    """Its CPUs stay pinned: every container has limits, and requests are the same."""
    resources = container["resources"]

    assert set(resources["limits"]) == {"cpu", "memory"}
    assert resources["requests"] == resources["limits"]


def test_the_exporter_stops_growing_before_it_is_killed() -> None:
    """A quarter is left between its own limit and the container's, less what its volumes hold."""
    config = settings(SIDECAR, defaults())
    limit = mebibytes(SIDECAR["resources"]["limits"]["memory"])

    assert config.limits_memory_soft < config.limits_memory_hard <= limit * 3 / 4


def test_it_starts_before_the_engine_and_ends_after_it() -> None:
    """A native sidecar, looked after by all three probes, that waits for one more scrape."""
    probes = {
        name: SIDECAR[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")
    }

    assert SIDECAR["restartPolicy"] == "Always"
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/-/ready",
        "readiness": "/-/ready",
        "liveness": "/-/healthy",
    }
    assert {probe["port"] for probe in probes.values()} == {SIDECAR["ports"][0]["name"]}
    # Kubernetes' own 30 s are enough where the engine takes half of them.
    assert int(SIDECAR["lifecycle"]["preStop"]["exec"]["command"][1]) in range(15, 25)


def test_images_are_this_release() -> None:
    """Neither latest nor another one."""
    images = {SIDECAR["image"], PLUGIN["image"]}

    assert images == {f"sidestep:{__version__}"}
    assert f"ARG VERSION={__version__}\n" in DOCKERFILE


def test_hadolint_has_nothing_to_say() -> None:
    """All its rules."""
    done = subprocess.run(
        [tool("hadolint"), ROOT / "deploy" / "Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "")
