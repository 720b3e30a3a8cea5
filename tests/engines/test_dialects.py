"""Agreement between settings and the engines' dialects."""

from __future__ import annotations

from sidestep.config.triton_servers import OWN_LABELS
from sidestep.engines.triton.rows import ROWS


def test_options_of_a_triton_server_exclude_labels_of_its_families() -> None:
    """The settings cannot import the rows, so this test compares their list of labels."""
    assert {label for row in ROWS for label in row.labels} == OWN_LABELS
