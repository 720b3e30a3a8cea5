"""The parser of passthrough lines: values, or one fixed reason for an invalid line."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.errors import WireError
from sidestep.exposition.passthrough import parser
from sidestep.exposition.passthrough.parser import (
    MAX_LINE_BYTES,
    parse_comment,
    parse_head,
    parse_value,
    series_text,
)

LINES = [
    (b"a 1", "a", {}, b"1"),
    (b"\t a:b_9{}\t1", "a:b_9", {}, b"1"),
    (b'a{b="c"} 1', "a", {"b": "c"}, b"1"),
    (b'a { b = "c" , d="" , } +Inf  17\t', "a", {"b": "c", "d": ""}, b"+Inf 17"),
    (rb'a{b="} 2 \\ \" \n",c="#"} 1', "a", {"b": '} 2 \\ " \n', "c": "#"}, b"1"),
    ('a{b="süß \u2028"} 1'.encode(), "a", {"b": "süß \u2028"}, b"1"),
    (b"a 1.", "a", {}, b"1."),
    (b"a .5e-1000", "a", {}, b".5e-1000"),
    (b"a nAN", "a", {}, b"nAN"),
    (b"a -infinity", "a", {}, b"-infinity"),
    (b"a 1e308 1700000000000", "a", {}, b"1e308 1700000000000"),
]


@pytest.mark.parametrize(("line", "name", "labels", "text"), LINES)
def test_a_sample_line_is_parsed(
    line: bytes, name: str, labels: dict[str, str], text: bytes
) -> None:
    """With blanks and escapes wherever the format allows them."""
    found = parse_head(line)

    assert (found.name, parser.unescape_labels(found.labels)) == (name, labels)
    assert parse_value(line[found.end :]) == text
    again = parse_head(series_text(found.name, found.labels) + b" 1")
    assert (again.name, again.labels) == (found.name, found.labels)


BAD = [
    (b"", "bad_line"),
    (b"1a 1", "bad_line"),
    (b"a-b 1", "bad_line"),
    (b"a", "bad_line"),
    (b"a1", "bad_line"),
    (b"a{}1", "bad_line"),
    (b'a{b="c} 1', "bad_line"),
    (b"a{b='c'} 1", "bad_line"),
    (b"a{b=c} 1", "bad_line"),
    (b'a{b="c"d="e"} 1', "bad_line"),
    (b'a{,b="c"} 1', "bad_line"),
    (b'a{b="\\t"} 1', "bad_line"),
    (b'a{1b="c"} 1', "bad_line"),
    (b'{"a.b"} 1', "bad_line"),
    (b'a{"b.c"="d"} 1', "bad_line"),
    (b'a{b="c"}} 1', "bad_line"),
    (b"a 1\r", "bad_line"),
    (b"a 1_000", "bad_line"),
    (b"a 0x1p-2", "bad_line"),
    (b"a +nan", "bad_line"),
    (b"a 1e309", "bad_line"),
    (b"a " + b"9" * 200, "bad_line"),
    (b"a 1 1.5", "bad_line"),
    (b"a 1 2 3", "bad_line"),
    (b"a 1 -5", "bad_line"),
    (b'a{b="\0"} 1', "bad_line"),
    (b'a{b="\\n\0"} 1', "bad_line"),
    (b"a 1 # {} 1", "bad_line"),
    (b"a 1 9999999999999999999", "bad_line"),
    (b"<html>", "bad_line"),
    (b'a{b="\xff"} 1', "not_utf8"),
    (b'a{b="c",b="d"} 1', "bad_label"),
    (b'a{__name__="b"} 1', "bad_label"),
    (b'a{b="' + b"c" * MAX_LINE_BYTES + b'"} 1', "too_long"),
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=[repr(line)[:30] for line, _ in BAD])
def test_an_invalid_line_is_refused_with_a_reason(line: bytes, reason: str) -> None:
    """By a WireError."""
    with pytest.raises(WireError) as error:
        parse_value(line[parse_head(line).end :])
    assert error.value.reason == reason


HOSTILE = [
    b"a" + b" " * 16000,
    b"a{" + b" " * 16000 + b"x",
    b'a{b="c"' + b" " * 16000 + b"x",
    b'a{b="c",' + b" " * 16000 + b"x",
    b"a{" + b'b="c" , ' * 1900 + b"x",
    b'a{b="' + b"\\\\" * 8000,
    b"a 1" + b" " * 16000 + b"x",
    b"a " + b"1" * 16000 + b"x",
    b"#" + b" " * 16000 + b"x",
    b"# HELP a " + b"\\" * 16000 + b"\xff",
]


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_no_line_takes_long(line: bytes) -> None:
    """Quadratic backtracking would take seconds."""
    started = time.process_time()
    with pytest.raises(WireError):
        _ = parse_comment(line) or parse_value(line[parse_head(line).end :])

    assert time.process_time() - started < 0.05


@given(st.binary(max_size=60) | st.text('a1{}="\\n#, .eE+-', max_size=30).map(str.encode))
def test_any_bytes_are_parsed_or_refused(line: bytes) -> None:
    """A parsed value equals the one that Python reads."""
    try:
        found = parse_head(line)
        text = parse_value(line[found.end :])
    except WireError:
        return
    float(text.partition(b" ")[0])
