"""Resource and scope of what the exporter sends by OTLP."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from sidestep import __version__

__all__ = ["SCOPE", "Resource", "resource"]

SCOPE = InstrumentationScope("sidestep", __version__)
VARIABLES: Mapping[str, str] = {
    "k8s.pod.name": "POD_NAME",
    "k8s.namespace.name": "POD_NAMESPACE",
    "k8s.pod.uid": "POD_UID",
    "k8s.pod.ip": "POD_IP",
    "k8s.node.name": "NODE_NAME",
}
"""Environment variables, as the downward API usually fills them, by attribute."""


def resource(port: int) -> Resource:
    """Return the resource of this exporter.

    OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME replace attributes; an empty value removes one.

    Args:
        port: Port of its page, which distinguishes exporters of a host; 0: none.
    """
    host = socket.gethostname()
    pod = {name: os.environ.get(variable, "") for name, variable in VARIABLES.items()}
    instance = pod["k8s.pod.name"] or host
    found = {
        "service.name": "sidestep",
        "service.namespace": pod["k8s.namespace.name"],
        "service.instance.id": f"{instance}:{port}" if port else instance,
        "host.name": host,
        **pod,
        **OTELResourceDetector().detect().attributes,
    }
    return Resource({name: value for name, value in found.items() if value})
