"""A support bundle: the report and each exporter's own pages, in one archive."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import AsyncIterator, Iterable

import aiohttp

from sidestep.errors import ConfigError
from sidestep_tools.web_client.fetch import FetchError, fetch, parse_address, refusal

PAGES = {
    "metrics.txt": "/metrics",
    "engines.json": "/-/engines",
    "live.json": "/api/v1/live",
    "cardinality.json": "/api/v1/cardinality",
    "debug.txt": "/-/debug",
}
"""Files of an exporter and the pages that they hold. None has a prompt, an output or a password."""


async def write(
    file: str, session: aiohttp.ClientSession, urls: Iterable[str], report: bytes
) -> None:
    """Write the archive ``file`` of gzipped tar.

    A page that cannot be read is a line that says why.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        with tarfile.open(file, "w:gz") as archive:
            _add(archive, "report.json", report)
            for number, url in enumerate(urls, 1):
                async for name, text in _pages(session, url):
                    _add(archive, f"exporter-{number}/{name}", text.encode())
    except OSError as error:
        raise ConfigError(f"--bundle {file}: {error.strerror or error}") from None


async def _pages(session: aiohttp.ClientSession, url: str) -> AsyncIterator[tuple[str, str]]:
    root = parse_address(url).root
    for name, path in PAGES.items():
        try:
            answer = await fetch(session, f"{root}{path}")
            text = answer.text or refusal(answer.status)
        except FetchError as error:
            text = str(error)
        yield name, text


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime = len(content), int(time.time())
    archive.addfile(member, io.BytesIO(content))
