"""Every block of code of README.md runs, or is checked as far as it can be here."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from markdown_blocks import Block, blocks, inline_code
from readers_machine import ROOT, Machine, machine

README = ROOT / "README.md"
COMMANDS = re.compile(r"(?:make|pip|sidestep|docker|kubectl|uvx|git|curl) ")
ENDLESS = {"make demo": "page for people"}
"""Commands that serve until they are ended, and what they print once they serve."""


@pytest.fixture
def reader() -> Iterator[Machine]:
    """Return a machine with a clone and engines' stand-ins."""
    with machine() as made:
        yield made


def run(reader: Machine, block: Block) -> None:
    """Run a block as a reader does who goes through the document from its beginning.

    Of a ``console`` block each command is repeated until it prints what the block has.
    """
    if block.text.strip() in ENDLESS:
        command = block.text.strip()
        reader.run(f"{command} & ENDLESS=$!")
        reader.wait_for(ENDLESS[command])
        reader.run("kill $ENDLESS; wait $ENDLESS || true")
    elif block.language == "sh":
        reader.run(block.text)
    elif block.language == "console":
        for command, output in re.findall(
            r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE
        ):
            reader.until(command, output.splitlines())
    else:
        pytest.fail(f"{block}: nothing checks a block of {block.language or 'no language'}")


def test_the_readmes_blocks_run(reader: Machine) -> None:
    """A reader without a GPU comes from a clone to engines that are connected, of vLLM and of SGLang."""
    for block in blocks(README):
        run(reader, block)
    shown = (
        "curl -s http://127.0.0.1:9857/metrics | grep -E '^(sidestep_engine_up|sglang:realtime)'"
    )
    reader.until(shown, [
        'sidestep_engine_up{engine="0",model_name="MODEL",origin=""} 1.0',
        'sidestep_engine_up{engine="0",model_name="tiny",origin=""} ...',
        'sidestep_engine_up{engine="...sglang/scheduler...",model_name="MODEL",origin=""} 1.0',
        'sglang:realtime_tokens_total{...model_name="MODEL"...} ...',
    ])  # fmt: skip


def test_commands_between_backticks_run(reader: Machine) -> None:
    """The commands in README.md's text make what they promise, and the targets of make exist."""
    found = {code for code in inline_code(README) if COMMANDS.match(code)}
    targets = {code.split()[1] for code in found if code.startswith("make ")}
    assert "compose" in targets
    for target in targets:
        reader.run(f"make --dry-run {target}")
    found -= {f"make {target}" for target in targets}

    assert found == {"pip wheel --no-deps .", "sidestep top"}
    reader.run("pip wheel --no-deps . && ls sidestep-*.whl && sidestep top --help")


def test_the_readme_is_short() -> None:
    """It has at most 150 lines."""
    assert len(README.read_text().splitlines()) <= 150
