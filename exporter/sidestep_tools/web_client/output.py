"""Standard output of the commands, which escapes the text of servers and files."""

from __future__ import annotations

from collections.abc import Iterable

import click
import msgspec

from sidestep.protocol.limits import escape


def show(lines: Iterable[str]) -> None:
    """Print lines."""
    for line in lines:
        click.echo(escape(line))


def show_json(value: msgspec.Struct) -> None:
    """Print a value as indented JSON."""
    show(msgspec.json.format(msgspec.json.encode(value)).decode().split("\n"))
