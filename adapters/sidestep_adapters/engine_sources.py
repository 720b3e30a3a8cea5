"""The sources of ``--engine``: one poller for each server. A new kind of server is one line here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sidestep.config.engine_targets import EngineTarget
from sidestep.config.settings import Config
from sidestep.errors import ConfigError, WireError
from sidestep.ingest.intake import Intake
from sidestep.ingest.local_stream import ServerFeed
from sidestep_adapters.llamacpp.api import KIND as LLAMACPP
from sidestep_adapters.polling.api import Kind
from sidestep_adapters.polling.poller import EnginePoller
from sidestep_adapters.scrape.poll_state import STATES

KINDS: Mapping[str, Kind] = {"llamacpp": LLAMACPP}


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
    kind = KINDS.get(server.kind)
    if kind is None:
        known = " and ".join(KINDS)
        raise ConfigError(f"--engine: {server.kind!r} is no kind of server; known are {known}")
    try:
        api = kind.api(server)
        intake.registry.check(api.check())
    except (ConfigError, ValueError, WireError) as error:
        raise ConfigError(f"--engine {name}: {error}") from None
    feed = ServerFeed(intake, f"engine {name}")
    return EnginePoller(
        name, server.target.interval, api, feed, metrics=intake.metrics, advice=kind.advice
    )
