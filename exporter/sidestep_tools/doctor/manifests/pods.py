"""Pods of manifests, and which of their containers run exporters and engines."""

from __future__ import annotations

import re
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
from sidestep.transport.addresses import IPC, TCP
from sidestep_tools.doctor.manifests.containers import (
    IMAGE,
    Container,
    Place,
    PodSpec,
    Volume,
    resolved,
)
from sidestep_tools.doctor.manifests.reading import UNREADABLE, Resource, mapping, mappings

IMAGE_DEFAULTS = {
    "SIDESTEP_WEB_LISTEN_ADDRESS": ":9857",
    "SIDESTEP_INGEST_ENDPOINT": "ipc:///run/sidestep/ingest/ingest.ipc",
    "SIDESTEP_STATE_DIR": "/var/lib/sidestep/state",
}
"""Variables that deploy/Dockerfile sets."""
ENDPOINT = "SIDESTEP_ENDPOINT"
ENGINES = {
    "vllm": (
        r"\bvllm serve\b|\bvllm\.entrypoints\b",
        r"vllm(-openai)?(-(cpu|rocm|tpu|xpu)(-release-repo)?)?|llm-d-cuda",
    ),
    "sglang": (r"\bsglang\.launch_server\b|\bsglang serve\b", r"sglang"),
    "triton": (r"\btritonserver\b", r"tritonserver"),
}
"""Patterns of an engine's command line and of its image's name."""


class Exporter(NamedTuple):
    """A container that runs ``sidestep serve``.

    Attributes:
        config: Settings by its flags and variables; None if they are refused, or not all in the manifest.
    """

    pod: Pod
    container: Container
    config: Config | None
    refusal: str = ""

    @property
    def settings(self) -> Config:
        """The settings, for checks that run only if they are known."""
        assert self.config is not None
        return self.config

    @property
    def polls(self) -> bool:
        """True if the exporter reads from engines, which then need no plugin."""
        return self.config is not None and self.config.has_sources

    @property
    def page_ports(self) -> set[int]:
        """Ports of the metrics page."""
        return {port for _, port in self.config.web_listen_address} if self.config else set()

    @property
    def ingest_ports(self) -> set[int]:
        """Ports of its tcp endpoints."""
        endpoints = self.config.ingest_endpoint if self.config else ()
        ports = [each.rpartition(":")[2] for each in endpoints if each.startswith(TCP)]
        return {int(each) for each in ports if each.isdecimal()}

    @property
    def is_read_only(self) -> bool:
        """True if its root file system is read-only."""
        return self.container.security_context.read_only_root_filesystem


class Engine(NamedTuple):
    """A container that runs an engine.

    Attributes:
        kind: vllm, sglang or triton; empty if only its variables show that it is one.
        is_server: Whether its command line starts the engine's server.
    """

    pod: Pod
    container: Container
    kind: str
    is_server: bool

    @property
    def endpoint(self) -> str:
        """The endpoint that it sends to; empty if it is not set or not in the manifest."""
        return self.container.variables.get(ENDPOINT, "")

    @property
    def socket(self) -> Place | None:
        """Place of its ipc endpoint."""
        return self.container.place(self.endpoint) if self.endpoint.startswith(IPC) else None

    @property
    def bound(self) -> dict[str, Exporter]:
        """The exporters of its pod by their endpoints; empty if the settings of one are not known."""
        exporters = self.pod.exporters
        if any(each.config is None for each in exporters):
            return {}
        return {each: one for one in exporters for each in one.settings.ingest_endpoint}

    @property
    def reached(self) -> Exporter | None:
        """The exporter of its pod whose socket is at the same place."""
        for each, exporter in self.bound.items() if self.socket else ():
            if exporter.container.place(each) == self.socket:
                return exporter
        return None

    @property
    def has_exporter(self) -> bool:
        """True if its endpoint is that of an exporter of its pod, even if it does not reach it."""
        if self.endpoint.startswith(IPC):
            return self.reached is not None or self.endpoint in self.bound
        ports = {str(port) for each in self.pod.exporters for port in each.ingest_ports}
        return self.endpoint.rpartition(":")[2] in ports

    @property
    def is_on_node_or_claim(self) -> bool:
        """True if other pods may have the volume of its socket."""
        volume = self.pod.volume(self.socket)
        return bool(volume and (volume.host_path or volume.persistent_volume_claim))


