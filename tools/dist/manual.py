"""The man page, and completions of shells, from the commands' own help."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete
from tools.dist.release import Release

from sidestep.app.cli import cli
from sidestep.config.settings import CONFIG_FILE, SETTINGS
from sidestep.config.variables import TOPICS

COMPLETIONS: dict[str, type[ShellComplete]] = {
    "completions/sidestep": BashComplete,
    "completions/_sidestep": ZshComplete,
    "completions/sidestep.fish": FishComplete,
}
EXITS = (("0", "success"), ("1", "an error while it ran"), ("2", "an invalid flag or setting"))


def manual(release: Release) -> dict[str, Path | str]:
    """Return the man page and the completions by their names in an archive."""
    found: dict[str, Path | str] = {"man/sidestep.1": man_page(release.version, release.epoch)}
    for name, shell in COMPLETIONS.items():
        # click asks the bash that is installed for its version, which the script does not depend on.
        variables = shell(cli, {}, "sidestep", "_SIDESTEP_COMPLETE").source_vars()
        found[name] = shell.source_template % variables
    return found


def man_page(version: str, epoch: int) -> str:
    """Return sidestep(1)."""
    date = time.strftime("%Y-%m-%d", time.gmtime(epoch))
    lines = [
        f'.TH SIDESTEP 1 "{date}" "sidestep {version}" "User Commands"',
        *_section("NAME", "sidestep - metrics of LLM inference engines"),
        ".SH SYNOPSIS",
        ".B sidestep",
        r"\fICOMMAND\fR [\fIARGUMENT\fR...]",
        *_section("DESCRIPTION", cli.help or ""),
        ".SH COMMANDS",
    ]
    context = click.Context(cli, info_name="sidestep")
    commands = [(name, cli.get_command(context, name)) for name in cli.list_commands(context)]
    for name, command in commands:
        if command is not None:
            lines += _command(command, click.Context(command, info_name=name, parent=context))
    lines += [
        ".SH SETTINGS",
        "Flags of",
        ".B serve",
        "and",
        ".BR demo .",
        "Each is also a variable of the environment, in brackets, and a key of the configuration file.",
    ]
    for topic in TOPICS:
        lines.append(f".SS {topic}")
        for setting in (*SETTINGS, CONFIG_FILE):
            if setting.topic == topic:
                text = f"{setting.help} [{setting.variable}; {setting.default_text}]"
                lines += _tagged(f"--{setting.usage}", text)
    lines += _section("EXIT STATUS", "Unless the command says otherwise:")
    for code, text in EXITS:
        lines += _tagged(code, text)
    return "\n".join(lines) + "\n"


def _section(title: str, text: str) -> list[str]:
    return [f".SH {title}", *_paragraphs(text)]


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f".SS {escaped(context.info_name or '')}"
    yield rf"\fB{escaped(context.command_path)}\fR {escaped(' '.join(command.collect_usage_pieces(context)))}"
    yield ".PP"
    yield from _paragraphs(command.help or "")
    elsewhere = {"help", *(setting.key for setting in (*SETTINGS, CONFIG_FILE))}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and isinstance(parameter, click.Option) and parameter.name not in elsewhere:
            yield from _tagged(*record)


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(text.strip().split("\n\n")):
        if number:
            yield ".PP"
        # A backspace marks lines that help does not fill.
        lines = paragraph.strip("\b\n").splitlines()
        yield from (
            [".nf", *map(escaped, lines), ".fi"] if "\b" in paragraph else map(escaped, lines)
        )


def _tagged(tag: str, text: str) -> list[str]:
    return [".TP", rf"\fB{escaped(tag)}\fR", escaped(text)]


def escaped(text: str) -> str:
    """Return a line as roff prints it: without commands, and with hyphens that can be searched."""
    safe = text.strip().replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"^(?=[.'])", r"\\&", safe)
