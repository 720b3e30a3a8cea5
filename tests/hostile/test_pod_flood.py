"""A flood of an exporter at the limits of the sidecar's manifest, in a cgroup."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fuzz.pod_flood import Pod, flood


def may_limit() -> bool:
    """Return whether this user may make a cgroup."""
    try:
        Pod(250, 64).close()
    except OSError:
        return False
    return os.getuid() == 0


@pytest.mark.skipif(not Path("/sys/fs/cgroup").is_dir() or not may_limit(), reason="needs cgroups")
@pytest.mark.timeout(300)
def test_an_exporter_at_the_manifests_limits_survives_a_flood() -> None:
    """Messages of many parts fill the memory fastest; the honest engine's counts stay exact."""
    assert flood("parts", "ipc", 3.0) == "lives"
