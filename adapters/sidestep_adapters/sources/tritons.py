"""The pollers that ``--triton`` asks for."""

from __future__ import annotations

from collections.abc import Sequence

from sidestep.config import Config
from sidestep.errors import ConfigError, WireError
from sidestep.feeds import ServerFeed
from sidestep.intake import Intake
from sidestep.triton_servers import Server
from sidestep.wire.messages import EngineInfo
from sidestep_adapters.sources.http_client import Client
from sidestep_adapters.sources.triton import Triton
from sidestep_adapters.sources.triton_http import HttpServer
from sidestep_adapters.sources.triton_models import DIALECT, identity
from sidestep_adapters.sources.triton_questions import IN_FLIGHT


def sources(config: Config, intake: Intake) -> Sequence[Triton]:
    """One for each server.

    Raises:
        ConfigError: One's labels cannot be shown, or a file that it needs cannot be read.
    """
    # One family cannot come from a page and from statistics, with other labels.
    has_failures = not any(server.metrics for server in config.triton)
    return [_source(server, intake, has_failures=has_failures) for server in config.triton]


def _source(server: Server, intake: Intake, *, has_failures: bool) -> Triton:
    client = Client(server.target, IN_FLIGHT)
    try:
        client.check()
        intake.registry.check(
            EngineInfo(identity(server.name), DIALECT, dict(server.target.labels))
        )
    except (ConfigError, WireError) as error:
        raise ConfigError(f"--triton {server.name}: {error}") from None
    answers = HttpServer(client, server.target.url)
    outlet = ServerFeed(intake, f"triton {server.name}")
    return Triton(server, answers, client, outlet, intake.reject, has_failures=has_failures)
