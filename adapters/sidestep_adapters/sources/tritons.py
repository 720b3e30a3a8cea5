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
    return [_source(server, intake) for server in config.triton]


def _source(server: Server, intake: Intake) -> Triton:
    client = Client(server.target, IN_FLIGHT)
    try:
        client.check()
        intake.registry.check(
            EngineInfo(identity(server.name), DIALECT, dict(server.target.labels))
        )
    except (ConfigError, WireError) as error:
        raise ConfigError(f"--triton {server.name}: {error}") from None
    answers = HttpServer(client, server.target.url)
    return Triton(
        server, answers, client, ServerFeed(intake, f"triton {server.name}"), intake.reject
    )
