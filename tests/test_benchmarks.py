"""The table of benchmarks: its rows, its text, and its copy in the document."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.summary import engine
from benchmarks.summary.document import BEGIN, END, write
from benchmarks.summary.topics import TOPICS, missing, topic

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "performance.md"
SHORTEST = "routers"
"""Topic that every run of the tests measures."""


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


def _table(path: Path) -> list[list[str]]:
    text = path.read_text().partition(BEGIN)[2].partition(END)[0]
    return [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
