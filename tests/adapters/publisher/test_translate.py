"""Label values and parts of samples that the wire's limits allow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidestep.protocol.limits import MAX_OBSERVATIONS, printable
from sidestep.protocol.self_described import Sample
from sidestep_adapters.publisher.translate import item_parts

samples = st.lists(st.integers(0, MAX_OBSERVATIONS).map(lambda n: Sample(observations=[0.0] * n)))


@given(st.text(max_size=400))
def test_label_values_are_printable_and_short(text: str) -> None:
    """Any model name becomes a valid label value."""
    assert printable(text).isprintable()
    assert len(printable(text)) <= 256


@given(samples)
def test_samples_are_divided_among_items(found: list[Sample]) -> None:
    """All samples are kept in order; only a single long one may fill an item by itself."""
    parts = list(item_parts(found))

    assert [sample for part in parts for sample in part] == found
    for part in parts:
        assert part
        size = sum(1 + len(sample.observations) for sample in part)
        assert len(part) == 1 or size <= MAX_OBSERVATIONS
