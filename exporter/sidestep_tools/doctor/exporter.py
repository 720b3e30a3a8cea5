"""Check of an exporter over HTTP: its answer, its own findings, its release and its clock."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec

from sidestep import __version__
from sidestep.diagnosis.finding import Code, Finding, OwnReport
from sidestep_tools.web_client.fetch import DENIED, FetchError, fetch, parse_address, refusal

SKEW_SECONDS = 5.0
"""Smallest difference of the clocks that is a finding; Prometheus's own limit for samples is minutes."""

# fmt: off
NO_ANSWER = Code("SD150", "error", "The exporter does not answer",
    "Its web server cannot be reached at this address.",
    "Start the server, or correct its address: `sidestep serve` prints it as `metrics on`.")
NOT_ALLOWED = Code("SD151", "error", "The exporter denies access",
    "Its --web.config.file requires a password or a client certificate.",
    "Give --user, or --cert and --key.")
NO_EXPORTER = Code("SD152", "error", "The server is no exporter, or an older one",
    "The address has neither an exporter's findings nor an engine's metrics page.",
    "Give the address of an exporter or of an engine; --engine-page takes the whole URL of a page. SGLang has a page with --enable-metrics.")
CLOCK = Code("SD153", "warning", "The clocks differ",
    "Times on pages and in logs differ, too.",
    "Synchronise both by NTP.")
OTHER_VERSION = Code("SD154", "info", "Exporter and command are different releases",
    "The meaning of codes may differ.",
    "Use the same release.")
# fmt: on
CODES = tuple(each for each in tuple(vars().values()) if isinstance(each, Code))


async def check(session: aiohttp.ClientSession, url: str) -> AsyncIterator[Finding]:
    """Yield what is wrong with the exporter at ``url``."""
    root = parse_address(url).root
    try:
        answer = await fetch(session, f"{root}/api/v1/doctor")
    except FetchError as error:
        yield NO_ANSWER.on(url, str(error))
        return
    if answer.status in DENIED:
        yield NOT_ALLOWED.on(url, refusal(answer.status))
        return
    try:
        report = msgspec.json.decode(answer.text, type=OwnReport)
    except msgspec.MsgspecError:
        yield NO_EXPORTER.on(url, f"/api/v1/doctor has no findings (HTTP {answer.status})")
        return
    skew = 0.0 if answer.time is None else answer.time - time.time()
    if abs(skew) >= SKEW_SECONDS:
        yield CLOCK.on(url, f"its clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}")
    if report.version != __version__:
        yield OTHER_VERSION.on(url, f"it runs {report.version}, this command is {__version__}")
    for finding in report.findings:
        yield msgspec.structs.replace(finding, subject=f"{url}: {finding.subject}")
