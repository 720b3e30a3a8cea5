"""Passthrough pages: the same samples, or fewer with a reason, and never an invalid page."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters import page_of_engine
from scraped import Passing, openmetrics_samples, samples, shown
from sidestep.errors import PollError
from sidestep.exposition.passthrough import page as pages

TRITON = ("page_triton", "page_triton_custom", "page_triton_responses")
ENGINES = (*TRITON, "page_main", "page_sglang_dp")


@pytest.mark.parametrize("name", ENGINES)
def test_real_pages_pass_through_unchanged(name: str) -> None:
    """Every sample and family is equal."""
    page = page_of_engine(name)
    passing = Passing()
    passing.take(page)
    text = passing.show()
    lines = [line for line in page.splitlines() if not line.startswith(("process_", "python_"))]

    assert samples(text) == samples("\n".join(lines) + "\n")
    assert set(text.splitlines()) >= {line for line in lines if line[:1] != "#"}
    assert set(passing.left_out()) <= {"ours"}


@pytest.mark.parametrize("name", ENGINES)
def test_the_strict_parser_reads_passthrough_pages_in_openmetrics(name: str) -> None:
    """Only families that are part of another one in OpenMetrics are left out."""
    page = page_of_engine(name)
    passing = Passing()
    passing.take(page)
    text = passing.show(openmetrics=True)
    expected = samples(passing.show()).items()

    assert openmetrics_samples(text) == {
        key: value for key, value in expected if not key[0].endswith("_created")
    }
    kinds = dict(re.findall("# TYPE (.*) (.*)", text))
    if name == "page_triton_custom":
        assert kinds == {
            "my_tokens": "counter",
            "my_running": "gauge",
            "my_lat_seconds": "histogram",
        }
    if name == "page_triton":
        assert kinds["nv_inference_count"] == "unknown"
        assert kinds["nv_inference_queue_summary_us"] == "summary"


def test_samples_are_sorted_by_family() -> None:
    """For any order of lines; buckets come first, in increasing order."""
    page = (
        'h_count{a="1"} 3\n'
        "b 1\n"
        'h_bucket{le="+Inf",a="2"} 1\n'
        'h_bucket{a="1",le="+Inf"} 3\n'
        "# TYPE h histogram\n"
        's{quantile="0.9"} 2\n'
        "c_total 1\n"
        'h_bucket{a="1",le="5"} 2\n'
        'h_sum{a="1"} 4.5\n'
        "# TYPE s summary\n"
        "s_sum 2\n"
        "# HELP h Two \\\\ lines,\\nin \\one.\n"
        'b{a="1"} 2\n'
        's{quantile="0.5"} 1\n'
        'h_bucket{a="1",le="1e1"} 3\n'
        "# TYPE c_total counter\n"
    )

    assert shown(page) == (
        "# HELP h Two \\\\ lines,\\nin \\\\one.\n"
        "# TYPE h histogram\n"
        'h_bucket{a="1",le="5"} 2\n'
        'h_bucket{a="1",le="1e1"} 3\n'
        'h_bucket{a="1",le="+Inf"} 3\n'
        'h_count{a="1"} 3\n'
        'h_sum{a="1"} 4.5\n'
        'h_bucket{le="+Inf",a="2"} 1\n'
        "# HELP s \n"
        "# TYPE s summary\n"
        's{quantile="0.5"} 1\n'
        's{quantile="0.9"} 2\n'
        "s_sum 2\n"
        "# HELP c_total \n"
        "# TYPE c_total counter\n"
        "c_total 1\n"
        "# HELP b \n"
        "# TYPE b untyped\n"
        "b 1\n"
        'b{a="1"} 2\n'
    )


LEFT_OUT = [
    ("a 1\nno line\n", {"bad_line": 1}, "a 1"),
    ('a 1\na{b="\\x"} 1\n', {"bad_line": 1}, "a 1"),
    ("a 1\na 2\na{} 3\n", {"duplicate": 2}, "a 1"),
    ('a{b="1",c=""} 1\na{c="",b="1"} 2\na{b="1"} 3\n', {"duplicate": 2}, 'a{b="1",c=""} 1'),
    ("# TYPE a info\na 1\n", {"unknown_kind": 1}, "a 1"),
    ("# TYPE a gauge\n# TYPE a counter\na 1\n# TYPE a gauge\n", {"second_type": 1}, "a 1"),
    ("# TYPE a histogram\na 1\na_count 1\n", {"odd_sample": 1}, "a_count 1"),
    ('# TYPE a histogram\na_bucket 1\na_bucket{le="x"} 1\na_sum 1\n', {"odd_sample": 2}, "a_sum 1"),
    ('# TYPE a summary\na 1\na{quantile="nan"} 1\na_sum 1\n', {"odd_sample": 2}, "a_sum 1"),
    (
        "# TYPE a histogram\n# TYPE a_count gauge\na_count 1\na_sum 1\n",
        {"name_clash": 1},
        "a_sum 1",
    ),
    (
        "# TYPE a_count gauge\n# TYPE a summary\na_count 1\na_sum 1\n",
        {"name_clash": 1},
        "a_count 1",
    ),
    ("process_a 1\nsidestep_b 1\npython_c 1\nd 1\n", {"ours": 3}, "d 1"),
    (f'a 1\nb{{c="{"d" * 70000}"}} 1\n', {"too_long": 1}, "a 1"),
    ('a 1\nb{c="\xff"} 1\n', {"not_utf8": 1}, "a 1"),
    ('a 1\nb{c="\0"} 1\nb 1 -1\n# HELP a \0\n', {"bad_line": 3}, "a 1"),
]


@pytest.mark.parametrize(("page", "reasons", "left"), LEFT_OUT)
def test_an_unreadable_line_is_left_out(page: str, reasons: dict[str, int], left: str) -> None:
    """Only that line; it is counted by reason."""
    passing = Passing()
    passing.take(page.encode("latin-1"))

    assert passing.left_out() == reasons
    assert [line for line in passing.show().splitlines() if line[0] != "#"] == [left]


NO_PAGE = [
    (b"", "bad_answer"),
    (b"\n\n", "bad_answer"),
    (b"<!doctype html>\n<title>Login</title>", "bad_answer"),
    (b'{"error": "no"}', "bad_answer"),
    (b"\0" * 100_000, "bad_answer"),
    (b"\n" * 50_001, "bad_answer"),
    (b"a 1\nb 2", "truncated"),
]


@pytest.mark.parametrize(("body", "cause"), NO_PAGE)
def test_a_response_that_is_no_page_leaves_the_last_page(body: bytes, cause: str) -> None:
    """Until the poller hides it."""
    passing = Passing()
    passing.take("a 1\n")
    with pytest.raises(PollError) as error:
        passing.take(body)

    assert error.value.cause == cause
    assert "a 1\n" in passing.show()
    passing.page().hide()
    assert (passing.show(), passing.left_out()) == ("", {})


def test_an_endless_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without line ends."""
    monkeypatch.setattr(pages, "MAX_PAGE_BYTES", 1 << 20)
    for line in ("a", 'a{b="c"} 1\n' * 100):
        with pytest.raises(PollError, match="bad_answer: more than 50000 lines, or 1 MiB"):
            Passing().take(line * ((1 << 20) // len(line) + 1))


@pytest.mark.parametrize("name", ENGINES)
def test_a_page_in_openmetrics_is_read_as_the_one_in_text(name: str) -> None:
    """Samples and types are equal; OpenMetrics has no type for counters without ``_total``."""
    passing = Passing()
    passing.take(page_of_engine(name))
    text = passing.show(openmetrics=True)
    again = Passing()
    again.take(text + "# EOF\n")

    def counters(page: str) -> set[str]:
        return set(re.findall(r"# (?:TYPE|HELP) \w+_total .*", page))

    assert samples(again.show()) == openmetrics_samples(text)
    assert counters(again.show()) == counters(passing.show())
    assert again.show(openmetrics=True) == text
    assert not again.left_out()


def test_exemplars_and_timestamps_of_openmetrics() -> None:
    """Exemplars are left out, timestamps become milliseconds; a page without its end is text."""
    page = (
        "# HELP a Text.\n# TYPE a counter\n"
        'a_total{b="c # {d"} 5 1700000000.5 # {trace_id="x"} 1.0 1700000000.4\n'
        'a_total{b="e"} 6 # {trace_id="y"} 1.0\n'
        "# TYPE g gauge\n# UNIT g seconds\ng 1 17\n"
    )
    passing = Passing()
    passing.take(page + "# EOF\n")

    assert passing.show().splitlines() == [
        "# HELP a_total Text.",
        "# TYPE a_total counter",
        'a_total{b="c # {d"} 5 1700000000500',
        'a_total{b="e"} 6',
        "# HELP g ",
        "# TYPE g gauge",
        "g 1 17000",
    ]
    assert not passing.left_out()
    passing.take(page)
    assert passing.left_out() == {"bad_line": 2}


def test_timestamps_pass_through() -> None:
    """In the unit of each format, also if only some polls have one."""
    passing = Passing()
    for page in ("a 1\nb 2\n", "a 1 1700000000123\nb 2\n", "a 1 61000\nb 2 5\n"):
        passing.take(page)
        assert samples(passing.show()) == samples(page)
        assert openmetrics_samples(passing.show(openmetrics=True)) == samples(page)
    passing.take("a 1 1700000000123\n")

    assert "a 1 1700000000.123\n" in passing.show(openmetrics=True)


def test_labels_are_added() -> None:
    """A label of that name is renamed, as Prometheus does."""
    passing = Passing((("pod", 'p"0'), ("az", "b")))
    passing.take('a 1\na{x="y"} 2\na{pod="q",exported_pod="r"} 3\nb{az=""} 4\n')

    assert [line for line in passing.show().splitlines() if line[0] != "#"] == [
        'a{pod="p\\"0",az="b"} 1',
        'a{x="y",pod="p\\"0",az="b"} 2',
        'a{exported_exported_pod="q",exported_pod="r",pod="p\\"0",az="b"} 3',
        'b{pod="p\\"0",az="b"} 4',
    ]


def test_openmetrics_leaves_out_families_with_names_of_another() -> None:
    """Text has them."""
    page = (
        "# TYPE a_total counter\na_total 1\n# TYPE a_created gauge\na_created 5\n"
        "# TYPE b counter\nb 2\n# TYPE b_created gauge\nb_created 6\nc 3\n# TYPE d unknown\nd 1\n"
    )
    passing = Passing()
    passing.take(page)

    assert samples(passing.show()) == samples(page)
    assert re.findall("# TYPE .*", passing.show(openmetrics=True)) == [
        "# TYPE a counter",
        "# TYPE b unknown",
        "# TYPE b_created gauge",
        "# TYPE d unknown",
        "# TYPE c unknown",
    ]


LINES = st.sampled_from(
    [
        "# TYPE a counter",
        "# TYPE a histogram",
        "# TYPE b_total counter",
        "# TYPE b summary",
        "# TYPE a_count gauge",
        "# HELP a Something.",
        "# HELP b_total \\n",
        "a 1",
        "a 2",
        'a{x="1"} 1',
        'a{x="1",y=""} 1 5',
        'a{y="2",x="1"} NaN',
        'a_bucket{le="1"} 1',
        'a_bucket{le="+Inf"} 1',
        'a_bucket{le="1",x="1"} 1',
        "a_sum 1",
        "a_count 1",
        "b_count 1",
        'b{quantile="0.5"} +Inf',
        "b_total 1",
        "b 1 # bad",
        "python_a 1",
        "",
        "#",
        'a{x="\0"} 1',
        "a 1 -1",
    ]
)
PAGES = st.lists(LINES | st.text('ab{}="x, 1\n#\0', max_size=12), max_size=25)


def readable(text: str) -> None:
    """Check that the page passes through whole and that prometheus_client reads it."""
    again = Passing()
    if text:
        again.take(text)
    assert again.left_out() == {}
    assert again.show() == text
    samples(text)


@given(st.lists(PAGES, min_size=1, max_size=4), st.integers(1, 60))
def test_earlier_pages_make_no_difference(found: list[list[str]], size: int) -> None:
    """Nor do the chunks in which a page arrives; the result is a valid page."""
    passing = Passing()
    for lines in found:
        text = "".join(f"{line}\n" for line in lines)
        fresh = Passing()
        try:
            fresh.take(text)
        except PollError:
            with pytest.raises(PollError):
                passing.take(text, size=size)
            continue
        passing.take(text, size=size)
        for openmetrics in (False, True):
            assert passing.show(openmetrics=openmetrics) == fresh.show(openmetrics=openmetrics)
        assert passing.left_out() == fresh.left_out()
        readable(passing.show())


@given(st.data())
def test_a_damaged_page_loses_only_damaged_lines(data: st.DataObject) -> None:
    """After bytes are lost, repeated or replaced."""
    page = bytearray(page_of_engine("page_triton_custom").encode() * 2)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(page) - 1))
        page[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    passing = Passing()
    passing.take(page_of_engine("page_triton_custom"))
    with contextlib.suppress(PollError):
        passing.take(bytes(page))

    readable(passing.show())
