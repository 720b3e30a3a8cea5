"""Pods of manifests: of any kind of resource that has a pod's specification, with the containers' roles."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import msgspec

from sidestep.config.settings import CONFIG_FILE, SETTINGS, Config, read
from sidestep.diagnosis.finding import Finding
from sidestep.doctor.manifests.reading import UNREADABLE, Resource, mapping
from sidestep.errors import ConfigError

IMAGE_DEFAULTS = {
    "SIDESTEP_WEB_LISTEN_ADDRESS": ":9857",
    "SIDESTEP_INGEST_ENDPOINT": "ipc:///run/sidestep/ingest/ingest.ipc",
    "SIDESTEP_STATE_DIR": "/var/lib/sidestep/state",
}
"""Variables that deploy/Dockerfile sets."""
IMAGE_USER = 65532
"""User and group of the exporter's image."""
KINDS_OF_KUBERNETES = {
    "CronJob", "DaemonSet", "Deployment", "Job", "Pod", "ReplicaSet", "ReplicationController", "StatefulSet",
}  # fmt: skip
"""Kinds whose pods have the labels of their template; operators add labels of their own."""
ENDPOINT = "SIDESTEP_ENDPOINT"
IPC = "ipc://"
_STARTED = {
    "vllm": re.compile(r"\bvllm serve\b|\bvllm\.entrypoints\b"),
    "sglang": re.compile(r"\bsglang\.launch_server\b|\bsglang serve\b"),
    "triton": re.compile(r"\btritonserver\b"),
}
_IMAGES = {
    "vllm": re.compile(r"vllm(-openai)?|llm-d-cuda"),
    "sglang": re.compile(r"sglang"),
    "triton": re.compile(r"tritonserver"),
}


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
    """Of a pod or of a container."""

    run_as_user: int | None = None
    run_as_group: int | None = None
    fs_group: int | None = None
    supplemental_groups: list[int] = []
    read_only_root_filesystem: bool = False


class Resources(_Fields, frozen=True):
    """Limits of a container."""

    limits: dict[str, str | int | float] = {}


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
    resources: Resources = Resources()

    @property
    def words(self) -> list[str]:
        """Command and arguments; those of a shell's string one by one."""
        given = [*self.command, *self.args]
        script = any(re.fullmatch(r"-\w*c", each) for each in given[:-1])
        return [word for each in given for word in (_split(each) if script else [each])]

    @property
    def variables(self) -> dict[str, str]:
        """Variables with a known value, references to others resolved."""
        found: dict[str, str] = {}
        for each in self.env:
            if each.value_from is None:
                found[each.name] = re.sub(
                    r"\$\(([\w.-]+)\)", lambda match: found.get(match[1], "x"), each.value
                )
        return found

    def has(self, name: str) -> bool:
        """Return whether the variable is set, or may be by a ConfigMap or a Secret."""
        return bool(self.env_from) or any(each.name == name for each in self.env)

    @property
    def image_name(self) -> str:
        """The image without registry and tag."""
        return re.split("[:@]", self.image.rpartition("/")[2])[0]


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
    host_network: bool = False
    termination_grace_period_seconds: int = 30


class Location(NamedTuple):
    """Where a path of a container is: a volume, and the path in it."""

    volume: str
    path: PurePosixPath
    read_only: bool

    def is_at(self, other: Location | None) -> bool:
        """Return whether both are the same place."""
        return other is not None and self[:2] == other[:2]


@dataclass(frozen=True)
class Exporter:
    """A container that runs ``sidestep serve``.

    Attributes:
        flags: Its arguments after ``serve``.
        settings: What they mean; None if a file or another resource has some of them, or if they are refused.
        refusal: Why they are refused, or empty.
    """

    container: Container
    flags: list[str]
    settings: Config | None = None
    refusal: str = ""

    @property
    def polls(self) -> bool:
        """Whether it reads from engines, which then need no plugin."""
        found = self.settings
        return found is None or bool(found.triton or found.scrape or found.subscribe)

    @property
    def page_ports(self) -> set[int]:
        """Ports of the metrics page."""
        return {port for _, port in self.settings.web_listen_address} if self.settings else set()


