"""The table of what to change: it covers all limits and parts, and names settings that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidestep.catalog.tuning import CAUSES
from sidestep.engines.dialects import DIALECTS
from sidestep.protocol.request_events import LIMITS
from sidestep.telemetry.rows import ROWS

WORK = ("prefill", "decode", "queue.none")
"""Parts that are the work itself, or the wait for the running step: nothing binds there."""

ROOT = Path(__file__).parents[2]
SETTING = re.compile(r"--[a-z][\w-]*")


def settings(dialect: str) -> set[str]:
    """Return the settings of an engine that the table names."""
    texts = [change.text for cause in CAUSES for change in cause.changes]
    assert all(change.dialect in DIALECTS for cause in CAUSES for change in cause.changes)
    assert len(texts) > 10
    own = [c.text for cause in CAUSES for c in cause.changes if c.dialect == dialect]
    return set(SETTING.findall(" ".join(own)))


def sources(engine: str, *files: str) -> list[ast.Module]:
    """Return files of an installed engine, parsed; skip the test without it."""
    found = [
        path
        for file in files
        for path in ROOT.glob(f"build/{engine}-venv/lib/python3*/site-packages/{engine}/{file}")
    ]
    if not found:
        pytest.skip(f"no {engine}: tools/setup_{engine}.sh")
    return [ast.parse(path.read_text()) for path in found]


def test_vllm_has_the_settings() -> None:
    """They are arguments of ``vllm serve``."""
    trees = sources("vllm", "engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
    known = {
        argument.value
        for tree in trees
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }

    assert settings("vllm") - known == set()


def sglang_fields(tree: ast.Module) -> Iterator[str]:
    """Yield the fields of the server's arguments that the command line has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and "no_cli=True" not in ast.unparse(node.annotation):
            yield ast.unparse(node.target)


def test_sglang_has_the_settings() -> None:
    """They are arguments of ``sglang.launch_server``."""
    trees = sources("sglang", "srt/arg_groups/fields/*.py")
    known = {f"--{name.replace('_', '-')}" for tree in trees for name in sglang_fields(tree)}

    assert settings("sglang") - known == set()


def test_every_limit_has_an_entry() -> None:
    """No part is in two entries, and only that without a limit needs none."""
    parts = [part for cause in CAUSES for part in cause.parts]

    assert len(parts) == len({*parts, *WORK}) - len(WORK)
    assert {f"queue.{limit}" for limit in LIMITS} <= {*parts, *WORK}


def test_families_exist() -> None:
    """The families to look at are in the catalogue."""
    known = {
        assignment.row.name
        for layout in DIALECTS.layouts().values()
        for assignment in layout.assignments
    }
    known |= {row.name for row in ROWS}
    named = re.findall(r"(?:sidestep_|vllm:|sglang:)\w+", " ".join(c.evidence for c in CAUSES))

    assert named
    assert set(named) - known == set()
