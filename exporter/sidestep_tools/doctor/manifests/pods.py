"""Pods of manifests: of any kind of resource that has a pod's specification, with the containers' roles."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import msgspec

from sidestep.config.settings import CONFIG_FILE, SETTINGS, Config, read
from sidestep.config.variables import PREFIX
from sidestep.diagnosis.finding import Finding
from sidestep.errors import ConfigError
from sidestep_tools.doctor.manifests.reading import UNREADABLE, Resource, mapping, mappings

IMAGE = "sidestep"
IMAGE_DEFAULTS = {
    "SIDESTEP_WEB_LISTEN_ADDRESS": ":9857",
    "SIDESTEP_INGEST_ENDPOINT": "ipc:///run/sidestep/ingest/ingest.ipc",
    "SIDESTEP_STATE_DIR": "/var/lib/sidestep/state",
}
"""Variables that deploy/Dockerfile sets."""
IMAGE_USER = 65532
"""User and group of the exporter's image."""
KINDS_OF_KUBERNETES = {
    "CronJob", "DaemonSet", "Deployment", "Job", "Pod", "ReplicaSet", "StatefulSet",
}  # fmt: skip
"""Kinds whose pods have the labels of their template; operators add labels of their own."""
ENDPOINT = "SIDESTEP_ENDPOINT"
IPC, TCP = "ipc://", "tcp://"
ENGINES = {
    "vllm": (r"\bvllm serve\b|\bvllm\.entrypoints\b", r"vllm(-openai)?|llm-d-cuda"),
    "sglang": (r"\bsglang\.launch_server\b|\bsglang serve\b", r"sglang"),
    "triton": (r"\btritonserver\b", r"tritonserver"),
}
"""How the command line of an engine and the name of its image are recognised."""
_REFERENCE = re.compile(r"\$\(([\w.-]+)\)")


class _Fields(msgspec.Struct, frozen=True, rename="camel"):
    """Fields that are read; others are ignored."""


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
        """Command and arguments; those of a shell's script one by one."""
        given = [*self.command, *self.args]
        is_script = any(re.fullmatch(r"-\w*c", each) for each in given[:-1])
        return [word for each in given for word in (_split(each) if is_script else [each])]

    @property
    def variables(self) -> dict[str, str]:
        """Variables with a known value."""
        found: dict[str, str] = {}
        for each in self.env:
            if each.value_from is None:
                found[each.name] = _resolved(each.value, found)
        return found

    def has(self, name: str) -> bool:
        """Return whether the variable is set, or may be by a ConfigMap or a Secret."""
        return bool(self.env_from) or any(each.name == name for each in self.env)

    @property
    def image_name(self) -> str:
        """The image without registry and tag."""
        return re.split("[:@]", self.image.rpartition("/")[2])[0]

    @property
    def image_id(self) -> int | None:
        """User and group of the image, if it is known."""
        return IMAGE_USER if self.image_name == IMAGE else None


class Volume(_Fields, frozen=True):
    """A volume of a pod; without any of these sources it is another kind."""

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


class Place(NamedTuple):
    """Where a path of a container is: a mount, its volume, and the path in that."""

    mount: Mount
    volume: str
    path: PurePosixPath

    def is_at(self, other: Place | None) -> bool:
        """Return whether both are the same place."""
        return other is not None and self[1:] == other[1:]


class EngineContainer(NamedTuple):
    """A container that runs an engine.

    Attributes:
        kind: vllm, sglang or triton; empty if only its variables show that it is one.
        is_server: Whether its command line starts the engine's server.
    """

    container: Container
    kind: str
    is_server: bool


