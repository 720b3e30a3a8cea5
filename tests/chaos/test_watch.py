"""The scraper of chaos runs, and its notion of a decrease."""

from __future__ import annotations

from chaos.watch import Monotony, parse, total

PAGE = """\
# HELP vllm:a_total Some.
# TYPE vllm:a_total counter
vllm:a_total{engine="0",model_name="m"} 5
vllm:a_total{engine="0",model_name="other"} 6
# HELP vllm:g A state.
# TYPE vllm:g gauge
vllm:g{engine="0",model_name="m"} 7
# HELP vllm:h Times.
# TYPE vllm:h histogram
vllm:h_bucket{engine="0",model_name="m",le="+Inf"} 2
vllm:h_sum{engine="0",model_name="m"} 0.5
# HELP sidestep_engine_restarts_total The exporter's own.
# TYPE sidestep_engine_restarts_total counter
sidestep_engine_restarts_total{engine="0",model_name="m"} 3.0
# HELP sidestep_items_total Likewise.
# TYPE sidestep_items_total counter
sidestep_items_total 9.0
"""


def test_monotonic_series_are_read() -> None:
    """Only counters and histograms of the run's engines are read."""
    assert parse(PAGE, "m") == {
        'vllm:a_total{engine="0",model_name="m"}': 5.0,
        'vllm:h_bucket{engine="0",model_name="m",le="+Inf"}': 2.0,
        'vllm:h_sum{engine="0",model_name="m"}': 0.5,
    }
    assert total(PAGE, "sidestep_items_total") == 9.0
    assert total(PAGE, "sidestep_folded_items_total") == 0.0


def test_a_lower_value_is_a_decrease() -> None:
    """A decrease counts once, and growth after it does not count."""
    monotony = Monotony()

    found = [monotony.look({"a": a, "b": b}, 0.0) for a, b in ((5, 1), (6, 1), (2, 0), (3, 4))]

    assert found == [0, 0, 2, 0]
    assert (monotony.decreases, monotony.pages) == (2, 1)
    assert (monotony.examples[0].series, monotony.examples[0].before) == ("a", 6)


def test_a_lower_value_after_an_absence_is_a_decrease() -> None:
    """A series that reappears with a lower value has decreased, however long it was absent."""
    monotony = Monotony()
    monotony.look({"a": 5, "b": 5}, 0.0)
    monotony.look({}, 0.0)
    monotony.look({"c": 1}, 0.0)

    assert monotony.decreases == 0
    assert monotony.look({"a": 4, "b": 5}, 0.0) == 1
