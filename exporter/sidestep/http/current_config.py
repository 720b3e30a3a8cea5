"""The active web configuration, read again when one of its files changes."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from sidestep.errors import ConfigError
from sidestep.http.config_files import WatchedFiles
from sidestep.http.tls import CLIENT_AUTH, make_context
from sidestep.http.web_config import WebConfig, load
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class ActiveConfig:
    """A configuration and the TLS context made from it."""

    config: WebConfig
    context: ssl.SSLContext | None

    @property
    def client_trust(self) -> object:
        """Return the rules on client certificates; connections made under other rules must end."""
        tls = self.config.tls
        return tls and (tls.client_auth, tls.client_ca and tls.client_ca.content, tls.allowed_sans)


class CurrentConfig:
    """The active configuration.

    If a changed file is invalid, the error is logged and the last valid configuration stays active:
    neither a mistake nor a partly written file admits a client.

    Args:
        changed: Called with the old and the new configuration, in the loop, before it is active.
    """

    def __init__(
        self,
        path: Path | None,
        metrics: SelfMetrics,
        changed: Callable[[ActiveConfig, ActiveConfig], None] = lambda _before, _after: None,
    ) -> None:
        self._path = path
        self._metrics = metrics
        self._changed = changed
        self._files = WatchedFiles()
        self._limited = RateLimitedLog(log)
        self.active = ActiveConfig(WebConfig(), None)
        if path is not None:
            self.active = _read(path, self._files)
            metrics.set("sidestep_web_config_current", 1)

    async def refresh(self) -> None:
        """Read the files again if one of them has changed."""
        if self._path is None or not self._files.changed():
            return
        before, self._files = self.active, WatchedFiles()
        try:
            after = await asyncio.to_thread(_read, self._path, self._files)
            if lost := protection_lost(before.config, after.config):
                raise ConfigError(f"{self._path}: {lost}, which takes a restart")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 - no file may end a running process
            self._metrics.set("sidestep_web_config_current", 0)
            reason = " ".join((str(error) or repr(error)).split())
            self._limited.error("bad", "web configuration not reloaded: %s", reason)
            return
        self._metrics.set("sidestep_web_config_current", 1)
        if after.config != before.config:
            self._changed(before, after)
            self.active = after
            log.info("web configuration read again: %s", self._path)


def _read(path: Path, files: WatchedFiles) -> ActiveConfig:
    config = load(path, files)
    return ActiveConfig(config, make_context(config.tls) if config.tls is not None else None)


def protection_lost(before: WebConfig, after: WebConfig) -> str:
    """Return the protection that ``after`` lacks; empty if it protects as well as ``before``.

    A file that is read while it is written lacks its end, and may still be valid.
    """
    if (before.tls is None) != (after.tls is None):
        return "tls_server_config comes or goes"
    if before.users and not after.users:
        return "the last of basic_auth_users goes"
    if before.tls is None or after.tls is None:
        return ""
    if CLIENT_AUTH.index(after.tls.client_auth) < CLIENT_AUTH.index(before.tls.client_auth):
        return "client_auth_type asks for less"
    if before.tls.allowed_sans is not None and after.tls.allowed_sans is None:
        return "client_allowed_sans goes"
    return ""
