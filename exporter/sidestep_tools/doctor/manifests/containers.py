"""Containers and volumes of a pod, as far as the checks of manifests read them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import msgspec

from sidestep.transport.addresses import IPC

IMAGE, IMAGE_USER = "sidestep", 65532
"""The exporter's image, and its user and group."""
_REFERENCE = re.compile(r"\$\(([\w.-]+)\)")


class _Fields(msgspec.Struct, frozen=True, rename="camel"):
    """Object of a manifest; fields without an attribute are ignored."""


class Variable(_Fields, frozen=True):
    """An environment variable."""

    name: str
    value: str = ""
    value_from: dict[str, Any] | None = None


class Port(_Fields, frozen=True):
    """A declared port."""

    container_port: int
    name: str = ""


class Mount(_Fields, frozen=True):
    """A volume in a container."""

    name: str
    mount_path: str
    sub_path: str = ""
    read_only: bool = False


@dataclass(frozen=True)
class Place:
    """A path in a volume; it is the same in all containers that mount the volume."""

    volume: str
    path: PurePosixPath
    mount: Mount = field(compare=False)


class HttpGet(_Fields, frozen=True):
    """A request of a probe."""

    port: int | str
    path: str = "/"


class Probe(_Fields, frozen=True):
    """A probe."""

    http_get: HttpGet | None = None
    period_seconds: int = 10
    failure_threshold: int = 3


class SecurityContext(_Fields, frozen=True):
    """Users and groups of a pod or of a container."""

    run_as_user: int | None = None
    run_as_group: int | None = None
    fs_group: int | None = None
    supplemental_groups: list[int] = []
    read_only_root_filesystem: bool = False


class Container(_Fields, frozen=True):
    """A container."""

    name: str = ""
    image: str = ""
    command: list[str] = []
    args: list[str] = []
    restart_policy: str = ""
    env: list[Variable] = []
    env_from: list[dict[str, Any]] = []
    ports: list[Port] = []
    volume_mounts: list[Mount] = []
    startup_probe: Probe | None = None
    liveness_probe: Probe | None = None
    readiness_probe: Probe | None = None
    security_context: SecurityContext = SecurityContext()
    resources: dict[str, dict[str, Any]] = {}

    @property
    def words(self) -> list[str]:
        """Command and arguments; a shell's script is split into words."""
        given = [*self.command, *self.args]
        is_script = any(re.fullmatch(r"-\w*c", each) for each in given[:-1])
        return [word for each in given for word in (_split(each) if is_script else [each])]

    @property
    def variables(self) -> dict[str, str]:
        """Variables with a known value."""
        found: dict[str, str] = {}
        for each in self.env:
            if each.value_from is None:
                found[each.name] = resolved(each.value, found)
        return found

    def place(self, path: str) -> Place | None:
        """Return the place of a path or an ipc endpoint; None if it is on no volume."""
        wanted = PurePosixPath(path.removeprefix(IPC))
        found = [
            Place(
                each.name, PurePosixPath(each.sub_path, wanted.relative_to(each.mount_path)), each
            )
            for each in self.volume_mounts
            if wanted.is_relative_to(each.mount_path)
        ]
        return max(found, key=lambda each: len(each.mount.mount_path), default=None)

    @property
    def image_name(self) -> str:
        """The image without registry and tag."""
        return re.split("[:@]", self.image.rpartition("/")[2])[0]

    @property
    def image_id(self) -> int | None:
        """User and group of the image, if it is known."""
        return IMAGE_USER if self.image_name == IMAGE else None


class Volume(_Fields, frozen=True):
    """A volume of a pod; without any of these sources it is of another kind."""

    name: str
    empty_dir: dict[str, Any] | None = None
    host_path: dict[str, Any] | None = None
    persistent_volume_claim: dict[str, Any] | None = None


class PodSpec(_Fields, frozen=True):
    """The specification of a pod."""

    containers: list[Container]
    init_containers: list[Container] = []
    volumes: list[Volume] = []
    security_context: SecurityContext = SecurityContext()
    termination_grace_period_seconds: int = 30


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def resolved(text: str, variables: Mapping[str, str]) -> str:
    """Replace references to variables; an unknown variable becomes the text ``x``."""
    return _REFERENCE.sub(lambda match: variables.get(match[1], "x"), text)
