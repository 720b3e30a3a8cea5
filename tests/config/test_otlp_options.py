"""Settings ``--otlp.*``, and error lines for invalid ones, without secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from refused import refused
from sidestep.config.settings import read
from sidestep.errors import ConfigError

URL = "http://host:4318"


@pytest.mark.parametrize(
    ("given", "url"),
    [
        (URL, f"{URL}/v1/metrics"),
        (f"{URL}/", f"{URL}/v1/metrics"),
        (f"{URL}/v1/metrics", f"{URL}/v1/metrics"),
        ("http://host:8428/opentelemetry/v1/metrics", "http://host:8428/opentelemetry/v1/metrics"),
        ("https://HOST/otlp/v1/metrics", "https://host/otlp/v1/metrics"),
        ("", ""),
    ],
)
def test_the_path_is_added_to_a_url_without_one(given: str, url: str) -> None:
    """A URL with a path is whole."""
    assert read({"otlp_endpoint": given}, {}).otlp_endpoint == url


def test_a_condition_without_an_output_is_refused() -> None:
    """It would have no effect."""
    with pytest.raises(ConfigError, match=r"requires --requests\.log, --otlp\.traces-endpoint"):
        read({"requests_log_if": "ttft > 2s"}, {})
    assert read({"requests_log_if": "ttft > 2s", "otlp_traces_endpoint": URL}, {}).requests_log_if


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"otlp_endpoint": "host:4318"}, "must be a URL, with http:// or https://HOST[:PORT]"),
        ({"otlp_endpoint": "grpc://host:4317"}, "must be a URL, with http://"),
        ({"otlp_endpoint": "http://u:s3cret@host"}, "use OTEL_EXPORTER_OTLP_HEADERS"),
        ({"otlp_interval": "0.5"}, "must be a number of seconds, 1 to 86400"),
    ],
)
def test_an_invalid_setting_is_one_line(flags: Mapping[str, Any], complaint: str) -> None:
    """The line names the remedy, and has no secret."""
    assert complaint in refused({"otlp_endpoint": URL, **flags})
