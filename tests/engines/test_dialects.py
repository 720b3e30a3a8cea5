"""What generic tables say of engines' dialects."""

from __future__ import annotations

from sidestep.config.triton_servers import OWN_LABELS
from sidestep.engines.triton.rows import ROWS


def test_no_option_of_a_triton_server_may_take_a_label_of_its_families() -> None:
    """The settings know nothing of the engines, so their list is compared here."""
    assert {label for row in ROWS for label in row.labels} == OWN_LABELS
