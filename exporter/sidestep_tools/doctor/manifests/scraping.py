"""Check of what scrapes the exporters: monitors and annotations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sidestep.diagnosis.finding import Code, Finding
from sidestep_tools.doctor.manifests.pods import Pod
from sidestep_tools.doctor.manifests.reading import Resource, items, mapping, mappings

# fmt: off
NOT_SELECTED = Code("SD542", "warning", "No monitor selects the pod",
    "The manifests have a PodMonitor or ServiceMonitor for exporters, and its selector or its namespaces do not include this pod.",
    "Correct the monitor's `selector` or `namespaceSelector`, or the pod's labels.")
NO_SUCH_PORT = Code("SD544", "error", "A monitor names a port that the exporter does not have",
    "The monitor selects the pod, and its port is none of the exporter's page: Prometheus has no such target.",
    "Set the monitor's `port` to the name of the exporter's port (`sidestep`).")
NO_SUCH_PATH = Code("SD545", "error", "A monitor scrapes a path that the exporter does not have",
    "The exporter's pages are --web.telemetry-path, `/metrics` by default, and the same with `/pod`: others are answered by 404.",
    "Remove `path`, or set it to one of these.")
# fmt: on
CODES = (NOT_SELECTED, NO_SUCH_PORT, NO_SUCH_PATH)


class Endpoint(NamedTuple):
    """One endpoint of a monitor, in one of the pods that the monitor selects.

    Attributes:
        ports: The port's numbers in the pod; none if the pod does not have it.
        settings: The endpoint as the monitor has it.
    """

    monitor: Resource
    pod: Pod
    ports: set[int]
    settings: Mapping[str, Any]

    @property
    def path(self) -> str:
        """The path that is scraped."""
        return str(self.settings.get("path", "/metrics"))


def check(pods: list[Pod], resources: list[Resource]) -> Iterator[Finding]:
    """Yield why an exporter is not scraped."""
    monitors = [each for each in resources if each.kind in ("PodMonitor", "ServiceMonitor")]
    endpoints = [found for each in monitors for found in _endpoints(each, pods, resources)]
    used = {each.monitor.subject for each in endpoints if each.ports & _pages(each.pod)}
    ours = used | {each.subject for each in monitors if "sidestep" in str(each.value)}
    for pod in pods:
        if not (pages := _pages(pod)):
            continue
        here = [each for each in endpoints if each.pod is pod]
        hits = [each for each in here if each.ports & pages]
        yield from _wrong(pod, hits)
        if hits or _annotated(pod) in pages:
            continue
        # A monitor of sidecars may select an exporter of its own, whose port has another name.
        missed = [e for e in here if e.monitor.subject in (ours if pod.engines else ours - used)]
        for each in missed:
            text = f"port {each.settings.get('port')} is not the exporter's in {pod.subject}"
            yield NO_SUCH_PORT.on(each.monitor.subject, text)
        if ours and pod.engines and not (missed or pod.has_more_labels):
            yield NOT_SELECTED.on(pod.subject, f"its labels are {dict(pod.labels)}")


def _pages(pod: Pod) -> set[int]:
    return set().union(*(each.page_ports for each in pod.exporters))


def _wrong(pod: Pod, hits: list[Endpoint]) -> Iterator[Finding]:
    pages = [e.settings.web_telemetry_path for e in pod.exporters if e.settings and e.page_ports]
    known = {*pages, *(f"{page.rstrip('/')}/pod" for page in pages)}
    for each in hits:
        if each.path not in known:
            yield NO_SUCH_PATH.on(each.monitor.subject, f"path {each.path} is not {pages[0]}")


def _annotated(pod: Pod) -> int | None:
    """Return the port of the annotations that a widespread Prometheus job scrapes by."""
    port = pod.annotations.get("prometheus.io/port", "")
    is_scraped = pod.annotations.get("prometheus.io/scrape") == "true"
    return int(port) if is_scraped and port.isdecimal() else None


def _endpoints(monitor: Resource, pods: list[Pod], resources: list[Resource]) -> Iterator[Endpoint]:
    selector = mapping(monitor.spec.get("selector"))
    services = [
        each
        for each in resources
        if each.kind == "Service"
        and _is_in_scope(monitor, each.namespace)
        and _selects(selector, mapping(each.metadata.get("labels")))
    ]
    for pod in pods:
        targets = [
            port
            for each in services
            if _is_same(pod.namespace, each.namespace)
            and _selects({"matchLabels": each.spec.get("selector")}, pod.labels)
            for port in mappings(each.spec.get("ports"))
        ]
        is_pods = monitor.kind == "PodMonitor"
        if is_pods and not (
            _is_in_scope(monitor, pod.namespace) and _selects(selector, pod.labels)
        ):
            continue
        if not (is_pods or targets):
            continue
        for each in mappings(monitor.spec.get("podMetricsEndpoints" if is_pods else "endpoints")):
            wanted = [each.get("port", each.get("portNumber", each.get("targetPort")))]
            if "port" in each and not is_pods:
                named = [target for target in targets if target.get("name") == each["port"]]
                wanted = [target.get("targetPort", target.get("port")) for target in named]
            ports = {number for port in wanted for number in _numbers(pod, port)}
            yield Endpoint(monitor, pod, ports, each)


def _is_in_scope(monitor: Resource, namespace: str) -> bool:
    scope = mapping(monitor.spec.get("namespaceSelector"))
    names = items(scope.get("matchNames")) or [monitor.namespace]
    return bool(scope.get("any")) or any(_is_same(namespace, each) for each in names)


def _is_same(namespace: str, other: str) -> bool:
    """Return whether two namespaces are equal, as far as the manifests name them."""
    return namespace == other or not (namespace and other)


def _numbers(pod: Pod, port: object) -> set[int]:
    """Return the numbers of a pod's port, which may be a name."""
    if isinstance(port, int):
        return {port}
    declared = [each for container in pod.running for each in container.ports]
    return {each.container_port for each in declared if each.name == port}


def _selects(selector: Mapping[str, Any], labels: Mapping[str, Any]) -> bool:
    wanted = mapping(selector.get("matchLabels")).items()
    return all(labels.get(key) == value for key, value in wanted) and all(
        {
            "In": labels.get(each.get("key", "")) in items(each.get("values")),
            "NotIn": labels.get(each.get("key", "")) not in items(each.get("values")),
            "Exists": each.get("key") in labels,
            "DoesNotExist": each.get("key") not in labels,
        }.get(each.get("operator", ""), True)
        for each in mappings(selector.get("matchExpressions"))
    )
