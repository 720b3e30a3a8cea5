"""Settings that an exporter refuses to start with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sidestep.config.settings import read
from sidestep.errors import ConfigError


def refused(given: Mapping[str, Any]) -> str:
    """Return the error of these settings, which has one line and no secret."""
    with pytest.raises(ConfigError) as raised:
        read(given, {})
    line = str(raised.value)
    assert "\n" not in line
    assert "s3cret" not in line
    return line
