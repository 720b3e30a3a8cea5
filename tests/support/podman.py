"""Arguments of podman for a container of a pod, without a registry: images are unpacked folders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Resource = dict[str, Any]
CONF = """
[containers]
default_ulimits = []
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
"""
"""Without ulimits, which root may lack the capability to raise; crun fails where both versions of cgroups are mounted."""
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


@dataclasses.dataclass(frozen=True)
class Image:
    """An unpacked image.

    Attributes:
        mounts: Host paths of further files, and where the containers have them.
        folder: Working directory.
    """

    root: Path
    environ: Sequence[str]
    entrypoint: Sequence[str]
    command: Sequence[str]
    user: str
    mounts: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    folder: str = "/"


def options(container: Resource, pod: Resource, fields: Mapping[str, str]) -> Iterator[str]:
    """Yield the options that follow from the manifest: limits, privileges and variables.

    ``fields`` are the values of the downward API.
    """
    own = container.get("securityContext", {})
    limits = container.get("resources", {}).get("limits", {})
    for group in pod.get("securityContext", {}).get("supplementalGroups", []):
        yield f"--group-add={group}"
    if own.get("readOnlyRootFilesystem"):
        yield "--read-only"
    for name in own.get("capabilities", {}).get("drop", []):
        yield f"--cap-drop={name}"
    if own.get("allowPrivilegeEscalation") is False:
        yield "--security-opt=no-new-privileges"
    if "memory" in limits:
        memory = int(quantity(limits["memory"]))
        yield from (f"--memory={memory}", f"--memory-swap={memory}")
    if "cpu" in limits:
        yield f"--cpus={quantity(limits['cpu']):g}"
    for variable in container.get("env", []):
        value = variable.get("value")
        if value is None:
            value = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        yield f"--env={variable['name']}={value}"


def arguments(container: Resource, image: Image) -> Iterator[str]:
    """Yield the rest of the command line: what the image has, its root, and the command in it."""
    own = container.get("securityContext", {})
    user, _, group = image.user.partition(":")
    yield f"--user={own.get('runAsUser', user)}:{own.get('runAsGroup', group)}"
    yield from ("--no-hosts", "--http-proxy=false", "--log-driver=passthrough")
    yield from ("--read-only-tmpfs=false", f"--workdir={image.folder}")
    named = {variable["name"] for variable in container.get("env", [])}
    for pair in image.environ:
        if pair.partition("=")[0] not in named:
            yield f"--env={pair}"
    for path, target in image.mounts.items():
        yield f"--volume={path}:{target}"
    yield from ("--rootfs", str(image.root), *container.get("command", image.entrypoint))
    yield from container.get("args", [] if "command" in container else image.command)


def quantity(text: str) -> float:
    """Return the number of a quantity such as 250m or 64Mi."""
    if text.endswith("m"):
        return float(text[:-1]) / 1000
    return float(text[:-2]) * UNITS[text[-2:]] if text[-2:] in UNITS else float(text)
