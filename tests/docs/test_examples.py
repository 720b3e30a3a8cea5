"""Examples of every document: commands that start the exporter, and queries."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from command_line import sidestep
from markdown_blocks import blocks

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
RECORDING = ROOT / "deploy" / "rules" / "recording.yaml"


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the arguments of each ``sidestep serve``, with its place."""
    for block in (block for path in DOCUMENTS for block in blocks(path)):
        for line in block.text.replace("\\\n", " ").splitlines():
            if block.language in ("sh", "console") and "sidestep serve" in line:
                words = shlex.split(line.removesuffix(" &"), comments=True)
                yield str(block), words[words.index("serve") :]


def queries() -> Iterator[str]:
    """Yield each query; a runbook has several in consecutive lines."""
    for block in (block for path in DOCUMENTS for block in blocks(path)):
        if block.language == "promql":
            between = r"\n+" if "runbooks" in block.path.parts else r"\n\s*\n"
            yield from re.split(between, block.text.strip())


@pytest.mark.parametrize("words", [pytest.param(words, id=place) for place, words in commands()])
def test_the_exporter_accepts_the_commands(words: list[str]) -> None:
    """Nothing but a file that is not on this machine is wrong with a command."""
    done = sidestep(*words, *([] if "--check" in words else ["--check"]))

    assert done.returncode == 0 or "No such file or directory" in done.stderr, done.stderr


def test_queries_name_what_exists(tmp_path: Path) -> None:
    """Queries are PromQL, and their metrics, labels and values are those of the catalogue and of the rules."""
    found = list(queries())
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(found)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "documents", "rules": rules}]}))

    done = sidestep("doctor", "--rules", file, "--rules", RECORDING, "--fail-on", "warning")

    assert len(found) > 50
    assert done.returncode == 0, done.stdout