@dataclass(frozen=True)
class Pod:
    """A pod of a resource.

    Attributes:
        subject: File, kind and name of the resource, for findings.
        labels: Labels of the template.
        own_labels: Whether the pods have these labels only; operators add some.
        is_exempt: Whether a label says that it has no engine.
        replicas: How many there are; 1 if the manifest does not say.
        claims: Names of the volumes of which each pod has its own claim.
    """

    subject: str
    kind: str
    namespace: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    own_labels: bool
    is_exempt: bool
    replicas: int
    claims: frozenset[str]
    spec: PodSpec

    @cached_property
    def exporters(self) -> list[Exporter]:
        """Containers that run ``sidestep serve``."""
        found = [_exporter(each) for each in self.running]
        return [each for each in found if each is not None]

    @cached_property
    def engines(self) -> dict[str, tuple[Container, str]]:
        """Containers that run an engine, by name, with the engine's kind or an empty text."""
        ours = [each.container for each in self.exporters]
        return {
            each.name: (each, kind)
            for each in self.running
            if each not in ours and not self.is_exempt and (kind := _engine(each)) is not None
        }

    @property
    def running(self) -> list[Container]:
        """Containers, and init containers that do not have to end before they start."""
        sidecars = [
            each
            for each in self.spec.init_containers
            if each.restart_policy == "Always" or _exporter(each) is not None
        ]
        return [*sidecars, *self.spec.containers]

    def volume(self, name: str) -> Volume | None:
        """Return the volume of that name."""
        return next((each for each in self.spec.volumes if each.name == name), None)

    def location(self, container: Container, path: str) -> Location | None:
        """Return where a path of a container is; None if it is on no volume."""
        wanted = PurePosixPath(path)
        mounts = sorted(container.volume_mounts, key=lambda each: -len(each.mount_path))
        for mount in mounts:
            if wanted.is_relative_to(mount.mount_path):
                below = PurePosixPath(mount.sub_path, wanted.relative_to(mount.mount_path))
                return Location(mount.name, below, mount.read_only)
        return None

    def user(self, container: Container) -> int | None:
        """Return the user of a container; None if its image decides."""
        own, pod = container.security_context.run_as_user, self.spec.security_context.run_as_user
        default = IMAGE_USER if container.image_name == "sidestep" else None
        return next((each for each in (own, pod, default) if each is not None), None)

    def groups(self, container: Container) -> set[int]:
        """Return the known groups of a container."""
        own, pod = container.security_context, self.spec.security_context
        default = IMAGE_USER if container.image_name == "sidestep" else None
        primary = next(
            (e for e in (own.run_as_group, pod.run_as_group, default) if e is not None), None
        )
        found = {primary, pod.fs_group, *pod.supplemental_groups}
        return {each for each in found if each is not None}


def find(resources: Iterable[Resource]) -> tuple[list[Pod], list[Finding]]:
    """Return the pods of all resources, and findings about those that cannot be read.

    A pod or a replica set is left out if its owner is among the resources; of the pods of one owner
    that is not, the first is returned.
    """
    known = list(resources)
    owners = {_owner_key(each, each.kind, each.metadata.get("name")) for each in known}
    pods: list[Pod] = []
    findings: list[Finding] = []
    for resource in known:
        keys = [
            _owner_key(resource, each.get("kind"), each.get("name"))
            for each in resource.metadata.get("ownerReferences", ())
        ]
        if owners.intersection(keys):
            continue
        owners.update(keys)
        try:
            pods += _pods(resource)
        except msgspec.ValidationError as error:
            findings.append(UNREADABLE.on(resource.subject, str(error)))
    return pods, findings


def _owner_key(resource: Resource, kind: object, name: object) -> tuple[object, ...]:
    return resource.metadata.get("namespace"), kind, name


