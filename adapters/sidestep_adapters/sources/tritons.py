"""The pollers that ``--triton`` asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sidestep.config import Config
from sidestep.errors import ConfigError, WireError
from sidestep.feeds import Outlet, ServerFeed
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
    try:
        intake.registry.check(engine_of(server))
        return poller(server, ServerFeed(intake, f"triton {server.name}"), intake.reject)
    except (ConfigError, WireError) as error:
        raise ConfigError(f"--triton {server.name}: {error}") from None


def engine_of(server: Server) -> EngineInfo:
    """The engine that the server itself is."""
    return EngineInfo(identity(server.name), DIALECT, dict(server.target.labels))


def poller(server: Server, outlet: Outlet, reject: Callable[[str], None]) -> Triton:
    """The one of ``server``; see ``Triton``.

    Raises:
        ConfigError: A file that it needs cannot be read, or gRPC's libraries are not there.
    """
    if server.is_grpc:
        # Of an extra that most do without.
        from sidestep_adapters.sources.triton_grpc import GrpcServer  # noqa: PLC0415

        asked = GrpcServer(server.target)
        asked.check()
        return Triton(server, asked, asked, outlet, reject)
    client = Client(server.target, IN_FLIGHT)
    client.check()
    return Triton(server, HttpServer(client, server.target.url), client, outlet, reject)