class Exporter(NamedTuple):
    """A container that runs ``sidestep serve``.

    Attributes:
        settings: What its flags and variables mean; None if they are refused, or not all in the manifest.
        refusal: Why they are refused, or empty.
    """

    container: Container
    settings: Config | None
    refusal: str = ""

    @property
    def polls(self) -> bool:
        """True if the exporter reads from engines, which then need no plugin."""
        return self.settings is not None and self.settings.has_sources

    @property
    def page_ports(self) -> set[int]:
        """Ports of the metrics page."""
        return {port for _, port in self.settings.web_listen_address} if self.settings else set()

    @property
    def ingest_ports(self) -> set[int]:
        """Ports of its tcp endpoints."""
        endpoints = self.settings.ingest_endpoint if self.settings else ()
        ports = [each.rpartition(":")[2] for each in endpoints if each.startswith(TCP)]
        return {int(each) for each in ports if each.isdecimal()}


@dataclass(frozen=True)
class Pod:
    """A pod of a resource.

    Attributes:
        subject: File, kind and name of the resource, for findings.
        labels: Labels of the template.
        has_more_labels: Whether an operator adds labels.
        is_exempt: Whether a label says that it runs no engine.
    """

    subject: str
    namespace: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    has_more_labels: bool
    is_exempt: bool
    spec: PodSpec

    @cached_property
    def running(self) -> list[Container]:
        """Sidecars and containers, in the order of their start."""
        sidecars = [
            each
            for each in self.spec.init_containers
            if each.restart_policy == "Always" or _exporter(each)
        ]
        return [*sidecars, *self.spec.containers]

    @cached_property
    def exporters(self) -> list[Exporter]:
        """Containers that run ``sidestep serve``."""
        return [found for each in self.running if (found := _exporter(each))]

    @cached_property
    def engines(self) -> list[EngineContainer]:
        """Containers that run an engine."""
        others = [each for each in self.running if not (_exporter(each) or self.is_exempt)]
        return [found for each in others if (found := _engine(each))]

    def part(self, container: Container) -> str:
        """Return what findings call a container."""
        return f"{self.subject}, container {container.name}"

    def volume(self, found: Place | None) -> Volume | None:
        """Return the volume of a place; None if the manifest does not have it."""
        name = found and found.volume
        return next((each for each in self.spec.volumes if each.name == name), None)

    def user(self, container: Container) -> int | None:
        """Return the user of a container; None if its image decides."""
        own, pod = container.security_context, self.spec.security_context
        return _first(own.run_as_user, pod.run_as_user, container.image_id)

    def groups(self, container: Container) -> set[int | None]:
        """Return the known groups of a container."""
        own, pod = container.security_context, self.spec.security_context
        primary = _first(own.run_as_group, pod.run_as_group, container.image_id)
        return {primary, pod.fs_group, *pod.supplemental_groups}


def place(container: Container, path: str) -> Place | None:
    """Return where a path of a container is; None if it is on no volume."""
    found = [
        Place(each, each.name, PurePosixPath(each.sub_path, wanted.relative_to(each.mount_path)))
        for each in container.volume_mounts
        if (wanted := PurePosixPath(path)).is_relative_to(each.mount_path)
    ]
    return max(found, key=lambda each: len(each.mount.mount_path), default=None)


def _first(*ids: int | None) -> int | None:
    return next((each for each in ids if each is not None), None)


def find(resources: Iterable[Resource]) -> Iterator[Pod | Finding]:
    """Yield the pods of all resources, and what of them cannot be read.

    Of the pods and replica sets of one owner, only the owner is read if it is among the resources, else the first.
    """
    known = list(resources)
    owners = {(each.namespace, each.kind, str(each.metadata.get("name"))) for each in known}
    for resource in known:
        references = mappings(resource.metadata.get("ownerReferences"))
        keys = {(resource.namespace, str(e.get("kind")), str(e.get("name"))) for e in references}
        if owners.isdisjoint(keys):
            owners |= keys
            try:
                yield from _pods(resource)
            except msgspec.ValidationError as error:
                yield UNREADABLE.on(resource.subject, str(error))


