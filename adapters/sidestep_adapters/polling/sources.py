"""The sources of ``--engine``: one poller for each server, of a kind that a package registers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

from sidestep.config.engine_targets import EngineTarget
from sidestep.config.settings import Config
from sidestep.errors import ConfigError, WireError
from sidestep.ingest.intake import Intake
from sidestep.ingest.local_stream import ServerFeed
from sidestep_adapters.polling.api import Kind
from sidestep_adapters.polling.poller import EnginePoller
from sidestep_adapters.polling.state import STATES

GROUP = "sidestep.server_kinds"
"""Entry point group of kinds of servers, each an ``api.Kind``."""


def sources(config: Config, intake: Intake, _: object) -> Sequence[EnginePoller]:
    """Return one poller for each ``--engine``.

    Raises:
        ConfigError: A kind, an option or a label is invalid, or a file cannot be read.
    """
    pollers = [_source(server, intake) for server in config.engine]
    intake.metrics.read(
        "sidestep_engine_poll_state",
        lambda: [
            ((each.name, state), float(each.state.state == state))
            for each in pollers
            for state in STATES
        ],
    )
    return pollers


def _source(server: EngineTarget, intake: Intake) -> EnginePoller:
    name = f"{server.kind}={server.target.name}"
    kinds = {point.name: point for point in entry_points(group=GROUP)}
    if server.kind not in kinds:
        known = " and ".join(sorted(kinds))
        raise ConfigError(f"--engine: {server.kind!r} is no kind of server; known are {known}")
    kind: Kind = kinds[server.kind].load()
    try:
        api = kind.api(server)
        intake.registry.check(api.check())
    except (ConfigError, ValueError, WireError) as error:
        raise ConfigError(f"--engine {name}: {error}") from None
    feed = ServerFeed(intake, f"engine {name}")
    return EnginePoller(
        name, server.target.interval, api, feed, metrics=intake.metrics, advice=kind.advice
    )