@dataclass(frozen=True)
class Pod:
    """A pod of a resource.

    Attributes:
        subject: File, kind and name of the resource, for findings.
        is_exempt: Whether a label says that it runs no engine.
    """

    subject: str
    spec: PodSpec
    is_exempt: bool

    @cached_property
    def running(self) -> list[Container]:
        """Sidecars and containers, in the order of their start."""
        init = self.spec.init_containers
        sidecars = [e for e in init if e.restart_policy == "Always" or _exporter(self, e)]
        return [*sidecars, *self.spec.containers]

    @cached_property
    def exporters(self) -> list[Exporter]:
        """Containers that run ``sidestep serve``."""
        return [found for each in self.running if (found := _exporter(self, each))]

    @cached_property
    def engines(self) -> list[Engine]:
        """Containers that run an engine."""
        known = [each.container for each in self.exporters]
        others = [] if self.is_exempt else [each for each in self.running if each not in known]
        return [found for each in others if (found := _engine(self, each))]

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


def _first(*ids: int | None) -> int | None:
    return next((each for each in ids if each is not None), None)


def find(resources: Iterable[Resource]) -> Iterator[Pod | Finding]:
    """Yield the pods of all resources, and findings on resources that cannot be read.

    Pods and replica sets of an owner that is among the resources are left out. Without the owner,
    only the first of them is read.
    """
    known = list(resources)
    owners = {(each.namespace, each.kind, str(each.metadata.get("name"))) for each in known}
    for resource in known:
        references = mappings(resource.metadata.get("ownerReferences"))
        keys = {(resource.namespace, str(e.get("kind")), str(e.get("name"))) for e in references}
        if owners.isdisjoint(keys):
            owners |= keys
            found = list(_specifications(resource.value, ()))
            labels = mapping(resource.metadata.get("labels"))
            try:
                for path, specification in found:
                    subject = " ".join((resource.subject, *path[-1:] * (len(found) > 1)))
                    spec = msgspec.convert(specification, PodSpec)
                    yield Pod(subject, spec, is_exempt=labels.get("sidestep/inject") == "false")
            except msgspec.ValidationError as error:
                yield UNREADABLE.on(resource.subject, str(error))


def _specifications(
    value: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield the pods' specifications in a resource, each with the keys that lead to it."""
    containers = value.get("containers")
    if isinstance(containers, list) and all(isinstance(each, dict) for each in containers):
        yield path, value
        return
    for key, child in value.items():
        is_usual = key in ("spec", "template")
        for each in mappings(child) or [mapping(child)]:
            yield from _specifications(
                each, path if is_usual else (*path, str(each.get("name", key)))
            )


def _engine(pod: Pod, container: Container) -> Engine | None:
    line, image = " ".join(container.words), container.image_name
    by_line = [kind for kind, (started, _) in ENGINES.items() if re.search(started, line)]
    by_image = [kind for kind, (_, name) in ENGINES.items() if re.fullmatch(name, image)]
    # Without a command vLLM's image starts the server; an unknown command may start any program.
    is_server = bool(by_line) or (by_image == ["vllm"] and not container.command)
    is_engine = any(each.name == ENDPOINT for each in container.env)
    if is_engine or is_server or (by_image and not container.command):
        return Engine(pod, container, next(iter(by_line + by_image), ""), is_server)
    return None


def _exporter(pod: Pod, container: Container) -> Exporter | None:
    words = container.words
    before = [PurePosixPath(each).name for each in takewhile(lambda word: word != "serve", words)]
    is_image = container.image_name.startswith(IMAGE)
    is_ours = not container.command and (is_image or container.name == IMAGE)
    # `sidestep run -- vllm serve` is an engine.
    serves = "serve" in words and (before[-1:] == [IMAGE] or is_ours)
    if not serves and (words or not is_image):
        return None
    after = words[len(before) + 1 :]
    flags = [*takewhile(lambda word: word not in ("&&", "||", ";", "|", "&"), after)]
    # Without a command the image is sidestep's, whatever its name, and has these defaults.
    environ = {
        **(IMAGE_DEFAULTS if is_image or not container.command else {}),
        **container.variables,
    }
    if (
        container.env_from
        or CONFIG_FILE.variable in environ
        or any(each.name.startswith(PREFIX) and each.value_from for each in container.env)
        or any("$" in resolved(each, {}) or each.startswith("--config.file") for each in flags)
    ):
        return Exporter(pod, container, None)
    try:
        return Exporter(pod, container, read(_flags(flags, environ), environ))
    except ConfigError as error:
        return Exporter(pod, container, None, str(error))


def _flags(words: list[str], variables: Mapping[str, str]) -> dict[str, object]:
    """Return the settings that are given as flags, by key."""
    known = {f"--{setting.flag}": setting for setting in SETTINGS}
    found: dict[str, Any] = {}
    waiting = iter(words)
    for word in waiting:
        name, equals, value = word.partition("=")
        if (setting := known.get(name)) is None:
            raise ConfigError(f"{name}: no such option")
        if setting.metavar and not equals:
            value = next(waiting, "")
        value = resolved(value, variables)
        if setting.repeatable:
            found.setdefault(setting.key, []).append(value)
        else:
            found[setting.key] = value if setting.metavar else True
    return found
