"""Pages of engines: what is read of them, and what is left out."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.engines.row_builders import SampledRows
from sidestep.errors import PollError
from sidestep.protocol.limits import VALUE_LIMIT
from sidestep_adapters.polling.page_reader import MAX_LINES, SLICE_LINES, PageReader

TOY = SampledRows("toy_")
ROWS = (
    TOY.counter("tokens_total", "Tokens."),
    TOY.counter("ends_total", "Ends.", "reason"),
    TOY.gauge("running", "Running."),
    TOY.gauge("temperature", "Temperature.", combine="max"),
)


def reader() -> PageReader:
    """Return a reader of these rows."""
    return PageReader(ROWS)


async def read(text: str | bytes) -> dict[str, object]:
    """Return what a page has: a number, or the counts and sum, by family and own labels."""
    found = await reader().read(text if isinstance(text, bytes) else text.encode())
    return {
        " ".join((family.name, *sample.labels)): sample.value
        for family in found
        for sample in family.samples
    }


async def test_series_are_read_by_their_labels() -> None:
    """Labels are in any order, with escapes; numbers may have an exponent."""
    page = (
        "toy_tokens_total 1.2016e+06\n"
        'toy_ends_total{reason="a\\"b"} 2\n'
        'toy_ends_total{reason="c"} 3\n'
    )

    assert await read(page) == {
        "toy_tokens_total": 1201600,
        'toy_ends_total a"b': 2,
        "toy_ends_total c": 3,
    }


@pytest.mark.parametrize(
    "line",
    [
        "toy_tokens_total NaN",
        "toy_tokens_total -1",
        "toy_tokens_total 1e300",
        "toy_tokens_total 5 1700000000000",
        'toy_tokens_total{new="label"} 5',
        "toy_unknown 5",
        "not a sample at all {",
    ],
)
async def test_what_no_row_can_have_is_left_out(line: str) -> None:
    """The other samples of the page are read."""
    assert await read(f"toy_running 1\n{line}\n") == {"toy_running": 1}


@pytest.mark.parametrize(
    ("page", "cause"),
    [
        (b"", "bad_answer"),
        (b"# HELP x\n", "bad_answer"),
        (b"<html>\n", "bad_answer"),
        (b"toy_running 1", "truncated"),
        (b"x 1\n" * (MAX_LINES + 1), "bad_answer"),
    ],
)
async def test_other_answers_are_refused(page: bytes, cause: str) -> None:
    """Their cause is that of the poll."""
    with pytest.raises(PollError) as error:
        await reader().read(page)
    assert error.value.cause == cause


@given(st.lists(st.one_of(st.binary(max_size=40), st.just(b"toy_running 1")), max_size=6))
def test_any_bytes_are_read_or_refused(lines: list[bytes]) -> None:
    """Nothing else is raised."""
    page = b"\n".join(lines) + b"\n"
    with contextlib.suppress(PollError):
        asyncio.run(reader().read(page))


async def test_the_event_loop_runs_between_slices() -> None:
    """A long page is read in several turns."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await reader().read(b"toy_running 1\n" * (10 * SLICE_LINES))
    counting.cancel()

    assert turns >= 10


async def test_the_sum_of_a_repeated_series_has_the_limit_of_a_number() -> None:
    """A snapshot of the exporter with a larger one could not be restored."""
    assert await read("toy_tokens_total 9e14\n" * 2) == {"toy_tokens_total": VALUE_LIMIT}