def _pods(resource: Resource) -> list[Pod]:
    spec = resource.spec
    labels = mapping(resource.metadata.get("labels"))
    own_metadata = resource.metadata if resource.kind == "Pod" else {}
    found = list(_specifications(resource.value, (), own_metadata))
    claims = [*spec.get("volumeClaimTemplates", ())]
    claims += mapping(spec.get("leaderWorkerTemplate")).get("volumeClaimTemplates", ())
    replicas = spec.get("replicas", 1)
    return [
        Pod(
            subject=" ".join((resource.subject, *_distinct(path)[-1:] * (len(found) > 1))),
            kind=resource.kind,
            namespace=str(resource.metadata.get("namespace", "")),
            labels=msgspec.convert(metadata.get("labels", {}), dict[str, str]),
            annotations=msgspec.convert(metadata.get("annotations", {}), dict[str, str]),
            own_labels=resource.kind in KINDS_OF_KUBERNETES,
            is_exempt=labels.get("sidestep/inject") == "false",
            replicas=replicas if isinstance(replicas, int) else 1,
            claims=frozenset(
                str(mapping(mapping(each).get("metadata")).get("name")) for each in claims
            ),
            spec=msgspec.convert(specification, PodSpec),
        )
        for path, specification, metadata in found
    ]


def _distinct(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(each for each in path if each not in ("spec", "template"))


def _specifications(
    value: Mapping[str, Any], path: tuple[str, ...], metadata: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the path, the specification and the metadata of all pods in a resource."""
    containers = value.get("containers")
    if isinstance(containers, list) and all(isinstance(each, dict) for each in containers):
        yield path, value, metadata
        return
    for key, each in value.items():
        if isinstance(each, dict):
            # A template has its own metadata; a resource's metadata is not its pods'.
            inner = mapping(value.get("metadata")) if key == "spec" and path else metadata
            yield from _specifications(each, (*path, key), inner)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _engine(container: Container) -> str | None:
    """Return the kind of engine that a container runs, empty if it is unknown; None for no engine."""
    line = " ".join(container.words)
    started = [kind for kind, pattern in _STARTED.items() if pattern.search(line)]
    images = [kind for kind, name in _IMAGES.items() if name.fullmatch(container.image_name)]
    if any(each.name == ENDPOINT for each in container.env):
        return next(iter(started + images), "")
    return next(iter(started if container.command else started + images), None)


def _exporter(container: Container) -> Exporter | None:
    words = container.words
    before, after = words, []
    if "serve" in words:
        index = words.index("serve")
        before, after = words[:index], words[index + 1 :]
    is_ours = "sidestep" in (container.name, container.image_name)
    runs = [PurePosixPath(each).name for each in before]
    if "serve" not in words:
        if words or container.image_name != "sidestep":
            return None
    elif not ("sidestep" in runs or (is_ours and not container.command)):
        return None
    return _configured(container, after)


def _configured(container: Container, flags: list[str]) -> Exporter:
    """Return the exporter with its settings, if the manifest has all of them."""
    environ = IMAGE_DEFAULTS if container.image_name == "sidestep" else {}
    environ = {**environ, **container.variables}
    ours = [each for each in container.env if each.name.startswith("SIDESTEP_")]
    try:
        given = _flags(flags, environ)
        if (
            container.env_from
            or any(each.value_from for each in ours)
            or CONFIG_FILE.key in given
            or CONFIG_FILE.variable in environ
        ):
            return Exporter(container, flags)
        return Exporter(container, flags, read(given, environ))
    except ConfigError as error:
        return Exporter(container, flags, refusal=str(error))


def _flags(words: list[str], variables: Mapping[str, str]) -> dict[str, object]:
    """Return the settings that are given as flags, by key.

    Raises:
        ConfigError: A flag is unknown, or lacks its value.
    """
    known = {f"--{setting.flag}": setting for setting in (CONFIG_FILE, *SETTINGS)}
    found: dict[str, Any] = {}
    waiting = iter(words)
    for word in waiting:
        name, equals, value = word.partition("=")
        setting = known.get(name)
        if setting is None:
            raise ConfigError(f"{name}: no such option")
        if setting.metavar and not equals:
            value = next(waiting, "")
        value = re.sub(r"\$\(([\w.-]+)\)", lambda match: variables.get(match[1], "x"), value)
        if setting.repeatable:
            found.setdefault(setting.key, []).append(value)
        else:
            found[setting.key] = value if setting.metavar else True
    return found
