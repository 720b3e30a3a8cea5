"""Several passthrough pages on one: conflicts among them and with the exporter's own families."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters import page_of_engine
from metric_families import families, labels_of, parsed
from pages import Family, parse
from scraped import Passing
from sidestep.exposition.family_series import passed_on
from sidestep.exposition.json_format import json_samples
from sidestep.exposition.passthrough.parser import Labels
from sidestep.exposition.protobuf_page import encode_samples

A: Labels = (("pod", "a"),)
B: Labels = (("pod", "b"),)


def lines(text: str) -> list[str]:
    """Return the samples."""
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_a_family_of_two_pages_is_merged() -> None:
    """With the HELP of the first page; a sample of both pages is that of the first."""
    passing = Passing((), ())
    passing.take('# HELP a First.\n# TYPE a gauge\na 1\na{x="1"} 2\n')
    passing.take('# HELP a Other.\n# TYPE a gauge\na{x="1",y=""} 3\na{x="2"} 4\nb 5\n', 1)

    assert passing.show() == (
        '# HELP a First.\n# TYPE a gauge\na 1\na{x="1"} 2\na{x="2"} 4\n# HELP b \n# TYPE b untyped\nb 5\n'
    )
    assert [passing.left_out(at) for at in (0, 1)] == [{}, {"other_target": 1}]


@pytest.mark.parametrize(
    "second",
    [
        '# TYPE a counter\na{x="2"} 1\n',
        '# TYPE a histogram\na_bucket{le="+Inf"} 1\n',
        "# TYPE a_bucket gauge\na_bucket 1\n",
    ],
)
def test_the_first_page_wins_a_conflict_of_kinds(second: str) -> None:
    """Also of names that are samples of one family and another family."""
    first = '# TYPE a gauge\na 1\n# TYPE b histogram\nb_bucket{le="+Inf"} 1\n'
    passing = Passing((), ())
    passing.take(first)
    passing.take(second.replace("a_bucket gauge\na_", "b_bucket gauge\nb_") + "c 1\n", 1)

    assert lines(passing.show()) == ["a 1", 'b_bucket{le="+Inf"} 1', "c 1"]
    assert passing.left_out(1) == {"other_target": 1}


def test_another_page_replaces_a_hidden_one() -> None:
    """The first page has the family again when it returns."""
    passing = Passing((), ())
    passing.take("a 1\n")
    passing.take("# TYPE a counter\na 2\n", 1)
    found = [lines(passing.show())]
    passing.page(0).hide()
    assert passing.show() == ""
    passing.take("# TYPE a counter\na 2\n", 1)
    found.append(lines(passing.show()))
    passing.take("a 3\n")
    found.append(lines(passing.show()))

    assert found == [["a 1"], ["a 2"], ["a 3"]]


def test_the_exporters_own_names_are_left_out() -> None:
    """By family and by any name that it takes, as long as it is the exporter's own."""
    page = (
        "# TYPE a_total counter\na_total 1\n# TYPE b histogram\nb_sum 1\n"
        "# TYPE c_created gauge\nc_created 1\n# TYPE d gauge\nd 1\nprocess_x 1\n"
    )
    passing = Passing(ours={"a", "b_count", "c_created"})
    passing.take(page)

    assert lines(passing.show()) == ["d 1"]
    assert passing.left_out() == {"ours": 4}
    passing.ours = frozenset()
    assert lines(passing.show()) == ["a_total 1", "b_sum 1", "c_created 1", "d 1"]


def test_a_source_can_exclude_families() -> None:
    """They are counted as excluded."""
    passing = Passing()
    page = passing.passed.page((), {"nv_inference_count", "my_lat_seconds"})
    text = page_of_engine("page_triton") + page_of_engine("page_triton_custom")
    page.update([text.encode()])

    assert "nv_inference_count" not in passing.show()
    assert "my_lat" not in passing.show()
    assert "nv_inference_exec_count" in passing.show()
    assert passing.passed.left_out(page) == {"excluded": 7 + 6}


