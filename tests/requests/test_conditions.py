"""The grammar of --requests.log.if."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.requests.conditions import NUMBERS, SECONDS, TEXTS, parse
from sidestep.requests.record import RequestRecord


def record(**more: Any) -> RequestRecord:
    """Return a record with these fields; others are unknown, 0 or empty."""
    empty = {"str": "", "int": 0, "float": 0.0, "dict[str, bool]": {}}
    fields = {
        field.name: empty.get(str(RequestRecord.__annotations__[field.name]))
        for field in msgspec.structs.fields(RequestRecord)
    }
    return RequestRecord(**{**fields, **more})


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ("", "must be TERM"),
        ("ttft", "must be TERM"),
        ("ttft > fast", "is a time"),
        ("ttfb > 2s", "is no field; known are e2e"),
        ("reason > abort", "compare it by = or !="),
        ("preemptions > few", "is a number"),
        ("ttft > 2s or", "must be TERM"),
    ],
)
def test_mistakes_complete_an_error_line(condition: str, says: str) -> None:
    """The error names the known values."""
    with pytest.raises(ValueError, match=says):
        parse(condition)


UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0}
ORDERED = ("=", "!=", "<", "<=", ">", ">=")
names = st.text("abcxyz0189-_./:", min_size=1, max_size=4)
counts = st.integers(0, 9)
milliseconds = st.integers(0, 9000)
BLANK = st.sampled_from(["", " ", "  "])


@st.composite
def terms(draw: st.DrawFn) -> tuple[str, str]:
    """Return one comparison as ``--requests.log.if`` has it, and as an expression of Python."""
    kind = draw(st.sampled_from(["time", "number", "text"]))
    if kind == "text":
        name, sign = draw(st.sampled_from(TEXTS)), draw(st.sampled_from(ORDERED[:2]))
        value = draw(names)
        python = repr(value)
        field = name
    elif kind == "number":
        name, sign = draw(st.sampled_from(NUMBERS)), draw(st.sampled_from(ORDERED))
        value = python = str(draw(counts))
        field = name
    else:
        name, sign = draw(st.sampled_from([*SECONDS])), draw(st.sampled_from(ORDERED))
        unit = draw(st.sampled_from([*UNITS]))
        number = draw(st.sampled_from(["0", "1", "2.5", ".5", "3."]))
        value, python = f"{number}{unit}", f"{float(number)!r} * {UNITS[unit]!r}"
        field = SECONDS[name]
    text = f"{name}{draw(BLANK)}{sign}{draw(BLANK)}{value}"
    sign = "==" if sign == "=" else sign
    return text, f"(r[{field!r}] is not None and r[{field!r}] {sign} {python})"


@given(
    st.lists(terms(), min_size=1, max_size=6),
    st.lists(st.sampled_from(["and", "or"]), min_size=5, max_size=5),
    st.dictionaries(st.sampled_from([*SECONDS.values()]), st.none() | milliseconds),
    st.dictionaries(st.sampled_from(NUMBERS), counts),
    st.dictionaries(st.sampled_from(TEXTS), names),
)
def test_conditions_mean_what_python_makes_of_them(
    chosen: list[tuple[str, str]],
    words: list[str],
    times: dict[str, int | None],
    numbers: dict[str, int],
    texts: dict[str, str],
) -> None:
    """Python's ``and`` binds closer than its ``or``, too."""
    text, python = chosen[0]
    for word, (more, expression) in zip(words, chosen[1:], strict=False):
        text, python = f"{text} {word} {more}", f"{python} {word} {expression}"
    seconds = {name: None if ms is None else ms / 1000 for name, ms in times.items()}
    found = record(**seconds, **numbers, **texts)
    fields = msgspec.structs.asdict(found)
    assert parse(text)(found) is eval(python, {"r": fields})


@given(st.text(max_size=40))
def test_any_text_is_a_condition_or_a_mistake(text: str) -> None:
    """Nothing else is raised."""
    with contextlib.suppress(ValueError):
        parse(text)