def _pods(resource: Resource) -> list[Pod]:
    found = list(_specifications(resource.value, (), {}))
    return [
        Pod(
            subject=" ".join((resource.subject, *path[-1:] * (len(found) > 1))),
            namespace=resource.namespace,
            labels=msgspec.convert(metadata.get("labels", {}), dict[str, str]),
            annotations=msgspec.convert(metadata.get("annotations", {}), dict[str, str]),
            has_more_labels=resource.kind not in KINDS_OF_KUBERNETES,
            is_exempt=mapping(resource.metadata.get("labels")).get("sidestep/inject") == "false",
            spec=msgspec.convert(specification, PodSpec),
        )
        for path, specification, metadata in found
    ]


def _specifications(
    value: Mapping[str, Any], path: tuple[str, ...], metadata: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any], Mapping[str, Any]]]:
    """Yield all pods' specifications in a resource, with their distinct keys and their metadata."""
    containers = value.get("containers")
    if isinstance(containers, list) and all(isinstance(each, dict) for each in containers):
        yield path, value, metadata
        return
    for key, child in value.items():
        is_usual = key in ("spec", "template")
        for each in mappings(child) or [mapping(child)]:
            below = path if is_usual else (*path, str(each.get("name", key)))
            yield from _specifications(each, below, mapping(value.get("metadata")))


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _resolved(text: str, variables: Mapping[str, str]) -> str:
    """Replace references to variables; one whose value is unknown becomes any text."""
    return _REFERENCE.sub(lambda match: variables.get(match[1], "x"), text)


def _engine(container: Container) -> EngineContainer | None:
    """Return the engine that a container runs."""
    line, image = " ".join(container.words), container.image_name
    by_line = [kind for kind, (started, _) in ENGINES.items() if re.search(started, line)]
    by_image = [kind for kind, (_, name) in ENGINES.items() if re.fullmatch(name, image)]
    # Without a command the image starts the server; an unknown command may be any program of it.
    is_server = bool(by_line) or (by_image == ["vllm"] and not container.command)
    is_engine = any(each.name == ENDPOINT for each in container.env)
    if is_engine or is_server or (by_image and not container.command):
        return EngineContainer(container, next(iter(by_line + by_image), ""), is_server)
    return None


def _exporter(container: Container) -> Exporter | None:
    """Return the exporter that a container runs, with its settings."""
    words = container.words
    before = [PurePosixPath(each).name for each in takewhile(lambda word: word != "serve", words)]
    is_image = container.image_name.startswith(IMAGE)
    is_ours = not container.command and (is_image or container.name == IMAGE)
    if len(before) == len(words):
        if words or not is_image:
            return None
    elif not (IMAGE in before or is_ours):
        return None
    flags = [
        *takewhile(lambda word: word not in ("&&", "||", ";", "|", "&"), words[len(before) + 1 :])
    ]
    # A container without a command has the image's: it is sidestep's, by whatever name.
    environ = IMAGE_DEFAULTS if is_image or not container.command else {}
    environ = {**environ, **container.variables}
    hidden = [each for each in container.env if each.name.startswith(PREFIX) and each.value_from]
    if hidden or container.env_from or CONFIG_FILE.variable in environ:
        return Exporter(container, None)
    try:
        return Exporter(container, read(_flags(flags, environ), environ))
    except ConfigError as error:
        is_hidden = any(
            "$" in _REFERENCE.sub("", each) or "--config.file" in each for each in flags
        )
        return Exporter(container, None, "" if is_hidden else str(error))


def _flags(words: list[str], variables: Mapping[str, str]) -> dict[str, object]:
    """Return the settings that are given as flags, by key.

    Raises:
        ConfigError: A flag is unknown, or is the file of settings, which no manifest has.
    """
    known = {f"--{setting.flag}": setting for setting in SETTINGS}
    found: dict[str, Any] = {}
    waiting = iter(words)
    for word in waiting:
        name, equals, value = word.partition("=")
        if (setting := known.get(name)) is None:
            raise ConfigError(f"{name}: no such option")
        if setting.metavar and not equals:
            value = next(waiting, "")
        value = _resolved(value, variables)
        if setting.repeatable:
            found.setdefault(setting.key, []).append(value)
        else:
            found[setting.key] = value if setting.metavar else True
    return found