def values_of(passing: Passing, names: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the families in the form of JSON."""
    return [
        {"name": each.name, "type": each.kind, "help": each.help, "samples": json_samples(each)}
        for each in passing.passed.families(names)
    ]


def test_families_as_json() -> None:
    """Numbers with their labels; each histogram and summary is one item."""
    passing = Passing()
    passing.take(
        page_of_engine("page_triton_custom")
        + '# TYPE s summary\ns{quantile="0.5"} 7\ns_count 2\ns_sum 9.5\nu{a="\\"\\n"} NaN 1500\n'
    )
    found = {family["name"]: family for family in values_of(passing)}
    model = {"lora": "a", "model": "custom", "version": "1"}

    assert found["my_tokens_total"] == {
        "name": "my_tokens_total",
        "type": "counter",
        "help": "tokens",
        "samples": [{"labels": model, "value": 20}],
    }
    assert found["my_lat_seconds"]["samples"] == [
        {"labels": model, "buckets": [[0.1, 0], [1.0, 4], [10.0, 4]], "count": 8, "sum": 121.2}
    ]
    assert found["s"]["samples"] == [
        {"labels": {}, "quantiles": [[0.5, 7]], "count": 2, "sum": 9.5}
    ]
    assert (
        str(found["u"]["samples"]) == "[{'labels': {'a': '\"\\n'}, 'value': nan, 'timestamp': 1.5}]"
    )
    assert [f["name"] for f in values_of(passing, {"s_sum"})] == ["s"]


PAGE = st.lists(
    st.sampled_from(
        [
            "# TYPE a gauge",
            "# TYPE a counter",
            "# TYPE b histogram",
            "a 1",
            'a{x="1"} 1',
            'a{x="1",pod="a"} 1',
            'b_bucket{le="+Inf"} 1',
            "b_count 1",
            "b_count_x 1",
        ]
    ),
    min_size=1,
    max_size=9,
).map(lambda found: "".join(f"{line}\n" for line in ["c 1", *found]))
"""Pages with at least one sample."""
GIVEN = st.sampled_from([(), A, B, (("x", "1"),), (("pod", "a"), ("x", "2"))])


@given(st.lists(st.tuples(GIVEN, PAGE), min_size=1, max_size=4), st.data())
def test_any_pages_merge_to_a_valid_page(
    found: list[tuple[Labels, str]], data: st.DataObject
) -> None:
    """No family or series is repeated, and every lost sample is counted, in any order of polls."""
    passing = Passing(*(labels for labels, _ in found))
    for at in data.draw(st.permutations(range(len(found)))):
        passing.take(found[at][1], at)
    text = passing.show()

    again = Passing()
    again.take(text)
    assert (again.show(), again.left_out()) == (text, {})
    ordered = Passing(*(labels for labels, _ in found))
    for at, (_, page) in enumerate(found):
        ordered.take(page, at)
    assert ordered.show() == text
    total = sum(sum(passing.left_out(at).values()) for at in range(len(found)))
    given_lines = sum(len(lines(page)) for _, page in found)
    comments = sum(passing.left_out(at)["second_type"] for at in range(len(found)))
    assert len(lines(text)) + total - comments == given_lines


def numbers(page: Mapping[str, Family]) -> dict[tuple[str, object], float]:
    """Return the samples by name and labels, with bounds as Python writes them.

    The reader of text calls every counter ``_total``, and leaves out what is called ``_created``.
    """
    return {
        (name.removesuffix("_total"), _as_numbers(labels)): value
        for family in page.values()
        for (name, labels), value in family.samples.items()
        if not name.endswith("_created")
    }


def _as_numbers(labels: Labels) -> Labels:
    bounds = ("le", "quantile")
    return tuple(
        (n, repr(float(v)).replace("inf", "+Inf") if n in bounds else v) for n, v in labels
    )


def encoded(passing: Passing, names: Collection[str] = ()) -> bytes:
    """Return the families in protobuf."""
    shown = passing.passed.families(names)
    return b"".join(part for family in shown for part in encode_samples(passed_on(family)))


@pytest.mark.parametrize(
    "name",
    ["page_triton", "page_triton_custom", "page_sglang"],
)
def test_protobuf_has_the_same_samples(name: str) -> None:
    """Protobuf has the samples of all kinds that real exporters have; histograms stay classic."""
    passing = Passing(A)
    passing.take(page_of_engine(name))
    made = encoded(passing)
    found, text = parsed(made), parse(passing.show())

    assert numbers(found) == pytest.approx(numbers(text), nan_ok=True, rel=0)
    kinds = {name: family.kind for name, family in found.items() if not name.endswith("_created")}
    assert kinds == {name: family.kind for name, family in text.items()}


def test_protobuf_has_timestamps_and_unescaped_labels() -> None:
    """Timestamps are in milliseconds."""
    passing = Passing()
    passing.take('# TYPE a gauge\na{x="1\\n\\"\\\\"} NaN 1234\na 2\n')
    (family,) = families(encoded(passing))
    (first, second) = family.metric

    assert labels_of(first) == (("x", '1\n"\\'),)
    assert (math.isnan(first.gauge.value), first.timestamp_ms) == (True, 1234)
    assert (second.gauge.value, second.HasField("timestamp_ms")) == (2.0, False)
    assert encoded(passing, ["b"]) == b""
