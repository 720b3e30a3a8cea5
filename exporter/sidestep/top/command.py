"""The command ``sidestep top``: what it asks, and how it shows the answers."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Sequence
from typing import NamedTuple

import click
import msgspec

from sidestep.errors import ConfigError
from sidestep.top.once import table
from sidestep.top.report import Report
from sidestep.top.targets import DISCOVERED, Targets, discover

LOCAL_EXPORTER = "http://127.0.0.1:9857"
PASSWORD = "SIDESTEP_TOP_PASSWORD"  # noqa: S105 - the name of a variable


class Access(NamedTuple):
    """How targets are asked; names as curl has them.

    Attributes:
        user: ``USER`` or ``USER:PASSWORD``.
        header: Lines such as ``Name: value``.
    """

    user: str = ""
    header: tuple[str, ...] = ()
    cacert: str = ""
    cert: str = ""
    key: str = ""
    insecure: bool = False


async def run(
    urls: Sequence[str], access: Access, *, finds: bool, interval: float, once: bool, as_json: bool
) -> int:
    """Ask the targets and show the answers; return 1 if a target did not answer, else 0.

    Raises:
        ConfigError: An address, a header or a file of certificates cannot be used.
    """
    urls = [*urls, *(await discover() if finds else [])]
    if finds and not urls:
        ports = sorted({url.rpartition(":")[2].partition("/")[0] for url in DISCOVERED}, key=int)
        raise ConfigError(f"--discover: nothing on 127.0.0.1 at the ports {', '.join(ports)}")
    headers = dict(map(_header, access.header))
    targets = Targets(urls or [LOCAL_EXPORTER], headers, _login(access.user), _context(access))
    async with targets.connected():
        if not (once or as_json):
            await _view(targets, interval)
            return 0
        report = await targets.poll()
        if any(target.error is None for target in report.targets):
            # Rates and percentiles are differences.
            await asyncio.sleep(interval)
            report = await targets.poll()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)))
    else:
        for line in table(report):
            click.echo(line)
    return _status(report)


def _status(report: Report) -> int:
    return int(any(target.error is not None for target in report.targets))


async def _view(targets: Targets, interval: float) -> None:
    try:
        # Only the view needs textual, which is an extra.
        from sidestep.top.app import view  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            "the terminal view needs textual: pip install 'sidestep[top]'; --once and --json do not"
        ) from None
    await view(targets, interval)


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip() or not line.isprintable():
        raise ConfigError(f"--header {name!r}: must be like 'Name: value'")
    return name.strip(), value.strip()


def _login(user: str) -> tuple[str, str] | None:
    if not user:
        return None
    name, colon, password = user.partition(":")
    if not colon:
        password = os.environ.get(PASSWORD) or click.prompt("Password", hide_input=True, err=True)
    return name, password


def _context(access: Access) -> ssl.SSLContext | None:
    if not (access.cacert or access.cert or access.key or access.insecure):
        return None
    try:
        context = ssl.create_default_context(cafile=access.cacert or None)
        if access.cert or access.key:
            context.load_cert_chain(access.cert, access.key or None)
    except OSError as error:
        # An error of OpenSSL is one, too, and names no file.
        named = access.cacert if not access.cert else f"{access.cert} {access.key}".strip()
        raise ConfigError(f"{named}: {error.strerror or error}") from None
    if access.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
