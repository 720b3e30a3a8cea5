"""The table of benchmarks: its rows, its text, and its copy in the document."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.summary import engine
from benchmarks.summary.document import BEGIN, END, write
from benchmarks.summary.rows import HEAD, Figure, Row, Topic, cells, met, ratio
from benchmarks.summary.topics import TOPICS, interpreter, missing, topic
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "performance.md"
COST = Row("a page", "ms", "a peer", target=20, limit=50)
SHORTEST = "routers"
"""Topic that every run of the tests measures."""
RATE = Row("values", "M values/s", "a peer", target=14, more=True)

figures = st.floats(min_value=1e-3, max_value=1e9)


@given(ours=figures, theirs=figures)
def test_a_ratio_above_one_favours_sidestep(ours: float, theirs: float) -> None:
    """A ratio above 1 means that sidestep is better, for costs as for rates."""
    figure = Figure(ours, theirs)
    better, worse = ratio(COST, figure), ratio(RATE, figure)
    assert better is not None
    assert worse is not None

    assert (better > 1) == (ours < theirs)
    assert (worse > 1) == (ours > theirs)


@pytest.mark.parametrize(
    ("row", "figure", "reached"),
    [
        (COST, Figure(50, 1000), True),
        (COST, Figure(51, 10_000), False),
        (COST, Figure(50, 999), False),
        (COST, Figure(49), True),
        (COST, Figure(why="absent"), None),
        (RATE, Figure(14, 1), True),
        (RATE, Figure(13.9, 1), False),
        (RATE, Figure(13.9), None),
        (Row("free", "us", "a peer"), Figure(1, 2), None),
        (Row("dropped", "steps", "a peer", limit=0), Figure(0, 0), True),
    ],
)
def test_a_row_is_met_if_target_and_limit_are(
    row: Row, figure: Figure, reached: bool | None
) -> None:
    """A row is met if its target and its limit are; without figures it is neither met nor missed."""
    assert met(row, figure) is reached


def test_an_absent_peer_is_named() -> None:
    """A row names an absent peer with the reason, and keeps sidestep's own figure."""
    shown = dict(zip(HEAD, cells(RATE, Figure(2.5, why="absent: not on the path")), strict=True))

    assert shown == {
        "row": "values",
        "unit": "M values/s",
        "sidestep": "2.50",
        "peer's": "",
        "peer": "a peer (absent: not on the path)",
        "ratio": "",
        "target": "14x",
        "met": "",
    }


def test_a_topic_without_its_engine_keeps_its_rows() -> None:
    """Without its engine, a topic keeps its rows, which name what is absent."""
    absent = Topic("of an engine", (COST, RATE), lambda _: {}, "no-venv", ("no_engine", "a.sh"))

    assert interpreter(absent) is None
    assert [figure.why for figure in missing(absent, "absent: no_engine").values()] == [
        "absent: no_engine"
    ] * 2


@pytest.mark.parametrize("name", TOPICS)
def test_names_of_rows_are_unique(name: str) -> None:
    """Names of rows are unique within a topic."""
    rows = topic(name).rows

    assert len({row.name for row in rows}) == len(rows) > 0


def test_costs_of_a_step_are_measured() -> None:
    """A step of one request costs something in every role; the whole topic lasts a minute."""
    case = engine.Case(latencies=1, turnover=1, calls=10)
    found = engine.results([case], 1, "client")

    for peer in engine.PEERS:
        step = engine.figure(found, case, peer, "step")
        assert step.ours
        assert step.theirs
    for what in ("process", "switches", "instructions"):
        whole = engine.figure(found, case, engine.PEERS[0], what)
        assert whole.why or whole.ours is not None


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        SHORTEST,
        *(
            pytest.param(name, marks=pytest.mark.engine if topic(name).venv else pytest.mark.long)
            for name in TOPICS
            if name not in ("engine", SHORTEST)
        ),
    ],
)
def test_the_table_has_all_rows_of_its_topics(name: str) -> None:
    """``python -m benchmarks --quick`` measures every topic, and prints a line with figures for each row."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--only", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    for row in topic(name).rows:
        (line,) = [each for each in done.stdout.splitlines() if each.startswith(f"{row.name}  ")]
        assert row.peer in line
        assert row.unit in line
        reason = re.search(r"\((absent: .+|left out by --quick)\)", line)
        figures = line.removeprefix(row.name)
        figures = figures.partition(row.peer)[0] if row.peer else figures.partition(row.unit)[2]
        assert reason or re.search(r"\d", figures)


def test_the_document_has_every_row(tmp_path: Path) -> None:
    """The document has every row and peer; an update changes figures only."""
    written = _table(DOCUMENT)
    page = tmp_path / "page.md"
    page.write_text(DOCUMENT.read_text())

    write(page, {name: missing(topic(name), "") for name in TOPICS})

    assert [line[:1] for line in _table(page)] == [line[:1] for line in written]
    assert page.read_text().partition(BEGIN)[0] == DOCUMENT.read_text().partition(BEGIN)[0]
    assert page.read_text().partition(END)[2] == DOCUMENT.read_text().partition(END)[2]


def test_a_document_without_markers_is_left_unchanged(tmp_path: Path) -> None:
    """A document without markers for the table is an error, and stays unchanged."""
    page = tmp_path / "page.md"
    page.write_text("# Performance\n")

    with pytest.raises(SystemExit, match="no place for the table"):
        write(page, {})

    assert page.read_text() == "# Performance\n"


def _table(path: Path) -> list[list[str]]:
    text = path.read_text().partition(BEGIN)[2].partition(END)[0]
    return [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
