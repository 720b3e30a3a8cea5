"""The dashboard of single requests: queries of a small part of LogQL, over fields that records have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tools.boards.__main__ import GRAFANA
from tools.boards.slow_requests import COLUMNS, SOURCE

from boards import dashboard, everything, panels, variables
from sidestep.requests.record import RequestRecord

BOARD = dashboard(GRAFANA / "loki" / "slow-requests.json")
FIELDS = {field.name for field in msgspec.structs.fields(RequestRecord)}
NUMBERS = {
    field.name for field in msgspec.structs.fields(RequestRecord) if "float" in str(field.type)
}
TYPED = {name: each for name, each in variables(BOARD).items() if each["type"] == "textbox"}

SELECTOR = r'\{[a-z_]+="[^"]*"\}'
STAGE = r'json|unwrap \w+|\w+=~?"[^"]*"|\w+ > [0-9.]+'
LOGS = rf"{SELECTOR}(?: \| (?:{STAGE}))+"
LOGQL = re.compile(
    rf"{LOGS}"
    rf"|sum by \(\w+\) \(rate\({LOGS} \[1m\]\)\)"
    rf"|quantile_over_time\(0\.\d+, {LOGS} \[1m\]\) by \(\w+\)"
)
"""The queries that are allowed: nothing else of LogQL is needed."""


def filled(expr: str) -> str:
    """Replace each variable by its default, as Grafana does."""
    given = {"__auto": "1m", **{name: each["query"] for name, each in TYPED.items()}}
    return re.sub(r"\$(\w+)", lambda found: given[found[1]], expr)


def queries() -> Iterator[tuple[str, str]]:
    """Yield the title of each panel with its queries."""
    for panel in panels(BOARD):
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == SOURCE
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("title", "expr"), list(queries()))
def test_queries_are_simple_logql(title: str, expr: str) -> None:
    """A selector, ``| json`` and comparisons of fields that a record has."""
    found = filled(expr)
    assert LOGQL.fullmatch(found), title
    compared = set(re.findall(r"\| (\w+)(?:=| >)", found)) - {"__error__"}
    unwrapped = set(re.findall(r"unwrap (\w+)", found))
    grouped = set(re.findall(r"by \((\w+)\)", found))
    assert compared | unwrapped | grouped <= FIELDS
    assert unwrapped | set(re.findall(r"\| (\w+) >", found)) <= NUMBERS
    # A line that is no record, such as one that a kill has cut, selects nothing.
    assert '| json | __error__=""' in found


def test_every_variable_is_used() -> None:
    """Variables are typed in: Loki has no list of a record's fields."""
    used = {name for _, expr in queries() for name in re.findall(r"\$([a-z]\w*)", expr)}
    assert used == TYPED.keys()
    assert variables(BOARD)["datasource"]["query"] == "loki"
    assert BOARD["uid"] == "sidestep-slow-requests"


def test_tables_show_fields_of_records() -> None:
    """From the line itself, where numbers are numbers; sorted by a column that is shown."""
    assert COLUMNS.keys() <= FIELDS
    tables: list[dict[str, Any]] = [one for one in panels(BOARD) if one["type"] == "table"]
    for table in tables:
        extract, organize, order = table["transformations"]
        assert extract["options"] == {"source": "Line", "format": "json", "replace": True}
        assert organize["options"]["renameByName"] == COLUMNS
        (by,) = order["options"]["sort"]
        assert by["field"] in COLUMNS.values()
    assert len(tables) >= 4
    assert all(one.get("description") for one in everything(BOARD) if one["type"] != "row")
