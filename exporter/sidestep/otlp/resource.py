"""Resource attributes of what the exporter sends by OTLP."""

from __future__ import annotations

import socket
from collections.abc import Mapping

VARIABLES: Mapping[str, str] = {
    "k8s.pod.name": "POD_NAME",
    "k8s.namespace.name": "POD_NAMESPACE",
    "k8s.pod.uid": "POD_UID",
    "k8s.pod.ip": "POD_IP",
    "k8s.node.name": "NODE_NAME",
}
"""Environment variables, as the downward API usually fills them, by attribute."""


def resource(environ: Mapping[str, str], port: int, given: Mapping[str, str]) -> dict[str, str]:
    """Return the resource attributes of this exporter.

    Args:
        environ: Environment variables.
        port: Port of its page, which distinguishes exporters of a host; 0: none.
        given: Attributes of --otlp.resource, which replace others; an empty value removes one.
    """
    host = socket.gethostname()
    pod = {name: environ.get(variable, "") for name, variable in VARIABLES.items()}
    instance = pod["k8s.pod.name"] or host
    found = {
        "service.name": "sidestep",
        "service.namespace": pod["k8s.namespace.name"],
        "service.instance.id": f"{instance}:{port}" if port else instance,
        "host.name": host,
        **pod,
        **given,
    }
    return {name: value for name, value in found.items() if value}
