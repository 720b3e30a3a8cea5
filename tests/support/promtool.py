"""promtool of Prometheus 2 and 3: checks of pages and rules, and queries over given series."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROMTOOL = shutil.which("promtool")
PROMTOOLS = {
    "2": PROMTOOL,
    "3": shutil.which("promtool", path=ROOT / "build" / "prometheus-3" / "usr" / "bin"),
}
"""promtool of Debian, and of a later Debian (``make tools``), by major version."""
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")


def run(
    *arguments: object, page: str | None = None, binary: str | None = PROMTOOL
) -> subprocess.CompletedProcess[str]:
    """Run promtool with ``arguments``, and with ``page`` as its input."""
    return subprocess.run(
        [str(binary), *map(str, arguments)],
        input=page,
        capture_output=True,
        text=True,
        check=False,
    )


def complaints(page: str) -> set[str]:
    """Return what promtool has to say about ``page``, which it must be able to parse."""
    done = run("check", "metrics", page=page)
    found = (done.stdout + done.stderr).splitlines()
    assert not [line for line in found if "error while" in line]
    return set(found)


def assert_query(
    directory: Path,
    series: Mapping[str, str],
    expr: str,
    wanted: Mapping[str, float],
    *,
    interval: str = "15s",
    at: str = "1m",
) -> None:
    """Assert that ``expr`` over ``series`` has the samples ``wanted``, by their labels.

    Values are compared to four decimal places: promtool compares all digits.
    """
    look = {
        "expr": f"round({expr}, 0.0001)",
        "eval_time": at,
        "exp_samples": [
            {"labels": labels, "value": round(value, 4)} for labels, value in wanted.items()
        ],
    }
    inputs = [{"series": one, "values": values} for one, values in series.items()]
    test = {"interval": interval, "input_series": inputs, "promql_expr_test": [look]}
    file = directory / "test.json"
    file.write_text(json.dumps({"tests": [test]}))
    done = run("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr
